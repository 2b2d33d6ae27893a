"""All kinds of mistakes that ``apex check`` knows, from ``mistakes.json``.

A row has what the line ``does`` (the line is the subject of the sentence), why that ``hurts``, and
the lines that ``fix`` it. Rules, ``--ignore``, the table of ``docs/check.md`` and the tests go by
these names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    """One kind of mistake; see the top of this file."""

    does: str
    hurts: str
    fix: list[str]


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
KINDS = {name: Mistake(**row) for name, row in _ROWS.items()}
