"""The areas of `apex selftest` in a dry run; with a GPU the command itself runs.

Each check is carried out as a program would call it, on a CPU, where stand-ins take the place of
captures and of waits. Triton's interpreter runs the kernels of two checks: those of all take it
minutes, and are in the tests.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from pathlib import Path

import torch

from apex.commands.selftest.check import Setting, carry_out
from apex.commands.selftest.command import every_check
from tools.gpu.rows import NOT_DRY, RIGHT, WRONG, Rows, as_rows, load

# Names of checks whose kernels are interpreted, through the command line.
INTERPRETED = ("swiglu, bf16, forward", "FusedSGD, fp32")


def main() -> None:
    """Carry out the checks of some areas."""
    parser = argparse.ArgumentParser()
    parser.add_argument("areas", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", required=True)
    args = parser.parse_args()
    rows = Rows(args.out)
    by_command(rows)
    from tools.gpu import stand_ins

    stand_ins.install()
    torch.set_num_threads(1)
    for area in args.areas:
        as_called(area, rows)


def by_command(rows: Rows) -> None:
    """Run the command line, which starts two processes: what it writes becomes rows."""
    os.environ["TRITON_INTERPRET"] = "1"
    words = ["--processes", "2", *(word for name in INTERPRETED for word in ("--only", name))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "selftest.json")
        main = importlib.import_module("apex.__main__").main
        code = main(["selftest", "--device", "cpu", *words, "--json", str(file)])
        for row in as_rows(load(file))["rows"]:
            rows.add(**row)
    if code:
        rows.add("apex selftest", WRONG, f"exit code {code}")


def as_called(area: str, rows: Rows) -> None:
    """Carry out what is called on a CPU, and what needs a GPU over stand-ins."""
    setting = Setting(torch.device("cpu"), "as called")
    chosen = [one for one in every_check() if f"{one.area}: ".startswith(area)]
    for check in chosen:
        rows.note(check.name)
        started = time.perf_counter()
        result = carry_out(check, setting)
        said = (result.error or "").strip().rpartition("\n")[2]
        if result.status == "wrong":
            said = f"{result.worst}"
        status = RIGHT if result.status == "right" else WRONG
        seconds = round(time.perf_counter() - started, 2)
        rows.add(f"{check.area}: {check.name}", status, said, seconds=seconds)
    left = sum("kernels" in check.paths for check in chosen)
    rows.add(f"{area}kernels of {left} checks", NOT_DRY, "tests run them in Triton's interpreter")


if __name__ == "__main__":
    main()
