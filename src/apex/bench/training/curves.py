"""Single plots over training steps: the loss, its difference from O0, the loss scale."""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from apex.bench.output.looks import INK, look
from apex.bench.training.panels import log_axis, tidy
from apex.bench.training.results import Report, Run
from apex.bench.training.rows import Row, baseline_of, runs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["draw_difference", "draw_loss", "draw_scale", "has_difference", "moving_scale"]

POINTS = 40  # of a curve: each is the mean of as many steps as it takes


def draw_loss(axes: "Axes", report: Report, of: list[Row]) -> None:
    """Draw the mean over the seeds, and a band from the lowest to the highest of them."""
    drawn = _draw(axes, of, lambda row: [np.array(x.losses) for x in _trained(report, row)])
    if drawn and min(drawn) > 0:
        log_axis(axes)
    axes.set_ylabel("loss (mean; band: all seeds)")


def draw_difference(axes: "Axes", report: Report, of: list[Row]) -> None:
    """Draw each level's loss minus that of O0 with the same seed: curves that else coincide."""

    def differences(row: Row) -> "list[NDArray[np.float64]]":
        base = baseline_of(row, of)
        if base is None or row is base:
            return []
        others = {run.cell.seed: run.losses for run in _trained(report, base)}
        return [
            np.subtract(*(np.array(losses[:shorter]) for losses in (run.losses, other)))
            for run in _trained(report, row)
            if (other := others.get(run.cell.seed))
            and (shorter := min(len(run.losses), len(other)))
        ]

    _draw(axes, of, differences)
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_ylabel("loss - loss of O0 (mean; band: all seeds)")


def has_difference(of: Sequence[Row]) -> bool:
    """Whether there are levels beside O0 at the same task and batch size."""
    return any(baseline_of(row, of) not in (None, row) for row in of)


def _trained(report: Report, row: Row) -> list[Run]:
    return [run for run in runs_of(report, row) if run.losses]


def _draw(
    axes: "Axes", of: list[Row], curves_of: "Callable[[Row], list[NDArray[np.float64]]]"
) -> list[float]:
    """Draw the curves of each row: mean and band. Returns what was drawn and is finite."""
    drawn: list[float] = []
    for row in of:
        curves = curves_of(row)
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
        drawn += seeds[np.isfinite(seeds)].tolist()
    tidy(axes)
    return drawn


def moving_scale(run: Run) -> Sequence[float]:
    """Return the loss scales of a run if they are not all the same."""
    return run.scales if len(set(run.scales)) > 1 else ()


def draw_scale(axes: "Axes", report: Report, of: list[Row]) -> None:
    """Draw the scale of the first seed of each level whose scale moved: T3's picture."""
    for row in of:
        run = next((run for run in runs_of(report, row) if moving_scale(run)), None)
        if run is None:
            continue
        scales = np.array(run.scales)
        turns = np.flatnonzero(np.diff(scales)) + 1  # between them nothing happens
        at = np.concatenate([[0], turns, [len(scales) - 1]])
        found = look(row.label, {r.label for r in of})
        axes.plot(at + 1, scales[at], drawstyle="steps-post", color=found.colour,
                  linewidth=found.width * 0.8, linestyle=found.dash,
                  label=f"{row.label}, seed {run.cell.seed}")  # fmt: skip
    log_axis(axes, base=2)
    axes.set_ylabel("loss scale")
    tidy(axes)
