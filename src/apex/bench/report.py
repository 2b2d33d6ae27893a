"""Output of `apex bench`: a progress bar while it trains, then the table and the plots.

It takes a finished `Report` and shows it; it never trains. Rich comes with the ``bench`` extra and
is imported where it is used.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from apex.bench.console import NOTHING, console, number
from apex.bench.plots import FILES, draw
from apex.bench.results import Report, Row, Run, Spread, rows

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["progress", "show", "tables"]

WIDE_ENOUGH = 100  # columns of a terminal for the table in full
SHORT = {"float16": "fp16", "bfloat16": "bf16"}


# --- progress ------------------------------------------------------------------------------------


class _Bar:
    """A progress bar that draws only when told: a thread of its own would slow the steps down."""

    REDRAW_AFTER = 0.1  # seconds

    def __init__(self, bar: "Progress", runs: int, steps: int) -> None:
        self._bar = bar
        self._runs = runs
        self._finished = 0
        self._steps = 0
        self._task = bar.add_task("", total=steps)
        self._drawn = 0.0

    def begin(self, label: str) -> None:
        self._bar.update(self._task, description=label)
        self._bar.refresh()

    def advance(self) -> None:
        self._steps += 1
        if time.monotonic() - self._drawn > self.REDRAW_AFTER:
            self._bar.update(self._task, completed=self._steps)
            self._bar.refresh()
            self._drawn = time.monotonic()

    def end(self, run: Run) -> None:
        self._finished += 1
        if not self._bar.console.is_terminal:  # a log file gets a line per run in place of a bar
            name = f"{run.level}, batch {run.batch}, seed {run.seed}"
            result = run.error or f"{run.epoch_accuracy[-1]:.2f} % right"
            line = f"{self._finished}/{self._runs}  {name}: {run.status}, {result}"
            self._bar.console.print(line, markup=False)


@contextmanager
def progress(runs: int, steps: int) -> Iterator[_Bar]:
    """Show on standard error how far ``runs`` trainings of ``steps`` steps in all have come."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        yield _Bar(bar, runs, steps)


# --- table ---------------------------------------------------------------------------------------


def show(report: Report, folder: Path) -> None:
    """Print the table on standard output and draw the plots into ``folder``."""
    to = console(120)
    if not report.runs:
        to.print("Interrupted before the first run was finished: there is nothing to show.")
        return
    to.print(_title(report), style="bold", markup=False)
    for table in tables(report, narrow=to.width < WIDE_ENOUGH):
        to.print(table)
    for line in [*_problems(report), *_warnings(report)]:
        to.print(line, markup=False)
    for name, note in report.notes.items():
        to.print(f"{name}: {note}.", style="dim", markup=False)
    draw(report, folder)
    files = ", ".join(["results.json", *FILES])
    to.print(f"In {folder}: {files}", markup=False)


def _problems(report: Report) -> list[str]:
    return [f"{row.level}, batch {row.batch}: {row.problem}" for row in rows(report) if row.problem]


def _warnings(report: Report) -> list[str]:
    """Say where a time does not mean what it seems to mean."""
    warnings = []
    noisy = [row for row in rows(report) if row.ms_median and (row.ms_p90 or 0) > 2 * row.ms_median]
    if noisy:
        names = ", ".join(f"{row.level} (batch {row.batch})" for row in noisy)
        warnings.append(
            f"The times vary a lot at {names}: the machine seems busy with something else. Do not "
            "trust these medians, nor the speeds that rest on them."
        )
    used = {SHORT[half["dtype"]]: half for half in report.environment["device"]["half_types"]}
    for dtype in dict.fromkeys(report.options["levels"].values()):
        if dtype in used and used[dtype]["native"] is False:
            warnings.append(f"{dtype} is not native to this device: {used[dtype]['why']}.")
    if report.environment.get("cuda", {}).get("fp32 convolutions") == "tf32":
        warnings.append("fp32 convolutions may compute in TF32 here (torch's default), also at O0.")
    return warnings


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Row], str]
    left: bool = False


COLUMNS = (
    _Column("level", lambda row: row.level, left=True),
    _Column("dtype", lambda row: row.dtype, left=True),
    _Column("ms per\nstep", lambda row: _three(row.ms_median)),
    _Column("p10–p90", lambda row: _range(row.ms_p10, row.ms_p90)),
    _Column("speed\n/ O0", lambda row: number(row.speed, ".2f", "×")),
    _Column("peak\nMiB", lambda row: _three(row.peak_mib)),
    _Column("memory\n/ O0", lambda row: number(row.memory, ".2f", "×")),
    _Column("final\nloss", lambda row: _spread(row.loss, ".4f")),
    _Column("test\nacc. %", lambda row: _spread(row.accuracy, ".2f")),
    _Column("steps\nskipped", lambda row: number(row.skipped, "d")),
    _Column("loss\nscale", lambda row: _ends(row.loss_scale)),
    _Column("", lambda row: (row.problem or "").partition(":")[0], left=True),
)


def tables(report: Report, *, narrow: bool = False) -> "list[Table]":
    """Make one table for each batch size, a line per level.

    Args:
        report: What to show.
        narrow: Fit into 80 columns.
    """
    made = rows(report)
    batches = report.options["batch"]
    return [
        _table([row for row in made if row.batch == batch], f"batch size {batch}", narrow)
        for batch in batches
    ]


def _table(made: Sequence[Row], title: str, narrow: bool) -> "Table":
    from rich import box
    from rich.table import Table

    padding = (0, 0 if narrow else 1, 0, 0)
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=padding, pad_edge=False
    )
    columns = [c for c in COLUMNS if c.heading or any(row.problem for row in made)]
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        wrap = column.heading == ""
        table.add_column(
            column.heading, justify=justify, vertical="bottom", no_wrap=not wrap, overflow="fold"
        )
    for row in made:
        cells = [column.cell(row) for column in columns]
        if narrow:
            cells = [cell.replace(" ± ", "\n± ") for cell in cells]
        table.add_row(*cells, style="red" if row.problem else None)
    return table


def _title(report: Report) -> str:
    options, here = report.options, report.environment
    title = f"{here['device']['name']}, torch {here['versions']['torch']}, "
    title += f"{_count(options['epochs'], 'epoch')}, {_count(options['seeds'], 'seed')}"
    if options.get("optimizer"):  # a report of old does not say
        title += f", {options['optimizer']}"
    if options["seeds"] > 1:
        title += " (mean ± standard deviation)"
    if not report.complete:
        title += f"\nINCOMPLETE: {len(report.runs)} of {report.planned} runs"
    return title


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _three(value: float | None) -> str:
    """Show at least three digits, and no more decimals than they need."""
    if value is None:
        return NOTHING
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _range(low: float | None, high: float | None) -> str:
    return NOTHING if low is None or high is None else f"{_three(low)}–{_three(high)}"


def _spread(value: Spread | None, spec: str) -> str:
    if value is None:
        return NOTHING
    return f"{value.mean:{spec}}" + ("" if value.sd is None else f" ± {value.sd:{spec}}")


def _ends(ascending: Sequence[float]) -> str:
    ends = dict.fromkeys([*ascending[:1], *ascending[-1:]])
    return "–".join(f"{value:g}" for value in ends) or NOTHING
