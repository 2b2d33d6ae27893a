"""The pictures of a report, PNG and SVG, drawn from finished reports; nothing is trained here.

*overview*: speed, memory and quality of each level beside O0, seeds as dots. *time*, *memory* and
*accuracy* against batch size, as tutorial T2 draws them. *loss* and *scale* over the steps. Levels
of the same numbers are one line, which has all their names.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apex.commands.bench.intervals import Interval, percentile
from apex.commands.bench.output.figures import (
    INK,
    PANEL,
    Drawn,
    Style,
    log_axis,
    new_figure,
    plain,
    save,
    style,
    tidy,
)
from apex.commands.bench.training.notes import marks, source
from apex.commands.bench.training.results import Results, Run
from apex.commands.bench.training.rows import LevelRow, rows
from apex.commands.bench.training.table import Line, lines
from apex.commands.bench.training.verdict import LOSS_MARGIN, Verdict, same_arithmetic
from apex.commands.tables import three

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

POINTS = 40  # of a curve: each is the mean of as many steps as it takes


def draw(report: Results, verdicts: Sequence[Verdict], folder: Path) -> dict[str, Drawn]:
    """Draw every plot for which there are numbers into ``folder``, as PNG and SVG.

    Returns:
        Each plot by its name, which is that of its files.
    """
    of = rows(report)
    made: dict[str, Callable[[], Figure | None]] = {
        "overview": partial(_overview, lines(report, verdicts)),
        **{name: partial(_against_batch, of, *view) for name, view in VIEWS.items()},
        "loss": partial(_curves, of, "Training loss", lambda run: run.losses, _draw_losses),
        "scale": partial(_curves, of, "Loss scale", _moving_scale, _draw_scales),
    }
    return save(made, folder, marks(report), source(report.environment))


def _style(row: LevelRow) -> Style:
    return style(row.label, {cell.label for cell in row.report.plan})


def _same_as(of: Sequence[LevelRow]) -> dict[str, str]:
    """Name for a label the first one before it that did the same arithmetic."""
    return {row.label: same[0].label for same in same_arithmetic(of) for row in same[1:]}


def _title(row: LevelRow, *, several: bool) -> str:
    return f"{plain(row.task)}, batch size {row.batch}" if several else plain(row.task)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


Points = list[tuple[float, float]]


def _draw_lines(
    axes: "Axes",
    of: Sequence[LevelRow],
    points: dict[str, Points],
    thin: float = 0.7,
    *,
    named: bool = True,
    **options: Any,
) -> None:
    """Draw a line for each level, one for all levels of the same numbers, named after them all.

    ``points`` and what ``options`` has are by label.
    """
    groups: dict[str, list[LevelRow]] = {}
    for row in of:
        groups.setdefault(repr(points[row.label]), []).append(row)
    for same in groups.values():
        row, own = same[0], _style(same[0])
        given = {name: value(row, own) for name, value in options.items()}
        if sum(math.isfinite(y) for _, y in points[row.label]) == 1:  # a line of one point is none
            given.setdefault("marker", own.marker)
        axes.plot(
            *zip(*points[row.label], strict=True), color=own.colour, linewidth=own.width * thin,
            label=", ".join(one.label for one in same) if named else None, **given,
        )  # fmt: skip


def _filling(row: LevelRow, own: Style) -> str:
    return "none" if own.hollow else own.colour


# --- the overview --------------------------------------------------------------------------------


def _overview(of: Sequence[Line]) -> "Figure | None":
    """Draw speed, memory and quality side by side, a line of panels for each batch size."""
    places: dict[tuple[str, int], list[Line]] = {}
    for line in of:
        places.setdefault((line.row.task, line.row.batch), []).append(line)
    shown = [here for here in places.values() if any(line.verdict for line in here)]
    if not shown:
        return None
    high = 0.9 + 0.3 * max(map(len, shown))
    figure, panels = new_figure(3 * len(shown), 3, (PANEL[0], high))
    figure.set_layout_engine("constrained", wspace=0.05)
    for place, here in enumerate(shown):
        first, *others = panels[3 * place : 3 * place + 3]
        _speeds(first, here)
        _memories(others[0], here)
        _qualities(others[1], here)
        first.set_title(f"{_title(here[0].row, several=len(shown) > 1)}\n{first.get_title()}")
        for axes in (first, *others):
            axes.set_yticks(range(len(here)), [line.row.label for line in here])
            axes.set_ylim(len(here) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
            tidy(axes, "x")
        for axes in others:
            axes.tick_params(labelleft=False)
    return figure


def _speeds(axes: "Axes", of: Sequence[Line]) -> None:
    shown = [1.0]
    for place, line in enumerate(of):
        if line.verdict is None:
            _write(axes, place, f"{three(line.row.ms)} ms" if line.row.ms else "")
            continue
        seeds, known = [math.exp(log) for log in line.verdict.each_speed], line.verdict.speed
        _dots(axes, place, line.row, seeds, known)
        shown += [*seeds, *([known.low, known.high] if known else [])]
        value = f"{line.ratio:.2f}×" if line.ratio else "not measured"
        _write(axes, place, "too noisy" if line.verdict.noise else value)
    axes.axvline(1, color=INK, linewidth=1)
    if len(shown) == 1:
        _say_empty(axes, _no_speeds(of))
    log_axis(axes, "x", shown)
    axes.set_title("Speed of a step, O0 = 1")
    axes.set_xlabel("right is faster (95 % interval)")


def _no_speeds(of: Sequence[Line]) -> str:
    stopped = all(line.row.stopped for line in of if line.verdict)
    return "stopped by the time budget" if stopped else "no level trained together with O0"


def _say_empty(axes: "Axes", why: str) -> None:
    """Write into a panel why there is nothing in it."""
    axes.text(
        0.5, 0.5, f"nothing to show:\n{why}", transform=axes.transAxes, ha="center", va="center",
        fontsize=9,
    )  # fmt: skip


def _memories(axes: "Axes", of: Sequence[Line]) -> None:
    if all(line.row.peak_bytes is None for line in of):
        cut = of[0].row.report.budget_s is not None
        _say_empty(axes, "the time budget was too short for it" if cut else "not measured")
    for place, line in enumerate(of):
        known, own = line.row.peak_bytes, _style(line.row)
        if known is None:
            continue
        axes.barh(place, known / 2**20, height=0.6, color=own.colour, linewidth=0)
        share = line.verdict.memory if line.verdict else None
        mib = f"{three(known / 2**20)} MiB"
        _write(axes, place, f"{share:.2f}×" if share else mib)
    axes.margins(x=0.03)
    axes.set_title("Peak memory of training")
    axes.set_xlabel("MiB of tensors, left is less")


def _qualities(axes: "Axes", of: Sequence[Line]) -> None:
    """Draw the accuracy minus O0's, or how much lower the loss is where there is none."""
    points = any(line.row.accuracies for line in of)
    same, margin = _same_as([line.row for line in of]), 100 * LOSS_MARGIN
    for place, line in enumerate(of):
        if line.verdict is None:
            values = line.row.accuracies if points else line.row.final_losses
            value = statistics.fmean(values) if values else None
            _write(
                axes, place, "" if value is None else f"{value:.1f} %" if points else f"{value:.3g}"
            )
            continue
        judged = line.verdict.accuracy if points else line.verdict.loss
        known = judged.interval if judged else None
        seeds = _differences(line.verdict, points=points)
        if points:
            margin = judged.margin if judged else margin
        else:
            known = known and Interval(*map(_per_cent, vars(known).values()))
        _dots(axes, place, line.row, seeds, known)
        value = statistics.fmean(seeds) if seeds else None
        text = "" if value is None else f"{value:+.2f}" if points else f"{value:+.1f} %"
        as_other = same.get(line.row.label)
        _write(axes, place, f"as {as_other}" if as_other else text)
    if not any(_differences(line.verdict, points=points) for line in of if line.verdict):
        _say_empty(axes, "no level trained to its end together with O0")
    axes.axvline(0, color=INK, linewidth=1)
    if not points or any(line.verdict and line.verdict.accuracy for line in of):
        axes.axvline(-margin, color=INK, linewidth=1, linestyle=":")
    axes.margins(x=0.08)
    loss = "test loss" if any(line.row.test_losses for line in of) else "training loss"
    axes.set_title("Test accuracy, O0 = 0" if points else f"{loss.capitalize()}, O0 = 0")
    unit = "points" if points else f"% lower {loss}"
    axes.set_xlabel(f"{unit}, right is better (dotted: margin)")


