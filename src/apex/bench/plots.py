"""The pictures of the bench: loss, accuracy, time and memory, one PNG each, and all in one.

Drawn from a finished `Report`; nothing is trained here. Figures are made without pyplot, so there
is no display to need and no global state to leave behind. Matplotlib comes with the ``bench`` extra
and is imported where it is used.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.bench.results import BASELINE, Report, Row, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FILES", "draw"]

# Okabe and Ito's colours, which colour-blind readers can tell apart. A bfloat16 level has the
# lighter shade of the hue of its float16 level (O4 of O1, O5 of O2), and another marker.
COLOURS = {
    "O0": "#333333", "O1": "#0072B2", "O2": "#D55E00",
    "O3": "#009E73", "O4": "#56B4E9", "O5": "#E69F00",
}  # fmt: skip
MARKERS = {"O0": "o", "O1": "s", "O2": "^", "O3": "D", "O4": "v", "O5": "P"}
# Curves often lie on top of each other: wide ones below, thin broken ones above.
WIDTHS = {"O0": 4.0, "O1": 3.2, "O2": 2.4, "O3": 1.8, "O4": 1.6, "O5": 1.4}
DASHES = {"O0": "-", "O1": "-", "O2": "-", "O3": "-", "O4": (0, (4, 2)), "O5": (0, (1, 1))}


def draw(report: Report, folder: Path) -> None:
    """Draw every plot into ``folder`` as PNG."""
    from matplotlib.figure import Figure

    for name, panel in PANELS.items():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        panel(report, figure.add_subplot())
        _finish(figure, report, folder / name)

    batches = report.options["batch"]
    figure = Figure(figsize=(5.4 * len(batches) + 1, 4.4), layout="constrained")
    for axes, batch in zip(
        figure.subplots(1, len(batches), sharey=True, squeeze=False).flat, batches, strict=True
    ):
        _draw_loss(report, axes, batch)
        axes.label_outer()
    _finish(figure, report, folder / LOSS)

    figure = Figure(figsize=(12, 8), layout="constrained")
    first, *others = figure.subplots(2, 2).flat
    _draw_loss(report, first, batches[0])
    for axes, panel in zip(others, PANELS.values(), strict=True):
        panel(report, axes)
    _finish(figure, report, folder / OVERVIEW)


def _finish(figure: "Figure", report: Report, path: Path) -> None:
    here = report.environment
    versions = here["versions"]
    source = f"{here['device']['name']}, torch {versions['torch']}, apex {versions['apex']}"
    figure.supxlabel(source, fontsize=8, color="0.45")
    if not report.complete:
        text = f"INCOMPLETE: {len(report.runs)} of {report.planned} runs"
        figure.suptitle(text, color="#B00020", fontweight="bold")
    figure.savefig(path, dpi=150)


def _draw_loss(report: Report, axes: "Axes", batch: int) -> None:
    """Mean training loss of each epoch, over the seeds."""
    from matplotlib.ticker import MaxNLocator

    for level in report.options["levels"]:
        runs = [run for run in report.runs if (run.level, run.batch) == (level, batch)]
        curves = [run.epoch_losses for run in runs if run.status != "failed"]
        if curves:
            means = [statistics.fmean(epoch) for epoch in zip(*curves, strict=True)]
            axes.plot(range(1, len(means) + 1), means, label=level, marker=".", **_line(level))
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="mean cross entropy")
    axes.set_title(f"Training loss, batch size {batch}")
    _tidy(axes)


def _draw_accuracy(report: Report, axes: "Axes") -> None:
    """Final test accuracy; the band is what counts as level with O0."""
    axes.set_title("Accuracy on digits not trained on")
    axes.set_ylabel("test accuracy, %")
    if len(report.options["batch"]) > 1:
        _against_batch(report, axes, lambda row: row.accuracy.mean if row.accuracy else None)
    else:
        for place, row in enumerate(_places(report, axes)):
            if row.accuracy is None:
                continue
            axes.errorbar(
                place, row.accuracy.mean, yerr=row.accuracy.sd, fmt=MARKERS[row.level],
                color=COLOURS[row.level], markersize=9, capsize=4,
            )  # fmt: skip
            _write(axes, (place, row.accuracy.mean), f"{row.accuracy.mean:.2f}", beside=True)
            if row.level == BASELINE:
                band = (row.accuracy.mean - 1, row.accuracy.mean + 1)
                axes.axhspan(*band, color="0.92", label="within one point of O0")
        if report.options["seeds"] > 1:
            axes.set_ylabel("test accuracy, % (mean ± standard deviation)")
    _tidy(axes)


def _draw_time(report: Report, axes: "Axes") -> None:
    """Median step time, with bars from the tenth to the ninetieth percentile."""
    if len(report.options["batch"]) > 1:
        axes.set_title("Time of a training step")
        axes.set_ylabel("ms per step (median)")
        _against_batch(report, axes, lambda row: row.ms_median)
        axes.set_yscale("log")
    else:
        axes.set_title("Time of a training step (×: speed relative to O0)")
        axes.set_ylabel("ms per step (median, p10 to p90)")
        for place, row in enumerate(_places(report, axes)):
            if row.ms_median is None or row.ms_p10 is None or row.ms_p90 is None:
                continue
            away = [[row.ms_median - row.ms_p10], [row.ms_p90 - row.ms_median]]
            axes.bar(place, row.ms_median, yerr=away, capsize=4, color=COLOURS[row.level])
            _write(axes, (place, row.ms_p90), _with_ratio(row.ms_median, row.speed))
        axes.margins(y=0.18)
    _tidy(axes)


def _draw_memory(report: Report, axes: "Axes") -> None:
    """Peak memory of the tensors."""
    axes.set_ylabel("MiB of tensors at the peak")
    if len(report.options["batch"]) > 1:
        axes.set_title("Peak memory of training")
        _against_batch(report, axes, lambda row: row.peak_mib)
        axes.set_ylim(bottom=0)
    else:
        axes.set_title("Peak memory of training (×: relative to O0)")
        for place, row in enumerate(_places(report, axes)):
            if row.peak_mib is not None:
                axes.bar(place, row.peak_mib, color=COLOURS[row.level])
                _write(axes, (place, row.peak_mib), _with_ratio(row.peak_mib, row.memory))
        axes.margins(y=0.18)
    _tidy(axes)


LOSS = "loss.png"
PANELS: dict[str, Callable[[Report, "Axes"], None]] = {
    "accuracy.png": _draw_accuracy,
    "time.png": _draw_time,
    "memory.png": _draw_memory,
}
OVERVIEW = "overview.png"
FILES = (LOSS, *PANELS, OVERVIEW)


def _places(report: Report, axes: "Axes") -> list[Row]:
    """Give each level its place on the horizontal axis, its problem written below if it has one."""
    made = rows(report)
    problems = [(row.problem or "").partition(":")[0] for row in made]
    labels = [f"{row.level}\n{what}".rstrip() for row, what in zip(made, problems, strict=True)]
    axes.set_xticks(range(len(made)), labels)
    middle = (len(made) - 1) / 2
    half = max(len(made), 4) / 2 + 0.1  # a bar of one level alone is not as wide as the plot
    axes.set_xlim(middle - half, middle + half)
    return made


def _against_batch(report: Report, axes: "Axes", value: Callable[[Row], float | None]) -> None:
    """Draw a line per level over the batch sizes."""
    made = rows(report)
    for level in report.options["levels"]:
        points = [(row.batch, value(row)) for row in made if row.level == level]
        known = sorted((batch, y) for batch, y in points if y is not None)
        if known:
            axes.plot(*zip(*known, strict=True), label=level, marker=MARKERS[level], **_line(level))
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.options["batch"], [str(batch) for batch in report.options["batch"]])
    axes.minorticks_off()
    axes.set_xlabel("batch size")


def _line(level: str) -> dict[str, Any]:
    return {"color": COLOURS[level], "linewidth": WIDTHS[level], "linestyle": DASHES[level]}


def _with_ratio(value: float, ratio: float | None) -> str:
    return f"{value:.2f}" if ratio is None else f"{value:.2f}\n{ratio:.2f}×"


def _write(axes: "Axes", point: tuple[float, float], text: str, *, beside: bool = False) -> None:
    """Write above a point, or to the right of it."""
    axes.annotate(
        text,
        point,
        xytext=(8, 0) if beside else (0, 3),
        textcoords="offset points",
        ha="left" if beside else "center",
        va="center" if beside else "bottom",
        fontsize=9,
    )


def _tidy(axes: "Axes") -> None:
    """Finish a panel: quiet axes, a legend if there is something to explain."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.88")
    axes.set_axisbelow(True)
    if not axes.has_data():
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=2)
