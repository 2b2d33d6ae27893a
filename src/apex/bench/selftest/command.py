"""``apex selftest``: the command line.

On a machine without a GPU the same checks run on the CPU, the kernels in Triton's interpreter. That
has to be chosen before kernels are imported, so the run is then a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from apex.bench.cli import UsageError
from apex.bench.info import machine
from apex.bench.options import (
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
)  # fmt: skip
from apex.bench.output.console import console
from apex.bench.output.files import save
from apex.bench.output.progress import progress
from apex.ops import _runtime

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "Check this installation on this machine: every kernel and every optimizer beside its "
    "definition in float64, twice with the same bits, a small training at every level; on a GPU "
    "also CUDA graphs, steps that never wait, and bandwidth. Without a GPU the same checks run on "
    "the CPU, the kernels in Triton's interpreter. The exit code is 1 if a "
    "number is wrong or a check raised. Attach the JSON file to an issue."
)
FORMAT = "apex selftest 1"
INTERPRET = "TRITON_INTERPRET"
VARIABLES = ("TRITON_", "CUDA_", "PYTORCH_", "TORCH_", "NVIDIA_", "OMP_", "THP_")  # beginnings
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex selftest``."""
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("apex-bench", "selftest.json"), metavar="FILE",
        help="file to write, after each check; attach it to an issue (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", default="", metavar="TEXT",
        help='checks with this in their name or area, e.g. --only "layer norm, bf16"',
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex selftest``.

    Returns:
        0, or 1 if a number was wrong or a check raised, or 130 if the run was interrupted; what was
        finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done; nothing was checked.
        ModuleNotFoundError: A package of the ``bench`` extra is missing; nothing was checked.
    """
    importlib.import_module("rich")  # now and not after minutes of work
    device = pick_device(args.device)
    check_file("--json", args.json)
    interpreted = os.environ.get(INTERPRET) == "1"
    if device.type == "cuda":
        if interpreted:
            raise UsageError(f"{INTERPRET}=1 is set: kernels would not run on the GPU; unset it")
        device = torch.device("cuda", device.index or 0)
    elif not interpreted and importlib.util.find_spec("triton"):
        return _in_a_process(args)
    return _checked(args, device)


def _in_a_process(args: argparse.Namespace) -> int:
    """Do the same with Triton's interpreter."""
    words = ["selftest", "--device", "cpu", "--json", str(args.json), "--only", args.only]
    code = (  # the same packages, whatever the current folder holds
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from apex.bench.cli import main; sys.exit(main({words!r}))"
    )
    call, environ = [sys.executable, "-c", code], {**os.environ, INTERPRET: "1"}
    # A session of its own, so that Ctrl-C reaches it once, through us.
    with (
        subprocess.Popen(call, env=environ, start_new_session=True) as process,
        terminated_like_interrupted(),
    ):
        try:
            ended = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it shows and keeps what is finished
            ended = process.wait()
    if ended >= 0:
        return ended
    said = f"ended by signal {-ended}; finished checks are in {args.json}, and its"
    print(f'apex selftest: {said} "next" is the one that ended it', file=sys.stderr)
    return FAILED


def _checked(args: argparse.Namespace, device: torch.device) -> int:
    from apex.bench.selftest import report
    from apex.bench.selftest.run import Result, carry_out, plan

    gpu, why_not = device.type == "cuda", None
    if gpu:
        why_not = _runtime.why_not_triton("cuda")
    elif importlib.util.find_spec("triton") is None:
        why_not = "the triton package is not installed: pip install triton"
    planned = plan(device, kernels=why_not is None, only=args.only)
    if not planned:
        raise UsageError(f"--only {args.only!r}: no check has this in its name")
    ran = "compiled" if gpu else "in Triton's interpreter, on the CPU"
    content: dict[str, Any] = {
        "format": FORMAT,
        "environment": _environment(device),
        "kernels": ran if why_not is None else f"not run: {why_not}",
        "planned": len(planned),
        "complete": False,
    }
    results: list[Result] = []
    with terminated_like_interrupted():
        interrupted = False
        try:
            with progress(report.Failures, len(planned), "{task.completed}/{task.total}") as bar:
                for result in carry_out(planned, bar.begun):
                    bar.ended(result)
                    results.append(result)
                    content["complete"] = len(results) == len(planned)
                    left = planned[len(results) :]
                    # The check that runs while a file is the newest: what a crash leaves.
                    content["next"] = f"{left[0][0].name} ({left[0][1].path})" if left else None
                    save({**content, "checks": report.as_json(results)}, args.json)
        except KeyboardInterrupt:
            interrupted = True
        with suppress(KeyboardInterrupt):
            to = console(140)
            report.show(to, results, content, device)
            if results:
                to.print(f"In {args.json}; attach it to an issue.", markup=False)
    if interrupted:
        return INTERRUPTED
    return OK if content["complete"] and all(r.status == "right" for r in results) else FAILED


def _environment(device: torch.device) -> dict[str, Any]:
    found = environment(device)
    found["tools"] = asdict(machine.cuda())
    found["variables"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)}
    found["command"] = sys.argv[1:]
    return found
