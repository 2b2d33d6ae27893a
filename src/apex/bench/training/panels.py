"""Single plots: what is drawn on one pair of axes. `plots` makes figures of them."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from apex.bench.output.columns import three
from apex.bench.output.looks import INK, Look, look
from apex.bench.training.results import Report
from apex.bench.training.rows import Row, baseline_of
from apex.bench.training.table import Line, lines, short_problem
from apex.bench.training.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "MOST_WRITTEN",
    "VIEWS",
    "Bar",
    "Source",
    "View",
    "batches_of",
    "draw_bars",
    "draw_speed",
    "draw_view",
    "has_speed",
    "log_axis",
    "plain",
    "series_of",
    "tidy",
]

MACHINE_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MACHINE_HATCHES = ("", "///", "...", "xxx")
MOST_WRITTEN = 24  # bars with their number beside them
SHIFT = 0.05  # in powers of two: error bars of neighbours side by side


class Source(NamedTuple):
    """A report to draw."""

    name: str
    """Of the machine, where there are several; else empty."""
    report: Report
    lines: list[Line]

    @classmethod
    def of(cls, name: str, report: Report, verdicts: Sequence[Verdict]) -> "Source":
        """Put the rows of a report together once for all plots."""
        return cls(name, report, lines(report, verdicts))

    def rows(self, task: str) -> list[Row]:
        """Return the rows of a task."""
        return [line.row for line in self.lines if line.row.task == task]


class View(NamedTuple):
    """One of the three views of tutorial T2: a number of each level against the batch size."""

    title: str
    unit: str
    value: Callable[[Row], tuple[float, float, float] | None]
    """The number, and the two ends of its error bar."""
    ratio: Callable[[Line], float | None]
    """Written on a bar, as `ratio_is`."""
    ratio_is: str
    bars: bool
    log: bool


def _time(row: Row) -> tuple[float, float, float] | None:
    if row.ms_median is None or row.ms_p10 is None or row.ms_p90 is None:
        return None
    return row.ms_median, row.ms_p10, row.ms_p90


def _memory(row: Row) -> tuple[float, float, float] | None:
    return None if row.peak_mib is None else (row.peak_mib,) * 3


def _accuracy(row: Row) -> tuple[float, float, float] | None:
    if row.accuracy is None or not math.isfinite(row.accuracy.mean):
        return None
    mean, sd = row.accuracy.mean, row.accuracy.sd or 0.0
    return mean, mean - sd, mean + sd


VIEWS = {
    "time": View("Time of a training step", "ms per step (median, p10 to p90)",
                 _time, lambda line: line.speed, "speed relative to O0", bars=True, log=True),
    "memory": View("Peak memory of training", "MiB of tensors at the peak",
                   _memory, lambda line: line.row.memory, "relative to O0", bars=True, log=False),
    "accuracy": View("Accuracy on data not trained on", "% right (mean ± standard deviation)",
                     _accuracy, lambda line: None, "", bars=False, log=False),
}  # fmt: skip


def draw_view(axes: "Axes", sources: Sequence[Source], view: View, task: str) -> None:
    """Draw a view of one task: lines over batch sizes, or bars where there is one."""
    batches = batches_of(sources, task)
    if len(batches) > 1:
        _against_batch(axes, sources, view, task, batches)
    else:
        _one_batch(axes, sources, view, task)
    axes.set_title(f"{view.title}: {plain(task)}")
    axes.set_ylabel(view.unit)
    tidy(axes)


def _against_batch(
    axes: "Axes", sources: Sequence[Source], view: View, task: str, batches: Sequence[int]
) -> None:
    """Draw a line for each machine and level over the batch sizes, with error bars."""
    series = series_of(sources, task)
    labels = {label for _, label in series}
    footnotes: list[str] = []
    for place, (machine, label) in enumerate(series):
        here = [row for row in sources[machine].rows(task) if row.label == label]
        here.sort(key=lambda row: row.batch)
        known = [(row.batch, value) for row in here if (value := view.value(row))]
        found, machine_name = look(label, labels), sources[machine].name
        name = f"{label}, {plain(machine_name)}" if machine_name else label
        footnotes.append(_footnote(here))
        if not known:  # it stands in the legend, and the footnote says why it is missing
            axes.errorbar(batches[0], math.nan, color=found.colour, marker=found.marker, label=name)
            continue
        shift = 2 ** (SHIFT * (place - (len(series) - 1) / 2) * min(1.0, 8 / len(series)))
        middle, low, high = (np.array([v[i] for _, v in known]) for i in range(3))
        dash = found.dash if len(sources) == 1 else MACHINE_DASHES[machine % 4]
        axes.errorbar(
            [batch * shift for batch, _ in known], middle, yerr=[middle - low, high - middle],
            label=name, color=found.colour, marker=found.marker, linewidth=found.width * 0.7,
            linestyle=dash, elinewidth=1, capsize=2, markersize=6,
            markerfacecolor="none" if found.hollow or machine else None,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    notes = textwrap.wrap("; ".join(filter(None, footnotes)), 70)
    axes.set_xlabel("\n".join(["batch size", *notes]), fontsize=8 if notes else None)
    if view.log:
        log_axis(axes)
    elif view.bars:
        axes.set_ylim(bottom=0)


def _one_batch(axes: "Axes", sources: Sequence[Source], view: View, task: str) -> None:
    """Draw a bar or a point for each level and machine, its problem below if it has one."""
    series = series_of(sources, task)
    names, labels = [], {label for _, label in series}
    for place, (machine, label) in enumerate(series):
        mine = [x for x in sources[machine].lines if (x.row.task, x.row.label) == (task, label)]
        row = mine[0].row
        machine_name = plain(sources[machine].name, 16)
        problem = short_problem(row)
        broken = label.replace(" TF32", "\nTF32").replace("native-", "native-\n")
        names.append("\n".join(filter(None, [broken, machine_name, problem])))
        value = view.value(row)
        if value is None:
            continue
        middle, low, high = value
        found, away = look(label, labels), [[middle - low], [high - middle]]
        if view.bars:
            hatch = MACHINE_HATCHES[machine % 4] or ("//" if found.hollow else "")
            axes.bar(
                place, middle, yerr=away if high > low else None, capsize=3, ecolor="0.5",
                color=found.colour, hatch=hatch or None, edgecolor="white" if hatch else "none",
                linewidth=0,
            )  # fmt: skip
            ratio = None if baseline_of(row, [row]) else view.ratio(mine[0])
            _write(axes, (place, high), _with_ratio(middle, ratio))
        else:
            axes.errorbar(
                place, middle, yerr=away, marker=found.marker, color=found.colour, markersize=8,
                capsize=3, markerfacecolor="none" if found.hollow or machine else None,
            )  # fmt: skip
            _write(axes, (place, high), f"{middle:.2f}")
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) > 5 else 9)
    half = max(len(names), 4) / 2 + 0.1  # a bar of one level alone is not as wide as the plot
    middle = (len(names) - 1) / 2
    axes.set_xlim(middle - half, middle + half)
    axes.margins(y=0.2)
    axes.set_xlabel(f"batch size {batches_of(sources, task)[0]}"
                    + (f"; ×: {view.ratio_is}" if view.ratio_is else ""))  # fmt: skip


class Bar(NamedTuple):
    """One speed relative to something."""

    name: str
    """In the legend; several bars may share one."""
    speed: float
    ends: tuple[float, float] | None
    """Of the interval, where there is one."""
    look: Look


def draw_speed(
    axes: "Axes", groups: Sequence[tuple[str, Sequence[Line]]], *, named: bool = True
) -> None:
    """Draw bars from 1 to the speed relative to O0; whiskers are the verdicts' intervals."""
    labels = {line.row.label for _, of in groups for line in of}
    tasks = {line.row.task for _, of in groups for line in of}
    bars = []
    for name, of in groups:
        for task, batch in dict.fromkeys((line.row.task, line.row.batch) for line in of):
            words = [plain(task, 18) if len(tasks) > 1 else "", f"batch {batch}", plain(name, 16)]
            here = [x for x in of if (x.row.task, x.row.batch) == (task, batch)]
            made = [bar for line in here if (bar := _bar_of(line, labels))]
            bars.append(("\n".join(filter(None, words)), made))
    draw_bars(axes, bars, named=named)
    axes.set_ylabel("× the speed of O0 (95 % interval)")
    of_task = f": {plain(next(iter(tasks)))}" if len(tasks) == 1 else ""
    base = "O0 TF32 off" if "O0 TF32 off" in labels else "O0"
    axes.set_title(f"Speed of a training step, {base} = 1{of_task}")