def _differences(of: Verdict, *, points: bool) -> Sequence[float]:
    """Give what is drawn of the seeds: points of accuracy, or how much lower a loss is."""
    if points:
        return of.each_accuracy
    return [_per_cent(x) for x in of.each_loss if math.isfinite(x)]


def _per_cent(log: float) -> float:
    """How much lower a loss is, of the logarithm of the other's over this one's."""
    return -100 * math.expm1(min(-log, 99.0))


def _dots(
    axes: "Axes", place: float, row: LevelRow, seeds: Sequence[float], known: Interval | None
) -> None:
    """Draw the seeds as dots, and the mean with its interval."""
    own = _style(row)
    if known:
        ends = [[known.value - known.low], [known.high - known.value]]
        axes.errorbar(
            known.value, place, xerr=ends, color=own.colour, marker=own.marker, markersize=7,
            capsize=3, linewidth=1.6, markerfacecolor=_filling(row, own),
        )  # fmt: skip
    axes.plot(seeds, [place + 0.24] * len(seeds), ".", color=own.colour, alpha=0.8, markersize=5)


def _write(axes: "Axes", place: float, text: str) -> None:
    """Write the number of a level beside its panel."""
    at = axes.get_yaxis_transform()
    axes.text(1.015, place, text, transform=at, va="center", fontsize=8.5)


