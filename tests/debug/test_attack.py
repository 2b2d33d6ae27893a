"""Programs that a sceptical user would try: each was wrong, or raised, when it was written."""

import dataclasses
from collections import UserDict

import pytest
import torch
from torch import nn

from apex import amp, debug
from apex.commands import command_line as cli
from apex.debug import reproduce
from tests.debug.in_process import main
from tests.debug.planted import explained, watching


class Root(nn.Module):
    """Finite forward, infinite backward."""

    def forward(self, x):
        return (x - x).sqrt() + x


def one(model, loss_of, step=None, watched=None):
    """One step with a watch; its report."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return explained(watched or model, loss_of, optimizer, told=True, repeat=step)


class Output(UserDict):
    """A model's output of a class that torch's pytrees do not know."""


@dataclasses.dataclass
class Nested:
    inner: dict


@pytest.mark.parametrize(
    ("kind", "loss_in"),
    [(Output, lambda out: out["loss"]), (Nested, lambda out: out.inner["loss"])],
    ids=["mapping of an unknown class", "dictionary in a dataclass"],
)
def test_outputs_in_objects(kind, loss_in):
    class Model(nn.Linear):
        def forward(self, x):
            return kind({"loss": torch.log(super().forward(x) * 0).mean()})

    model, x = Model(4, 3), torch.randn(3, 4)
    report = one(model, lambda: loss_in(model(x)))
    assert (report.cause, report.operation) == ("model", "aten.log.default")


def test_a_model_that_is_called_on_its_own_output():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4)), torch.randn(3, 4)
    report = one(model, lambda: model(model(model(x))).sum())
    assert (report.cause, report.module, report.direction) == ("model", "1", "backward")


def test_double_backward_is_explained_by_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.zeros_(model[0].weight)
    x = torch.zeros(3, 4, requires_grad=True)

    def step():
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum(1).sqrt().mean()

    report = one(model, step, step)
    assert report.cause == "loss"
    assert "SqrtBackward0" in report.sentence


def test_forward_is_named_where_backward_breaks_at_the_same_place():
    class Normal(nn.Module):
        def forward(self, x):
            return x / x.square().sum(-1, keepdim=True).sqrt()

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4, bias=False), Normal()), torch.randn(3, 4)
    validation = torch.randn(3, 4)
    x[1] = 0.0
    report = one(model, lambda: [model(validation), model(x).sum()][1])
    assert (report.operation, report.direction) == ("aten.div.Tensor", "forward")


def test_a_replay_that_raises_is_a_report():
    class Once(nn.Linear):
        values = iter([0.0])

        def forward(self, x):
            return torch.log(super().forward(x) * next(self.values))

    model, x = Once(4, 1), torch.randn(3, 4)
    state = torch.get_rng_state()
    report = one(model, lambda: model(x).sum())
    assert report.cause == "unrepeatable"
    assert "raised StopIteration" in report.sentence
    assert torch.equal(torch.get_rng_state(), state)


def test_attributes_that_a_forward_writes_are_given_back():
    class Stateful(nn.Linear):
        hidden, count = torch.ones(4), 0

        def forward(self, x):
            self.count += 1
            self.hidden = super().forward(x + self.hidden).detach()
            return torch.log(super().forward(x) * 0)

    model, x = Stateful(4, 4), torch.randn(3, 4)
    with watching(model) as (optimizer, watch):
        model(x).sum().backward()
        optimizer.step()
        hidden = model.hidden
        watch.explain()
    assert model.hidden is hidden
    assert model.count == 1


def test_a_learning_rate_of_inf_is_the_optimizers():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with watching(model) as (optimizer, watch):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = float("inf")
        model(x).square().sum().backward()
        optimizer.step()
        assert watch.explain().cause == "optimizer"


def test_an_update_of_masters_is_the_optimizers():
    """Its state is amp's: a weight finds its master's entry in it."""
    model, x = nn.Linear(4, 4), torch.ones(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with debug.watch(model, optimizer, on_fault="keep") as watch:
        for rate in (0.01, float("inf"), float("inf")):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            with amp.scale_loss(model(x).float().square().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert watch.explain().cause == "optimizer"


def test_functions_of_torch_func_run_as_without_a_watch():
    model, x = nn.Linear(4, 1), torch.randn(5, 3, 4)
    expected = torch.func.vmap(model)(x)
    with watching(model, on_fault="raise") as (optimizer, watch):
        assert torch.equal(torch.func.vmap(model)(x), expected)
        torch.func.jvp(model, (x,), (x,))
        params = {name: one.detach() for name, one in model.named_parameters()}
        gradients = torch.func.grad(
            lambda params: torch.func.functional_call(model, params, (x,)).square().mean()
        )(params)
        for name, param in model.named_parameters():
            param.grad = gradients[name]
        optimizer.step()
        assert watch.fault is None


def saved(tmp_path, **changes):
    """A file as ``report.save()`` writes it, with changes."""
    entry = {"format": reproduce.FORMAT, "operation": "aten.log.default", "kwargs": {}}
    entry |= {"args": [torch.zeros(2)], "random": torch.get_rng_state(), "torch": "2"}
    path = tmp_path / "nan.pt"
    torch.save(entry | {"report": {"sentence": "s"}} | changes, path)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"random": torch.zeros_like(torch.get_rng_state())},
        {"random": torch.zeros(3, dtype=torch.uint8)},
        {"random": torch.get_rng_state().to_sparse()},
        {"args": [torch.zeros(2, device="meta")]},
        {"operation": "aten.index_select.default", "args": [torch.ones(2), 0, torch.tensor([9])]},
    ],
    ids=["random", "short", "sparse", "meta", "index"],
)
def test_a_file_that_does_not_run_is_one_error(tmp_path, changes):
    path = saved(tmp_path, **changes)
    with pytest.raises(debug.FileError, match="cannot be run on a CPU"):
        reproduce.run(reproduce.load(path))


def test_a_file_sends_nothing_to_the_terminal(tmp_path, capsys):
    path = saved(tmp_path, report={"sentence": "\x1b[2Jred"}, torch="\x1b[31m2")
    assert cli.main(["debug", "repro", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    torch.save({"format": reproduce.FORMAT, "operation": "\x1b[2J"}, path)
    cli.main(["debug", "repro", str(path)])
    assert "\x1b" not in capsys.readouterr().err


def command(tmp_path, capsys, text):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport torch\n" + text, "utf-8")
    code = main(["debug", "--out", str(tmp_path / "out"), str(script)])
    return code, capsys.readouterr()


def test_a_script_module_runs_as_without_the_command(tmp_path, capsys):
    text = """model = torch.jit.script(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print('trained')
"""
    code, printed = command(tmp_path, capsys, text)
    assert (code, printed.out) == (0, "trained\n")
    assert printed.err.startswith("apex debug: saw no step of an optimizer")


@pytest.mark.parametrize(
    ("text", "code"), [("sys.exit(3)", 3), ("sys.exit('wrong')", 1), ("1 / 0", 1)]
)
def test_a_script_that_fails_first_gets_no_advice_about_optimizers(tmp_path, capsys, text, code):
    got, printed = command(tmp_path, capsys, text)
    assert got == code
    assert "no step" not in printed.err


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=8.0)])
def test_of_two_optimizers_the_second_has_the_fault(scaler):
    torch.manual_seed(0)
    model, optimizers = two_parts(nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 4), Root()))
    x, keep = torch.randn(3, 4), {"on_fault": "keep", "patience": 0}
    with debug.watch(model, optimizers, scaler=scaler, **keep) as watch:
        loss = model(x)
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        report = watch.explain()
    assert (report.cause, report.module) == ("model", "1.1")


def two_parts(*parts):
    """A model that adds up two parts, and an optimizer for each."""
    model = nn.ModuleList(parts)
    model.forward = lambda x: model[0](x).sum() + model[1](x).sum()
    return model, [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]


def test_a_fault_stays_when_another_optimizer_has_none():
    model, optimizers = two_parts(nn.Sequential(nn.Linear(4, 4), Root()), nn.Linear(4, 1))
    with debug.watch(model, optimizers, on_fault="keep") as watch:
        model(torch.randn(3, 4)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert watch.explain().module == "0.1"


def test_patience_counts_for_each_optimizer():
    model, optimizers = two_parts(nn.Sequential(nn.Linear(4, 4), Root()), nn.Linear(4, 1))
    scaler, reports = torch.amp.GradScaler("cpu", init_scale=8.0), []
    watched = {"scaler": scaler, "patience": 2, "on_fault": reports.append}
    with debug.watch(model, optimizers, **watched):
        for _ in range(3):
            scaler.scale(model(torch.randn(3, 4))).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert [report.step for report in reports] == [5]


def test_an_output_whose_sum_overflows_is_finite():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity())
    nn.init.ones_(model[0].weight)
    x = torch.full((2, 4), 5e37)
    assert one(model, lambda: model(x).square().sum()).cause == "loss"


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    inner: list


@pytest.mark.parametrize(
    "kind", [Between, lambda inner: Output(inner=inner), lambda x: {"inner": x}]
)
def test_a_model_takes_the_output_of_another_in_an_object(kind):
    class First(nn.Linear):
        def forward(self, x):
            return kind([super().forward(x)])

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.root, self.last = Root(), nn.Linear(4, 1)

        def forward(self, given):
            (x,) = given.inner if isinstance(given, Between) else given["inner"]
            return self.last(self.root(x))

    torch.manual_seed(0)
    models, x = nn.ModuleList([First(4, 4), Second()]), torch.randn(3, 4)
    report = one(models, lambda: models[1](models[0](x)).sum(), watched=list(models))
    assert (report.cause, report.module) == ("model", "Second.root")
