"""What was found: places in a program, and findings as they are written."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch

from apex.debug.check.mistakes import KINDS

_APEX = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, _APEX, "<frozen", "<string", "<eval_with_key")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_IGNORE = re.compile(r"#\s*apex:\s*ignore\s+([\w\s,-]+)")
OURS, LIBRARY, PROGRAM = range(3)  # whose a file is: torch's, apex's or Python's, another's, ...


@dataclass(frozen=True)
class Place:
    """A line of the program; ``ignored`` are the kinds that a comment on it names."""

    file: str
    line: int
    function: str
    text: str
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        is_here = self.file.startswith(os.getcwd() + os.sep)
        shown = os.path.relpath(self.file) if is_here else self.file
        return f"{shown}:{self.line} in {self.function}: {self.text}"


def here() -> Place:
    """The innermost line of the program on the stack; of another library where there is none."""
    frame: Any = sys._getframe(1)
    library = frame
    while frame is not None and (whose := whose_is(frame.f_code.co_filename)) != PROGRAM:
        if whose == LIBRARY and library.f_code.co_filename.startswith(_APEX):
            library = frame
        frame = frame.f_back
    frame = frame or library
    return _place(frame.f_code.co_filename, frame.f_code, frame.f_lineno, frame.f_lasti)


def caller() -> int:
    """Whose the code is that called a patched function."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_APEX):
        frame = frame.f_back
    return whose_is(frame.f_code.co_filename)


@cache
def _place(file: str, code: Any, line: int, instruction: int) -> Place:
    last = line  # codes of two files may be equal: the file is an argument for the cache
    if hasattr(code, "co_positions"):  # Python 3.11: where a statement of several lines ends
        ends = [end for i, (_, end, *_) in enumerate(code.co_positions()) if i == instruction // 2]
        last = max([line, *filter(None, ends)])
    lines = [linecache.getline(file, number) for number in range(line, last + 1)]
    named = " ".join(found for text in lines for found in _IGNORE.findall(text))
    ignored = tuple(re.split(r"[\s,]+", named))
    return Place(file, line, code.co_name, lines[0].strip(), ignored)


@cache
def whose_is(file: str) -> int:
    """Whether a file is of torch, apex or Python, of another library, or of the program."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if file.startswith(_SKIPPED):
        return OURS
    if "site-packages" in file or "dist-packages" in file:
        is_own = file.startswith(os.path.dirname(os.path.abspath(main)) + os.sep)
        return PROGRAM if is_own else LIBRARY
    return OURS if file.startswith(_STANDARD) else PROGRAM


@dataclass
class Finding:
    """One precision mistake of a program, with its measurements.

    Attributes:
        kind: The kind of mistake, such as ``"update-lost"``.
        file: Path of the file that contains it.
        line: Number of the line.
        function: Name of the function.
        text: Source of the line.
        sentence: What the line does, in one sentence.
        fix: Lines of code that fix it.
        first: The first measurement.
        first_step: The step of ``first``; 0 for a measurement of the whole run.
        worst: The worst measurement; empty if it was the first one.
        worst_step: The step of ``worst``.
        count: Number of steps that had the mistake.
        steps: Number of steps that were measured.
        ranks: The ranks that had the mistake, in a distributed program.
    """

    kind: str
    file: str
    line: int
    function: str
    text: str
    sentence: str
    fix: list[str]
    first: str
    first_step: int
    worst: str = ""
    worst_step: int = 0
    count: int = 1
    steps: int = 0
    ranks: list[int] = field(default_factory=list)
    _size: float = 0.0
    _last: int = 0

    @classmethod
    def new(
        cls,
        kind: str,
        at: Place,
        step: int,
        text: str,
        size: float,
        sentence: str = "",
        fix: Iterable[str] = (),
    ) -> Finding:
        """A mistake that is seen for the first time; the last two replace what the table has."""
        known, where = KINDS[kind], (at.file, at.line, at.function, at.text)
        made = cls(kind, *where, sentence or known.does, [*fix] or known.fix, text, step)
        made._size, made._last = size, step
        return made

    def again(self, step: int, text: str, size: float) -> None:
        """Take another measurement of the same."""
        self.count += step != self._last
        self._last = step
        if size > self._size:
            self._size, self.worst, self.worst_step = size, text, step

    def ended(self, steps: int, measured: int) -> None:
        """Count in the steps of the program: what follows the last step is counted as in it."""
        self.first_step = min(self.first_step, steps)
        self.worst_step = min(self.worst_step, steps)
        self.count = min(self.count, max(steps, 1))
        self.steps = steps if self.count > measured else measured

    def measured(self) -> str:
        """Return the measurements in one line."""
        if not self.first_step:
            return self.first
        worst = f"; worst in step {self.worst_step}: {self.worst}" if self.worst else ""
        return f"step {self.first_step}: {self.first}{worst} ({self.count} of {self.steps} steps)"

    def lines(self, number: int) -> list[str]:
        """Return the finding as it is printed, in lines; ``number`` is put in front."""
        place = Place(self.file, self.line, self.function, self.text)
        ranks = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        head = [f"{number}  {self.kind}  {place}{ranks}", f"   {self.sentence}"]
        fix = [f"   fix:      {self.fix[0]}", *(f"             {line}" for line in self.fix[1:])]
        return [*head, f"   measured: {self.measured()}", *fix]

    @classmethod
    def of(cls, whole: dict[str, Any]) -> Finding:
        """What :meth:`as_dict` was made of."""
        return cls(**{name: value for name, value in whole.items() if name != "measured"})

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON, with ``measured()`` under ``"measured"``."""
        whole = {name: value for name, value in asdict(self).items() if name[0] != "_"}
        return {**whole, "measured": self.measured()}