# --- against batch size --------------------------------------------------------------------------

Value = Callable[[Run], float | None]
VIEWS: dict[str, tuple[str, str, Value]] = {  # title, unit and number of a run
    "time": ("Time of a step", "ms (median of a seed)", lambda run: percentile(run.counted_ms, 50)),
    "memory": (
        "Peak memory", "MiB of tensors", lambda run: run.peak_bytes and run.peak_bytes / 2**20,
    ),
    "accuracy": (
        "Test accuracy", "% right", lambda run: run.accuracy[-1] if run.accuracy else None,
    ),
}  # fmt: skip


def _against_batch(of: Sequence[LevelRow], title: str, unit: str, value: Value) -> "Figure | None":
    """Draw a panel for each task: the mean of a level as a line, its seeds as dots."""
    seeds = {id(row): _finite([value(run) for run in row.finished]) for row in of}
    of = [row for row in of if seeds[id(row)]]
    tasks = list(dict.fromkeys(row.task for row in of))
    if not tasks:
        return None
    figure, panels = new_figure(len(tasks))
    for axes, task in zip(panels, tasks, strict=True):
        here = [row for row in of if row.task == task]
        batches = sorted({row.batch for row in here})
        firsts = {row.label: row for row in reversed(here)}  # one row of each label
        labels, several = list(dict.fromkeys(row.label for row in here)), len(batches) > 1
        points: dict[str, Points] = {label: [] for label in labels}
        for row in sorted(here, key=lambda row: row.batch):
            x = row.batch if several else labels.index(row.label)
            points[row.label].append((x, statistics.fmean(seeds[id(row)])))
            dots, colour = [x] * len(seeds[id(row)]), _style(row).colour
            axes.plot(dots, seeds[id(row)], ".", color=colour, alpha=0.6, markersize=4)
        _draw_lines(
            axes, [firsts[label] for label in labels], points, markerfacecolor=_filling,
            named=several, marker=lambda _, own: own.marker,
        )  # fmt: skip
        if several:
            log_axis(axes, "x", batches)
            axes.set_xticks(batches, map(str, batches))
            axes.set_xlabel("batch size")
        else:
            axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        if unit.startswith("ms"):
            log_axis(axes)
        axes.set_ylabel(unit)
        axes.set_title(f"{title}: {_title(here[0], several=not several)}")
        tidy(axes)
    return figure


