"""The pictures of a report, PNG and SVG: speed, time, memory, accuracy, loss, loss scale.

Drawn from finished reports; nothing is trained here. `draw` takes one report, `compare` overlays
those of several machines. Figures are made without pyplot, so there is no display to need and no
global state to leave behind. Matplotlib comes with the ``bench`` extra and is imported where used.
"""

import io
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from apex.bench.looks import INK, Look, look
from apex.bench.results import Report, Run
from apex.bench.rows import Row, baseline_of, rows, runs_of
from apex.bench.table import Line, lines, short_problem
from apex.bench.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["VIEWS", "Source", "compare", "draw", "marks", "source"]

PANEL = (5.2, 3.7)  # inches: readable on a phone, where a page scales it down by a third
POINTS = 40  # of a loss curve: each is the mean of as many steps as it takes
MACHINE_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MACHINE_HATCHES = ("", "///", "...", "xxx")
SHIFT = 0.05  # in powers of two: error bars of neighbours side by side


class Source(NamedTuple):
    """A report to draw; the name tells machines apart, and is empty where there is one."""

    name: str
    report: Report
    verdicts: Sequence[Verdict]


class View(NamedTuple):
    """One of the three views of tutorial T2: a number of each level against the batch size."""

    title: str
    unit: str
    value: Callable[[Row], tuple[float, float, float] | None]
    """The number, and the two ends of its error bar."""
    ratio: Callable[[Row], float | None]
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
                 _time, lambda row: row.speed, "speed relative to O0", bars=True, log=True),
    "memory": View("Peak memory of training", "MiB of tensors at the peak",
                   _memory, lambda row: row.memory, "relative to O0", bars=True, log=False),
    "accuracy": View("Accuracy on data not trained on", "% right (mean ± standard deviation)",
                     _accuracy, lambda row: None, "", bars=False, log=False),
}  # fmt: skip


# --- whole figures -------------------------------------------------------------------------------


def draw(report: Report, verdicts: Sequence[Verdict], folder: Path) -> dict[str, str]:
    """Draw every plot for which there are numbers into ``folder``, as PNG and SVG.

    Returns:
        The SVG of each plot by its name, which is that of its files.
    """
    here = [Source("", report, verdicts)]
    made: dict[str, Callable[[], Figure | None]] = {
        "overview": lambda: _overview(here),
        "speed": lambda: _speed(here),
        **{name: lambda view=view: _view(here, view) for name, view in VIEWS.items()},
        "loss": lambda: _curves(report, "Training loss", _draw_loss, lambda run: run.losses),
        "scale": lambda: _curves(report, "Loss scale", _draw_scale, _moving_scale),
    }
    return _save(made, here, folder)


def compare(sources: Sequence[Source], folder: Path) -> dict[str, str]:
    """Overlay the reports of several machines: T2's three views and the speed."""
    made: dict[str, Callable[[], Figure | None]] = {
        "speed": lambda: _speed(sources),
        **{name: lambda view=view: _view(sources, view) for name, view in VIEWS.items()},
    }
    return _save(made, sources, folder)


def source(report: Report) -> str:
    """Say in one line what machine and versions the numbers are from."""
    here = report.environment
    versions = here["versions"]
    return f"{here['device']['name']}, torch {versions['torch']}, apex {versions['apex']}"


def marks(report: Report) -> list[str]:
    """Say what keeps these numbers from being a full result."""
    found = []
    if not report.complete:
        found.append(f"INCOMPLETE: {len(report.runs)} of {len(report.plan)} runs")
    if report.quick:
        found.append("QUICK: fewer steps and less data")
    return found


