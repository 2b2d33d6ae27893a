"""What is installed and which GPU is here: the first part, which names the files of all others."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
from datetime import datetime, timezone
from pathlib import Path

from tools.gpu.rows import MISSING, RIGHT, WRONG, Rows

# What parts use; without pytest-xdist the suite runs in one process.
PACKAGES = ("torch", "triton", "numpy", "pytest", "pytest-xdist", "hypothesis", "msgspec")


def main() -> None:
    """Write one row for each package, and the card."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    rows = Rows(args.out, python=platform.python_version(), date=today, card=None, torch=None)
    for name in PACKAGES:
        try:
            rows.add(name, RIGHT, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            rows.add(name, MISSING, f"{name} is not installed")
    try:
        import torch
    except ModuleNotFoundError:
        return
    rows.content["torch"] = torch.__version__.split("+")[0]
    rows.content["cuda"] = torch.version.cuda or torch.version.hip
    if args.dry:
        rows.content["card"] = "dry"
    elif torch.cuda.is_available():
        rows.content["card"] = torch.cuda.get_device_name()
        rows.content["memory"] = torch.cuda.get_device_properties(0).total_memory
    rows.save()
    for name in ("apex", "amp_C"):
        try:
            rows.add(name, RIGHT, str(importlib.import_module(name).__file__))
        except Exception as error:  # noqa: BLE001  what fails here fails everywhere, and is said here
            rows.add(name, WRONG, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
