"""A part that runs in this process: the checks or the times of one module.

python -m tools.gpu.part MODULE --out FILE [--dry] [--only WORD ...]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.gpu import checking
from tools.gpu.rows import MISSING, NOT_DRY, RIGHT, WRONG, Rows


def main() -> None:
    """Run one module's checks, or measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    args = parser.parse_args()
    checking.choose_device(args.dry)
    name, _, which = args.module.partition(":")
    module = importlib.import_module(f"tools.gpu.{name}")
    rows = Rows(args.out)
    if which:
        module.measure(which, rows, dry=args.dry)
    else:
        chosen = {n: f for n, f in checking.CHECKS.items() if any(w in n for w in args.only)}
        if not chosen:
            rows.add("", WRONG, f"no check has one of {', '.join(args.only)} in its name")
        run_checks(chosen, rows)
    rows.note("")


def run_checks(checks: dict[str, Callable[[], Any]], rows: Rows) -> None:
    """Carry out checks one by one, until the GPU no longer answers."""
    for number, (name, function) in enumerate(checks.items()):
        rows.note(name)
        started = time.perf_counter()
        status, said = carry_out(function)
        rows.add(name, status, said, seconds=round(time.perf_counter() - started, 2))
        if status == WRONG and is_lost():
            left = f"the GPU no longer answers: {len(checks) - number - 1} checks are not run"
            rows.add("", WRONG, left)
            return


def is_lost() -> bool:
    """Whether everything fails since an error: an illegal address, an assertion of a kernel."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def carry_out(function: Callable[[], Any]) -> tuple[str, str]:
    """Run a check; return its status and what it said. A missing package is no failure."""
    try:
        torch.manual_seed(0)
        said = function()
        torch.cuda.synchronize()
    except ModuleNotFoundError as error:
        return MISSING, f"{error.name} is not installed"
    except checking.NotDry as reason:
        return NOT_DRY, str(reason)
    except Exception as error:  # noqa: BLE001  a failed check is a result
        return WRONG, in_a_line(error)
    finally:
        _restore()
    return RIGHT, str(said or "")


def _restore() -> None:
    """Leave nothing of a check for the next one; what a lost GPU refuses is passed over."""
    from apex import amp

    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    amp.reset()
    with contextlib.suppress(RuntimeError):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.cuda.set_sync_debug_mode("default")
        if not checking.DRY:  # 0.3 s, for memory that a GPU needs
            gc.collect()
            torch.cuda.empty_cache()


def in_a_line(error: Exception) -> str:
    """The error, the line of the check and the last line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    of_apex = [frame for frame in frames if "/src/" in frame.filename]
    checks = [frame for frame in frames if "/tools/gpu/" in frame.filename and frame.line]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in checks[2:3]]
    places += [f"{frame.filename.partition('/src/')[2]}:{frame.lineno}" for frame in of_apex[-1:]]
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text} ({', '.join(places)})"


if __name__ == "__main__":
    main()
