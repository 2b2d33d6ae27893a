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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from apex.bench import machine
from apex.bench.cli import UsageError
from apex.bench.console import console
from apex.bench.options import (
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
)
from apex.bench.results import save
from apex.ops import _runtime

if TYPE_CHECKING:
    from apex.bench.selftest.run import Planned

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
    # A session of its own, so that Ctrl-C reaches it once, through us.
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, INTERPRET: "1"}, start_new_session=True
        ) as process,
        terminated_like_interrupted(),
    ):
        try:
            ended = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it shows and keeps what is finished
            ended = process.wait()
    if ended >= 0:
        return ended
    print(
        f"apex selftest: ended by signal {-ended}; finished checks are in {args.json}, and its "
        '"next" is the one that ended it',
        file=sys.stderr,
    )
    return FAILED


def _checked(args: argparse.Namespace, device: torch.device) -> int:
    from apex.bench.selftest import report
    from apex.bench.selftest.run import Result, carry_out, plan

    why_not = _why_no_kernels(device)
    planned = plan(device, kernels=why_not is None, only=args.only)
    if not planned:
        raise UsageError(f"--only {args.only!r}: no check has this in its name")
    content: dict[str, Any] = {
        "format": FORMAT,
        "environment": _environment(device),
        "kernels": _kernels(device, why_not),
        "planned": len(planned),
        "complete": False,
    }
    results: list[Result] = []
    with terminated_like_interrupted():
        interrupted = False
        try:
            with report.progress(len(planned)) as bar:
                for result in carry_out(planned, bar.begin):
                    bar.end(result)
                    results.append(result)
                    content["complete"] = len(results) == len(planned)
                    content["next"] = _next(planned[len(results) :])
                    save({**content, "checks": report.as_json(results)}, args.json)
        except KeyboardInterrupt:
            interrupted = True
        with suppress(KeyboardInterrupt):
            _show(args, device, content, results)
    if interrupted:
        return INTERRUPTED
    return OK if content["complete"] and all(r.status == "right" for r in results) else FAILED


def _next(planned: Sequence[Planned]) -> str | None:
    """The check that runs while a file is the newest: what a crash leaves."""
    return f"{planned[0][0].name} ({planned[0][1].path})" if planned else None


def _why_no_kernels(device: torch.device) -> str | None:
    """Why kernels cannot run, not even in the interpreter; ``None`` if they can."""
    if device.type == "cuda":
        return _runtime.why_not_triton("cuda")
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed: pip install triton"
    return None


def _kernels(device: torch.device, why_not: str | None) -> str:
    if why_not is not None:
        return f"not run: {why_not}"
    return "compiled" if device.type == "cuda" else "in Triton's interpreter, on the CPU"


def _environment(device: torch.device) -> dict[str, Any]:
    found = environment(device)
    found["tools"] = asdict(machine.cuda())
    found["variables"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)}
    found["command"] = sys.argv[1:]
    return found


def _show(
    args: argparse.Namespace, device: torch.device, content: dict[str, Any], results: list[Any]
) -> None:
    from apex.bench.selftest import report

    to = console(140)
    here = content["environment"]
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("apex", "torch", "triton"))
    gpu = device.type == "cuda"
    to.print(f"{here['device']['name']} ({device}), {versions}", style="bold", markup=False)
    headings = {"kernels": "kernels" if gpu else "kernels, interpreted"}
    headings |= {path: path for path in ("as called", "definition")}
    report.show(to, results, headings)
    failed = sum(result.status != "right" for result in results)
    seconds = sum(result.seconds for result in results)
    if not content["complete"]:
        to.print(f"INCOMPLETE: {len(results)} of {content['planned']} checks", style="bold red")
    to.print(f"{len(results)} checks in {seconds:.0f} s, {failed} failed.", style="bold")
    to.print(f"Kernels: {content['kernels']}.", markup=False)
    if not gpu:
        to.print(
            "No GPU was used: nothing was compiled, and CUDA graphs, waits and bandwidth were not "
            "checked."
        )
    if results:
        to.print(f"In {args.json}; attach it to an issue.", markup=False)
