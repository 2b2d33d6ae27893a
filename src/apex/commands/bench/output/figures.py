"""What the figures of reports share: styles of levels, panels, axes that a person reads, files.

Figures are made without pyplot: there is no display to need and no global state to leave behind.

The colours are Okabe and Ito's, which colour-blind readers can tell apart, two violets and a brown:
as protanopes, deuteranopes and tritanopes see them, any two are at least 16 apart in CIELAB. A
bfloat16 level has the lighter shade of its float16 level, and every level has a marker of its own,
so that no reader depends on colours. They name levels; none means good or bad.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["INK", "PANEL", "Drawn", "Style", "log_axis", "new_figure", "plain", "save", "style"]
__all__ += ["tidy"]

INK = "#333333"  # text and axes too; a page on a dark background replaces it
PANEL = (4.6, 3.3)  # inches: readable on a phone
STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2, 3, 5, 7, 9))


class Style(NamedTuple):
    """Of one line, bar or point.

    Curves often lie on top of each other: wide ones are below, thin ones above. A ``hollow`` marker
    has no filling.
    """

    colour: str
    marker: str
    width: float
    hollow: bool = False


STYLES = {
    "O0": Style(INK, "o", 3.6),
    "O1": Style("#0072B2", "s", 3.0),
    "O2": Style("#D55E00", "^", 2.6),
    "O3": Style("#009E73", "D", 2.2),
    "O4": Style("#56B4E9", "v", 1.8),
    "O5": Style("#E69F00", "P", 1.6),
    "native-fp16": Style("#7722EE", "<", 1.6),
    "native-bf16": Style("#BB66FF", ">", 1.4),
    "FP16": Style("#884422", "X", 1.4),
}
TF32_ON = "#858585"  # O0 with TF32, beside O0 without


def style(label: str, among: Collection[str] = ()) -> Style:
    """Find the style of a level, with TF32 where that is a choice.

    Args:
        label: `apex.commands.bench.training.results.Cell.label`.
        among: All labels of the plot: only a level that is there with and without TF32 needs two
            styles.
    """
    level, _, tf32 = label.partition(" TF32 ")
    found = STYLES[level]
    if tf32 != "on" or f"{level} TF32 off" not in among:
        return found
    return found._replace(hollow=True, colour=TF32_ON if level == "O0" else found.colour)


class Drawn(NamedTuple):
    """A figure for a page, as SVG."""

    wide: str
    narrow: str | None
    """With one panel below the other, where there are several beside each other."""


def save(
    made: "dict[str, Callable[[], Figure | None]]", folder: Path, marks: Sequence[str], source: str
) -> dict[str, Drawn]:
    """Write the files; a plot without numbers has none, and those of an earlier run go away.

    Args:
        made: What makes the figure of each name.
        folder: For the files.
        marks: What keeps the numbers from being a full result: the words before the colon go below
            the figure in its file. A page has them once.
        source: Where the numbers are from, below the figure in its file.

    Returns:
        Each plot for a page.
    """
    words = [*(mark.partition(":")[0].lower() for mark in marks), source]
    drawn = {}
    for name, make in made.items():
        with _settings(name):
            figure = make()
            if figure is None:
                for suffix in ("png", "svg"):
                    (folder / f"{name}.{suffix}").unlink(missing_ok=True)
                continue
            below = figure.supxlabel(plain(" · ".join(words), 400), fontsize=7.5, alpha=0.75)
            _legend(figure)
            figure.savefig(folder / f"{name}.png", dpi=150)
            text = _svg(figure).replace("<svg ", '<svg style="background: white" ', 1)
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
            below.remove()
            wide = _svg(figure)
            with _settings(f"{name} narrow"):
                drawn[name] = Drawn(wide, _svg(figure) if _stack(figure) else None)
    return drawn


def _svg(figure: "Figure") -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)


@contextmanager
def _settings(salt: str) -> Iterator[None]:
    import matplotlib as mpl

    settings: dict[str, Any] = {
        "svg.fonttype": "none",  # text stays text: small files, and a page can colour it
        "svg.hashsalt": salt,
        "text.parse_math": False,  # a task's name may have dollars in it
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
        ),
    }
    with mpl.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # of a user's name
        yield


def new_figure(
    count: int, columns: int | None = None, size: tuple[float, float] = PANEL
) -> "tuple[Figure, list[Axes]]":
    """Make a figure with so many panels of ``size`` inches."""
    from matplotlib.figure import Figure

    columns = columns or (count if count < 3 else 2 if count == 4 else 3)
    lines_of = math.ceil(count / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines_of + 0.5), layout="constrained")
    panels = list(figure.subplots(lines_of, columns, squeeze=False).flat)
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count]


def _stack(figure: "Figure") -> bool:
    """Put the panels below each other, for a narrow screen; whether they were not."""
    from matplotlib.gridspec import GridSpec

    grid = figure.axes[0].get_gridspec()
    if grid is None or grid.ncols == 1:
        return False
    high = (figure.get_figheight() - 0.5) / grid.nrows
    figure.set_size_inches(PANEL[0], high * len(figure.axes) + 0.5)
    below = GridSpec(len(figure.axes), 1, figure=figure)
    for place, axes in enumerate(figure.axes):
        axes.set_subplotspec(below[place])
        axes.tick_params(labelleft=True)
    _legend(figure)
    return True


def _legend(figure: "Figure") -> None:
    """Name every style of the figure once, above its panels."""
    for old in figure.legends:
        old.remove()
    by_name: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            by_name.setdefault(name, handle)
    if by_name:
        columns = _legend_columns(list(by_name), figure.get_figwidth())
        figure.legend(
            list(by_name.values()), list(by_name), loc="outside upper center", frameon=False,
            ncols=columns, fontsize=8.5,
        )  # fmt: skip


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """Find as many columns as fit: a legend fills them from the top, each as wide as it needs."""
    for columns in range(len(names), 1, -1):
        deep = math.ceil(len(names) / columns)
        longest = [max(map(len, names[i : i + deep])) for i in range(0, len(names), deep)]
        if sum(0.85 + 0.085 * length for length in longest) <= inches:
            return columns
    return 1


# --- axes ----------------------------------------------------------------------------------------


def log_axis(axes: "Axes", which: str = "y", shown: Collection[float] = ()) -> None:
    """Make an axis logarithmic, with ticks such as 0.5, 1, 1.5, 2, 3 over the values ``shown``."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis: Axis = axes.yaxis if which == "y" else axes.xaxis
    getattr(axes, f"set_{which}scale")("log")
    ends = getattr(axes, f"get_{which}lim")() if not shown else (min(shown), max(shown))
    low, high = ends[0] * 0.93, ends[1] * 1.07
    axis.set_major_locator(FixedLocator(_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if shown:
        getattr(axes, f"set_{which}lim")(low, high)


def _ticks(low: float, high: float) -> list[float]:
    """Choose round numbers: three to six of them where the range has so many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in STEPS:
        found = [step * 10.0**n for n in decades for step in steps]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 7)] if found else []


def tidy(axes: "Axes", which: str = "y") -> None:
    """Draw faint lines behind what is drawn."""
    axes.grid(axis=which, color="0.5", alpha=0.25)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def plain(text: str, most: int = 40) -> str:
    """Make a user's name fit to be drawn: no control characters, and not too long."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
