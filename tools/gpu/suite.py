"""Tests as a part: pytest in this process, and a row for each failure as it happens.

python -m tools.gpu.suite --out FILE [--dry] [--stand-ins] PYTEST_ARGUMENTS
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.gpu.rows import MISSING, WRONG, Rows

CASES = 3  # rows of a function; further ones are counted, because one cause can fail hundreds
PAUSE = 1.0  # seconds between two notes of the test that runs
PACKAGE = re.compile(r"No module named '([\w.]+)'|(\w+) not installed")


class Recorder:
    """A plugin that keeps what failed."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.noted = rows, 0.0
        self.failed: Counter[str] = Counter()
        rows.content.update(passed=0, skipped=0, failed=0, finished=False, running="")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs: what a killed process leaves."""
        self.rows.content["running"] = nodeid
        if time.monotonic() - self.noted > PAUSE:
            self.noted = time.monotonic()
            self.rows.save()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count, and keep a failure."""
        if report.passed:
            self.rows.content["passed"] += report.when == "call"
        elif report.skipped:
            self.rows.content["skipped"] += 1
        else:
            self.rows.content["failed"] += 1
            self.keep(report.nodeid, report.when, report.longrepr)

    def pytest_collectreport(self, report: Any) -> None:
        """Keep a module that cannot be imported."""
        if report.failed:
            self.keep(report.nodeid, "collection", report.longrepr)

    def keep(self, nodeid: str, when: str, found: Any) -> None:
        """Add a row for one of the first cases of a function."""
        function = nodeid.partition("[")[0]
        self.failed[function] += 1
        if self.failed[function] > CASES:
            return
        text = str(getattr(getattr(found, "reprcrash", None), "message", found))
        said = " ".join(text.split())[:400]
        missing = PACKAGE.search(text)
        if missing:
            said = f"{missing[1] or missing[2]} is not installed"
        self.rows.add(nodeid, MISSING if missing else WRONG, said, when=when)

    def pytest_sessionfinish(self) -> None:
        """The last note."""
        self.rows.content.update(finished=True, running="")
        self.rows.save()


def main() -> None:
    """Run pytest; its exit code says nothing that the rows do not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--stand-ins", action="store_true", help="of tests marked gpu, on a CPU")
    args, words = parser.parse_known_args()
    rows = Rows(args.out)
    if importlib.util.find_spec("pytest") is None:
        rows.add("pytest", MISSING, "pytest is not installed")
        return
    import pytest

    processes = max(1, (os.cpu_count() or 1) // 2)
    if not args.dry and importlib.util.find_spec("xdist") and processes > 1:
        words += [f"-n{processes}"]
    if args.dry and importlib.util.find_spec("xdist"):
        words += ["-n0"]
    plugins: list[object] = [Recorder(rows)]
    if args.stand_ins:
        from tools.gpu import marked

        plugins.append(marked.StandIns(rows))
        words += marked.files()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *words], plugins=plugins)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(int(code))


if __name__ == "__main__":
    main()
