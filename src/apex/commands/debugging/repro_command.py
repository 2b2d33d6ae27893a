"""``apex debug repro FILE``: run the operation of a saved report again, on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from apex.commands.command_line import UsageError
from apex.debug import reproduce

HELP = """Run the operation that a report of apex.debug saved, on this machine's CPU, show its
result, and print a program of ten lines that does the same without apex."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="written by report.save() or apex debug"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if the fault shows, 1 if it does not."""
    try:
        entry = reproduce.load(args.file)
        results = reproduce.run(entry)
    except reproduce.FileError as error:
        raise UsageError(str(error)) from None
    print(reproduce.printable(entry["report"].get("sentence", "")))
    print(f"{entry['operation']}, saved by torch {reproduce.printable(entry['torch'])}:")
    bad = False
    for one in results:
        bad = bad or bool(one["nan"] or one["inf"])
        shape = " x ".join(map(str, one["shape"])) or "one element"
        print(f"  {one['dtype']}, {shape}: {one['nan']} NaN, {one['inf']} inf")
    print(
        "The result is not finite on this machine either."
        if bad
        else "All values are finite on this machine."
    )
    print(f"\nWithout apex:\n\n{reproduce.script(args.file)}", end="")
    return 0 if bad else 1
