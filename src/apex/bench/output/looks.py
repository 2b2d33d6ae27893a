"""How a level looks in every plot and table: colour, marker, width.

Okabe and Ito's colours, which colour-blind readers can tell apart, two violets and a brown: as
protanopes, deuteranopes and tritanopes see them, any two are at least 16 apart in CIELAB. A
bfloat16 level has the lighter shade of its float16 level, and every level has a marker of its own,
so that no reader depends on colours. They name levels; none means good or bad.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

__all__ = ["INK", "Look", "look"]

INK = "#333333"  # text and axes too; a page on a dark background replaces it


@dataclass(frozen=True)
class Look:
    """Of one line, bar or point."""

    colour: str
    marker: str
    width: float
    """Curves often lie on top of each other: wide ones below, thin ones above."""
    hollow: bool = False
    """Markers without filling, bars with hatching."""


LOOKS = {
    "O0": Look(INK, "o", 3.6),
    "O1": Look("#0072B2", "s", 3.0),
    "O2": Look("#D55E00", "^", 2.6),
    "O3": Look("#009E73", "D", 2.2),
    "O4": Look("#56B4E9", "v", 1.8),
    "O5": Look("#E69F00", "P", 1.6),
    "native-fp16": Look("#7722EE", "<", 1.6),
    "native-bf16": Look("#BB66FF", ">", 1.4),
    "FP16": Look("#884422", "X", 1.4),
}
TF32_ON = "#858585"  # O0 with TF32, beside O0 without


def look(label: str, among: Collection[str] = ()) -> Look:
    """Find the look of a label, `apex.bench.training.results.Cell.label`.

    Args:
        label: A level, with TF32 where that is a choice.
        among: All labels of the plot: only a level that is there with and without TF32 needs two
            looks.
    """
    level, _, tf32 = label.partition(" TF32 ")
    found = LOOKS[level]
    if tf32 != "on" or f"{level} TF32 off" not in among:
        return found
    return replace(found, hollow=True, colour=TF32_ON if level == "O0" else found.colour)
