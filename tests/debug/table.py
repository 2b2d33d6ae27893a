"""The ten programs of the table that the tools of 2026 were tried on: eight faults, two healthy."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex import debug


class Block(nn.Module):
    """A layer between two linear ones: ``function`` is the line with the fault."""

    def __init__(self, function, checkpointed=False):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x):
        x = self.first(x)
        if self.checkpointed:
            x = checkpoint(self.function, x, use_reentrant=False)
        else:
            x = self.function(x)
        return self.last(x)


class Middle(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def square(x):
    return (x * 3000) * (x * 3000)


def root(x):
    return torch.sqrt(x - x.detach())


def trap(x):
    return torch.where(x > 1e9, 1 / (x - x.detach()), x)


def logarithm(out):
    return (out - out.detach()).log()


def train(model, loss_of, optimizer=None, batches=1, x=None, **options):
    """Train with a watch; return it and the report, if there is one."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 8) if x is None else x
    with debug.watch(model, optimizer, on_fault="keep", **options) as watch:
        for _ in range(batches):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
            if watch.fault:
                return watch.explain()
    return None


def overflow_in_a_module():
    torch.manual_seed(0)
    model = Block(Middle(square)).half()
    x = torch.randn(4, 8).half()
    return train(model, lambda out: out.float().square().mean(), x=x)


def root_of_zero():
    torch.manual_seed(0)
    return train(Block(Middle(root)), lambda out: out.square().mean())


def root_of_zero_in_a_checkpoint():
    torch.manual_seed(0)
    return train(Block(Middle(root), checkpointed=True), lambda out: out.square().mean())


def where_trap():
    torch.manual_seed(0)
    return train(Block(Middle(trap)), lambda out: out.square().mean())


def log_of_zero_in_the_loss():
    torch.manual_seed(0)
    model = Block(Middle(torch.relu))
    torch.manual_seed(1)
    x = torch.randn(4, 8)

    def step():
        return -(logarithm(model(x))).mean()

    return train(model, lambda out: -(logarithm(out)).mean(), x=x, step=step)


def bad_row_of_data():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    x[2, 5] = float("nan")
    return train(Block(Middle(torch.relu)), lambda out: out.square().mean(), x=x)


def broken_parameter():
    torch.manual_seed(0)
    model = Block(Middle(torch.relu))
    with torch.no_grad():
        model.last.weight[1, 2] = float("nan")
    return train(model, lambda out: out.square().mean())


def eps_underflows():
    torch.manual_seed(0)
    model = Block(Middle(torch.relu)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    x = torch.randn(4, 8).half()
    return train(model, lambda out: out.float().square().mean() * 1e-4, optimizer, 4, x)


def causal_mask():
    torch.manual_seed(0)

    def attend(x):
        scores = x @ x.T
        mask = torch.ones_like(scores).triu(1).bool()
        return functional.softmax(scores.masked_fill(mask, float("-inf")), -1) @ x

    return train(Block(Middle(attend)), lambda out: out.square().mean(), batches=5)


def scale_that_heals():
    torch.manual_seed(0)
    model = Block(Middle(torch.relu))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    x = torch.randn(4, 8)
    with debug.watch(model, optimizer, scaler=scaler, on_fault="raise") as watch:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert watch.skipped > 0
        assert watch.fault is None
        return watch.report


# program -> cause, operation without overload, module, direction; None for no report
TABLE = {
    overflow_in_a_module: ("range", "mul", "function", "forward"),
    root_of_zero: ("model", "div", "function", "backward"),
    root_of_zero_in_a_checkpoint: ("model", "div", "function", "backward"),
    where_trap: ("model", "reciprocal", "function", "forward"),
    log_of_zero_in_the_loss: ("loss", "log", None, "forward"),
    bad_row_of_data: ("data", None, None, None),
    broken_parameter: ("parameter", None, "last", None),
    eps_underflows: ("optimizer", "addcdiv_", "first", None),
    causal_mask: None,
    scale_that_heals: None,
}
