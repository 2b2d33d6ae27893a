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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from apex.cli.command_line import UsageError
from apex.cli.options import (
    add_device,
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.cli.tables import NOTHING, aligned, save
from apex.info import machine
from apex.ops import _runtime
from apex.selftest import gpu, ops, optimizers, training
from apex.selftest.check import (
    PATHS,
    Check,
    Measured,
    Result,
    Setting,
    carry_out,
    is_lost,
)

__all__ = ["HELP", "add_arguments", "every_check", "plan", "run"]

HELP = (
    "Check this installation on this machine: every kernel and every optimizer beside its "
    "definition in float64, twice with the same bits, a small training at every level; on a GPU "
    "also CUDA graphs and steps that never wait. Without a GPU the same checks run on "
    "the CPU, the kernels in Triton's interpreter. The exit code is 1 if a "
    "number is wrong or a check raised."
)
INTERPRET = "TRITON_INTERPRET"
VARIABLES = ("TRITON_", "CUDA_", "PYTORCH_", "TORCH_", "NVIDIA_", "OMP_", "THP_")  # beginnings
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes
CLEAR = "\r\x1b[K"  # of a terminal's line
PAUSE = 5.0  # seconds between lines that say what runs, where there is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex selftest``."""
    add_device(parser)
    parser.add_argument(
        "--json", type=Path, default=Path("apex-bench", "selftest.json"), metavar="FILE",
        help="file to write, after each check (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", default="", metavar="TEXT",
        help='checks with this in their name or area, e.g. --only "layer norm, bf16"',
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex selftest``; what is finished when it is interrupted is shown and kept."""
    device = pick_device(args.device)
    check_file("--json", args.json)
    device, why_not = _choose(device)
    planned = plan(device, kernels=why_not is None, only=args.only)
    if not planned:
        raise UsageError(f"--only {args.only!r}: no check has this in its name")
    ran = "compiled" if device.type == "cuda" else "in Triton's interpreter, on the CPU"
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)}
    here = {"tools": machine.cuda(), "variables": variables, "command": sys.argv[1:]}
    content: dict[str, Any] = {
        "format": "apex selftest 1",
        "environment": {**environment(device), **here},
        "kernels": ran if why_not is None else f"not run: {why_not}",
        "planned": len(planned),
        "complete": False,
    }
    if why_not is None:  # now: Triton makes an ImportError of a Ctrl-C, and stays half imported
        importlib.import_module("triton.language")
    results: list[Result] = []
    said = time.monotonic()
    with terminated_like_interrupted():
        interrupted = True
        with suppress(KeyboardInterrupt):
            for number, (check, setting) in enumerate(planned):
                # The check that runs while a file is the newest: what a crash leaves.
                content["next"] = f"{check.name} ({setting.path})"
                save({**content, "checks": [one.as_json() for one in results]}, args.json)
                running = f"{number + 1}/{len(planned)}  {check.area}: {content['next']}"
                said = show_running(running, said)
                results.append(carry_out(check, setting))
                if results[-1].status != "right":
                    show_failed(results[-1])
                if results[-1].status == "raised" and is_lost(device):
                    break
            interrupted = False
        with suppress(KeyboardInterrupt):
            if len(results) == len(planned):
                content.update(complete=True, next=None)
            save({**content, "checks": [one.as_json() for one in results]}, args.json)
            show(results, content, gpu=device.type == "cuda")
            print(f"In {args.json}; it has all that a report of a problem needs.")
    right = content["complete"] and all(result.status == "right" for result in results)
    return INTERRUPTED if interrupted else OK if right else FAILED


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


def plan(device: torch.device, *, kernels: bool, only: str = "") -> list[tuple[Check, Setting]]:
    """The checks with ``only`` in area or name, on each path; ``kernels`` says if these can run."""
    return [
        (check, Setting(device, path))
        for check in every_check()
        if only.lower() in f"{check.area}: {check.name}".lower()
        if not check.gpu or device.type == "cuda"
        for path in check.paths
        if path != "kernels" or kernels
    ]


# --- output: torch is enough for it ---------------------------------------------------------------


def show_running(what: str, said: float) -> float:
    """Name the check that runs: in a terminal's line, or elsewhere in a line each 5 seconds.

    ``said`` is when the last line was printed; the result is that of the next call.
    """
    if sys.stderr.isatty():
        print(f"{CLEAR}{what[:79]}", end="", file=sys.stderr, flush=True)
    elif (now := time.monotonic()) - said >= PAUSE:
        print(what, file=sys.stderr, flush=True)
        return now
    return said


def clear_running() -> None:
    """Clear a terminal's line."""
    if sys.stderr.isatty():
        print(CLEAR, end="", file=sys.stderr, flush=True)


def show_failed(result: Result) -> None:
    """Say at once that a check has failed."""
    clear_running()
    print(_failure(result), file=sys.stderr)


def show(results: Sequence[Result], content: dict[str, Any], *, gpu: bool) -> None:
    """Print where it ran, a table of each area, everything that failed, and what was not run."""
    clear_running()
    here = content["environment"]
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("apex", "torch", "triton"))
    print(f"{here['device']['name']} ({here['device']['device']}), {versions}")
    for area in unique(result.area for result in results):
        print("", area, *aligned(_rows([r for r in results if r.area == area], gpu)), sep="\n")
    failed = [result for result in results if result.status != "right"]
    print("", *map(_failure, failed), sep="\n")
    if not content["complete"]:
        print(f"INCOMPLETE: {len(results)} of {content['planned']} checks")
    seconds = sum(result.seconds for result in results)
    print(f"{len(results)} checks in {seconds:.0f} s, {len(failed)} failed.")
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
