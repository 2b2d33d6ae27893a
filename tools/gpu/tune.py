"""Which tiles, warps and programs are fastest on this card: ``./dev gpu --tune [WORD ...]``.

A check is one launcher at one size. It runs once by the formulas of `apex.kernels`, whose numbers
come by in `apex.kernels._settings`. Of each set of numbers it times candidates around it, once
each; the fastest few then take three turns with the formula, which is timed at the beginning and at
the end of each. A candidate becomes a row of ``src/apex/kernels/settings.json`` if

* in each turn it takes at most 0.95 of the formula's smaller time, and
* in each turn the two times of the formula are within 10 % of each other.

A row that a rerun measures anew is replaced, or removed if the candidate is no longer faster. If
the formula's times differ it stays. Each row is written as soon as it is found: what a killed run
has found stays, and names of operations continue it, as in ``./dev gpu --tune group_norm``.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.turns import take_turns
from tools.gpu import checking
from tools.gpu.checking import BF16, F16, F32, Tensor, check, need
from tools.gpu.rows import replace

if checking.DRY:  # before kernels are decorated
    os.environ["TRITON_INTERPRET"] = "1"

from apex.kernels import (
    _measured,
    _settings,
    cross_entropy,
    group_norm,
    rotary,
    row_norms,
    scaled_softmax,
    swiglu,
)
from apex.kernels._measured import Row
from apex.kernels._settings import Choice, Key

TURNS, FASTER, DIFFER = 3, 0.95, 0.10
FINALISTS = 4  # candidates that take three turns
DRY_CANDIDATES = 1  # of each set of numbers: the interpreter is slow
WARM_UP = 2
# How far a candidate's result may be from the formula's, in eps of its dtype: sums have another
# order.
AGREE = {F32: 64.0, F16: 1.0, BF16: 1.0}
TODAY, AGAIN = "formula", "formula again"
Result = Sequence[Tensor | None]
Work = Callable[[], Result]
Timer = Callable[[Choice, Work], float]  # milliseconds of a call; the choice is for stand-ins


# -- what is timed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A launcher, forward or backward, at a size; ``small`` is that of a dry run."""

    make: Callable[..., dict[str, Work]]
    dtype: torch.dtype
    way: str
    shape: tuple[int, ...]
    small: tuple[int, ...]

    def __str__(self) -> str:
        """Name of the check."""
        size = " x ".join(map(str, self.shape))
        return f"{self.make.__name__} {self.way}, {size}, {str(self.dtype)[6:]}"

    def work(self) -> Work:
        """Make the tensors."""
        shape = self.small if checking.DRY else self.shape
        return self.make(self.dtype, *shape)[self.way]


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=checking.DEVICE, dtype=F32).to(dtype)


def _norm(centered: bool, dtype: torch.dtype, rows: int, columns: int) -> dict[str, Work]:
    x, dy, weight = (_random(dtype, *shape) for shape in ((rows, columns),) * 2 + ((columns,),))
    bias = weight if centered else None
    options: dict[str, Any] = {"shape": (columns,), "eps": 1e-5, "centered": centered}
    forward = functools.partial(row_norms.forward, x, weight, bias, dtype=dtype, **options)
    _, mean, rstd = forward()
    saved = {"x": x, "mean": mean if centered else None, "rstd": rstd, "x_dtype": dtype}
    given: dict[str, Any] = {"weight": weight, "bias": bias, **saved, **options}
    return {
        "forward": forward,
        "backward": functools.partial(row_norms.backward, dy, [True] * 3, **given),
    }


def rms_norm(dtype: torch.dtype, rows: int, columns: int) -> dict[str, Work]:
    """Without a bias."""
    return _norm(False, dtype, rows, columns)


def layer_norm(dtype: torch.dtype, rows: int, columns: int) -> dict[str, Work]:
    """With weight and bias."""
    return _norm(True, dtype, rows, columns)