def _save(
    made: "dict[str, Callable[[], Figure | None]]", sources: Sequence[Source], folder: Path
) -> dict[str, str]:
    """Write the files; a plot without numbers has none, and those of an earlier run go away."""
    svgs = {}
    for name, make in made.items():
        with _style(name):
            figure = make()
            if figure is None:
                for suffix in ("png", "svg"):
                    (folder / f"{name}.{suffix}").unlink(missing_ok=True)
                continue
            _finish(figure, sources)
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.set_layout_engine("none")  # what it has found for the PNG stays: twice as fast
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
            svgs[name] = text.getvalue()
            white = svgs[name].replace("<svg ", '<svg style="background: white" ', 1)
            (folder / f"{name}.svg").write_text(white, encoding="utf-8")
    return svgs


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib as mpl

    settings: dict[str, Any] = {
        "svg.fonttype": "none",  # text stays text: small files, and a page can colour it
        "svg.hashsalt": salt,
        "text.parse_math": False,  # a task's name may have dollars in it
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlesize": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "hatch.linewidth": 0.6,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # of a user's name
        yield


def _finish(figure: "Figure", sources: Sequence[Source]) -> None:
    """Add what holds for the whole figure: legend, source, what is not complete."""
    by_name: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            by_name.setdefault(name, handle)
    if by_name:
        inches = sum(0.6 + 0.07 * len(name) for name in by_name)
        deep = math.ceil(inches / figure.get_figwidth())
        figure.legend(
            list(by_name.values()), list(by_name), loc="outside upper center", frameon=False,
            ncols=math.ceil(len(by_name) / deep), fontsize=8.5,
        )  # fmt: skip
    named = [f"{s.name}: {source(s.report)}" if s.name else source(s.report) for s in sources]
    figure.supxlabel(_plain("\n".join(named), 400), fontsize=7.5, alpha=0.75)
    found = list(dict.fromkeys(mark for s in sources for mark in marks(s.report)))
    if found:
        figure.suptitle(" · ".join(found), fontsize=10, fontweight="bold")


def _panels(count: int, columns: int | None = None, width: float = PANEL[0]) -> "tuple[Any, Any]":
    from matplotlib.figure import Figure

    columns = columns or (count if count < 3 else 2 if count == 4 else 3)
    lines_of = math.ceil(count / columns)
    size = (width * columns, PANEL[1] * lines_of + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(lines_of, columns, squeeze=False).flat)
    for empty in panels[count:]:
        empty.set_axis_off()
    return figure, panels[:count]


def _tasks(sources: Iterable[Source]) -> list[str]:
    return list(dict.fromkeys(cell.task for s in sources for cell in s.report.plan))


def _batches(sources: Iterable[Source], task: str) -> list[int]:
    return sorted({c.batch for s in sources for c in s.report.plan if c.task == task})


def _overview(sources: Sequence[Source]) -> "Figure | None":
    """Put four plots of the first task with numbers into one."""
    first = sources[0]
    tasks = [t for t in _tasks(sources) if any(r.task == t and _time(r) for r in rows(first[1]))]
    if not tasks:
        return None
    task = tasks[0]
    mine = [line for line in lines(first.report, first.verdicts) if line.row.task == task]
    figure, panels = _panels(4, 2)
    # Where the other panels have lines, the legend is theirs: the same colours.
    _draw_speed(panels[0], [("", mine)], named=len(_batches(sources, task)) == 1)
    for axes, view in zip(panels[1:], VIEWS.values(), strict=True):
        _draw_view(axes, sources, view, task)
    return figure  # type: ignore[no-any-return]


def _view(sources: Sequence[Source], view: View) -> "Figure | None":
    """Draw a panel for each task."""
    measured = {row.task for s in sources for row in rows(s.report) if view.value(row)}
    tasks = [task for task in _tasks(sources) if task in measured]
    if not tasks:
        return None
    bars = max(len(_places(sources, task)) for task in tasks if len(_batches(sources, task)) == 1
               ) if any(len(_batches(sources, t)) == 1 for t in tasks) else 0  # fmt: skip
    figure, panels = _panels(len(tasks), width=max(PANEL[0], 0.62 * bars))
    for axes, task in zip(panels, tasks, strict=True):
        _draw_view(axes, sources, view, task)
    return figure  # type: ignore[no-any-return]


def _speed(sources: Sequence[Source]) -> "Figure | None":
    """Draw a group of bars for each task, batch size and machine."""
    groups = [(s.name, lines(s.report, s.verdicts)) for s in sources]
    bars = sum(_compared(line) for _, of in groups for line in of)
    if not bars:
        return None
    figure, [axes] = _panels(1, width=max(PANEL[0], 1.5 + 0.24 * bars))
    _draw_speed(axes, groups)
    return figure  # type: ignore[no-any-return]


def _curves(
    report: Report,
    title: str,
    drawing: "Callable[[Axes, Report, list[Row]], None]",
    values: Callable[[Run], Sequence[float]],
) -> "Figure | None":
    """Draw a panel for each task and batch size in which there is something to see."""
    made = rows(report)
    keys = dict.fromkeys((run.cell.task, run.cell.batch) for run in report.runs if values(run))
    if not keys:
        return None
    figure, panels = _panels(len(keys))
    for axes, (task, batch) in zip(panels, keys, strict=True):
        drawing(axes, report, [row for row in made if (row.task, row.batch) == (task, batch)])
        axes.set_title(f"{title}: {_plain(task)}, batch size {batch}")
        axes.set_xlabel("training step")
        _tidy(axes)
    return figure  # type: ignore[no-any-return]


# --- panels --------------------------------------------------------------------------------------


def _draw_view(axes: "Axes", sources: Sequence[Source], view: View, task: str) -> None:
    batches = _batches(sources, task)
    if len(batches) > 1:
        _against_batch(axes, sources, view, task, batches)
    else:
        _one_batch(axes, sources, view, task)
    axes.set_title(f"{view.title}: {_plain(task)}")
    axes.set_ylabel(view.unit)
    _tidy(axes)


def _against_batch(
    axes: "Axes", sources: Sequence[Source], view: View, task: str, batches: Sequence[int]
) -> None:
    """Draw a line for each machine and level over the batch sizes, with error bars."""
    series = _places(sources, task)
    labels = {label for _, label in series}
    for place, (machine, label) in enumerate(series):
        here = [r for r in rows(sources[machine].report) if (r.task, r.label) == (task, label)]
        here.sort(key=lambda row: row.batch)
        known = [(row.batch, value) for row in here if (value := view.value(row))]
        found, name = look(label, labels), _named(label, sources[machine].name, here)
        if not known:  # the legend says why
            axes.plot([], [], color=found.colour, marker=found.marker, label=name)
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
    axes.set_xlabel("batch size")
    if view.log:
        _log_axis(axes)
    elif view.bars:
        axes.set_ylim(bottom=0)


def _one_batch(axes: "Axes", sources: Sequence[Source], view: View, task: str) -> None:
    """Draw a bar or a point for each level and machine, its problem below if it has one."""
    series = _places(sources, task)
    names, labels = [], {label for _, label in series}
    for place, (machine, label) in enumerate(series):
        made = rows(sources[machine].report)
        row = next(r for r in made if (r.task, r.label) == (task, label))
        machine_name = _plain(sources[machine].name, 16)
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
                place, middle, yerr=away if high > low else None, capsize=3, hatch=hatch,
                color=found.colour, edgecolor="white" if hatch else "none", linewidth=0, ecolor="0.5",
            )  # fmt: skip
            ratio = None if baseline_of(row, [row]) else view.ratio(row)
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
    axes.set_xlabel(f"batch size {_batches(sources, task)[0]}"
                    + (f"; ×: {view.ratio_is}" if view.ratio_is else ""))  # fmt: skip


