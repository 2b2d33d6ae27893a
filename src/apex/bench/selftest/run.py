"""Carry out checks and keep what comes of them.

A check that raises is a failed check and not the end of the run; only a GPU that no longer answers
ends it, because after such an error every later call on it fails too.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from apex.bench.selftest import gpu, lists, ops, optimizers, training
from apex.bench.selftest.check import PATHS, Check, Measured, Setting
from apex.ops import _runtime

__all__ = ["Planned", "Result", "carry_out", "every_check", "plan"]

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
    status: Literal["right", "wrong", "raised"]
    measured: tuple[Measured, ...]
    seconds: float
    error: str | None
    warnings: tuple[str, ...]

    @property
    def worst(self) -> Measured | None:
        """The number that is nearest to what is allowed, or furthest beyond."""
        wrong = [one for one in self.measured if not one.right]
        return max(wrong or self.measured, key=_share, default=None)


def _share(one: Measured) -> float:
    if one.allowed:
        return one.value / one.allowed
    return 0.0 if one.right else float("inf")


def every_check() -> Iterator[Check]:
    """All checks, those for a GPU included."""
    for module in (ops, lists, optimizers, training, gpu):
        yield from module.checks()


def plan(device: torch.device, *, kernels: bool, only: str = "") -> list[Planned]:
    """Which checks are to run.

    Args:
        device: Of the tensors.
        kernels: Whether Triton kernels can run there, in its interpreter on a CPU.
        only: A part of the names of the checks wanted, areas included.
    """
    return [
        (check, Setting(device, path))
        for check in every_check()
        if only.lower() in f"{check.area}: {check.name}".lower()
        if not check.gpu or device.type == "cuda"
        for path in check.paths
        if path != "kernels" or kernels
    ]


def carry_out(
    planned: Sequence[Planned], begin: Callable[[Check, Setting], object]
) -> Iterator[Result]:
    """Run checks one after the other, up to that in which a GPU is lost; ``begin`` is told each."""
    for check, setting in planned:
        begin(check, setting)
        result = _result(check, setting)
        yield result
        if result.status == "raised" and _is_lost(setting.device):
            return


def _result(check: Check, setting: Setting) -> Result:
    measured: list[Measured] = []
    error = None
    started = time.perf_counter()
    wanted = PATHS[setting.path]
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
    right = measured and all(one.right for one in measured)  # nothing measured proves nothing
    return Result(
        check.area,
        check.name,
        setting.path,
        "raised" if error else "right" if right else "wrong",
        tuple(measured),
        time.perf_counter() - started,
        error,
        tuple(dict.fromkeys(" ".join(str(one.message).split()) for one in caught)),
    )


def _is_lost(device: torch.device) -> bool:
    """Whether a GPU fails at everything since an error: an illegal address, an assertion."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
    return False
