"""``apex selftest``: the command line.

On a machine without a GPU the same checks run on the CPU, the kernels in Triton's interpreter. That
has to be chosen before triton is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from apex.bench.cli import UsageError
from apex.bench.info import machine
from apex.bench.options import (
    add_device,
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
)
from apex.bench.output.tables import save
from apex.bench.selftest import gpu, ops, optimizers, report, training
from apex.bench.selftest.check import Check, Result, Setting, carry_out, is_lost
from apex.ops import _runtime

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
    results: list[Result] = []
    with terminated_like_interrupted():
        interrupted = True
        with suppress(KeyboardInterrupt):
            for number, (check, setting) in enumerate(planned):
                # The check that runs while a file is the newest: what a crash leaves.
                content["next"] = f"{check.name} ({setting.path})"
                save({**content, "checks": [one.as_json() for one in results]}, args.json)
                report.show_running(f"{number + 1}/{len(planned)}  {check.area}: {content['next']}")
                results.append(carry_out(check, setting))
                if results[-1].status != "right":
                    report.show_failed(results[-1])
                if results[-1].status == "raised" and is_lost(device):
                    break
            interrupted = False
        with suppress(KeyboardInterrupt):
            if len(results) == len(planned):
                content.update(complete=True, next=None)
            save({**content, "checks": [one.as_json() for one in results]}, args.json)
            report.show(results, content, gpu=device.type == "cuda")
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