def _draw_speed(
    axes: "Axes", groups: Sequence[tuple[str, Sequence[Line]]], *, named: bool = True
) -> None:
    """Draw bars from 1 to the speed relative to O0; whiskers are the verdicts' intervals."""
    labels = {line.row.label for _, of in groups for line in of}
    place, ticks, shown = 0.0, [], set() if named else set(labels)
    count = sum(_compared(line) for _, of in groups for line in of)
    tasks = {line.row.task for _, of in groups for line in of}
    for name, of in groups:
        for task, batch in dict.fromkeys((line.row.task, line.row.batch) for line in of):
            bars = [x for x in of if (x.row.task, x.row.batch) == (task, batch) and _compared(x)]
            if not bars:
                continue
            ticks.append((
                place + (len(bars) - 1) / 2,
                "\n".join(filter(None, [_plain(task, 18) if len(tasks) > 1 else "",
                                        f"batch {batch}", _plain(name, 16)])),
            ))  # fmt: skip
            for line in bars:
                label = "" if line.row.label in shown else line.row.label
                shown.add(line.row.label)
                _speed_bar(axes, place, line, label, look(line.row.label, labels), count <= 24)
                place += 1
            place += 0.8
    axes.axhline(1, color=INK, linewidth=1)
    _log_axis(axes, base=2)
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.15)
    axes.set_ylabel("× the speed of O0 (95 % interval)")
    of_task = f": {_plain(next(iter(tasks)))}" if len(tasks) == 1 else ""
    base = "O0 TF32 off" if "O0 TF32 off" in labels else "O0"
    axes.set_title(f"Speed of a training step, {base} = 1{of_task}")
    _tidy(axes)


def _speed_bar(
    axes: "Axes", place: float, line: Line, label: str, found: Look, written: bool
) -> None:
    known = line.verdict.speed if line.verdict else None
    speed = known.value if known else line.row.speed
    if speed is None:
        return
    low, high = (known.low, known.high) if known else (speed, speed)
    hatch = {"hatch": "//", "edgecolor": "white"} if found.hollow else {}
    axes.bar(place, speed - 1, bottom=1, color=found.colour, linewidth=0,
             **({"label": label} if label else {}), **hatch)  # fmt: skip
    if known:
        axes.errorbar(place, speed, yerr=[[speed - low], [high - speed]], color="0.5", capsize=2)
    if written:
        below = speed < 1
        at = (place, low if below else high)
        _write(axes, at, f"{speed:.2f}", below=below, size=7.5)


