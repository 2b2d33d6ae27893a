"""From how many elements on an eager call on a GPU takes the kernel of an operation.

Each operation has two numbers, in ``thresholds.json`` beside this file:

* ``gpu``: from there on the kernels take the GPU less time than torch's functions;
* ``wall``: from there on a call is over sooner, for somebody who waits for it. A kernel of ours
  costs the host more than torch's functions do, so this is the larger number.

The file also says on which card, with which torch and Triton and when they were measured. ``./dev
gpu thresholds`` measures all and writes it. ``derived`` says how a number was found that no run has
measured yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from apex.kernels import _measured

__all__ = ["FILE", "Threshold", "check", "prefer", "threshold"]

Clock = Literal["gpu", "wall"]
CLOCKS = get_args(Clock)
FILE = Path(__file__).with_name("thresholds.json")


class Threshold:
    """Both numbers of an operation; ``least`` is the one that counts now."""

    __slots__ = ("gpu", "least", "wall")

    def __init__(self, gpu: int, wall: int) -> None:
        self.gpu, self.wall = gpu, wall
        self.least: int = getattr(self, _preferred)


_preferred: Clock = "wall"
_rows: dict[str, Threshold] = {}  # by operation


def threshold(name: str) -> Threshold | None:
    """The numbers of an operation, the same object for every caller; ``None`` if it has none."""
    if not _rows:
        rows = _measured.read(FILE, check, lambda row: True)
        _rows.update((row["op"], Threshold(row["gpu"], row["wall"])) for row in rows)
    return _rows.get(name)


def check(row: _measured.Row) -> None:
    """Refuse a row without numbers.

    Raises:
        ValueError: Says what they are.
    """
    for clock in CLOCKS:
        number = row.get(clock)
        if type(number) is not int or number < 1:
            raise ValueError(
                f"{row['op']}: {clock} is {number!r}; it must be an integer of 1 or more."
            )


class prefer:  # lower case, like torch.set_grad_enabled: used as a function
    """Say which clock decides whether a call on a GPU takes apex's kernel or torch's functions.

    ``"wall"``, the default, is for programs that wait for the host: they are never slower than with
    torch's own modules. ``"gpu"`` is for trainings that keep the GPU busy, so that the host's time
    does not show; more calls take the kernels then.

    It holds for the whole process, as threads of autograd run forwards again in
    ``torch.utils.checkpoint``. In a ``with`` block it holds until the end of the block. A backward
    takes the path of its forward. The two paths round differently: results are equal up to
    rounding, not bit by bit.

    Args:
        clock: ``"wall"`` or ``"gpu"``.

    Raises:
        ValueError: Another word.

    Example:
        >>> prefer("gpu")  # from now on
        prefer('gpu')
        >>> with prefer("wall"):  # in this block
        ...     pass
        >>> prefer("wall")
        prefer('wall')
    """

    def __init__(self, clock: Clock) -> None:
        if clock not in CLOCKS:
            raise ValueError(f'prefer: clock is {clock!r}; allowed are "wall" and "gpu".')
        self.clock, self._before = clock, _preferred
        _set(clock)

    def __enter__(self) -> prefer:
        return self

    def __exit__(self, *exception: object) -> None:
        _set(self._before)

    def __repr__(self) -> str:
        return f"prefer({self.clock!r})"


def _set(clock: Clock) -> None:
    global _preferred  # noqa: PLW0603  one setting of the process
    _preferred = clock
    for row in _rows.values():
        row.least = getattr(row, clock)
