"""Rows of results, written to a JSON file at once: what a killed process has found stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT = "apex gpu 1"
# "right", or why not; "missing": a package that is not installed, which is no failure.
RIGHT, WRONG, MISSING, UNSTEADY = "right", "wrong", "missing", "unsteady"


class Rows:
    """The rows of a part, each with ``name``, ``status`` and ``said``; times have ``ratio``."""

    def __init__(self, file: Path, **content: Any) -> None:
        self.file = file
        self.content: dict[str, Any] = {"format": FORMAT, **content, "rows": []}
        self.save()

    def add(self, name: str, status: str = RIGHT, said: str = "", **more: Any) -> None:
        """Add a row and write the file."""
        self.content["rows"].append({"name": name, "status": status, "said": said, **more})
        self.save()

    def save(self) -> None:
        """Replace the file, so that a reader never sees half of it."""
        save(self.content, self.file)


def save(content: dict[str, Any], file: Path) -> None:
    """Write a JSON file in one piece."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    os.replace(beside, file)


def load(file: Path) -> dict[str, Any]:
    """Read what a part wrote; one that wrote nothing has no rows."""
    if not file.exists():
        return {"format": FORMAT, "rows": []}
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found
