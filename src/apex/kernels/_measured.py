"""Tables that a run on a GPU wrote: a JSON file beside the code that reads it.

A bad row must not end a training: `read` leaves it out, with a warning, and what the row was about
is decided as without it. Tools that write a table call `check_all`, which raises.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Row", "check_all", "content", "read"]

Row = dict[str, Any]
Check = Callable[[Row], None]  # raises a ValueError that says what is wrong with a row


def content(file: Path) -> list[Row]:
    """Load the rows of a file: a list of them, or an object that has them by ``op``.

    Raises:
        ValueError: If it is neither.
        OSError: If it cannot be read.
    """
    found = json.loads(file.read_text("utf-8"))
    if isinstance(found, dict):
        found = [{"op": name, **row} for name, row in found.items() if isinstance(row, dict)]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError("it is not a list of rows")
    return found


def check_all(file: Path, check: Check) -> list[Row]:
    """Load a file, all of whose rows have to be good.

    Raises:
        ValueError: Names the file, the row and what is wrong.
    """
    rows = content(file)
    for row in rows:
        try:
            check(row)
        except ValueError as error:
            raise ValueError(f"{file}: {error} The row is {json.dumps(row)}.") from None
    return rows


def read(file: Path, check: Check, concerns: Callable[[Row], bool]) -> list[Row]:
    """Load the good ones of the rows that concern this machine; warn of others of them, once."""
    wrong: list[str] = []
    found: list[Row] = []
    try:
        found = [*_good(content(file), check, concerns, wrong)]
    except (OSError, ValueError) as error:
        wrong.append(f"it cannot be read: {error}")
    if wrong:
        said = f"apex: {file} is damaged, so apex ignores some rows: {' '.join(wrong)}"
        warnings.warn(
            f"{said} Results stay correct, but may be slower; install apex again.",
            RuntimeWarning,
            2,
        )
    return found


def _good(
    rows: list[Row], check: Check, concerns: Callable[[Row], bool], wrong: list[str]
) -> Iterator[Row]:
    for row in rows:
        if concerns(row):
            try:
                check(row)
            except ValueError as error:
                wrong.append(str(error))
            else:
                yield row
