"""Notes which test runs which line, in all processes that a test starts.

``tools.mutate`` lets each Python process import this file as ``sitecustomize`` at its start, and
pytest take it as a plugin. The folder ``LINES_OF_TESTS`` has ``files``, the names of those whose
lines are noted, and gets ``lines``, which ``tools.mutate`` reads. It uses ``sys.settrace``, which
Python has in all releases: coverage knows no test of the processes that tests start.
PYTEST_DONT_REWRITE: pytest warns of plugins that are imported already, unless it says so.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
from types import FrameType
from typing import Any

FOLDER = "LINES_OF_TESTS"
CURRENT = "LINES_OF_TESTS_CURRENT"  # names the file with the key of the test that runs now
SIZE = 8  # of a key


def key(test: str) -> bytes:
    """Return a number for a test, which all processes can read at once."""
    return hashlib.blake2b(test.encode(), digest_size=SIZE).digest()


class Log:
    """What this process writes down."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with open(os.path.join(folder, "files"), encoding="utf-8") as file:
            self.files = frozenset(file.read().splitlines())
        name, flags = os.path.join(folder, "lines"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(name, flags, 0o600)
        self.noted: set[tuple[bytes, str, int]] = set()
        self.share()
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def share(self) -> None:
        """Open the memory that this process shares with those that it starts."""
        name = os.environ.setdefault(CURRENT, os.path.join(self.folder, f"test-{os.getpid()}"))
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, SIZE)
        self.current = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)

    def write(self, line: str) -> None:
        """Append a line; what several processes append does not mix."""
        os.write(self.file, f"{line}\n".encode())

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Look at the lines of functions in these files alone."""
        return self.note if frame.f_code.co_filename in self.files else None

    def note(self, frame: FrameType, event: str, _: Any) -> Any:
        """Write a line down once for each test and process."""
        one = self.current[:], frame.f_code.co_filename, frame.f_lineno
        if event == "line" and one not in self.noted:
            self.noted.add(one)
            self.write(f"{one[0].hex()} {one[1]}:{one[2]}")
        return self.note


def pytest_sessionstart() -> None:
    """Share no memory with the pytest that started this one, as that of xdist does."""
    os.environ.pop(CURRENT, None)
    log.share()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say to all processes which test begins."""
    log.current[:] = key(nodeid)
    sys.settrace(log.trace)  # the test before may have ended it


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how long a part of a test took, and whether it was green."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # whose reports go to the first process
        log.write(f"test {report.outcome} {report.duration:.3f} {report.nodeid}")


if __name__ == "sitecustomize":
    log = Log(os.environ[FOLDER])
