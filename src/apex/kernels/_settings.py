"""How a launcher cuts its work: by a formula, or as a run on this card has found faster.

A launcher derives the numbers of its launches (elements of a tile, warps, programs ...) by a
formula. Before it makes a `Family` of them it passes them through `setting`, which gives them back,
unless ``settings.json`` has a row for this card, Triton and torch and for the operation, the dtype
and what is static of the size: the length of rows, never their number. Such a row was written by
``./dev gpu --tune``, which takes the numbers of the formula as they come by here, varies them
(`around`), and times launches. Nothing else writes the file. While it is empty, every launch is the
formula's.

This is once for each family: functions that make families, or cut sizes, are `kept`, and a launch
looks nothing up. Programs whose GPUs are of several kinds take the formula.

A tile of other elements, or other programs, may add up in another order: results that depend on a
row are equal up to rounding, not bit by bit, to those of another card or of an empty file.
``programs`` is the only number that says how rows are spread over programs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from apex.kernels import _measured
from apex.kernels._launching import power_of_2
from apex.kernels._measured import Row

FILE = Path(__file__).with_name("settings.json")
Choice = dict[str, int]
Key = tuple[str, str, tuple[int, ...]]  # operation, dtype, size
DTYPES = ("bfloat16", "float16", "float32")

# Least and largest of each number. All but stages and whole are powers of 2.
LIMITS = {
    "whole": (0, 1),  # whether a tile has whole rows; else a row goes in blocks
    "elements": (16, 65536),  # of a tile
    "width": (8, 1024),  # columns of a tile; its other side is elements // width
    "warps": (1, 16 if torch.version.hip else 32),  # 1,024 threads
    "stages": (0, 4),  # how far tiles are read ahead; 0: the compiler's default
    "programs": (1, 8192),  # at most: on a multiprocessor, GroupNorm on the chip
}
MOST_PER_THREAD = 64  # elements of a tile; registers hold 255 numbers a thread


class Fields(NamedTuple):
    """What a row of an operation has: the names of its size, and of its choice."""

    size: tuple[str, ...]
    choice: tuple[str, ...]


_ROWS = Fields(("columns",), ("whole", "elements", "warps"))
_GROUPS = Fields(
    ("channels", "groups", "pixels"), ("width", "elements", "warps", "stages", "programs")
)
_FLAT = Fields((), ("elements", "warps"))
OPS = {
    **dict.fromkeys(("layer_norm_forward", "rms_norm_forward"), _ROWS),
    **dict.fromkeys(
        [
            f"{kind}_norm_backward{end}"
            for kind, end in itertools.product(("layer", "rms"), ("", "_from_output"))
        ],
        Fields(("columns",), ("whole", "elements", "warps", "stages", "programs")),
    ),
    **dict.fromkeys(
        ("layer_norm_weight_sums", "rms_norm_weight_sums"),  # of rows that go in blocks
        Fields(("columns",), ("width", "elements", "warps", "programs")),
    ),
    **dict.fromkeys(("softmax_forward", "softmax_backward"), _ROWS),
    "cross_entropy_forward": Fields(("columns",), ("elements", "warps", "programs")),
    "cross_entropy_backward": Fields(("columns",), ("elements", "warps")),
    **dict.fromkeys(("group_norm_forward", "group_norm_backward"), _GROUPS),
    **dict.fromkeys(("swiglu_forward", "swiglu_backward"), _FLAT),
    "rotary": Fields(("heads", "channels", "half"), ("elements", "warps")),  # elements: of a half
}

_Result = TypeVar("_Result")
_kept: list[Any] = []  # all that depends on settings, so that `use` can forget it
_table: dict[Key, Choice] | None = None  # not read yet
_asked: dict[Key, Choice] | None = None  # of `use`


# -- what launchers call -------------------------------------------------------------------------


def kept(
    function: Callable[..., _Result], most: int | None = None
) -> functools._lru_cache_wrapper[_Result]:
    """Decorate what depends on `setting`: computed once for its arguments, `most` of them."""
    found = functools.lru_cache(most)(function)
    _kept.append(found)
    return found


def setting(op: str, dtype: torch.dtype, size: tuple[int, ...], **formula: int) -> tuple[int, ...]:
    """The numbers of a launch, in the order of the formula's.

    Args:
        op: One of `OPS`.
        dtype: Of what the kernel reads most of.
        size: What is the same in all launches of the family.
        formula: What a launch takes without a row of the table.
    """
    key = (op, str(dtype).removeprefix("torch."), size)
    if _asked is not None:
        _asked[key] = formula
    choice = _rows_here().get(key, formula)
    return tuple([choice[name] for name in formula])


# -- the table -----------------------------------------------------------------------------------


@functools.cache
def here() -> tuple[str, str, str] | None:
    """Card, Triton and torch; ``None`` without a GPU, or with several kinds of them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(number) for number in range(count)}
    if len(names) != 1:
        return None
    return names.pop(), triton.__version__, torch.__version__.split("+")[0]


