"""``./dev gpu``: run every part and say what failed, what was missing and which ratios came out.

    ./dev gpu [checks | times | thresholds] [PART ...] [--dry] [--out FOLDER]
    ./dev gpu --tune [WORD ...]

It needs nothing but the Python that runs it: no installation, no network. A part is a process with
a time limit of its own, which writes a file of its own at once:
``benchmarks/results/gpu/CARD-TORCH-DATE-PART.json``. With ``--dry`` the same parts run on a CPU
with stand-ins and small sizes, and write into a temporary folder. ``thresholds`` and ``--tune``
write tables of the package and run only where they are named.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from tools.gpu.rows import MISSING, NOT_DRY, RIGHT, UNSTEADY, WRONG, as_rows, load, save

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
VERSIONS = "versions"
FIRST = ("amp", "optimizers", "ops")  # of the tests: what trainings are made of
FOLDERS = [path.name for path in sorted((ROOT / "tests").iterdir()) if any(path.rglob("test_*.py"))]
SUITE = [f"tests/{name}" for name in (*FIRST, *sorted({*FOLDERS} - {*FIRST}))]
SELFTEST = ["norms and losses: ", "lists of tensors: ", "optimizers: ", "training: "]
SELFTEST += ["CUDA graphs: ", "no waits: "]  # the areas, for a dry run
DEFAULT = ("checks", "times")  # ten minutes together, what a machine lends in one call
# Seconds of all parts of a kind.
LIMITS = {"checks": 330.0, "times": 240.0, "thresholds": 120.0, "tune": 540.0}
SLOWER = 3  # of a dry run, on a machine that others use as well
TOGETHER = 6  # parts of checks at a time: each keeps one core busy, the suite half of all
SHOWN = 60  # failures in the table; the files have all


@dataclass(frozen=True)
class Part:
    """A process: ``words`` after ``python -m``, and those of a dry run where they differ."""

    words: Sequence[str]
    limit: float
    kind: str = "checks"
    dry: Sequence[str] = ()


PARTS = {
    "suite": Part(
        ["tools.gpu.suite", "--device", "cuda", "--quick", *SUITE], 300,
        dry=["tools.gpu.suite", "--device", "cpu", "--quick", "tests/amp/scaling/test_scaler.py"],
    ),
    # It has processes of its own: as one this took over 240 s on an H200.
    "selftest": Part(
        ["apex", "selftest", "--all"], 240, dry=["tools.gpu.selftest", *SELFTEST],
    ),
    "gpu-tests": Part(
        ["tools.gpu.suite", "--device", "cuda", "-m", "gpu", "tests"], 240,
        dry=["tools.gpu.suite", "--stand-ins", "-m", "gpu"],
    ),
    "steps": Part(["tools.gpu.part", "steps"], 150),
    "graphs": Part(["tools.gpu.part", "graphs"], 150),
    "captures": Part(["tools.gpu.part", "captures"], 150),
    "layers": Part(["tools.gpu.part", "layers"], 150),
    "ranks": Part(["tools.gpu.part", "ranks"], 150),
    "large": Part(["tools.gpu.part", "large"], 120),
    "trainings": Part(["tools.gpu.part", "times:trainings"], 80, "times"),
    "host": Part(["tools.gpu.part", "times:host"], 40, "times"),
    "lists": Part(["tools.gpu.part", "times:lists"], 60, "times"),
    "ops": Part(["tools.gpu.part", "times:ops"], 60, "times"),
    "anchors": Part(["tools.gpu.part", "times:anchors"], 90, "times"),
    "captured": Part(["tools.gpu.part", "times:captured"], 120, "times"),
    "thresholds": Part(["tools.gpu.part", "thresholds"], 120, "thresholds"),
    "tune": Part(["tools.gpu.part", "tune"], 540, "tune"),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the parts; 1 if one failed, 2 if there is nothing to run them on."""
    parser = argparse.ArgumentParser(prog="./dev gpu", description=__doc__.split("\n")[0])
    parser.add_argument(
        "what", nargs="*", metavar="PART", help=f"checks, times, {', '.join(PARTS)}"
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, with stand-ins")
    parser.add_argument("--out", type=Path, help="folder for the files")
    said = "only write src/apex/kernels/settings.json: all of it, or checks whose names have a word"
    parser.add_argument("--tune", nargs="*", metavar="WORD", help=said)
    args = parser.parse_args(argv)
    chosen = choose(args.what, args.tune, args.dry, parser.error)
    folder = args.out or (Path(tempfile.mkdtemp(prefix="apex-gpu-")) if args.dry else RESULTS)
    folder = folder.resolve()  # parts run at the root of the tree
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    here = run_part(
        Part(["tools.gpu.versions"], 60), folder / "versions.json", args.dry, begun + 60
    )
    if here.get("card") is None:
        (folder / "versions.json").unlink(missing_ok=True)
        said = f"torch {here.get('torch')} sees no GPU"
        if here.get("torch") is None:
            said = f"{sys.executable} has no torch"
        print(f"./dev gpu: {said}; ./dev gpu --dry runs every part on a CPU", file=sys.stderr)
        return 2
    stem = re.sub(r"[^\w.]+", "-", f"{here['card']}-{here['torch']}-{here['date']}".lower())
    (folder / "versions.json").replace(folder / f"{stem}-{VERSIONS}.json")
    results = {VERSIONS: here, **run_all(chosen, folder, stem, args.dry)}
    show(results, times=not args.dry)
    print(f"{time.monotonic() - begun:.0f} s; files: {folder / stem}-*.json")
    return int(any(failures(content) for content in results.values()))


def choose(
    words: Sequence[str], tune: Sequence[str] | None, dry: bool, error: Callable[[str], NoReturn]
) -> dict[str, Part]:
    """The parts that are named: by kind, by the beginning of a name, or by ``--tune``."""
    chosen: dict[str, Part] = {}
    if tune is None and not words:
        words = [*LIMITS] if dry else DEFAULT
    for word in words:
        found = {n: part for n, part in PARTS.items() if n.startswith(word) or part.kind == word}
        if not found:
            error(f"{word!r} is no part: choose from {', '.join([*LIMITS, *PARTS])}")
        chosen |= found
    if tune is not None:
        part = PARTS["tune"]
        chosen["tune"] = replace(part, words=[*part.words, *(["--only", *tune] if tune else [])])
    return chosen


def run_all(chosen: dict[str, Part], folder: Path, stem: str, dry: bool) -> dict[str, Any]:
    """Run the checks several at a time, then the times one after the other."""
    found: dict[str, Any] = {}
    for kind, seconds in LIMITS.items():
        parts = {name: part for name, part in chosen.items() if part.kind == kind}
        until = time.monotonic() + seconds * (SLOWER if dry else 1)
        together = 1 if kind != "checks" else min(TOGETHER, os.cpu_count() or 1)
        with ThreadPoolExecutor(together) as pool:
            running = {
                pool.submit(
                    run_part, part, folder / f"{stem}-{name}.json", dry, until
                ): name
                for name, part in parts.items()
            }  # fmt: skip
            for future in as_completed(running):
                name = running[future]
                found[name] = future.result()
                print(f"{name:19} {summary(found[name])}", flush=True)
    return found


def run_part(part: Part, file: Path, dry: bool, until: float) -> dict[str, Any]:
    """Run a part to its end or its limit, and return what its file then has."""
    words = [*(part.dry or part.words if dry else part.words)]
    if words[0] == "apex":
        words += ["--json", str(file)]
    else:
        words[1:1] = ["--out", str(file), *["--dry"] * dry]
    file.unlink(missing_ok=True)
    begun = time.monotonic()
    limit = max(1.0, min(part.limit * (SLOWER if dry else 1), until - begun))
    paths = [ROOT / "src", ROOT / "src" / "extension_modules", ROOT]
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # the processes that it has started, too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    content = as_rows(load(file))
    content.update(command=words, code=code, seconds=round(time.monotonic() - begun, 1))
    if code is None:
        said = f"not finished in {limit:.0f} s"
        content["rows"].append(
            {"name": content.get("running") or "", "status": WRONG, "said": said}
        )
    elif code != 0 and not failures(content):
        said = f"ended with {code}: {' '.join(output.split())[-300:]}"
        content["rows"].append({"name": "", "status": WRONG, "said": said})
    if failures(content):
        content["output"] = output[-3000:]
    save(content, file)
    return content


def failures(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that are wrong; a package that is missing is no failure."""
    return [row for row in content["rows"] if row["status"] == WRONG]


def summary(content: dict[str, Any]) -> str:
    """How many rows of each status, and the time."""
    statuses = [row["status"] for row in content["rows"]]
    counts = {name: statuses.count(name) for name in (RIGHT, WRONG, MISSING, UNSTEADY, NOT_DRY)}
    if "passed" in content:  # of tests, whose rows are the failures
        counts.update({RIGHT: content["passed"], "skipped": content["skipped"]})
    words = [f"{count} {name}" for name, count in counts.items() if count]
    return f"{', '.join(words) or 'nothing ran'}; {content['seconds']:.0f} s"


def show(found: dict[str, Any], *, times: bool) -> None:
    """Print what failed, what is missing, and the ratios, which a dry run's times do not give."""
    wrong = [(name, row) for name, content in found.items() for row in failures(content)]
    if wrong:
        print(f"\nFailed ({len(wrong)}):")
    for name, row in wrong[:SHOWN]:
        print(f"  {name}: {row['name']}: {row['said'][:200]}")
    rows = [row for content in found.values() for row in content["rows"]]
    missing = sorted({row["said"] for row in rows if row["status"] == MISSING})
    if missing:
        print("\nMissing:", *missing, sep="\n  ")
    left_out = [(name, row) for name, content in found.items() for row in content["rows"]]
    left_out = [(name, row) for name, row in left_out if row["status"] == NOT_DRY]
    if left_out:
        print(f"\nNot run dry ({len(left_out)}):")
    for name, row in left_out:
        print(f"  {name}: {row['name']}: {row['said']}")
    ratios = [row for row in rows if times and "ratio" in row]
    if ratios:
        print("\nTime over that of what is named last (below 1: ours is faster)")
    for row in ratios:
        mark = f"   UNSTEADY: {row['said']}" if row["status"] == UNSTEADY else ""
        print(f"  {row['name']:44} {row['ms']:9.4f} ms {row['ratio']:6.2f}  {row['over']}{mark}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
