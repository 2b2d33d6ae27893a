"""The pictures of a report, PNG and SVG: speed, time, memory, accuracy, loss, loss scale.

Drawn from finished reports; nothing is trained here. `draw` takes one report, `compare` overlays
those of several machines. Figures are made without pyplot, so there is no display to need and no
global state to leave behind. Matplotlib comes with the ``bench`` extra and is imported where used.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.bench.output.looks import INK
from apex.bench.training.curves import (
    draw_difference,
    draw_loss,
    draw_scale,
    has_difference,
    moving_scale,
)
from apex.bench.training.panels import (
    VIEWS,
    Source,
    View,
    batches_of,
    draw_speed,
    draw_view,
    has_speed,
    plain,
    series_of,
)
from apex.bench.training.remarks import marks, source
from apex.bench.training.results import Report, Run
from apex.bench.training.rows import Row
from apex.bench.training.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PANEL", "Source", "compare", "draw", "new_figure", "save"]

PANEL = (5.2, 3.7)  # inches: readable on a phone, where a page scales it down by a third


def draw(report: Report, verdicts: Sequence[Verdict], folder: Path) -> dict[str, str]:
    """Draw every plot for which there are numbers into ``folder``, as PNG and SVG.

    Returns:
        The SVG of each plot by its name, which is that of its files.
    """
    here = [Source.of("", report, verdicts)]
    made: dict[str, Callable[[], Figure | None]] = {
        "overview": partial(_overview, here),
        "speed": partial(_speed, here),
        **{name: partial(_view, here, view) for name, view in VIEWS.items()},
        "loss": partial(_curves, here[0], "Training loss", draw_loss, lambda run: run.losses),
        "loss-difference": partial(_differences, here[0]),
        "scale": partial(_curves, here[0], "Loss scale", draw_scale, moving_scale),
    }
    return save(made, folder, marks(report), source(report.environment))


def compare(sources: Sequence[Source], folder: Path) -> dict[str, str]:
    """Overlay the reports of several machines: T2's three views and the speed."""
    made: dict[str, Callable[[], Figure | None]] = {
        "speed": partial(_speed, sources),
        **{name: partial(_view, sources, view) for name, view in VIEWS.items()},
    }
    said = list(dict.fromkeys(mark for s in sources for mark in marks(s.report)))
    named = "\n".join(f"{s.name}: {source(s.report.environment)}" for s in sources)
    return save(made, folder, said, named)


def save(
    made: "dict[str, Callable[[], Figure | None]]", folder: Path, said: Sequence[str], below: str
) -> dict[str, str]:
    """Write the files; a plot without numbers has none, and those of an earlier run go away.

    Args:
        made: What makes the figure of each name.
        folder: For the files.
        said: Above each figure: what keeps its numbers from being a full result.
        below: Below each figure: where its numbers are from.

    Returns:
        The SVG of each plot.
    """
    svgs = {}
    for name, make in made.items():
        with _style(name):
            figure = make()
            if figure is None:
                for suffix in ("png", "svg"):
                    (folder / f"{name}.{suffix}").unlink(missing_ok=True)
                continue
            _finish(figure, " · ".join(said), below)
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


def _finish(figure: "Figure", said: str, below: str) -> None:
    """Add what holds for the whole figure: legend, source, what is not complete."""
    said = textwrap.fill(said, int(11 * figure.get_figwidth()))  # so many characters to an inch
    by_name: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            by_name.setdefault(name, handle)
    if by_name:  # its title, as matplotlib would draw a title of the figure on top of it
        figure.legend(
            list(by_name.values()), list(by_name), loc="outside upper center", frameon=False,
            ncols=_legend_columns(list(by_name), figure.get_figwidth()), fontsize=8.5,
            title=said or None, title_fontproperties={"size": 9.5, "weight": "bold"},
        )  # fmt: skip
    elif said:
        figure.suptitle(said, fontsize=9.5, fontweight="bold")
    figure.supxlabel(plain(below, 400), fontsize=7.5, alpha=0.75)


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """Find as many columns as fit: a legend fills them from the top, each as wide as it needs."""
    for columns in range(len(names), 1, -1):
        deep = math.ceil(len(names) / columns)
        longest = [max(map(len, names[i : i + deep])) for i in range(0, len(names), deep)]
        if sum(0.85 + 0.08 * length for length in longest) <= inches:
            return columns
    return 1


