"""What a check is: a name that users recognise, and a function that measures.

A check is run once for each *path* by which the library computes. Its function gets a `Setting` and
yields `Measured`: a number and the largest one allowed. It does not compare the two and catches no
error: a number above what is allowed, a nan and an error are all a failed check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from apex.bench import tolerance

__all__ = [
    "DTYPES",
    "PATHS",
    "Check",
    "Measured",
    "Setting",
    "differing",
    "one_rounding",
    "random",
    "same_again",
]

# Ways to compute, and the word that `apex.ops._runtime.use` has for each.
PATHS: dict[str, str | None] = {
    "as called": None,  # what a program gets on this device
    "definition": "reference",  # plain PyTorch
    "kernels": "triton",
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """Where a check runs.

    Attributes:
        device: Of the tensors; a GPU with its number.
        path: One of `PATHS`.
    """

    device: torch.device
    path: str

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter computes, which truncates float32 to bfloat16."""
        return self.path == "kernels" and self.device.type == "cpu"

    @property
    def large(self) -> bool:
        """Whether sizes at which a GPU is busy are affordable."""
        return self.device.type == "cuda"


class Measured(NamedTuple):
    """One number.

    Attributes:
        what: What was measured.
        value: The number.
        allowed: The largest that is right; ``None`` for a number that is only reported.
        unit: Of both.
    """

    what: str
    value: float
    allowed: float | None
    unit: str

    @property
    def right(self) -> bool:
        """Whether the number is as small as it has to be; nan is not."""
        return self.allowed is None or self.value <= self.allowed


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        area: What it belongs to, for people.
        name: What is checked, for people.
        run: Measures. Warnings are kept beside the result.
        paths: By which of `PATHS` it runs.
        gpu: Whether it needs a GPU.
    """

    area: str
    name: str
    run: Callable[[Setting], Iterable[Measured]]
    paths: tuple[str, ...] = tuple(PATHS)
    gpu: bool = False


def one_rounding(
    what: str, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], setting: Setting
) -> Iterator[Measured]:
    """Compare results with their float64 definitions: one rounding is allowed.

    Args:
        what: What is compared.
        pairs: What was computed and its definition. Those of a dtype are taken together: a single
            number may be off by chance.
        setting: Where it was computed.
    """
    pools: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for actual, exact in pairs:
        if actual.shape != exact.shape:
            yield Measured(f"{what}: shape", 1, 0, "wrong shapes")
        pools.setdefault(actual.dtype, []).append((actual.detach().flatten(), exact.flatten()))
    for dtype, pool in pools.items():
        actual, exact = (torch.cat(side) for side in zip(*pool, strict=True))
        found = tolerance.roundings(actual, exact, truncated=setting.interpreted)
        yield Measured(what, found, tolerance.ROUNDINGS[dtype], "roundings")


def same_again(
    what: str, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> Measured:
    """Compare two runs of the same: not a bit may differ."""
    pairs = zip(first, second, strict=True)
    return Measured(what, sum(differing(a, b) for a, b in pairs), 0, "elements differ")


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ; nan equals nan."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    return int(((a != b) & ~((a != a) & (b != b))).sum())


def random(
    shape: Sequence[int],
    dtype: torch.dtype,
    setting: Setting,
    *,
    seed: int = 0,
    scale: float = 1.0,
    mean: float = 0.0,
) -> torch.Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    made = scale * torch.randn(tuple(shape), generator=generator) + mean
    return made.to(dtype).to(setting.device)
