"""What float16 on a CPU costs and how exact it is, beside float32.

Three networks train at O0 to O3 in one process, step by step in turn; the ratio is the median of
the ratios of neighbouring steps, O0's below. Then the share of elements of a linear layer, a matrix
product and a convolution, with their gradients, that equal the float64 result rounded once. Last,
what torch's own float16 kernels take: a matrix product of 512, and a convolution (batch 128, 16 to
32 channels, 16x16) forward and backward, over float32.

    python -m benchmarks.float16_on_cpu [CNN] [transformer] [LSTM] [exact] [torch]
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m benchmarks.float16_on_cpu   # no float16 there
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.casting import cpu_float16
from benchmarks.turns import ratio, take_turns, timed
from tools import quiet_without_reader

STEPS = 15
LEVELS = ("O0", "O1", "O2", "O3")
GOALS = {"CNN": 1.3, "transformer": 1.5, "LSTM": 1.5}


class LSTM(nn.Module):
    """Two recurrent layers and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(128, 256, 2), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(time, batch, 128)`` to ``(batch, 10)``."""
        return self.out(self.lstm(x)[0][-1])


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network and its input."""
    torch.manual_seed(0)
    if name == "LSTM":
        return LSTM(), torch.randn(32, 32, 128)
    if name == "transformer":
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
        return layer, torch.randn(8, 128, 256)
    convolutions = [nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 16), (16, 32), (32, 32))]
    layers = [x for c in convolutions for x in (c, nn.BatchNorm2d(c.out_channels), nn.ReLU())]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*layers, *head), torch.randn(64, 3, 32, 32)


def training(name: str, level: str) -> Callable[[], None]:
    """Return one step of a training."""
    model, x = network(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return step


seconds = partial(timed, clock=time.perf_counter)


def ratios(name: str) -> dict[str, float]:
    """Step times of each level over those of O0."""
    steps = {level: partial(seconds, training(name, level)) for level in LEVELS}
    times = take_turns(steps, STEPS, warm_up=2)
    return {level: ratio(times[level], times["O0"]).median for level in LEVELS}


def exact_share(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> float:
    """Share of elements, of result and gradients, that are the float64 ones rounded once."""
    torch.manual_seed(0)
    half = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    wide = [tensor.detach().double().requires_grad_() for tensor in half]
    result, definition = function(*half), function(*wide)
    grad = torch.randn_like(result)
    ours = [result, *torch.autograd.grad(result, half, grad)]
    theirs = [definition, *torch.autograd.grad(definition, wide, grad.double())]
    equal = [(a == b.half()).flatten() for a, b in zip(ours, theirs, strict=True)]
    return torch.cat(equal).double().mean().item()


def torchs_own() -> dict[str, float]:
    """Times of torch's own float16 kernels over those of float32."""
    cpu_float16.switch(on=False)
    a, x = torch.randn(512, 512), torch.randn(128, 16, 16, 16, requires_grad=True)
    weight = torch.randn(32, 16, 3, 3, requires_grad=True)

    def product(dtype: torch.dtype) -> float:
        wide = a.to(dtype)
        return min(seconds(lambda: wide @ wide) for _ in range(3))

    def convolution(dtype: torch.dtype) -> float:
        of = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        return min(seconds(lambda: F.conv2d(of[0], of[1]).sum().backward()) for _ in range(3))

    return {
        timed.__name__: timed(torch.float16) / timed(torch.float32)
        for timed in (product, convolution)
    }


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    asked = sys.argv[1:] or [*GOALS, "exact", "torch"]
    has = "has" if cpu_float16.has_float16_instructions() else "has no"
    print(f"torch {torch.__version__}, one thread; this CPU {has} float16 instructions")
    for name in GOALS:
        if name in asked:
            found = ratios(name)
            cells = "  ".join(f"{level} {found[level]:5.2f}" for level in LEVELS[1:])
            print(f"{name:12} step over O0's: {cells}   (goal {GOALS[name]})", flush=True)
    if "exact" in asked:
        cpu_float16.begin(torch.float16, ["cpu"])
        cases: dict[str, Any] = {
            "linear": (F.linear, (64, 512), (256, 512), (256,)),
            "matmul": (torch.matmul, (8, 64, 128), (8, 128, 64)),
            "convolution": (F.conv2d, (16, 16, 16, 16), (32, 16, 3, 3), (32,)),
        }
        for name, (function, *shapes) in cases.items():
            share = exact_share(function, *shapes)
            print(f"{name:12} equal to float64 rounded once: {share:.2%}   (goal 99 %)")
    if "torch" in asked:
        for name, ratio in torchs_own().items():
            print(f"{name:12} torch's own float16 over float32: {ratio:.0f}")


if __name__ == "__main__":
    with quiet_without_reader():
        main()