def new_figure(
    count: int, columns: int | None = None, width: float = PANEL[0]
) -> "tuple[Figure, list[Axes]]":
    """Make a figure with so many panels, each ``width`` inches wide."""
    from matplotlib.figure import Figure

    columns = columns or (count if count < 3 else 2 if count == 4 else 3)
    lines_of = math.ceil(count / columns)
    size = (width * columns, PANEL[1] * lines_of + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(lines_of, columns, squeeze=False).flat)
    for empty in panels[count:]:
        empty.set_axis_off()
    return figure, panels[:count]


def _tasks(sources: Sequence[Source]) -> list[str]:
    return list(dict.fromkeys(cell.task for s in sources for cell in s.report.plan))


def _overview(sources: Sequence[Source]) -> "Figure | None":
    """Put four plots of the first task with numbers into one."""
    first = sources[0]
    timed = [line.row.task for line in first.lines if line.row.ms_median is not None]
    if not timed:
        return None
    task = timed[0]
    figure, panels = new_figure(4, 2)
    # Where the other panels have lines, the legend is theirs: the same colours.
    mine = [line for line in first.lines if line.row.task == task]
    draw_speed(panels[0], [("", mine)], named=len(batches_of(sources, task)) == 1)
    for axes, view in zip(panels[1:], VIEWS.values(), strict=True):
        draw_view(axes, sources, view, task)
    return figure


def _view(sources: Sequence[Source], view: View) -> "Figure | None":
    """Draw a panel for each task."""
    measured = {x.row.task for s in sources for x in s.lines if view.value(x.row)}
    tasks = [task for task in _tasks(sources) if task in measured]
    if not tasks:
        return None
    bars = [len(series_of(sources, t)) for t in tasks if len(batches_of(sources, t)) == 1]
    figure, panels = new_figure(len(tasks), width=max(PANEL[0], 0.62 * max(bars, default=0)))
    for axes, task in zip(panels, tasks, strict=True):
        draw_view(axes, sources, view, task)
    return figure


def _speed(sources: Sequence[Source]) -> "Figure | None":
    """Draw a group of bars for each task, batch size and machine."""
    groups = [(s.name, s.lines) for s in sources]
    bars = sum(has_speed(line) for _, of in groups for line in of)
    if not bars:
        return None
    count = len({(name, x.row.task, x.row.batch) for name, of in groups for x in of})
    figure, [axes] = new_figure(1, width=max(PANEL[0], 1.5 + 0.24 * bars, 1.0 + 0.8 * count))
    draw_speed(axes, groups)
    return figure


def _differences(of: Source) -> "Figure | None":
    if not any(has_difference(of.rows(task)) for task in _tasks([of])):
        return None
    title = "Training loss, difference from O0"
    return _curves(of, title, draw_difference, lambda run: run.losses)


def _curves(
    of: Source,
    title: str,
    drawing: "Callable[[Axes, Report, list[Row]], None]",
    values: Callable[[Run], Sequence[float]],
) -> "Figure | None":
    """Draw a panel for each task and batch size in which there is something to see."""
    keys = dict.fromkeys((r.cell.task, r.cell.batch) for r in of.report.runs if values(r))
    if not keys:
        return None
    figure, panels = new_figure(len(keys))
    for axes, (task, batch) in zip(panels, keys, strict=True):
        drawing(axes, of.report, [row for row in of.rows(task) if row.batch == batch])
        axes.set_title(f"{title}: {plain(task)}, batch size {batch}")
        axes.set_xlabel("training step")
    return figure