def _bar_of(line: Line, labels: set[str]) -> Bar | None:
    speed, known = line.speed, line.verdict.speed if line.verdict else None
    if speed is None or not has_speed(line):
        return None
    ends = (known.low, known.high) if known else None
    return Bar(line.row.label, speed, ends, look(line.row.label, labels))


def draw_bars(
    axes: "Axes", groups: Sequence[tuple[str, Sequence[Bar]]], *, named: bool = True
) -> None:
    """Draw groups of bars from 1 to a speed, with whiskers where there is an interval."""
    place, ticks, shown = 0.0, [], set[str]()
    count = sum(len(bars) for _, bars in groups)
    for tick, bars in groups:
        if not bars:
            continue
        ticks.append((place + (len(bars) - 1) / 2, tick))
        for bar in bars:
            hollow = bar.look.hollow
            axes.bar(
                place, bar.speed - 1, bottom=1, color=bar.look.colour, linewidth=0,
                label=bar.name if named and bar.name not in shown else None,
                hatch="//" if hollow else None, edgecolor="white" if hollow else None,
            )  # fmt: skip
            shown.add(bar.name)
            low, high = bar.ends or (bar.speed, bar.speed)
            if bar.ends:
                away = [[max(0, bar.speed - low)], [max(0, high - bar.speed)]]
                axes.errorbar(place, bar.speed, yerr=away, color="0.5", capsize=2)
            if count <= MOST_WRITTEN:
                below = bar.speed < 1
                at = (place, low if below else high)
                _write(axes, at, f"{bar.speed:.2f}", below=below, size=7.5)
            place += 1
        place += 0.8
    axes.axhline(1, color=INK, linewidth=1)
    log_axis(axes, base=2)
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.15)
    tidy(axes)


