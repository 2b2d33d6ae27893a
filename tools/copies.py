"""Copies of the working tree, in which tests run with a bug planted; the tree is only read."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = ["Copies", "Copy", "Run", "TimedOut", "listed"]

RED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.+?)(?: - .*)?$", re.MULTILINE)
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
Job = TypeVar("Job")
Answer = TypeVar("Answer")


class TimedOut(Exception):
    """pytest did not end."""


class Run(NamedTuple):
    """What pytest said: its exit status, the cases that were red, its last line or an error."""

    status: int
    red: list[str]
    last: str


def listed(root: Path) -> list[str]:
    """Name the files that git has or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    names = filter(None, done.stdout.split("\0"))
    return [name for name in names if (root / name).is_file()]  # git may not know of a removal yet


class Copy:
    """A copy of the files of ``root`` in ``folder``, which need not exist yet."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._seconds = itertools.count(1)
        self._child: subprocess.Popen[str] | None = None
        for name in listed(root):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)

    @contextlib.contextmanager
    def changed(self, name: str, text: str) -> Iterator[None]:
        """Have another text in a file of the copy, inside of this block."""
        before = (self.folder / name).read_text("utf-8")
        self._write(self.folder / name, text)
        try:
            yield
        finally:
            self._write(self.folder / name, before)

    def _write(self, file: Path, text: str) -> None:
        """Write, at a time of its own: Python would take bytecode of the same second and size."""
        file.write_text(text, "utf-8")
        second = next(self._seconds)
        os.utime(file, (second, second))

    def run(
        self,
        arguments: Sequence[str],
        seconds: float,
        path: Sequence[Path] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Run:
        """Run pytest in the copy.

        Args:
            arguments: Of pytest.
            seconds: After which it is ended, with the processes that its tests have started.
            path: Folders from which modules are imported before all others.
            variables: Of the environment.

        Raises:
            TimedOut: It was ended.
        """
        words = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        folders = [*path, self.folder / "src", self.folder / "src/extension_modules"]
        environment = {**os.environ, **(variables or {})}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else all is compiled at each start
        environment.pop("PYTEST_XDIST_WORKER", None)  # of a test that plants: this is no worker
        child = self._child = subprocess.Popen(
            [*words, *arguments], cwd=self.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimedOut from None
        finally:
            self.end()
        lines = output.strip().splitlines() or ["pytest said nothing"]
        last = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        return Run(child.returncode, RED.findall(output), last)

    def end(self) -> None:
        """End pytest, if it runs."""
        child = self._child
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


class Copies:
    """Some copies, in each of which one job runs at a time.

    At the end of the ``with`` block, at Ctrl-C and at SIGTERM the processes that run in them are
    ended and the copies removed.
    """

    def __init__(self, root: Path, count: int) -> None:
        self._root, self._count = root, max(1, count)
        self._free: queue.Queue[Copy] = queue.Queue()

    def __enter__(self) -> Copies:
        self._handlers = {number: signal.signal(number, _exit) for number in ENDING}
        self._folder = tempfile.TemporaryDirectory(prefix="planted-")
        folders = [Path(self._folder.name, str(number)) for number in range(self._count)]
        self._copies = [Copy(self._root, folder) for folder in folders]
        for copy in self._copies:
            self._free.put(copy)
        self._pool = ThreadPoolExecutor(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for copy in self._copies:
            copy.end()
        self._pool.shutdown()
        self._folder.cleanup()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def each(self, work: Callable[[Copy, Job], Answer], jobs: Iterable[Job]) -> Iterator[Answer]:
        """Return each ``work(copy, job)``, in the order of the jobs."""

        def one(job: Job) -> Answer:
            copy = self._free.get()
            try:
                return work(copy, job)
            finally:
                self._free.put(copy)

        return self._pool.map(one, jobs)


def _exit(number: int, _: Any) -> None:
    sys.exit(128 + number)
