"""Rows of results, written to a JSON file at once: what a killed process has found stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT = "apex gpu 1"
# "right", or why not; "missing": a package that is not installed, which is no failure.
RIGHT, WRONG, MISSING, UNSTEADY = "right", "wrong", "missing", "unsteady"
NOT_DRY = "not run dry"  # in a dry run: nothing can stand in for the GPU


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

    def note(self, running: str) -> None:
        """Say what runs now: what a killed process leaves."""
        self.content["running"] = running
        self.save()

    def save(self) -> None:
        """Replace the file, so that a reader never sees half of it."""
        save(self.content, self.file)


def save(content: dict[str, Any], file: Path) -> None:
    """Write a JSON file in one piece."""
    replace(json.dumps(content, indent=1) + "\n", file)


def replace(text: str, file: Path) -> None:
    """Write a file in one piece: a process that is killed leaves the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(text, "utf-8")
    os.replace(beside, file)


def load(file: Path) -> dict[str, Any]:
    """Read what a part wrote; one that wrote nothing has no rows."""
    if not file.exists():
        return {"format": FORMAT, "rows": []}
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def as_rows(content: dict[str, Any]) -> dict[str, Any]:
    """Give what `apex selftest` wrote the rows that parts have."""
    if "checks" in content:
        content["running"] = content.get("next")
        content["rows"] = [
            {
                "name": f"{check['area']}: {check['name']} ({check['path']})",
                "status": RIGHT if check["status"] == "right" else WRONG,
                "said": (check["error"] or "").strip().rpartition("\n")[2] or _numbers(check),
            }
            for check in content["checks"]
        ]
    return content


def _numbers(check: dict[str, Any]) -> str:
    wrong = [one for one in check["measured"] if not one["right"]]
    return "; ".join(f"{one['what']}: {one['value']:.3g} of {one['allowed']:.3g}" for one in wrong)
