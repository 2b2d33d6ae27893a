"""Checkpoints that are whole at any moment."""

import os
from typing import Any

import torch


def save(path: str, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path``, where at any moment there is the old file or the new, whole."""
    temporary = f"{path}.tmp"  # in the same folder: os.replace cannot cross file systems
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    os.replace(temporary, path)


def load(path: str) -> dict[str, Any]:
    """Read what :func:`save` wrote; ends the program with a line if it is something else."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SystemExit(f"there is no checkpoint {path}") from None
    except Exception:  # noqa: BLE001  (whatever torch.load raises on another kind of file)
        saved = None
    if not isinstance(saved, dict) or "vocabulary" not in saved:
        raise SystemExit(f"{path} is no checkpoint of this example")
    return saved


def check_options(path: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """End the program if an option, or the text, would change the run."""
    for name, value in before.items():
        if value != now[name]:
            what = "another text" if name == "checksum" else f"{name} {value}, not {now[name]}"
            raise SystemExit(f"--resume: {path} was made with {what}")