def has_speed(line: Line) -> bool:
    """Whether the line has a speed relative to another one."""
    return line.row.speed is not None and not baseline_of(line.row, [line.row])


# --- pieces --------------------------------------------------------------------------------------


def batches_of(sources: Sequence[Source], task: str) -> list[int]:
    """List the batch sizes of a task, ascending."""
    return sorted({c.batch for s in sources for c in s.report.plan if c.task == task})


def series_of(sources: Sequence[Source], task: str) -> list[tuple[int, str]]:
    """List machine and label of each series: the levels in order, the machines within them."""
    labels = dict.fromkeys(c.label for s in sources for c in s.report.plan if c.task == task)
    there = {(i, c.label) for i, s in enumerate(sources) for c in s.report.plan if c.task == task}
    return [(i, label) for label in labels for i in range(len(sources)) if (i, label) in there]


def _footnote(of: Sequence[Row]) -> str:
    """Name the batch sizes at which a level had a problem, or nothing."""
    found: dict[str, list[str]] = {}
    for row in of:
        if row.problem:
            found.setdefault(f"{row.label} {short_problem(row)}", []).append(str(row.batch))
    return "; ".join(f"{what} at {', '.join(batches)}" for what, batches in found.items())


def _with_ratio(value: float, ratio: float | None) -> str:
    return three(value) if ratio is None else f"{three(value)}\n{ratio:.2f}×"


def _write(
    axes: "Axes", point: tuple[float, float], text: str, *, below: bool = False, size: float = 8
) -> None:
    axes.annotate(
        text, point, xytext=(0, -3 if below else 3), textcoords="offset points", ha="center",
        va="top" if below else "bottom", fontsize=size,
    )  # fmt: skip


def log_axis(axes: "Axes", base: int = 10) -> None:
    """Make the vertical axis logarithmic with plain numbers, also within one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))


def tidy(axes: "Axes") -> None:
    """Draw faint horizontal lines behind what is drawn."""
    axes.grid(axis="y", color="0.5", alpha=0.25)
    axes.set_axisbelow(True)


def plain(text: str, most: int = 40) -> str:
    """Make a user's name fit to be drawn: no control characters, and not too long."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
