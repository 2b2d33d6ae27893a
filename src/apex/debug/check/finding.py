"""What was found: places in a program, findings, and how both are written."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from apex._mistakes import KINDS

_SKIPPED = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.dirname(__file__))),  # apex
    )
)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_IGNORE = re.compile(r"#\s*apex:\s*ignore\s+([\w,\- ]+)")
OURS, LIBRARY, PROGRAM = range(3)
_is_of: dict[str, int] = {}  # file -> whose it is


@dataclass(frozen=True)
class Place:
    """A line of the program."""

    file: str
    line: int
    function: str
    text: str
    ignored: tuple[str, ...] = ()  # kinds, by a comment on the line

    def __str__(self) -> str:
        shown = self.file
        if shown.startswith(os.getcwd() + os.sep):
            shown = os.path.relpath(shown)
        return f"{shown}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


def here() -> Place:
    """The innermost line of the program on the stack; of another library where there is none."""
    frame: Any = sys._getframe(1)
    library = None
    while frame is not None:
        whose = whose_is(frame.f_code.co_filename)
        if whose == PROGRAM:
            return _place(frame)
        if whose == LIBRARY and library is None:
            library = frame
        frame = frame.f_back
    return Place("", 0, "", "") if library is None else _place(library)


def caller() -> int:
    """Whose the code is that called a patched function."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED[1]):
        frame = frame.f_back
    return whose_is(frame.f_code.co_filename)


def _place(frame: Any) -> Place:
    code, line = frame.f_code, frame.f_lineno
    last = line
    if hasattr(code, "co_positions"):  # Python 3.11
        positions = [p for i, p in enumerate(code.co_positions()) if i == frame.f_lasti // 2]
        last = max([line, *(end for _, end, _, _ in positions if end)])
    lines = [linecache.getline(code.co_filename, number) for number in range(line, last + 1)]
    ignored = [kind for text in lines for found in _IGNORE.findall(text) for kind in _words(found)]
    return Place(code.co_filename, line, code.co_name, lines[0].strip(), tuple(ignored))


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def whose_is(file: str) -> int:
    """Whether a file is of torch, apex or Python, of another library, or of the program."""
    found = _is_of.get(file)
    if found is None:
        main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
        is_site = "site-packages" in file or "dist-packages" in file
        if file.startswith((*_SKIPPED, "<frozen", "<string", "<eval_with_key")):
            found = OURS
        elif is_site and not file.startswith(os.path.dirname(os.path.abspath(main)) + os.sep):
            found = LIBRARY
        else:
            found = OURS if file.startswith(_STANDARD) and not is_site else PROGRAM
        _is_of[file] = found
    return found


@dataclass
class Finding:
    """One mistake of a program, with what was measured.

    Attributes:
        kind: A key of :data:`KINDS`.
        file, line, function, text: Where it is.
        sentence: What that line does.
        first: What was measured where it was first seen; ``step`` is that step.
        worst: The same where it was worst; empty if that was the first time.
        count: In how many steps it was seen.
        steps: How many steps were measured.
        fix: The lines that end it.
    """

    kind: str
    file: str
    line: int
    function: str
    text: str
    sentence: str
    first: str
    step: int
    fix: list[str]
    worst: str = ""
    worst_step: int = 0
    count: int = 1
    steps: int = 0
    ranks: list[int] = field(default_factory=list)
    _size: float = 0.0
    _last: int = 0

    def again(self, step: int, text: str, size: float) -> None:
        """Take another measurement of the same."""
        if step != self._last:
            self._last, self.count = step, self.count + 1
        if text and size > self._size:
            self._size, self.worst, self.worst_step = size, text, step

    def measured(self) -> str:
        """What was measured, in one line."""
        text = self.first
        if self.step:
            text = f"step {self.step}: {text}"
            if self.worst:
                text += f"; worst in step {self.worst_step}: {self.worst}"
            text += f" ({self.count} of {self.steps} steps)"
        return text

    def lines(self, number: int) -> list[str]:
        """The finding as it is printed."""
        place = Place(self.file, self.line, self.function, self.text)
        ranks = f" (ranks {', '.join(map(str, self.ranks))})" if self.ranks else ""
        first, *more = self.fix
        return [
            f"{number}  {self.kind}  {place}{ranks}",
            f"   {self.sentence}",
            f"   measured: {self.measured()}",
            f"   fix:      {first}",
            *(f"             {line}" for line in more),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        whole = {name: value for name, value in asdict(self).items() if name[0] != "_"}
        return {**whole, "measured": self.measured()}


def new(kind: str, place: Place, step: int, text: str, size: float, **more: Any) -> Finding:
    """A finding at its first sight; ``more`` replaces sentence or fix of the table."""
    known = KINDS[kind]
    where = (place.file, place.line, place.function, place.text)
    sentence, fix = more.get("sentence") or known.does, list(more.get("fix") or known.fix)
    return Finding(kind, *where, sentence, text, step, fix, _size=size, _last=step)
