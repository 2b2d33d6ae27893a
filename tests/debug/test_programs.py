"""Programs of many shapes: what each does besides forward, backward and step is replayed too."""

import types

import pytest
import torch
from torch import nn

from apex import amp, debug
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal
from tests.debug.planted import explained, mlp, plant, watching
from tests.debug.table import Block, Middle


def root(x):
    return (x - x.detach()).sqrt()


class Two(nn.Module):
    """Gives a dictionary with a good and a bad output."""

    def __init__(self, bad=root):
        super().__init__()
        self.body, self.good, self.harm = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.bad = Middle(bad)

    def forward(self, x):
        x = self.body(x)
        return {"good": self.good(x), "others": [self.harm(self.bad(x)), None, 3]}


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def watched(model, optimizer, **options):
    return debug.watch(model, optimizer, **({"on_fault": "keep"} | options))


def names(report):
    return report.cause, report.module, report.direction


def test_outputs_in_containers_and_two_backwards():
    model = Two()

    def loss():
        out = model(torch.randn(4, 8))
        out["good"].mean().backward(retain_graph=True)
        return out["others"][0].mean()

    report = explained(model, loss)
    assert names(report) == ("model", "bad", "backward")
    assert report.parameters == ["body.weight", "body.bias"]


def test_a_bad_output_that_nobody_uses_is_no_fault():
    model = Two(torch.log)
    with watching(model, on_fault="raise") as (optimizer, watch):
        for _ in range(3):
            optimizer.zero_grad()
            model(-torch.ones(4, 8))["good"].mean().backward()
            optimizer.step()
    assert (watch.steps, watch.skipped) == (3, 0)


