"""What a check is: a name that users recognise, and a function that measures; and its result.

A check is run once for each *path* by which the library computes. Its function gets a `Setting` and
yields `Measured`: a number and the largest one allowed. A number above that, a nan and an error are
all a failed check, and not the end of the run. Only a GPU that no longer answers ends it, because
after such an error every later call on it fails too.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from apex.catalogue import tolerance
from apex.ops import _runtime

__all__ = ["PATHS", "Check", "Measured", "Pair", "Planned", "Result", "Setting"]
__all__ += ["carry_out", "is_lost", "joined", "one_rounding", "same"]

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
    """What was measured, and the largest value that is right."""

    what: str
    value: float
    allowed: float
    unit: str

    @property
    def right(self) -> bool:
        """Whether the value is as small as it has to be; nan is not."""
        return self.value <= self.allowed


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        area: For people.
        name: For people; no other check of the area has it.
        run: What measures.
        paths: The ways in which it is run.
        gpu: Whether it needs one.
        rare: Whether only ``--all`` runs it.
        subject: What it computes with, if that is not its name. Checks of the same one launch the
            same kernels: one process runs them, so that each kernel is compiled once.
    """

    area: str
    name: str
    run: Callable[[Setting], Iterable[Measured]]
    paths: tuple[str, ...] = tuple(PATHS)
    gpu: bool = False
    rare: bool = False
    subject: str = ""


Planned = tuple[Check, Setting]


@dataclass(frozen=True)
class Result:
    """What came of a check on one path.

    ``measured`` has the numbers, those until an error included; ``error`` is the traceback of what
    it raised, ``seconds`` include compiling, and ``warnings`` are those of the check.
    """

    area: str
    name: str
    path: str
    measured: tuple[Measured, ...]
    seconds: float
    error: str | None
    warnings: tuple[str, ...]

    @property
    def status(self) -> Literal["right", "wrong", "raised"]:
        """Nothing measured proves nothing."""
        if self.error:
            return "raised"
        return "right" if self.measured and all(one.right for one in self.measured) else "wrong"

    @property
    def worst(self) -> Measured | None:
        """The number that is nearest to what is allowed, or furthest beyond."""

        def share(one: Measured) -> tuple[bool, float]:
            return not one.right, one.value / one.allowed if one.allowed else 0.0

        return max(self.measured, key=share, default=None)

    def as_json(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers."""
        measured = [{**one._asdict(), "right": one.right} for one in self.measured]
        named = {"status": self.status, "seconds": round(self.seconds, 3), "measured": measured}
        return {**vars(self), **named}


def carry_out(check: Check, setting: Setting) -> Result:
    """Run a check on a path."""
    measured: list[Measured] = []
    error, started, wanted = None, time.perf_counter(), PATHS[setting.path]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with _runtime.use(wanted) if wanted else contextlib.nullcontext():
                for one in check.run(setting):
                    measured.append(one)
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)
        except Exception:  # noqa: BLE001  a failed check is a result
            error = traceback.format_exc()
    messages = dict.fromkeys(" ".join(str(one.message).split()) for one in caught)
    seconds = time.perf_counter() - started
    return Result(
        check.area, check.name, setting.path, tuple(measured), seconds, error, tuple(messages)
    )


def is_lost(device: torch.device) -> bool:
    """Whether a GPU fails at everything since an error: an illegal address, an assertion."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
    return False


# --- comparisons ----------------------------------------------------------------------------------


def one_rounding(what: str, pairs: Iterable[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare results with their float64 definitions: one rounding is allowed.

    Pairs of a dtype are taken together: a single number may be off by chance.
    """
    pools: dict[torch.dtype, list[Pair]] = {}
    for actual, exact in pairs:
        pools.setdefault(actual.dtype, []).append((actual, exact))
    for dtype, pool in pools.items():
        found = tolerance.roundings(*joined(pool), truncated=setting.interpreted)
        yield Measured(what, found, tolerance.ROUNDINGS[dtype], "roundings")


def joined(pairs: Iterable[Pair]) -> Pair:
    """Flatten and join all that was computed, and all definitions, of the same shapes."""
    pairs = list(pairs)
    assert all(actual.shape == exact.shape for actual, exact in pairs), "wrong shapes"
    actual, exact = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
    return actual.detach(), exact


def same(what: str, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> Measured:
    """Compare two runs of the same: not a bit may differ."""
    pairs = zip(first, second, strict=True)
    return Measured(what, sum(_differing(a, b) for a, b in pairs), 0, "elements differ")


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ; nan equals nan."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    return int(((a != b) & ~((a != a) & (b != b))).sum())
