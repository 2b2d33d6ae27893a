"""JSON files that are written whole or not at all."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["jsonable", "save"]


def save(content: dict[str, Any], path: Path) -> None:
    """Write JSON whole or not at all; `write` says what becomes of inf and nan."""
    text = json.dumps(jsonable(content), indent=1, allow_nan=False)
    # A list of numbers goes on one line. Strings are safe: there is no bare line break in them.
    text = re.sub(r"\[\n[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:  # an interruption too leaves no litter
        temporary.unlink(missing_ok=True)


def jsonable(value: Any) -> Any:
    """Replace inf and nan by strings and tuples by lists."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