def key_of(row: Row) -> Key:
    """What a row is looked up by, of those for one card, Triton and torch."""
    return row["op"], row["dtype"], tuple(row["size"])


def _rows_here() -> dict[Key, Choice]:
    global _table  # noqa: PLW0603  read when the first kernel is launched
    if _table is None:
        place = here()
        rows = (
            [] if place is None else _measured.read(FILE, check, functools.partial(_is_of, place))
        )
        _table = {key_of(row): row["choice"] for row in rows}
    return _table


def _is_of(place: tuple[str, str, str], row: Row) -> bool:
    return place == (row.get("card"), row.get("triton"), row.get("torch"))


@contextlib.contextmanager
def use(rows: Iterable[Row] = ()) -> Iterator[dict[Key, Choice]]:
    """In this block take these rows and no others, whatever card they are of: for tools and tests.

    Yields:
        What launchers have asked for since: the numbers of the formula.
    """
    global _table, _asked
    before = _table, _asked
    _table, _asked = {key_of(row): row["choice"] for row in rows}, {}
    _forget()
    try:
        yield _asked
    finally:
        _table, _asked = before
        _forget()


def _forget() -> None:
    for function in _kept:
        function.cache_clear()


# -- what a row may say --------------------------------------------------------------------------


def check(row: Row) -> None:
    """Refuse a row that no launch can follow.

    Raises:
        ValueError: What is wrong with it.
    """
    op = row.get("op")
    if op not in OPS:
        raise ValueError(f"There is no operation {op!r}: choose from {', '.join(OPS)}.")
    if row.get("dtype") not in DTYPES:
        raise ValueError(
            f"{op}: dtype is {row.get('dtype')!r}; it must be one of {', '.join(DTYPES)}."
        )
    size, choice = row.get("size"), row.get("choice")
    names = OPS[op].size
    if not isinstance(size, list) or len(size) != len(names) or not all(map(_counts, size)):
        raise ValueError(
            f"{op}: size is {size!r}; it must be a list of {', '.join(names) or 'nothing'}."
        )
    if not isinstance(choice, dict) or {*choice} != {*OPS[op].choice}:
        raise ValueError(f"{op}: choice is {choice!r}; it must have {', '.join(OPS[op].choice)}.")
    for name, value in choice.items():
        _check_number(f"{op}: {name}", value, name)
    said = impossible(size, choice)
    if said:
        raise ValueError(f"{op}: {said}.")


def _counts(value: object) -> bool:
    return type(value) is int and value > 0


def _check_number(what: str, value: object, name: str) -> None:
    least, most = LIMITS[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}; it must be an integer from {least} to {most}.")
    if name not in ("whole", "stages") and value & (value - 1):
        raise ValueError(f"{what} is {value}; it must be a power of 2.")


def impossible(size: Iterable[int], choice: Choice) -> str:
    """Why no tile is like this, or nothing."""
    elements, threads = choice["elements"], 32 * choice["warps"]
    if elements > MOST_PER_THREAD * threads:
        return f"{elements} elements are more than {MOST_PER_THREAD} for each of {threads} threads"
    if choice.get("width", 1) > elements:
        return f"a tile of {elements} elements is less than {choice['width']} wide"
    if "whole" in choice:
        row = power_of_2(next(iter(size)))
        if choice["whole"] and elements < row:
            return f"a tile of {elements} elements has no whole row of {row}"
        if not choice["whole"] and elements > row:
            return f"a block of {elements} elements is longer than a row of {row}"
    return ""


def around(key: Key, formula: Choice) -> list[Choice]:
    """Candidates: a number of the formula half or twice as large, or elements and warps together.

    And the other path of rows, with what most formulas have: 16 elements a thread.
    """
    op, dtype, size = key
    starts = [formula]
    if "whole" in formula:
        elements = 4096 if formula["whole"] else power_of_2(size[0])
        other = {"whole": 1 - formula["whole"], "elements": elements}
        starts.append(formula | other | {"warps": min(32, max(4, elements // 512))})
    found: list[Choice] = []
    for start in starts:
        steps = {name: _neighbours(name, start) for name in start}
        for names in (("elements", "warps"), *((name,) for name in start)):
            for values in itertools.product(*(steps[name] for name in names)):
                found.append(start | dict(zip(names, values, strict=True)))
    row = {"op": op, "dtype": dtype, "size": [*size]}
    unique = {tuple(choice.items()): choice for choice in found if choice != formula}
    return [choice for choice in unique.values() if _is_good({**row, "choice": choice})]


def _neighbours(name: str, start: Choice) -> list[int]:
    value, in_blocks = start[name], start.get("whole") == 0
    if name == "whole" or (in_blocks and name in ("stages", "programs")):
        return [value]  # blocks of rows do without
    if name == "stages":
        return [value, *({0, 1, 2, 3} - {value})]
    return [value, 2 * value, value // 2]


def _is_good(row: Row) -> bool:
    try:
        check(row)
    except ValueError:
        return False
    return True