def _compared(line: Line) -> bool:
    """Whether the line has a speed relative to another one."""
    return line.row.speed is not None and not baseline_of(line.row, [line.row])


def _draw_loss(axes: "Axes", report: Report, of: list[Row]) -> None:
    """Draw the mean over the seeds, and a band from the lowest to the highest of them."""
    positive = True
    for row in of:
        curves = [np.array(run.losses) for run in runs_of(report, row) if run.losses]
        if not curves:
            continue
        steps = min(map(len, curves))
        parts = np.array_split(np.arange(steps), min(POINTS, steps))
        with np.errstate(all="ignore"):  # inf - inf in a training that diverged
            seeds = np.array([[curve[part].mean() for part in parts] for curve in curves])
            mean = seeds.mean(0)
        at = [statistics.fmean(part) + 1 for part in parts]
        found = look(row.label, {r.label for r in of})
        seeds, mean = (np.where(np.isfinite(v), v, np.nan) for v in (seeds, mean))
        axes.plot(at, mean, color=found.colour, linewidth=found.width * 0.7, linestyle=found.dash,
                  label=row.label)  # fmt: skip
        if len(curves) > 1:
            axes.fill_between(at, seeds.min(0), seeds.max(0), color=found.colour, alpha=0.15,
                              linewidth=0)  # fmt: skip
        positive &= not bool((seeds <= 0).any())
    if positive:
        _log_axis(axes)
    axes.set_ylabel("loss (mean; band: all seeds)")


def _moving_scale(run: Run) -> Sequence[float]:
    return run.scales if len(set(run.scales)) > 1 else ()


def _draw_scale(axes: "Axes", report: Report, of: list[Row]) -> None:
    """Draw the scale of the first seed of each level whose scale moved: T3's picture."""
    for row in of:
        run = next((run for run in runs_of(report, row) if _moving_scale(run)), None)
        if run is None:
            continue
        scales = np.array(run.scales)
        turns = np.flatnonzero(np.diff(scales)) + 1  # between them nothing happens
        at = np.concatenate([[0], turns, [len(scales) - 1]])
        found = look(row.label, {r.label for r in of})
        axes.plot(at + 1, scales[at], drawstyle="steps-post", color=found.colour,
                  linewidth=found.width * 0.8, linestyle=found.dash,
                  label=f"{row.label}, seed {run.cell.seed}")  # fmt: skip
    _log_axis(axes, base=2)
    axes.set_ylabel("loss scale")


# --- pieces --------------------------------------------------------------------------------------


def _places(sources: Sequence[Source], task: str) -> list[tuple[int, str]]:
    """List machine and label of each series: the levels in order, the machines within them."""
    labels = dict.fromkeys(c.label for s in sources for c in s.report.plan if c.task == task)
    there = {(i, c.label) for i, s in enumerate(sources) for c in s.report.plan if c.task == task}
    return [(i, label) for label in labels for i in range(len(sources)) if (i, label) in there]


def _named(label: str, machine: str, of: Sequence[Row]) -> str:
    """Name a line in the legend, with the batch sizes at which the level had a problem."""
    problems: dict[str, list[str]] = {}
    for row in of:
        if row.problem:
            problems.setdefault(short_problem(row), []).append(str(row.batch))
    said = [f"{what} at {', '.join(batches)}" for what, batches in problems.items()]
    name = f"{label}, {_plain(machine)}" if machine else label
    return f"{name}: {'; '.join(said)}" if said else name


def _with_ratio(value: float, ratio: float | None) -> str:
    text = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return text if ratio is None else f"{text}\n{ratio:.2f}×"


def _write(
    axes: "Axes", point: tuple[float, float], text: str, *, below: bool = False, size: float = 8
) -> None:
    axes.annotate(
        text, point, xytext=(0, -3 if below else 3), textcoords="offset points", ha="center",
        va="top" if below else "bottom", fontsize=size,
    )  # fmt: skip


def _log_axis(axes: "Axes", base: int = 10) -> None:
    """Make the vertical axis logarithmic with plain numbers, also within one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))


def _tidy(axes: "Axes") -> None:
    axes.grid(axis="y", color="0.5", alpha=0.25)
    axes.set_axisbelow(True)


def _plain(text: str, most: int = 40) -> str:
    """Make a user's name fit to be drawn: no control characters, and not too long."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
