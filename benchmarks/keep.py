"""Run a program of this folder and keep what it prints as a results file.

    python -m benchmarks.keep host_overhead --rounds 9
    python -m benchmarks.keep tools.kernels

prints what ``python -m benchmarks.host_overhead --rounds 9`` prints, and writes it, after the
command, the commit and the machine, to ``benchmarks/results/host-overhead.txt``. A name with a dot
is a program of another folder: the second line keeps ``./dev kernels`` in ``tools-kernels.txt``.
While the program runs, and for good if it fails, the file ends in ``.part``, so that no number is
lost and none of an unfinished run is taken for a result. With ``--found`` an exit code of 1 is no
failure: ``./dev kernels`` ends so where a kernel spills.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from apex.commands.options import environment
from tools import quiet_without_reader

__all__ = ["keep"]

RESULTS = Path(__file__).parent / "results"
WIDE = "250"  # columns: a file has room for every one of a table
# What decides which instructions oneDNN takes is part of the command.
OF_THE_COMMAND = ("ONEDNN_MAX_CPU_ISA", "THP_MEM_ALLOC_ENABLE")


def keep(program: str, arguments: list[str], file: Path, *, found: bool = False) -> int:
    """Run ``program`` and write ``file``; give back the program's exit code."""
    module = program if "." in program else f"benchmarks.{program}"
    words = [sys.executable, "-u", "-m", module, *arguments]
    given = [f"{name}={os.environ[name]}" for name in OF_THE_COMMAND if name in os.environ]
    where = environment(torch.device("cpu" if not torch.cuda.is_available() else "cuda"))
    part = file.with_name(file.name + ".part")
    with part.open("w", encoding="utf-8") as kept:
        kept.write(f"$ {' '.join([*given, 'python', *words[2:]])}\n")
        kept.write(f"commit: {_commit()}\n")
        kept.writelines(f"{name}: {json.dumps(value)}\n" for name, value in where.items())
        kept.write("\n")
        wide = {**os.environ, "COLUMNS": WIDE}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=wide) as process:
            for line in process.stdout or ():
                sys.stdout.write(line)
                kept.write(f"{line.rstrip()}\n")
                kept.flush()
        kept.write(f"\nended: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC\n")
    if process.returncode in ((0, 1) if found else (0,)):
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
    parser.add_argument("program", help="a module of this folder, or a.b of another one")
    parser.add_argument("--file", type=Path, help="default: benchmarks/results/PROGRAM.txt")
    parser.add_argument("--found", action="store_true", help="exit code 1 is no failure")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's")
    args = parser.parse_args()
    file = args.file or RESULTS / f"{re.sub('[._]', '-', args.program)}.txt"
    return keep(args.program, args.arguments, file, found=args.found)


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
