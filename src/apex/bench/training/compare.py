"""`apex bench compare BEFORE AFTER`: what got slower, larger or less accurate between two results.

Rows of the same task, batch size and level are compared by their median step times. The 95 %
interval is Welch's, of the logarithms of the runs' medians, from three seeds on each side. Seeds
are not paired: the two files were measured at different times, so runs of the same seed share their
weights and batches, which hardly change a time, and not the state of the machine, which does. What
differed between the two times for all runs alike is in the ratio and not in the interval.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex.bench.cli import UsageError
from apex.bench.intervals import Interval, difference_interval
from apex.bench.output.console import console, number
from apex.bench.training.remarks import SHARED
from apex.bench.training.results import Report, Run, read
from apex.bench.training.rows import Row, rows, runs_of
from apex.bench.training.verdict import percent

__all__ = ["HELP", "Change", "add_arguments", "changes", "differences", "run"]

HELP = (
    "Compare two results.json of apex bench, row by row. Exits with 1 if a level of the second is "
    "slower by more than the threshold, and its 95 % interval, where both have three seeds or "
    "more, excludes equal times; or if a level that trained before no longer does. Exits with 0 "
    "otherwise."
)
THRESHOLD = 10.0
OPTIONS = ("optimizer", "lr", "epochs", "compile", "quick")  # of a cell, beside what names a row


@dataclass(frozen=True)
class Change:
    """A row before and after."""

    before: Row
    after: Row
    time: float | None
    """Step time after divided by before: above 1 is slower."""
    time_interval: Interval | None
    memory: float | None
    """Peak memory after divided by before."""
    accuracy: float | None
    """Points of accuracy, after minus before."""
    accuracy_interval: Interval | None
    broken: bool
    """Whether a smaller share of its runs trained after: more failed, diverged or were out of
    memory."""

    def slower(self, threshold: float) -> bool:
        """Whether a step takes more than ``threshold`` per cent longer, beyond doubt."""
        if self.time is None or self.time <= 1 + threshold / 100:
            return False
        return self.time_interval is None or self.time_interval.low > 1

    def found(self, threshold: float) -> list[str]:
        """Say what is worse."""
        said = [self.after.problem or ""] if self.broken else []
        if self.slower(threshold) and self.time is not None:
            said.append(f"slower by {percent(self.time - 1)}")
        if self.memory is not None and self.memory > 1 + threshold / 100:
            said.append(f"{percent(self.memory - 1)} more memory")
        if self.accuracy_interval is not None and self.accuracy_interval.high < 0:
            said.append(f"accuracy {self.accuracy_interval.value:+.2f} points")
        return said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a results.json")
    parser.add_argument("after", type=Path, metavar="AFTER", help="a later one")
    parser.add_argument(
        "--threshold", type=_per_cent, default=THRESHOLD, metavar="PERCENT",
        help="report differences in time or memory above this (default: %(default)g)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    before, after = _read(args.before), _read(args.after)
    compared = changes(before, after)
    if not compared:
        raise UsageError(f"{args.before} and {args.after} have no row in common")
    to = console(120)
    to.print(_table(compared))
    found = [_worse(change, args.threshold) for change in compared if change.found(args.threshold)]
    shared = [SHARED] if before.quick or after.quick else []
    for line in [*found, *_only_in_one(before, after), *differences(before, after), *shared]:
        to.print(line, markup=False)
    slower = sum(change.slower(args.threshold) for change in compared)
    broken = sum(change.broken for change in compared)
    to.print(f"{slower} of {len(compared)} rows slower by more than {args.threshold:g} %", end="")
    to.print(f", {broken} no longer trained as before." if broken else ".")
    return 1 if slower or broken else 0


def changes(before: Report, after: Report) -> list[Change]:
    """Compare the rows that both have, in the order of the first."""
    later = {_name(row): row for row in rows(after)}
    pairs = [(row, later[_name(row)]) for row in rows(before) if _name(row) in later]
    return [_change(before, old, after, new) for old, new in pairs]


def _change(before: Report, old: Row, after: Report, new: Row) -> Change:
    logs = [
        [math.log(ms) for ms in _medians(runs_of(report, row)) if ms > 0]
        for report, row in ((before, old), (after, new))
    ]
    right = [
        [run.accuracy[-1] for run in runs_of(report, row) if run.finished and run.accuracy]
        for report, row in ((before, old), (after, new))
    ]
    time = math.exp(statistics.fmean(logs[1]) - statistics.fmean(logs[0])) if all(logs) else None
    interval = difference_interval(*logs)
    trained = [
        statistics.fmean([run.status == "ok" for run in runs_of(report, row)] or [1.0])
        for report, row in ((before, old), (after, new))
    ]
    return Change(
        before=old,
        after=new,
        time=time,
        time_interval=None if interval is None else interval.exp,
        memory=new.peak_bytes / old.peak_bytes if new.peak_bytes and old.peak_bytes else None,
        accuracy=statistics.fmean(right[1]) - statistics.fmean(right[0]) if all(right) else None,
        accuracy_interval=difference_interval(*right),
        broken=trained[1] < trained[0],
    )


def _medians(runs: Sequence[Run]) -> list[float]:
    return [statistics.median(r.counted_ms) for r in runs if r.finished and r.counted_ms]


def differences(before: Report, after: Report) -> list[str]:
    """Name in one line what else differs: machine, versions and options."""
    old, new = (_circumstances(report) for report in (before, after))
    found = [
        f"{name} {old.get(name, 'none')} and {new.get(name, 'none')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    return [f"Not the same: {'; '.join(found)}."] if found else []


def _circumstances(report: Report) -> dict[str, str]:
    """Give everything that times depend on as text, under the name that a user knows it by."""
    found: dict[str, str] = {}
    for name, value in report.environment.items():
        if not isinstance(value, dict):
            found[name] = str(value)
        elif name == "device":  # what else it says follows from these
            found[name] = f"{value.get('device')} {value.get('name')}"
        else:
            found |= {f"{name} {key}".removeprefix("versions "): str(value[key]) for key in value}
    found.pop("date", None)
    for option in OPTIONS:
        found[option] = ", ".join(sorted({str(getattr(cell, option)) for cell in report.plan}))
    return found


def _only_in_one(before: Report, after: Report) -> list[str]:
    old, new = (list(dict.fromkeys(map(_name, rows(report)))) for report in (before, after))
    alone = {
        "before": [_words(name) for name in old if name not in new],
        "after": [_words(name) for name in new if name not in old],
    }
    return [f"Only {which}: {', '.join(names)}." for which, names in alone.items() if names]


def _worse(change: Change, threshold: float) -> str:
    said = "; ".join(change.found(threshold))
    return f"{_words(_name(change.after))}: {' '.join(said.split())}."


def _words(name: tuple[str, int, str]) -> str:
    task, batch, label = name
    return f"{task} {label} at batch {batch}"


def _name(row: Row) -> tuple[str, int, str]:
    return row.task, row.batch, row.label


def _table(compared: Sequence[Change]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for heading in ("step ms", "time (95 %)", "memory", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in compared:
        interval = change.time_interval
        between = "" if interval is None else f" ({interval.low:.2f}–{interval.high:.2f})"
        times = (number(row.ms_median, ".3g") for row in (change.before, change.after))
        table.add_row(
            escape(_words(_name(change.before))),
            " → ".join(times),
            number(change.time, ".2f", f"x{between}"),
            number(change.memory, ".2f", "x"),
            number(change.accuracy, "+.2f"),
        )
    return table


def _read(path: Path) -> Report:
    try:
        return read(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _per_cent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value
