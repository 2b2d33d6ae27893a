"""``./dev kernels``: registers, spills and memory accesses of each Triton kernel, without a GPU.

    ./dev kernels [--target NAME ...] [--kernel NAME ...] [--json]
    ./dev kernels --triton DIR ... [--target NAME ...]

The work is done by :mod:`tools.kernels.finding`, which needs Triton; here are the options, the
table and the exit code.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apex.commands.command_line import UsageError, suggestion
from apex.commands.options import unique
from apex.commands.tables import NOTHING, Column, console, fitted
from tools import quiet_without_reader
from tools.kernels import versions

if TYPE_CHECKING:
    from tools.kernels.finding import Finding

HELP = (
    "Compile every Triton kernel, which needs no GPU, and show registers, spills, widths of the "
    "accesses to memory, bytes moved per element, instructions per byte and what limits the "
    "kernel. The exit code is 1 if something is wrong: a program cannot be launched on the target, "
    "registers are spilled, tiles are not moved by the widest accesses, or there are more "
    "instructions than an H100 issues meanwhile. The last three are advice for a target that the "
    "kernels are not made for (sm_75)."
)
DEFAULT = "sm_90"
OK, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect the kernels that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="./dev kernels", description=HELP)
    parser.add_argument(
        "--target", nargs="+", default=[DEFAULT], metavar="NAME",
        help=f"what to compile for: sm_80, sm_90, sm_100, gfx942, ... (default: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument(
        "--triton", nargs="+", metavar="DIR",
        help="compile with each of these unpacked releases, and print spills and registers as JSON",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.triton:
        return _compare(args.triton, unique(args.target))
    try:
        findings = _inspect(unique(args.target), args.kernel)
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        import triton

        which = {"triton": triton.__version__, "from": triton.__file__}
        print(json.dumps({**which, "kernels": [asdict(one) for one in findings]}, indent=2))
    else:
        _show(findings)
    return FAILED if any(finding.problems for finding in findings) else OK


def _compare(folders: Sequence[str], targets: Sequence[str]) -> int:
    """Print a row for each release of Triton and target; return the exit code."""
    try:
        rows = versions.compared(folders, targets)
    except RuntimeError as error:
        print(f"./dev kernels: {error}", file=sys.stderr)
        return UNUSABLE
    print(json.dumps({"date": f"{datetime.date.today()}", "releases": rows}, indent=2))
    return FAILED if any(row["above_limits"] for row in rows) else OK


def _inspect(targets: Sequence[str], names: Sequence[str] | None) -> list[Finding]:
    """Compile and judge the cases of these names, or all, for each target.

    Raises:
        UsageError: Triton or its compiler for a target is missing, or a name is unknown.
    """
    if importlib.util.find_spec("triton") is None:
        raise UsageError("triton not installed: pip install triton")
    # Under Triton's interpreter nothing would be compiled; read when triton is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    from tools.kernels import finding

    cases = list(finding.cases())
    known = unique(case.name for case in cases)
    for name in names or ():
        if name not in known:
            hint = suggestion(name, known)
            raise UsageError(f"--kernel {name}: {hint}unknown; there are {', '.join(known)}")
    chosen = [case for case in cases if not names or case.name in names]
    try:
        found = [finding.inspect(chosen, target) for target in targets]
        return list(itertools.chain(*zip(*found, strict=True)))
    except finding.UnavailableError as error:
        raise UsageError(str(error)) from error


def _show(findings: Sequence[Finding]) -> None:
    to = console()
    table, left_out = fitted(COLUMNS, findings, to)
    to.print(table)
    to.print(
        "Spilled bytes are per thread, bytes of shared memory per program. Accesses are those in "
        "the code of one thread: how many × bits each; main is the path without masks, tiles only. "
        "Instructions: of all threads, on the fast path, for each byte it moves. Limit: memory, "
        "or the pipe whose instructions take longer than the memory on an H100 and an H200 (sm_90) "
        "or an A100 (sm_80), and how many times as long.",
        style="dim",
    )
    if left_out:
        names = ", ".join(left_out)
        to.print(f"Columns left out, too wide: {names} (--json has them).", style="dim")
    for finding in findings:
        where = f"{finding.kernel} ({finding.variant}), {finding.target}"
        for problem in finding.problems:
            to.print(f"{where}: {problem}", markup=False, style="red")
        for advice in finding.advice:
            to.print(f"{where}: {advice}", markup=False, style="yellow")


def _pipes(instructions: dict[str, float] | None) -> str:
    pipes = sorted((instructions or {}).items(), key=lambda pair: -pair[1])
    return " ".join(f"{pipe} {number:.2f}" for pipe, number in pipes if number >= 0.005)


def _limits(finding: Finding) -> str:
    limits = finding.limits
    if len(set(limits.values())) == 1:
        return next(iter(limits.values()))
    return ", ".join(f"{gpu} {limit}" for gpu, limit in limits.items()) or NOTHING


def _widths(counts: dict[int, int] | None) -> str:
    return " ".join(f"{count}×{bits}" for bits, count in sorted((counts or {}).items())[::-1])


def _plain(value: float | None) -> str:
    return NOTHING if value is None else f"{value:g}"


def _column(
    heading: str, name: str, text: Callable[[Any], str] = str, drop: int = 0
) -> Column[Finding]:
    """A field of a finding."""
    left = text in (str, _widths, _pipes)
    return Column(heading, lambda finding: text(getattr(finding, name)), {}, drop=drop, left=left)


COLUMNS = (
    _column("kernel", "kernel"),
    _column("variant", "variant"),
    _column("target", "target"),
    _column("regis-\nters", "registers", _plain),
    _column("spilled", "spilled", _plain),
    _column("shared", "shared", _plain, 3),
    _column("main\nloads", "main_loads", _widths, 1),
    _column("main\nstores", "main_stores", _widths, 1),
    _column("all\nloads", "loads", _widths, 4),
    _column("all\nstores", "stores", _widths, 4),
    _column("bytes per\nelement", "bytes_per_element", _plain, 3),
    _column(
        "instructions\nper byte",
        "instructions",
        lambda pipes: f"{sum(pipes.values()):.2f}" if pipes else NOTHING,
        1,
    ),
    _column("by pipe", "instructions", _pipes, 5),
    Column("limit", _limits, {}, drop=2, left=True),
)


if __name__ == "__main__":
    with quiet_without_reader():
        sys.exit(main())