def group_norms(
    dtype: torch.dtype, images: int, channels: int, side: int, groups: int
) -> dict[str, Work]:
    """With SiLU, channels last."""
    x, dy = (
        _random(dtype, images, channels, side, side).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    weight = _random(dtype, channels)
    options: dict[str, Any] = {"groups": groups, "eps": 1e-5, "silu": True}
    forward = functools.partial(group_norm.forward, x, weight, weight, **options)
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": weight, "stats": forward()[1]}
    return {
        "forward": forward,
        "backward": functools.partial(group_norm.backward, dy, [True] * 3, **given, **options),
    }


def losses(dtype: torch.dtype, rows: int, classes: int) -> dict[str, Work]:
    """Cross-entropy, no smoothing."""
    x, dy = _random(dtype, rows, classes), _random(F32, rows)
    labels = torch.randint(classes, (rows,), device=checking.DEVICE)
    options: dict[str, Any] = {"smoothing": 0.0, "padding_idx": -100}
    forward = functools.partial(cross_entropy.forward, x, labels, **options)
    given: dict[str, Any] = {"logits": x, "labels": labels, "sums": forward()[1]}
    return {
        "forward": forward,
        "backward": functools.partial(cross_entropy.backward, dy, [True], **given, **options),
    }


def softmaxes(
    dtype: torch.dtype, heads: int, queries: int, columns: int, causal: int
) -> dict[str, Work]:
    """Without a mask, or causal."""
    x, dy = (_random(dtype, 1, heads, queries, columns) for _ in range(2))
    options: dict[str, Any] = {"scale": 0.1, "causal": bool(causal)}

    y = scaled_softmax.forward(x, None, **options)
    return {
        "forward": lambda: [scaled_softmax.forward(x, None, **options)],
        "backward": functools.partial(scaled_softmax.backward, dy, [True], y=y, **options),
    }


def gated(dtype: torch.dtype, rows: int, columns: int) -> dict[str, Work]:
    """SwiGLU."""
    gate, up, dy = (_random(dtype, rows, columns) for _ in range(3))
    return {
        "forward": lambda: [swiglu.forward(gate, up)],
        "backward": functools.partial(swiglu.backward, dy, [True] * 2, gate=gate, up=up),
    }


def rotated(dtype: torch.dtype, length: int, heads: int, channels: int) -> dict[str, Work]:
    """All channels of each head."""
    t = _random(dtype, length, 2, heads, channels)
    cos, sin = (_random(F32, length, channels) for _ in range(2))
    return {"forward": lambda: [rotary.forward(t, cos, sin, None, 0)]}


def _cases() -> list[Case]:
    """What the project is compared by first. No two have the same key of the table."""
    found: list[Case] = []

    def add(make: Any, dtype: torch.dtype, shape: Any, small: Any, ways: str = "both") -> None:
        both = ("forward", "backward") if ways == "both" else (ways,)
        found.extend(Case(make, dtype, way, shape, small) for way in both)

    add(rms_norm, BF16, (4096, 4096), (20, 256))
    add(group_norms, BF16, (4, 256, 128, 32), (1, 32, 4, 4))
    for norm, small in ((rms_norm, (1, 8200)), (layer_norm, (20, 300))):
        add(norm, BF16, (2048, 32768), small)
    add(layer_norm, BF16, (4096, 4096), (20, 256))
    add(group_norms, BF16, (4, 320, 64, 32), (1, 40, 4, 4))
    add(losses, BF16, (8192, 32000), (3, 1000))
    add(losses, BF16, (2048, 128256), (3, 5000))
    add(losses, BF16, (64, 50304), (1, 9000), "forward")  # several programs share a row
    add(softmaxes, BF16, (32, 2048, 2048, 1), (2, 3, 100, 0))
    add(gated, BF16, (4096, 14336), (5, 1000))
    add(rotated, BF16, (4096, 32, 128), (5, 4, 32), "forward")
    for norm in (rms_norm, layer_norm):
        add(norm, BF16, (16384, 768), (20, 96))
        add(norm, F32, (8192, 4096), (20, 256))
    return found


CASES = _cases()


# -- clocks --------------------------------------------------------------------------------------


def on_the_gpu(choice: Choice, work: Work) -> float:
    """Milliseconds of a call, once it is compiled."""
    for _ in range(WARM_UP):
        work()
    return checking.gpu_ms(work)


def stand_in(choice: Choice, work: Work) -> float:
    """What a dry run takes for a time: the fewer elements a warp has, the faster."""
    return 1.2 ** math.log2(choice["elements"] / choice["warps"])


# -- choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What came of a key: the row to write if there is one, and what to say.

    ``row`` is ``None`` too where the times of the formula differ; then the run says nothing about
    a row that is there, which ``steady`` tells.
    """

    row: Row | None
    steady: bool
    said: str


def row_of(place: tuple[str, str, str], key: Key, choice: Choice, **more: Any) -> Row:
    """A row of the table."""
    (card, triton, on), (op, dtype, size) = place, key
    row = {"card": card, "triton": triton, "torch": on, "op": op, "dtype": dtype}
    return {**row, "size": [*size], "choice": choice, **more}


def tune_key(
    key: Key, formula: Choice, work: Work, timer: Timer, place: tuple[str, str, str], shape: str
) -> Found:
    """Time candidates around the formula; the others of the launcher's numbers stay as they are."""

    def timed(choice: Choice) -> float:
        with _settings.use([row_of(place, key, choice)]):
            return timer(choice, work)

    candidates = _settings.around(key, formula)
    ways, lost = _that_run(candidates[: DRY_CANDIDATES if checking.DRY else None], key, work, timed)
    said = f"{key[0]} {[*key[2]]}: {len(ways)} candidates, {lost} cannot run"
    best = sorted(ways, key=lambda name: ways[name][1])[:FINALISTS]
    names = [TODAY, *best, AGAIN]
    choices = {TODAY: formula, AGAIN: formula, **{name: ways[name][0] for name in best}}
    turns = {name: functools.partial(timed, choices[name]) for name in names}
    times = take_turns(turns, TURNS)
    if not steady(times[TODAY], times[AGAIN]):
        return Found(None, False, f"{said}; unsteady: the formula took {_words(times[TODAY])} and "
                     f"{_words(times[AGAIN])} ms")  # fmt: skip
    winner = fastest(times)
    if winner is None:
        return Found(None, True, f"{said}; none is faster")
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    ms = {"formula": _rounded(times[TODAY]), "choice": _rounded(times[winner])}
    more = {"formula": formula, "shape": shape, "ms": ms, "date": today}
    ratio = sum(times[winner]) / sum(times[TODAY])
    row = row_of(place, key, choices[winner], **more)
    return Found(row, True, f"{said}; {choices[winner]} takes {ratio:.2f} of the formula's time")


def _that_run(
    candidates: list[Choice], key: Key, work: Work, timed: Callable[[Choice], float]
) -> tuple[dict[str, tuple[Choice, float]], int]:
    """Candidates that compile and agree with the formula, each with a first time; how many not."""
    with _settings.use():
        exact = [*work()]
    ways: dict[str, tuple[Choice, float]] = {}
    for choice in candidates:
        try:
            ms = timed(choice)
            with _settings.use([row_of(("", "", ""), key, choice)]):
                found = work()
        except Exception:  # noqa: BLE001  too much shared memory, too many registers
            torch.cuda.synchronize()  # raises if the GPU is lost, which ends the part
            continue
        _agree(found, exact, choice)
        ways[json.dumps(choice)] = choice, ms
    return ways, len(candidates) - len(ways)


def _agree(found: Result, exact: Result, choice: Choice) -> None:
    for one, other in zip(found, exact, strict=True):
        if one is not None and other is not None and one.numel():
            eps = torch.finfo(one.dtype).eps
            error = checking.off(one, other) / eps
            need(
                error <= AGREE[one.dtype], f"{choice}: off the formula's result by {error:.3g} eps"
            )


def steady(some: Sequence[float], again: Sequence[float]) -> bool:
    """Whether in each turn both times of the formula are near each other."""
    return all(abs(b / a - 1) <= DIFFER for a, b in zip(some, again, strict=True))


def fastest(times: dict[str, list[float]]) -> str | None:
    """The candidate with the smallest times, of those that are faster in each turn."""
    least = [min(pair) for pair in zip(times[TODAY], times[AGAIN], strict=True)]
    faster = [
        name
        for name, taken in times.items()
        if name not in (TODAY, AGAIN)
        and all(ms <= FASTER * formula for ms, formula in zip(taken, least, strict=True))
    ]
    return min(faster, key=lambda name: sum(times[name]), default=None)


def _rounded(times: Sequence[float]) -> list[float]:
    return [float(f"{ms:.4g}") for ms in times]


def _words(times: Sequence[float]) -> str:
    return ", ".join(f"{ms:.4g}" for ms in times)


# -- the file ------------------------------------------------------------------------------------


def _full_key(row: Row) -> tuple[Any, ...]:
    """What a row is about; rows are in this order."""
    return tuple([row[name] for name in ("card", "triton", "torch", "op", "dtype", "size")])


def store(file: Path, place: tuple[str, str, str], key: Key, row: Row | None) -> None:
    """Replace the row of a key, or remove it, and keep the file sorted, a line for each row.

    Raises:
        ValueError: A row that is there, or the new one, is bad: nothing is written.
    """
    about = _full_key(row_of(place, key, {}))
    rows = [one for one in _measured.check_all(file, _settings.check) if _full_key(one) != about]
    if row is not None:
        _settings.check(row)
        rows.append(row)
    lines = [json.dumps(one) for one in sorted(rows, key=_full_key)]
    replace("\n".join(["[", ",\n".join(lines), "]\n"]) if lines else "[\n]\n", file)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of a dry run; removed at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="apex-tune-")
    Path(folder.name, "settings.json").write_text(_settings.FILE.read_text("utf-8"), "utf-8")
    return folder


def tune_case(case: Case, timer: Timer, file: Path, place: tuple[str, str, str]) -> str:
    """Time all numbers that a launcher asks for, and write what is faster; say what was found."""
    _measured.check_all(file, _settings.check)  # before anything is timed
    work = case.work()
    with _settings.use() as asked:
        work()
    said = []
    for key, formula in [*asked.items()]:
        found = tune_key(key, formula, work, timer, place, str(case))
        if found.steady:
            store(file, place, key, found.row)
        said.append(found.said)
    return "; ".join(said)


@check(*CASES)
def tune(case: Case) -> str:
    """Tune a launcher at one size."""
    place = _settings.here() or ("dry", "dry", "dry")
    if not checking.DRY:
        need(_settings.here() is not None, "GPUs of several kinds: let the run see one of them")
    file = Path(_folder().name, "settings.json") if checking.DRY else _settings.FILE
    return tune_case(case, stand_in if checking.DRY else on_the_gpu, file, place)