@pytest.mark.parametrize("with_step", [True, False])
def test_gradient_penalty(with_step):
    """The root of a gradient that is zero: its backward goes through the model a second time."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.zeros_(model[2].weight)
    x = torch.randn(4, 8, requires_grad=True)

    def loss():
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (gradient.norm(dim=1) - 1).square().sum() + gradient.sum().sqrt()

    report = explained(model, loss, repeat=loss if with_step else None)
    if with_step:
        assert names(report) == ("loss", None, "backward")
        assert "sqrt" in report.line or "norm" in report.line
    else:  # of a second derivative a replay has nothing
        assert report.cause in ("unrepeatable", "loss")


def test_grad_scaler_with_unscale_and_clipping():
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plant(model[2], "backward", "nan", "one", None)
    with watched(model, optimizer, scaler=scaler, patience=1) as watch:
        reports = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            reports.append(watch.explain())

    assert [names(one) for one in reports] == [("model", "2", "backward")] * 3
    assert [one.scale for one in reports] == [4.0, 2.0, 1.0]
    assert (watch.steps, watch.skipped) == (3, 3)


@pytest.mark.parametrize("fused_step", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_fused_optimizers(level, fused_step):
    model = mlp()
    plant(model[2], "backward", "nan", "one", None)
    model, optimizer = amp.initialize(
        model, FusedAdam(model.parameters()), opt_level=level, verbosity=0, fused_step=fused_step
    )
    before = [p.detach().clone() for p in model.parameters()]
    with watched(model, optimizer) as watch:
        with amp.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        report = watch.explain()

    assert names(report) == ("model", "2", "backward")
    assert_equal([p.detach() for p in model.parameters()], before)


def test_closures():
    """A fault in the second evaluation of a step."""
    model = mlp().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    evaluations = []
    x = torch.randn(4, 8)
    with watched(model, optimizer) as watch:

        def closure():
            optimizer.zero_grad()
            evaluations.append(None)
            loss = model(x).square().mean()
            if len(evaluations) == 2:
                loss = loss * float("nan")
            loss.backward()
            return loss

        optimizer.step(closure)
        report = watch.explain() if watch.fault else watch.report

    assert report is not None
    assert report.cause == "loss"
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_sgd_with_a_closure_is_bit_equal():
    states = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = sgd(model, momentum=0.9)
        watch = watched(model, optimizer, on_fault="raise") if is_watched else None
        losses = []
        for _ in range(4):

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        if watch is not None:
            watch.close()
        states.append((losses, dict(model.state_dict()), optimizer.state_dict()))
    assert_equal(*states)


def test_two_watches_are_independent():
    models = [mlp(), mlp()]
    optimizers = [sgd(one) for one in models]
    first, second = (watched(*pair) for pair in zip(models, optimizers, strict=True))
    first.close()
    for model, optimizer in zip(models, optimizers, strict=True):
        (model(torch.randn(4, 8)) * float("nan")).mean().backward()
        optimizer.step()

    assert (first.steps, second.steps) == (0, 1)
    assert second.explain().cause == "loss"
    second.close()


def test_modes_since_the_forward():
    """eval() after the forward: the replay is in train() as the forward was, with its dropout."""
    inverse = Middle(lambda x: 1 / x)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), inverse, nn.Linear(8, 4))
    with watching(model) as (optimizer, watch):
        model(torch.ones(4, 8)).mean().backward()
        optimizer.step()
        model.eval()
        report = watch.explain()

    assert names(report) == ("model", "2", "forward")
    assert not any(module.training for module in model.modules())


def test_tied_and_frozen_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.head.weight = self.embedding.weight
            self.root = Middle(root)

        def forward(self, tokens):
            return self.head(self.root(self.frozen(self.embedding(tokens))))

    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    report = explained(model, lambda: model(torch.randint(12, (4, 3))).mean(), optimizer)
    assert names(report) == ("model", "root", "backward")
    assert report.parameters == ["embedding.weight"]


def test_inputs_of_all_kinds():
    class Odd(nn.Linear):
        def forward(self, batch, *rest, scale=None):
            logits = super().forward(batch.x) * rest[0][1]["y"]
            return types.SimpleNamespace(logits=logits, extra=scale)

    model = Odd(8, 4)
    with torch.inference_mode():
        frozen = torch.ones(4, 4)
    x = torch.randn(4, 8)
    x[1, 1] = float("nan")
    batch, more = types.SimpleNamespace(x=x, name="a"), (None, {"y": frozen.clone()})
    report = explained(model, lambda: model(batch, more, "text", scale=frozen).logits.mean())
    assert report.cause == "data"
    assert report.values["rows"] == [1]


def test_one_model_called_several_times():
    """Siamese: one call is good, the other not."""
    model = Block(Middle(lambda x: x.log() if x.shape[0] == 2 else x))
    sizes = (4, 2)
    report = explained(model, lambda: sum(model(torch.randn(n, 8)).mean() for n in sizes))
    assert names(report) == ("model", "function", "forward")
    assert report.values["shape"] == [2, 8]


def test_a_part_of_a_model_may_be_watched():
    """Only the last layer is: what comes from before it is data."""
    body, head = Block(Middle(torch.log)), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    report = explained(head, lambda: head(body(torch.randn(4, 8))).mean(), optimizer)
    assert report.cause == "data"


def test_a_fault_of_a_forward_without_backward_stays_out():
    """A validation with gradients on, whose result nobody uses, is not the step's."""
    model = Block(Middle(lambda x: x.log() if x.shape[0] == 2 else x))

    def loss():
        model(torch.randn(2, 8))
        return (model(torch.randn(4, 8)) * float("nan")).mean()

    assert explained(model, loss).cause == "loss"


def test_a_graph_over_two_steps():
    """Truncated backpropagation: the hidden state of the last step is an input of this one."""
    cell = nn.GRUCell(8, 8)
    optimizer = sgd(cell)
    hidden = torch.zeros(4, 8)
    with watched(cell, optimizer) as watch:
        for number in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                hidden = cell(torch.randn(4, 8), hidden)
            if number == 2:
                hidden = (hidden - hidden.detach()).sqrt()
            hidden.mean().backward()
            optimizer.step()
            hidden = hidden.detach()
        report = watch.explain()

    assert (watch.steps, report.since) == (3, 2)
    assert report.cause == "loss"


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(12, 8, sparse=True), Middle(root))
    before = model[0].weight.detach().clone()
    report = explained(model, lambda: model(torch.randint(12, (4, 3))).mean())
    assert names(report) == ("model", "1", "backward")
    assert torch.equal(model[0].weight, before)


def test_complex_numbers():
    model = nn.Sequential(nn.Linear(8, 8), Middle(lambda x: torch.fft.rfft(x.log()).abs()))
    report = explained(model, lambda: model(torch.randn(4, 8)).mean())
    assert names(report) == ("model", "1", "forward")
    assert report.operation == "aten.log.default"


def test_sharp_edges_of_json():
    model = Block(Middle(root))
    with watching(model) as (optimizer, watch):
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
        report = watch.explain()
        again = watch.explain()

    assert report == again
    assert report.to_json() == again.to_json()
    assert str(report) == report.text()
    assert "NaN" not in report.to_json().replace(report.sentence, "")
