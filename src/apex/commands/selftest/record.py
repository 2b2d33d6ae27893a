"""What a run has found so far: its file, what runs now, and the lines that say so."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.commands.selftest.check import Planned, Result
from apex.commands.tables import save

__all__ = ["Progress", "Record", "clear"]

CLEAR = "\r\x1b[K"  # of a terminal's line
PAUSE = 5.0  # seconds between lines that say what runs, where there is no terminal
REDRAW = 1.0  # seconds between changes of a terminal's line


class Record:
    """The results of the checks that are planned, in their order, and the file that has them.

    Attributes:
        content: What the file has beside them.
        results: By the number of the check.
        running: When each began that runs now, by its number.
        fault: Why the file could not be written the last time; empty if it was.
    """

    def __init__(self, planned: Sequence[Planned], content: dict[str, Any], file: Path) -> None:
        self.planned, self.content, self._file = planned, content, file
        self.results: dict[int, Result] = {}
        self.running: dict[int, float] = {}
        self._saved, self.fault = float("-inf"), ""

    def begin(self, number: int) -> None:
        """Note that a check begins."""
        self.running[number] = time.monotonic()

    def end(self, number: int, result: Result) -> None:
        """Note what came of it."""
        del self.running[number]
        self.results[number] = result

    def in_order(self) -> list[Result]:
        """The results as they were planned."""
        return [self.results[number] for number in sorted(self.results)]

    @property
    def complete(self) -> bool:
        """Whether every check has a result."""
        return len(self.results) == len(self.planned)

    def save(self, *, after: float = 0.0) -> None:
        """Write the file, unless it was written in the last ``after`` seconds.

        A full disk does not end the run: it is said once, and the results can still be shown.
        ``next`` are the checks that run while a file is the newest: what a crash leaves.
        """
        if time.monotonic() - self._saved < after:
            return
        running = [f"{check.name} ({setting.path})" for check, setting in self._running()]
        self.content["next"] = "; ".join(running) or None
        self.content["complete"] = self.complete
        checks = [one.as_json() for one in self.in_order()]
        before, self.fault = self.fault, ""
        try:
            save({**self.content, "checks": checks}, self._file)
        except OSError as error:
            self.fault = error.strerror or str(error)
            if not before:
                clear()
                print(f"{self._file}: cannot be written ({self.fault})", file=sys.stderr)
        self._saved = time.monotonic()

    def _running(self) -> list[Planned]:
        return [self.planned[number] for number in sorted(self.running)]

    def line(self) -> str:
        """How many checks are done, and which has been running for the longest."""
        running = sorted(self.running.copy().items(), key=lambda one: one[1])  # see Progress
        done = f"{len(self.results)}/{len(self.planned)}"
        if not running:
            return f"{done}  preparing"
        (number, since), *others = running
        check, setting = self.planned[number]
        more = f" and {len(others)} more" if others else ""
        seconds = time.monotonic() - since
        return f"{done}  {check.area}: {check.name} ({setting.path}), {seconds:.0f} s{more}"


class Progress:
    """Says what runs, from a thread: a check may take minutes. On standard error.

    In a terminal one line is drawn anew; elsewhere there is a line every 5 seconds.
    """

    def __init__(self, record: Record) -> None:
        self._record, self._ended = record, threading.Event()
        self._thread = threading.Thread(target=self._say, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._ended.set()
        self._thread.join()
        clear()

    def _say(self) -> None:
        while not self._ended.wait(REDRAW if sys.stderr.isatty() else PAUSE):
            line = self._record.line()
            if sys.stderr.isatty():
                print(f"{CLEAR}{line[:79]}", end="", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)


def clear() -> None:
    """Clear a terminal's line."""
    if sys.stderr.isatty():
        print(CLEAR, end="", file=sys.stderr, flush=True)
