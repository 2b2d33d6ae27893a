"""The pictures of a report, PNG and SVG, drawn from finished reports; nothing is trained here.

*overview*: speed, memory and quality of each level beside O0, seeds as dots. *time*, *memory* and
*accuracy* against batch size, as tutorial T2 draws them. *loss* and *scale* over the steps. Levels
whose lines coincide are drawn as dashes of one after the other, so that each is seen.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from apex.bench.intervals import Interval, percentile
from apex.bench.output.columns import three
from apex.bench.output.figures import PANEL, Drawn, log_axis, new_figure, plain, save, tidy
from apex.bench.output.looks import INK, Look, look
from apex.bench.training.notes import marks, source
from apex.bench.training.results import Report, Run
from apex.bench.training.rows import Row, rows
from apex.bench.training.table import Line, lines
from apex.bench.training.verdict import (
    LOSS_MARGIN,
    Verdict,
    as_long,
    paired,
    paired_ratio,
    same_arithmetic,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

POINTS = 40  # of a curve: each is the mean of as many steps as it takes
DASH = 7  # points: of a line among lines that coincide with it


def draw(report: Report, verdicts: Sequence[Verdict], folder: Path) -> dict[str, Drawn]:
    """Draw every plot for which there are numbers into ``folder``, as PNG and SVG.

    Returns:
        Each plot by its name, which is that of its files.
    """
    of = rows(report)
    made: dict[str, Callable[[], Figure | None]] = {
        "overview": partial(_overview, lines(report, verdicts)),
        **{name: partial(_view, of, view) for name, view in VIEWS.items()},
        "loss": partial(_curves, of, "Training loss", lambda run: run.losses, _draw_losses),
        "scale": partial(_curves, of, "Loss scale", _moving_scale, _draw_scales),
    }
    return save(made, folder, marks(report), source(report.environment))


def _look(row: Row) -> Look:
    return look(row.label, {cell.label for cell in row.report.plan})


def _same_as(of: Sequence[Row]) -> dict[str, str]:
    """Name for a label the first one before it that did the same arithmetic."""
    return {row.label: same[0].label for same in same_arithmetic(of) for row in same[1:]}


def _place(row: Row, *, several: bool) -> str:
    return f"{plain(row.task)}, batch size {row.batch}" if several else plain(row.task)


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
        first.set_title(f"{_place(here[0].row, several=len(shown) > 1)}\n{first.get_title()}")
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
        logs = [
            found[0]
            for pair in paired(line.verdict.row, line.verdict.other)
            if (found := paired_ratio(*pair))
        ]
        seeds, known = [math.exp(log) for log in logs], line.verdict.speed
        _dots(axes, place, line.row, seeds, known)
        shown += [*seeds, *([known.low, known.high] if known else [])]
        value = f"{line.ratio:.2f}×" if line.ratio else "not measured"
        _write(axes, place, "too noisy" if line.verdict.noise else value)
    axes.axvline(1, color=INK, linewidth=1)
    log_axis(axes, "x", shown)
    axes.set_title("Speed of a step, O0 = 1")
    axes.set_xlabel("right is faster (95 % interval)")


def _memories(axes: "Axes", of: Sequence[Line]) -> None:
    for place, line in enumerate(of):
        known, found = line.row.peak_bytes, _look(line.row)
        if known is None:
            continue
        axes.barh(place, known / 2**20, height=0.6, color=found.colour, linewidth=0)
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
        pairs = paired(line.verdict.row, line.verdict.other)
        pairs = [both for both in pairs if as_long(*both)]
        judged = line.verdict.accuracy if points else line.verdict.loss
        known = judged.interval if judged else None
        if points:
            both = [(m.accuracy, t.accuracy) for m, t in pairs]
            seeds = [m[-1] - t[-1] for m, t in both if m and t]
            margin = judged.margin if judged else margin
        else:
            losses = [(_loss(m), _loss(t)) for m, t in pairs]
            seeds = [100 * (1 - m / t) for m, t in losses if m and t and 0 < m / t < math.inf]
            ends = vars(known).values() if known else ()
            known = known and Interval(*(-100 * math.expm1(min(-x, 99.0)) for x in ends))
        _dots(axes, place, line.row, seeds, known)
        value = statistics.fmean(seeds) if seeds else None
        text = "" if value is None else f"{value:+.2f}" if points else f"{value:+.1f} %"
        as_other = same.get(line.row.label)
        _write(axes, place, f"as {as_other}" if as_other else text)
    axes.axvline(0, color=INK, linewidth=1)
    if not points or any(line.verdict and line.verdict.accuracy for line in of):
        axes.axvline(-margin, color=INK, linewidth=1, linestyle=":")
    axes.margins(x=0.08)
    loss = "test loss" if any(line.row.test_losses for line in of) else "training loss"
    axes.set_title("Test accuracy, O0 = 0" if points else f"{loss.capitalize()}, O0 = 0")
    unit = "points" if points else f"% lower {loss}"
    axes.set_xlabel(f"{unit}, right is better (dotted: margin)")


def _loss(run: Run) -> float | None:
    return run.test_loss[-1] if run.test_loss else run.final_loss


def _dots(
    axes: "Axes", place: float, row: Row, seeds: Sequence[float], known: Interval | None
) -> None:
    """Draw the seeds as dots, and the mean with its interval."""
    found = _look(row)
    if known:
        ends = [[known.value - known.low], [known.high - known.value]]
        axes.errorbar(
            known.value, place, xerr=ends, color=found.colour, marker=found.marker, markersize=7,
            capsize=3, linewidth=1.6, markerfacecolor="none" if found.hollow else found.colour,
        )  # fmt: skip
    axes.plot(seeds, [place + 0.24] * len(seeds), ".", color=found.colour, alpha=0.8, markersize=5)


def _write(axes: "Axes", place: float, text: str) -> None:
    """Write the number of a level beside its panel."""
    at = axes.get_yaxis_transform()
    axes.text(1.015, place, text, transform=at, va="center", fontsize=8.5)


# --- against batch size --------------------------------------------------------------------------


class View(NamedTuple):
    """A number of each run against the batch size."""

    title: str
    unit: str
    of: Callable[[Run], float | None]
    log: bool = False


VIEWS = {
    "time": View(
        "Time of a step", "ms (median of a seed)", lambda run: percentile(run.counted_ms, 50), True
    ),
    "memory": View(
        "Peak memory", "MiB of tensors", lambda run: run.peak_bytes and run.peak_bytes / 2**20
    ),
    "accuracy": View(
        "Test accuracy", "% right", lambda run: run.accuracy[-1] if run.accuracy else None
    ),
}


def _view(of: Sequence[Row], view: View) -> "Figure | None":
    """Draw a panel for each task: the mean of a level as a line, its seeds as dots."""
    values = {_key(row): _finite([view.of(run) for run in row.finished]) for row in of}
    tasks = list(dict.fromkeys(row.task for row in of if values[_key(row)]))
    if not tasks:
        return None
    figure, panels = new_figure(len(tasks))
    for axes, task in zip(panels, tasks, strict=True):
        here = [row for row in of if row.task == task and values[_key(row)]]
        batches = sorted({row.batch for row in here})
        labels = list(dict.fromkeys(row.label for row in here))
        series = {}
        for label in labels:
            mine = sorted((row for row in here if row.label == label), key=lambda r: r.batch)
            series[label] = [
                (float(row.batch), statistics.fmean(values[_key(row)])) for row in mine
            ]
        alike = _alike(series)
        for label in labels:
            mine = [row for row in here if row.label == label]
            at, mean = map(list, zip(*series[label], strict=True))
            if not batches[1:]:
                at = [labels.index(label)]
            found = _look(mine[0])
            axes.plot(
                at, mean, color=found.colour, marker=found.marker, linewidth=found.width * 0.7,
                linestyle=alike[label], label=label if batches[1:] else None,
                markerfacecolor="none" if found.hollow else found.colour,
            )  # fmt: skip
            for row in mine:
                x = row.batch if batches[1:] else labels.index(label)
                seeds = values[_key(row)]
                axes.plot([x] * len(seeds), seeds, ".", color=found.colour, alpha=0.6, markersize=4)
        if batches[1:]:
            log_axis(axes, "x", batches)
            axes.set_xticks(batches, map(str, batches))
            axes.set_xlabel("batch size")
        else:
            axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        if view.log:
            log_axis(axes)
        axes.set_ylabel(view.unit)
        axes.set_title(f"{view.title}: {_place(here[0], several=not batches[1:])}")
        tidy(axes)
    return figure


def _key(row: Row) -> tuple[str, int, str]:
    return row.task, row.batch, row.label


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _alike(lines_of: "dict[str, list[tuple[float, float]]]") -> dict[str, object]:
    """Choose line styles: lines of the same numbers take turns along their way."""
    groups: dict[str, list[str]] = {}
    for label, line in lines_of.items():
        groups.setdefault(repr(line), []).append(label)
    return {
        label: (DASH * i, (DASH, DASH * (len(same) - 1))) if len(same) > 1 else "-"
        for same in groups.values()
        for i, label in enumerate(same)
    }


# --- over the steps ------------------------------------------------------------------------------


def _curves(
    of: Sequence[Row],
    title: str,
    values: Callable[[Run], Sequence[float]],
    drawing: "Callable[[Axes, list[Row]], None]",
) -> "Figure | None":
    """Draw a panel for each task and batch size in which there is something to see."""
    places: dict[tuple[str, int], list[Row]] = {}
    for row in of:
        if any(values(run) for run in row.runs):
            places.setdefault((row.task, row.batch), []).append(row)
    if not places:
        return None
    figure, panels = new_figure(len(places))
    for axes, here in zip(panels, places.values(), strict=True):
        drawing(axes, here)
        axes.set_title(f"{title}: {_place(here[0], several=True)}")
        axes.set_xlabel("training step")
        tidy(axes)
    return figure


def _draw_losses(axes: "Axes", of: list[Row]) -> None:
    """Draw the mean over the seeds, and a band from the lowest to the highest of them."""
    series, bands = {}, {}
    for row in of:
        curves = [np.array(run.losses) for run in row.runs if run.losses]
        if not curves:
            continue
        steps = min(map(len, curves))
        parts = np.array_split(np.arange(steps), min(POINTS, steps))
        with np.errstate(all="ignore"):  # inf - inf in a training that diverged
            seeds = np.array([[curve[part].mean() for part in parts] for curve in curves])
            seeds = np.where(np.isfinite(seeds), seeds, np.nan)
            mean = seeds.mean(0)
        at = [statistics.fmean(part) + 1 for part in parts]
        series[row.label] = list(zip(at, map(float, mean), strict=True))
        bands[row.label] = (seeds.min(0), seeds.max(0)) if len(curves) > 1 else None
    alike, same = _alike(series), _same_as(of)
    for row in (row for row in of if row.label in series):
        at, mean = map(list, zip(*series[row.label], strict=True))
        found, band = _look(row), bands[row.label]
        as_other = f", same as {same[row.label]}" if row.label in same else ""
        axes.plot(
            at, mean, color=found.colour, linewidth=found.width * 0.7, label=row.label + as_other,
            linestyle=alike[row.label],
        )  # fmt: skip
        if band and not as_other:
            axes.fill_between(at, *band, color=found.colour, alpha=0.12, linewidth=0)
    drawn = [value for line in series.values() for _, value in line if math.isfinite(value)]
    if drawn and min(drawn) > 0:
        log_axis(axes)
    axes.set_ylabel("loss (mean; band: all seeds)")


def _moving_scale(run: Run) -> Sequence[float]:
    """Return the loss scales of a run if they are not all the same."""
    return run.scales if len(set(run.scales)) > 1 else ()


def _draw_scales(axes: "Axes", of: list[Row]) -> None:
    """Draw the scale of the first seed of each level whose scale moved."""
    traces = {}
    for row in of:
        run = next(run for run in row.runs if _moving_scale(run))
        scales = np.array(run.scales)
        turns = np.flatnonzero(np.diff(scales)) + 1  # between them nothing happens
        at = np.concatenate([[0], turns, [len(scales) - 1]])
        traces[row.label] = [(float(x) + 1, float(scales[x])) for x in at]
    alike = _alike(traces)
    for row in of:
        steps, scale = map(list, zip(*traces[row.label], strict=True))
        found = _look(row)
        axes.plot(
            steps, scale, drawstyle="steps-post", color=found.colour, label=row.label,
            linewidth=found.width * 0.8, linestyle=alike[row.label],
        )  # fmt: skip
    seen = sorted({scale for trace in traces.values() for _, scale in trace})
    ticks = seen[:: math.ceil(len(seen) / 6)]
    axes.set_yscale("log", base=2)
    axes.set_yticks(ticks, [f"{scale:,g}" for scale in ticks])
    axes.set_ylabel("loss scale (first seed)")
