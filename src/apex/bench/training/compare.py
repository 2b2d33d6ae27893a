"""`apex bench compare BEFORE AFTER`: what got slower, larger or less accurate between two results.

Rows of the same task, batch size and level are compared by their median step times. The 95 %
interval is Welch's, of the logarithms of the runs' medians, from three seeds on each side. Seeds
are not paired: the two files were measured at different times. What differed between the two times
for all runs alike is in the ratio and not in the interval.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apex.bench.cli import UsageError
from apex.bench.intervals import Interval, difference_interval
from apex.bench.options import positive
from apex.bench.output.tables import Column, console, fitted, number, three
from apex.bench.training.results import Report, read
from apex.bench.training.rows import Row, rows

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

    @property
    def broken(self) -> bool:
        """Whether a smaller share of its runs trained after."""
        old, new = (
            statistics.fmean([run.status == "ok" for run in row.runs] or [1.0])
            for row in (self.before, self.after)
        )
        return new < old

    def slower(self, threshold: float) -> bool:
        """Whether a step takes more than ``threshold`` per cent longer, beyond doubt."""
        if self.time is None or self.time <= 1 + threshold / 100:
            return False
        return self.time_interval is None or self.time_interval.low > 1

    def worse(self, threshold: float) -> list[str]:
        """Say what is worse."""
        found = [self.after.problem or ""] if self.broken else []
        if self.slower(threshold) and self.time is not None:
            found.append(f"slower by {100 * (self.time - 1):.0f} %")
        if self.memory is not None and self.memory > 1 + threshold / 100:
            found.append(f"{100 * (self.memory - 1):.0f} % more memory")
        if self.accuracy_interval is not None and self.accuracy_interval.high < 0:
            found.append(f"accuracy {self.accuracy_interval.value:+.2f} points")
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a results.json")
    parser.add_argument("after", type=Path, metavar="AFTER", help="a later one")
    parser.add_argument(
        "--threshold", type=positive, default=THRESHOLD, metavar="PERCENT",
        help="report differences in time or memory above this (default: %(default)g)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    before, after = read(args.before), read(args.after)
    compared = changes(before, after)
    if not compared:
        raise UsageError(f"{args.before} and {args.after} have no row in common")
    to = console()
    to.print(fitted(COLUMNS, compared, to)[0])
    for change in compared:
        if worse := "; ".join(change.worse(args.threshold)):
            to.print(f"{_name(change.after)}: {' '.join(worse.split())}.", markup=False)
    for line in (*_only_in_one(before, after), *differences(before, after)):
        to.print(line, markup=False)
    slower = sum(change.slower(args.threshold) for change in compared)
    broken = sum(change.broken for change in compared)
    to.print(f"{slower} of {len(compared)} rows slower by more than {args.threshold:g} %", end="")
    to.print(f", {broken} no longer trained as before." if broken else ".")
    return 1 if slower or broken else 0


def changes(before: Report, after: Report) -> list[Change]:
    """Compare the rows that both have, in the order of the first."""
    later = {_name(row): row for row in rows(after)}
    return [_change(row, later[_name(row)]) for row in rows(before) if _name(row) in later]


def _change(old: Row, new: Row) -> Change:
    logs = [_logs(row) for row in (old, new)]
    cut = old.cut or new.cut  # trained for other numbers of steps
    right = [() if cut else row.accuracies for row in (old, new)]
    time = math.exp(statistics.fmean(logs[1]) - statistics.fmean(logs[0])) if all(logs) else None
    interval = difference_interval(*logs)
    return Change(
        before=old,
        after=new,
        time=time,
        time_interval=None if interval is None else interval.exp,
        memory=new.peak_bytes / old.peak_bytes if new.peak_bytes and old.peak_bytes else None,
        accuracy=statistics.fmean(right[1]) - statistics.fmean(right[0]) if all(right) else None,
        accuracy_interval=difference_interval(*right),
    )


def _logs(row: Row) -> list[float]:
    """Give the logarithm of the median step time of each run."""
    medians = [statistics.median(run.counted_ms) for run in row.finished if run.counted_ms]
    return [math.log(ms) for ms in medians if ms > 0]


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
    if report.budget_s is not None:
        found["budget"] = f"{report.budget_s:g} s"
    for option in OPTIONS:
        found[option] = ", ".join(sorted({str(getattr(cell, option)) for cell in report.plan}))
    return found


def _only_in_one(before: Report, after: Report) -> list[str]:
    old, new = (list(map(_name, rows(report))) for report in (before, after))
    return [
        f"Only {which}: {', '.join(alone)}."
        for which, mine, other in (("before", old, new), ("after", new, old))
        if (alone := [name for name in mine if name not in other])
    ]


def _name(row: Row) -> str:
    return f"{row.task} {row.label} at batch {row.batch}"


def _ratio(change: Change) -> str:
    ends = change.time_interval
    return number(change.time, ".2f", f"x ({ends.low:.2f}–{ends.high:.2f})" if ends else "x")


COLUMNS: Sequence[Column[Change]] = (
    Column("", lambda x: _name(x.before), {}, left=True, wraps=True),
    Column("step ms", lambda x: f"{three(x.before.ms)} → {three(x.after.ms)}", {}),
    Column("time (95 %)", _ratio, {}),
    Column("memory", lambda x: number(x.memory, ".2f", "x"), {}),
    Column("accuracy", lambda x: number(x.accuracy, "+.2f"), {}),
)
