"""What a training step costs on the host, against the same step written in plain torch.

A model of 300 small parameter tensors on the CPU; at O1 and O4 against ``torch.autocast`` with
``torch.amp.GradScaler``, at O2 and O5 against hand-written float32 masters. The two alternate in
one process; the ratio is the median of the ratios of neighbouring steps. The last column is how
often our code reads a tensor on the host in one step, with the state treated as if it were on a
device: each such read would wait for a GPU.

    python benchmarks/host_overhead.py [LEVEL ...]
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.scaler import LossScaler

STEPS = 200
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}


class Net(nn.Module):
    """150 small linear layers: 300 parameter tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(150))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 16)`` to ``(batch, 16)``."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def ours(level: str, x: torch.Tensor, y: torch.Tensor):  # noqa: ANN201
    """Return a step written with apex."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return step


def by_autocast(level: str, x: torch.Tensor, y: torch.Tensor):  # noqa: ANN201
    """Return a step written with torch.autocast and torch's scaler."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=level == "O1")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF[level]):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def by_masters(level: str, x: torch.Tensor, y: torch.Tensor):  # noqa: ANN201
    """Return a step written with float32 masters by hand."""
    model, dtype = Net(), HALF[level]
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    weights = list(model.to(dtype).parameters())
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=level == "O2")

    def step() -> None:
        for weight in weights:
            weight.grad = None
        loss = F.mse_loss(model(x.to(dtype)).float(), y)
        scaler.scale(loss).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return step


def milliseconds(step, casts: bool) -> float:  # noqa: ANN001
    """Time one step, with the thread's casts as its side has them."""
    torch.set_autocast_enabled("cpu", casts)
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def host_reads(step) -> int:  # noqa: ANN001
    """Count the reads of tensors on the host in one step, as on a device."""
    count = 0
    names = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "nonzero")
    before = {name: getattr(torch.Tensor, name) for name in names}
    free_read = LossScaler._waits_for_nothing

    def counted(original):  # noqa: ANN001, ANN202
        def read(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            return original(*args, **kwargs)

        return read

    try:
        LossScaler._waits_for_nothing = False
        for name in names:
            setattr(torch.Tensor, name, counted(before[name]))
        step()
    finally:
        LossScaler._waits_for_nothing = free_read
        for name in names:
            setattr(torch.Tensor, name, before[name])
    return count


def main(levels: list[str]) -> None:
    """Print a line for each level."""
    torch.set_num_threads(1)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    for level in levels:
        left = ours(level, x, y)
        casts = torch.is_autocast_enabled("cpu")
        right = (by_autocast if level in ("O1", "O4") else by_masters)(level, x, y)
        rows = [(milliseconds(left, casts), milliseconds(right, False)) for _ in range(STEPS)][20:]
        mine, theirs = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(a / b for a, b in rows)
        torch.set_autocast_enabled("cpu", casts)
        reads = host_reads(left)
        print(
            f"{level}  apex {mine:6.2f} ms  plain torch {theirs:6.2f} ms  ratio {ratio:.3f}  "
            f"host reads {reads}"
        )
        amp.reset()


if __name__ == "__main__":
    main(sys.argv[1:] or list(HALF))
