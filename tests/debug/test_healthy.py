"""No alarm in 2,000 healthy steps of programs that have infinities, skips or nothing in them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from apex import amp, debug
from tests.debug.planted import LSTM, Transformer

STEPS = 2000


class Run:
    """A healthy program: ``step(number)`` makes one step."""

    def __init__(self, model, *, optimizer=torch.optim.SGD, lr=0.01, level=None, scaler=None):
        torch.manual_seed(0)
        self.model, self.scaler = model, scaler
        self.optimizer = optimizer(model.parameters(), lr=lr)
        if level is not None:
            options = {"verbosity": 0, "init_scale": 2.0**20, "growth_interval": 4}
            self.model, self.optimizer = amp.initialize(
                model, self.optimizer, opt_level=level, **options
            )
        self.reports = []
        self.watch = debug.watch(
            self.model, self.optimizer, scaler=scaler, on_fault=self.reports.append, every=5
        )

    def step(self, number):
        self.optimizer.zero_grad()
        loss = self.loss(number)
        if hasattr(self.optimizer, "_amp_stash"):
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            self.watch.loss(loss).backward()
        self.optimizer.step()

    def loss(self, number):
        return self.model(torch.randn(4, 8)).float().square().mean()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


class Scaled(Run):
    """A GradScaler that grows every fourth step, and so overflows now and then."""

    def __init__(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        super().__init__(mlp(), scaler=scaler)

    def step(self, number):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(number)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Tokens(Run):
    def loss(self, number):
        tokens = torch.randint(12, (3, 5))
        return functional.cross_entropy(self.model(tokens).float().mT, tokens)


class LogTargets(Run):
    """Log-softmax of logits of which some are -inf, against targets of log 0; xlogy at 0."""

    def loss(self, number):
        out = self.model(torch.randn(4, 8)).clone()
        hidden = torch.zeros(4, 4).bool()
        hidden[:, 3] = True
        logits = out.masked_fill(hidden, float("-inf")).log_softmax(-1)
        target = torch.tensor([0.5, 0.5, 0.0, 0.0]).log().expand(4, 4)  # of log 0
        terms = torch.where(target.isinf(), 0.0, target.exp() * (target - logits))
        divergence = functional.kl_div(logits[:, :3], target[:, :3].exp(), reduction="batchmean")
        return (
            terms.sum()
            + divergence
            + torch.xlogy(hidden.float(), hidden.float() + out.exp()).mean()
        )


class Empty(Run):
    """Each third batch is empty: its loss is NaN, its gradients are 0."""

    def loss(self, number):
        return self.model(torch.randn(0 if number % 3 == 0 else 4, 8)).square().mean()


class Pruned(Run):
    def __init__(self):
        model = mlp()
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        prune.random_structured(model[3], "weight", amount=0.5, dim=1)
        super().__init__(model, optimizer=torch.optim.Adam)


class Unused(Run):
    """Half of the parameters have no gradient; forwards without backward, without gradients."""

    def __init__(self):
        model = mlp()
        model.unused = nn.Linear(8, 8)
        model.forward = lambda x: nn.Sequential.forward(nn.Sequential(*list(model)[:4]), x)
        super().__init__(model)

    def loss(self, number):
        self.model(torch.full((4, 8), float("nan")))
        with torch.no_grad():
            self.model(torch.full((4, 8), float("inf")))
        return super().loss(number)


class Accumulated(Run):
    def step(self, number):
        self.optimizer.zero_grad()
        for _ in range(3):
            (self.loss(number) / 3).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class Closures(Run):
    """LBFGS calls its closure up to four times a step."""

    def __init__(self):
        super().__init__(mlp().eval(), optimizer=Few, lr=0.01)
        self.x = torch.randn(4, 8)  # one batch: with others each step LBFGS does diverge

    def step(self, number):
        x = self.x

        def closure():
            self.optimizer.zero_grad()
            loss = (self.model(x) - x[:, :4]).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Few(torch.optim.LBFGS):
    def __init__(self, params, lr):
        super().__init__(list(params), lr=lr, max_iter=3)


class Infinite(nn.Module):
    """Reads an infinity from a buffer, and forgets what it makes of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("bound", torch.tensor(float("inf")))

    def forward(self, x):
        out = torch.minimum(self.layer(x), self.bound)
        return torch.where(out > 0, out, (out.detach() * 0).log().exp())


PROGRAMS = {
    "GradScaler": Scaled,
    "O1": lambda: Run(mlp(), level="O1"),
    "O2": lambda: Run(mlp(), level="O2"),
    "O5": lambda: Run(mlp(), level="O5"),
    "masked attention": lambda: Tokens(Transformer(), lr=0.1),
    "masked attention, O2": lambda: Tokens(Transformer(), level="O2"),
    "LSTM": lambda: Tokens(LSTM()),
    "log-softmax": lambda: LogTargets(mlp()),
    "empty batches": lambda: Empty(mlp()),
    "pruned": Pruned,
    "unused": Unused,
    "accumulated": lambda: Accumulated(mlp()),
    "closures": Closures,
    "infinite buffer": lambda: Run(Infinite()),
}


@pytest.mark.slow
def test_no_alarm(capsys):
    torch.manual_seed(0)
    each = -(-STEPS // len(PROGRAMS))
    taken, alarms, drifts, skipped = 0, [], [], {}
    for name, build in PROGRAMS.items():
        run = build()
        for number in range(each):
            run.step(number)
        run.watch.close()
        amp.reset()
        taken += run.watch.steps
        skipped[name] = run.watch.skipped
        alarms += [(name, one.text()) for one in run.reports]
        drifts += [(name, str(one)) for one in run.watch.drifts]
    with capsys.disabled():
        print(f" [{taken} healthy steps, {len(alarms)} alarms, {len(drifts)} drifts]")  # noqa: T201

    assert alarms == []
    assert drifts == []
    assert taken >= STEPS
    assert {name for name, count in skipped.items() if count} == {
        *("GradScaler", "O1", "O2", "masked attention, O2")
    }
