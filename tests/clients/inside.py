"""Runs a client's checks in the client's environment: python -I inside.py CHECKS.PY."""

import importlib.util
import sys
from pathlib import Path

import pytest


def main(checks):
    """Run pytest on a file, if it would import the installed apex; return the exit code."""
    for name in ("apex", "amp_C"):
        spec = importlib.util.find_spec(name)
        origin = Path((spec and spec.origin) or "nowhere").resolve()
        if not origin.is_relative_to(Path(sys.prefix).resolve()):
            sys.exit(f"{name} is {origin}, not the one installed in {sys.prefix}")
    sys.path.append(str(Path(__file__).parents[2]))  # for imports from tests; no apex is there
    settings = Path(__file__).with_name("checks.ini")
    return pytest.main(["-c", str(settings), "--rootdir", str(Path(checks).parent), checks])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