# --- over the steps ------------------------------------------------------------------------------


def _curves(
    of: Sequence[LevelRow],
    title: str,
    values: Callable[[Run], Sequence[float]],
    drawing: "Callable[[Axes, list[LevelRow]], None]",
) -> "Figure | None":
    """Draw a panel for each task and batch size in which there is something to see."""
    places: dict[tuple[str, int], list[LevelRow]] = {}
    for row in of:
        if any(values(run) for run in row.runs):
            places.setdefault((row.task, row.batch), []).append(row)
    if not places:
        return None
    figure, panels = new_figure(len(places))
    for axes, here in zip(panels, places.values(), strict=True):
        drawing(axes, here)
        axes.set_title(f"{title}: {_title(here[0], several=True)}")
        axes.set_xlabel("training step")
        tidy(axes)
    return figure


def _draw_losses(axes: "Axes", of: list[LevelRow]) -> None:
    """Draw the mean over the seeds; the first has a band from the lowest to the highest of them."""
    of = [row for row in of if any(run.losses for run in row.runs)]
    points: dict[str, Points] = {}
    for row in of:
        curves = [np.array(run.losses) for run in row.runs if run.losses]
        steps = min(map(len, curves))
        parts = np.array_split(np.arange(steps), min(POINTS, steps))
        with np.errstate(all="ignore"):  # inf - inf in a training that diverged
            seeds = np.array([[curve[part].mean() for part in parts] for curve in curves])
            seeds = np.where(np.isfinite(seeds), seeds, np.nan)
            mean = seeds.mean(0)
        at = [statistics.fmean(part) + 1 for part in parts]
        points[row.label] = list(zip(at, map(float, mean), strict=True))
        if len(curves) > 1 and row is of[0]:
            band, colour = (seeds.min(0), seeds.max(0)), _style(row).colour
            axes.fill_between(at, *band, color=colour, alpha=0.12, linewidth=0)
    _draw_lines(axes, of, points)
    drawn = [value for line in points.values() for _, value in line if math.isfinite(value)]
    if drawn and min(drawn) > 0:
        log_axis(axes)
    if not drawn:
        _say_empty(axes, "no loss was a finite number")
    axes.set_ylabel(f"loss (mean; band: seeds of {of[0].label})" if of else "loss")


def _moving_scale(run: Run) -> Sequence[float]:
    """Return the loss scales of a run if they are not all the same."""
    return run.scales if len(set(run.scales)) > 1 else ()


def _draw_scales(axes: "Axes", of: list[LevelRow]) -> None:
    """Draw the scale of the first seed of each level whose scale moved."""
    points: dict[str, Points] = {}
    for row in of:
        scales = np.array(next(run for run in row.runs if _moving_scale(run)).scales)
        changes = np.flatnonzero(np.diff(scales)) + 1  # between them nothing happens
        at = np.concatenate([[0], changes, [len(scales) - 1]])
        points[row.label] = [(float(x) + 1, float(scales[x])) for x in at]
    _draw_lines(axes, of, points, 0.8, drawstyle=lambda *_: "steps-post")
    seen = sorted({scale for line in points.values() for _, scale in line})
    ticks = seen[:: math.ceil(len(seen) / 6)]
    axes.set_yscale("log", base=2)
    axes.set_yticks(ticks, [f"{scale:,g}" for scale in ticks])
    axes.set_ylabel("loss scale (first seed)")
