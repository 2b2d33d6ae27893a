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

__all__ = ["PATHS", "Check", "Measured", "Setting", "differing", "joined", "one_rounding", "same"]

# Ways to compute, and the word that `apex.ops._runtime.use` has for each.
PATHS: dict[str, str | None] = {
    "as called": None,  # what a program gets on this device
    "definition": "reference",  # plain PyTorch
    "kernels": "triton",
}
Pair = tuple[torch.Tensor, torch.Tensor]  # what was computed, and its definition in float64


@dataclass(frozen=True)
class Setting:
    """Where a check runs: the device of the tensors (a GPU with its number), and one of `PATHS`."""

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
    """One number: what was measured, its value, and the largest value that is right.

    ``None`` is allowed for a number that is only reported. ``unit`` is that of both.
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
    """One line of the report: what it belongs to and its name, for people; and what measures.

    Warnings of ``run`` are kept beside the result. ``paths`` are those of `PATHS` by which it runs;
    ``gpu`` says that it needs a GPU.
    """

    area: str
    name: str
    run: Callable[[Setting], Iterable[Measured]]
    paths: tuple[str, ...] = tuple(PATHS)
    gpu: bool = False


def one_rounding(what: str, pairs: Iterable[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare results with their float64 definitions: one rounding is allowed.

    Pairs of a dtype are taken together: a single number may be off by chance.
    """
    pools: dict[torch.dtype, list[Pair]] = {}
    for actual, exact in pairs:
        if actual.shape != exact.shape:
            yield Measured(f"{what}: shape", 1, 0, "wrong shapes")
        pools.setdefault(actual.dtype, []).append((actual, exact))
    for dtype, pool in pools.items():
        found = tolerance.roundings(*joined(pool), truncated=setting.interpreted)
        yield Measured(what, found, tolerance.ROUNDINGS[dtype], "roundings")


def joined(pairs: Iterable[Pair]) -> Pair:
    """Flatten and join all that was computed, and all definitions."""
    actual, exact = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
    return actual.detach(), exact


def same(what: str, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> Measured:
    """Compare two runs of the same: not a bit may differ."""
    pairs = zip(first, second, strict=True)
    return Measured(what, sum(differing(a, b) for a, b in pairs), 0, "elements differ")


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ; nan equals nan."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    return int(((a != b) & ~((a != a) & (b != b))).sum())
