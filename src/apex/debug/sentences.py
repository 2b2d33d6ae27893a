"""What the sentences of reports are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHOWN = 4  # names in a sentence
HINT = (
    " (apex.debug.watch(model, optimizer, step=lambda: loss_function(model(x), y)) names the line)"
)
OUTSIDE = {  # kind of origin -> cause and sentence
    "input": ("data", "{name} was not finite: {counts}{rows}."),
    "parameter": ("parameter", "The parameter {name} was not finite: it has {counts}."),
    "buffer": ("parameter", "The buffer {name} was not finite: it has {counts}."),
    "memory": (
        "uninitialised",
        "{place} returned uninitialized memory that the program then read, or memory that a kernel "
        "wrote without torch seeing it.",
    ),
    "collective": ("rank", "{name} brought {counts} from another rank."),
    "tensor": ("loss", "A tensor from before the step, such as the targets, has {counts}{rows}."),
}


def listed(names: Sequence[str]) -> str:
    """Names for a sentence: ``"a, b and c"``, or the first of them and how many more there are."""
    if len(names) > SHOWN:
        names = [", ".join(names[:SHOWN]), f"{len(names) - SHOWN} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def rows_of(values: dict[str, Any]) -> str:
    """The rows that are not finite, for a sentence."""
    rows, count = values.get("rows", []), values.get("bad_rows", 0)
    if not rows:
        return ""
    if count == values["shape"][0] > 1:
        return f" (all {count} rows)"
    more = f" and {count - len(rows)} more" if count > len(rows) else ""
    return f" (row{'s' if count > 1 else ''} {', '.join(map(str, rows))}{more})"
