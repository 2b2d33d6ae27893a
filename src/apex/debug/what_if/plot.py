"""The plot: a row for each layer, a column for each format, the worst cosine in each cell."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from apex.debug.what_if.verdicts import LOOK, NOT_DECIDED, NOT_SAFE, SAFE

if TYPE_CHECKING:
    from apex.debug.what_if.result import WhatIf

# Okabe and Ito's colours, which colour-blind readers can tell apart; the words are in the legend.
COLOURS = {SAFE: "#56B4E9", LOOK: "#F0E442", NOT_SAFE: "#D55E00", NOT_DECIDED: "#CCCCCC"}


def draw(result: WhatIf, path: Path) -> None:
    """Write the file; its suffix decides the kind."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("matplotlib is not installed: pip install matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    rows, columns = result.layers, result.formats
    figure = Figure(
        figsize=(2.4 + 1.3 * len(columns), 1.4 + 0.26 * len(rows)), layout="constrained"
    )
    axes = figure.subplots()
    for y, layer in enumerate(rows):
        for x, form in enumerate(columns):
            verdict = layer.verdicts[form]
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[verdict.state], edgecolor="w"))
            text = "inf" if verdict.score.inf else f"{verdict.score.cosine:.3f}"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), frame_on=False)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [one.name or one.kind for one in rows])
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    states = {one.verdicts[form].state for one in rows for form in columns}
    patches = [Patch(color=colour, label=s) for s, colour in COLOURS.items() if s in states]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{result.model}: worst cosine to float32", fontsize=9)
    figure.savefig(path, dpi=150)
