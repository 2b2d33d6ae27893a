"""Draw time, memory and accuracy against batch size from what run_benchmark.py measured.

``--GPU`` names one set of results, or several. The pictures go to ``plots``, of several sets to a
folder each in it.
"""

import argparse
import sys
from pathlib import Path

from run_benchmark import BATCHES, METHODS, RESULTS, device_name

from apex.commands.command_line import main


def run() -> int:
    """Hand the command line to apex bench plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--GPU", nargs="+", default=[device_name()], help="names of results")
    parser.add_argument("--method", nargs="+", default=METHODS, help="which lines to draw")
    parser.add_argument("--batch", nargs="+", default=BATCHES, help="which batch sizes to draw")
    parser.add_argument("--out", default="plots", help="folder for the pictures")
    args = parser.parse_args()
    files = [str(RESULTS / name / "results.json") for name in args.GPU]
    missing = [file for file in files if not Path(file).exists()]
    if missing:
        there = sorted(path.parent.name for path in RESULTS.glob("*/results.json"))
        print(
            f"{missing[0]}: no such results; there are {', '.join(there) or 'none'}: "
            "python run_benchmark.py --GPU NAME makes them",
            file=sys.stderr,
        )
        return 2
    chosen = ["--levels", *args.method, "--batch", *args.batch]
    return main(["bench", "plot", *files, "--out", args.out, *chosen])


if __name__ == "__main__":
    sys.exit(run())
