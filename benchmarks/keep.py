"""Run a program of this folder and keep what it prints as a results file.

    python -m benchmarks.keep host_overhead --rounds 9

prints what ``python -m benchmarks.host_overhead --rounds 9`` prints, and writes it, after the
command, the commit and the machine, to ``benchmarks/results/host-overhead.txt``. While the program
runs, and for good if it fails, the file ends in ``.part``, so that no number is lost and none of an
unfinished run is taken for a result.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

import torch

from apex.cli.options import environment
from tools import quiet_without_reader

__all__ = ["keep"]

RESULTS = Path(__file__).parent / "results"


def keep(program: str, arguments: list[str], file: Path) -> int:
    """Run ``program`` and write ``file``; give back the program's exit code."""
    words = [sys.executable, "-u", "-m", f"benchmarks.{program}", *arguments]
    where = environment(torch.device("cpu" if not torch.cuda.is_available() else "cuda"))
    part = file.with_name(file.name + ".part")
    with part.open("w", encoding="utf-8") as kept:
        kept.write(f"$ {' '.join(['python', *words[2:]])}\n")
        kept.write(f"commit: {_commit()}\n")
        kept.writelines(f"{name}: {json.dumps(value)}\n" for name, value in where.items())
        kept.write("\n")
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                sys.stdout.write(line)
                kept.write(line)
                kept.flush()
        kept.write(f"\nended: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC\n")
    if process.returncode == 0:
        part.replace(file)
    return process.returncode


def _commit() -> str:
    """The commit, and ``-dirty`` if files other than results differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)benchmarks/results"
    )
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
    words = ("git", "-C", str(RESULTS.parents[1]), *words)
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Read the command line; what follows the program's name is the program's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", help="a module of this folder")
    parser.add_argument("--file", type=Path, help="default: benchmarks/results/PROGRAM.txt")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's")
    args = parser.parse_args()
    file = args.file or RESULTS / f"{args.program.replace('_', '-')}.txt"
    return keep(args.program, args.arguments, file)


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
