"""``apex selftest``: the command line.

On a machine without a GPU the same checks run on the CPU, the kernels in Triton's interpreter. That
has to be chosen before triton is imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apex.commands.command_line import UsageError
from apex.commands.info import machine
from apex.commands.options import (
    add_device,
    at_least,
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.commands.selftest import gpu, ops, optimizers, training
from apex.commands.selftest.check import (
    PATHS,
    Check,
    Measured,
    Planned,
    Result,
    Setting,
)
from apex.commands.selftest.record import Progress, Record, clear
from apex.commands.selftest.spread import LIMITS, processes_for, serially, spread
from apex.commands.tables import NOTHING, aligned
from apex.ops import _runtime

__all__ = ["HELP", "add_arguments", "every_check", "plan", "run"]

HELP = (
    "Check this installation on this machine: compare every kernel and every optimizer with its "
    "definition in float64, and train a small model at every level. On a GPU also check CUDA "
    "graphs, and that steps never wait for the GPU. Without a GPU the same checks run on the CPU, "
    "and the kernels in Triton's interpreter. The exit code is 1 if a number is wrong or a check "
    "raises an error."
)
INTERPRET = "TRITON_INTERPRET"
VARIABLES = ("TRITON_", "CUDA_", "PYTORCH_", "TORCH_", "NVIDIA_", "OMP_", "THP_")  # beginnings
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes
SAVED = 1.0  # seconds between two files, where a check ends no more than its own process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex selftest``."""
    add_device(parser)
    parser.add_argument(
        "--json", type=Path, default=Path("apex-bench", "selftest.json"), metavar="FILE",
        help="file to write, after each check (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help='run only checks with this in their name or area, e.g. --only "layer norm, bf16"; '
        "you can repeat the option",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true",
        help="also check every variant of the optimizers' formulas, and float16",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=at_least(0), metavar="N",
        help="processes at a time (default: one for each core, at most 8); 0: run all checks in "
        "this process, for a debugger",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex selftest``; what is finished when it is interrupted is shown and kept."""
    device = pick_device(args.device)
    check_file("--json", args.json)
    device, why_not = _choose(device)
    make = partial(
        plan, device, kernels=why_not is None, only=tuple(args.only), everything=args.all
    )
    planned = make()
    for text in args.only:
        if not any(_matches(check, [text]) for check, _ in planned):
            raise UsageError(f"--only {text!r}: no check has this in its name")
    processes = processes_for(device) if args.processes is None else args.processes
    record = Record(planned, _content(args, device, why_not, planned, processes), args.json)
    began = time.monotonic()
    with terminated_like_interrupted():
        interrupted = True
        with suppress(KeyboardInterrupt), Progress(record):
            _carry_out(record, make, processes, why_not)
            interrupted = False
        with suppress(KeyboardInterrupt):
            record.save()
            show(record, time.monotonic() - began, gpu=device.type == "cuda")
            if record.fault:
                print(f"Results NOT saved: {args.json} cannot be written ({record.fault}).")
            else:
                print(f"Written: {args.json}. Attach it to a problem report.")
    right = (
        record.complete
        and not record.fault
        and all(one.status == "right" for one in record.in_order())
    )
    return INTERRUPTED if interrupted else OK if right else FAILED


def _content(
    args: argparse.Namespace,
    device: torch.device,
    why_not: str | None,
    planned: Sequence[Planned],
    processes: int,
) -> dict[str, Any]:
    """What the file has beside results."""
    ran = "compiled" if device.type == "cuda" else "in Triton's interpreter, on the CPU"
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)}
    here = {"tools": machine.cuda(), "variables": variables, "command": sys.argv[1:]}
    return {
        "format": "apex selftest 1",
        "environment": {**environment(device), **here},
        "kernels": ran if why_not is None else f"not run: {why_not}",
        "planned": len(planned),
        "every variant": bool(args.all or args.only),
        "processes": processes,
        "complete": False,
    }


def _carry_out(
    record: Record, make: Callable[[], list[Planned]], processes: int, why_not: str | None
) -> None:
    """Carry out what is planned, keep each result, and say at once what has failed."""

    def begin(number: int) -> None:
        record.begin(number)
        record.save(after=SAVED if processes else 0.0)  # here a check may end this process

    if processes:
        results = spread(make, begin, processes, LIMITS[record.planned[0][1].device.type])
    else:
        if why_not is None:  # now: Triton makes an ImportError of a Ctrl-C, half imported for ever
            importlib.import_module("triton.language")
        results = serially(record.planned, begin)
    with closing(results):
        for number, result in results:
            record.end(number, result)
            if result.status != "right":
                clear()
                print(_failure(result), file=sys.stderr)


def _choose(device: torch.device) -> tuple[torch.device, str | None]:
    """Number a GPU, or choose the interpreter; the text says why kernels cannot run."""
    interpreted, why_not = os.environ.get(INTERPRET) == "1", None
    if device.type == "cuda":
        if interpreted:
            raise UsageError(f"{INTERPRET}=1 is set: kernels would not run on the GPU; unset it")
        device, why_not = torch.device("cuda", device.index or 0), _runtime.why_not_triton("cuda")
    elif missing := [p for p in ("triton", "numpy") if importlib.util.find_spec(p) is None]:
        why_not = f"{', '.join(missing)} not installed: pip install {' '.join(missing)}"
    elif not interpreted:
        if "triton" in sys.modules:
            raise UsageError(f"triton is imported already; set {INTERPRET}=1 before Python starts")
        os.environ[INTERPRET] = "1"
    return device, why_not


def every_check() -> Iterator[Check]:
    """All checks, those for a GPU included."""
    for module in (ops, optimizers, training, gpu):
        yield from module.checks()


def plan(
    device: torch.device, *, kernels: bool, only: Sequence[str] = (), everything: bool = True
) -> list[Planned]:
    """The checks, each on its paths.

    Args:
        device: Where they run.
        kernels: Whether kernels can run there.
        only: Texts of which one has to be in area or name; then rare checks count, too.
        everything: Whether rare checks are wanted without being named.
    """
    return [
        (check, Setting(device, path))
        for check in every_check()
        if (_matches(check, only) if only else everything or not check.rare)
        if not check.gpu or device.type == "cuda"
        for path in check.paths
        if path != "kernels" or kernels
    ]


def _matches(check: Check, texts: Iterable[str]) -> bool:
    name = f"{check.area}: {check.name}".lower()
    return any(text.lower() in name for text in texts)


# --- output: torch is enough for it ---------------------------------------------------------------


def show(record: Record, seconds: float, *, gpu: bool) -> None:
    """Print where it ran, a table of each area, everything that failed, and what was not run."""
    content, results = record.content, record.in_order()
    here = content["environment"]
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("apex", "torch", "triton"))
    print(f"{here['device']['name']} ({here['device']['device']}), {versions}")
    for area in unique(result.area for result in results):
        print("", area, *aligned(_rows([r for r in results if r.area == area], gpu)), sep="\n")
    failed = [result for result in results if result.status != "right"]
    print("", *map(_failure, failed), sep="\n")
    if not record.complete:
        print(f"INCOMPLETE: {len(results)} of {content['planned']} checks")
    print(f"{len(results)} checks in {seconds:.0f} s, {len(failed)} failed.")
    if not content["every variant"]:
        print("--all checks more variants and dtypes.")
    print(f"Kernels: {content['kernels']}.")
    if not gpu:
        print("No GPU was used: nothing was compiled, and CUDA graphs and waits were not checked.")


def _rows(results: Sequence[Result], gpu: bool) -> Iterator[list[str]]:
    paths = [path for path in PATHS if any(result.path == path for result in results)]
    yield ["check", *(p if gpu or p != "kernels" else "kernels, interpreted" for p in paths)]
    for name in unique(result.name for result in results):
        found = {result.path: result for result in results if result.name == name}
        yield [name, *(_cell(found[path]) if path in found else NOTHING for path in paths)]


def _cell(result: Result) -> str:
    number = NOTHING if result.worst is None else _number(result.worst)
    return {"raised": "RAISED", "right": number, "wrong": f"WRONG: {number}"}[result.status]


def _number(one: Measured) -> str:
    """Show the value, what is allowed and the unit; a count of nothing is number in one word."""
    if one.allowed == 0 and one.right:
        return "exact"
    return f"{one.value:.3g} of {one.allowed:.3g} {one.unit}".rstrip()


def _failure(result: Result) -> str:
    name = f"{result.area}: {result.name} ({result.path})"
    if result.error:
        return f"RAISED  {name}: {result.error.strip().splitlines()[-1]}"
    wrong = [f"{one.what}: {_number(one)}" for one in result.measured if not one.right]
    return f"WRONG  {name}: {'; '.join(wrong) or 'nothing was measured'}"
