"""``apex debug SCRIPT``: run a program as it is, with a watch on what it trains."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from apex.bench.cli import UsageError
from apex.bench.options import check_folder
from apex.debug.report import Report
from apex.debug.tensors import params_of
from apex.debug.watch import Watch

HELP = """Run a training script as it is. At the first step whose gradients are not finite, say
which operation made the first inf or NaN, and why, on stderr and in apex-debug/. The script's own
output and exit code stay; updates that would write a NaN are skipped. Where nothing is wrong, no
file is written. Watched are the modules that are called and hold parameters of an optimizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, default=Path("apex-debug"), help="folder for reports")
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program, as after 'python'")
    rest = parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments"
    )
    rest.required = False  # else an error without SCRIPT names both


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code of the script."""
    if not args.as_module and not Path(args.script).is_file():
        raise UsageError(f"{args.script}: no such file")
    program, code = _Program(Path(args.out).absolute()), 1
    argv, path = sys.argv, list(sys.path)
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = os.getcwd() if args.as_module else str(Path(args.script).absolute().parent)
    try:
        with program.watched():
            if args.as_module:
                runpy.run_module(args.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args.script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:  # noqa: BLE001  # shown as Python shows it
        frames = error.__traceback__
        while frames and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
    finally:
        sys.argv, sys.path = argv, path
        program.finish(failed=code != 0)
    return code


class _Program:
    """One watch on all modules and optimizers of a program, as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watch = Watch([], [], None, None, self._write)
        self._optimizers: list[Any] = []  # made, and not watched yet
        self._unseen: set[int] = set()  # their parameters without a module that was called
        self._looked_at: WeakSet[torch.nn.Module] = WeakSet()  # modules without any of these
        self._call = torch.nn.Module.__call__

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice optimizers and scalers when they are made, and modules when they are called."""
        undo = [
            self._stop_looking,
            register_optimizer_step_pre_hook(self._begins).remove,
            _after_init(torch.optim.Optimizer, self._made),
            _after_init(torch.amp.GradScaler, self._watch.attach_scaler),
        ]
        try:
            yield
        finally:
            for each in undo:
                each()

    def _made(self, optimizer: Any) -> None:
        self._optimizers.append(optimizer)
        self._unseen |= set(map(id, params_of(optimizer)))
        self._looked_at.clear()
        called, call = self._called, self._call

        def look(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            called(module)
            return call(module, *args, **kwargs)

        # Not a hook for all modules, of which torch.compile warns: nothing while all are seen.
        torch.nn.Module.__call__ = look  # type: ignore[method-assign]

    def _stop_looking(self) -> None:
        torch.nn.Module.__call__ = self._call  # type: ignore[method-assign]

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Watch a step from its start on where the model's first call is in its closure."""
        if len(args) > 1 or kwargs.get("closure") is not None:
            self._attach(optimizer)

    def _called(self, module: torch.nn.Module) -> None:
        """Watch a module that has parameters of an optimizer, from this call on."""
        if module in self._looked_at or isinstance(module, torch.jit.ScriptModule):
            return
        own = {id(param) for param in module.parameters()}
        if own.isdisjoint(self._unseen):
            self._looked_at.add(module)
            return
        self._unseen -= own
        if not self._unseen:
            self._stop_looking()
        self._watch.attach(module)
        for optimizer in list(self._optimizers):
            if not own.isdisjoint(map(id, params_of(optimizer))):
                self._attach(optimizer)

    def _attach(self, optimizer: Any) -> None:
        if optimizer in self._optimizers:
            self._optimizers.remove(optimizer)
            self._watch.attach_optimizer(optimizer)

    def _write(self, report: Report) -> None:
        print(report.text(), file=sys.stderr)
        rank = f"-rank{report.rank}" if report.rank else ""
        try:
            check_folder("--out", self._folder)
            (self._folder / f"report{rank}.txt").write_text(report.text() + "\n", "utf-8")
            (self._folder / f"report{rank}.json").write_text(report.to_json() + "\n", "utf-8")
            _say(f"wrote {self._folder}")
            if report.call is not None:
                file = report.save(self._folder / f"nan{rank}.pt")
                _say(f"apex debug repro {file} shows it again")
        except ValueError as error:
            _say(f"no file to show it again: {error}")
        except (OSError, RuntimeError, UsageError) as error:  # the script goes on
            _say(f"not all was written: {error}")

    def finish(self, *, failed: bool) -> None:
        """Say where nothing could be watched, and take the hooks off."""
        if self._watch.steps == 0 and not failed:
            _say(
                "no step of an optimizer was seen whose parameters are in a module that was "
                "called. Write into the script: with apex.debug.watch(model, optimizer):"
            )
        elif self._watch.report is not None:
            _say(f"{self._watch.skipped} of {self._watch.steps} steps were skipped")
        self._watch.close()


def _say(text: str) -> None:
    print(f"apex debug: {text}", file=sys.stderr)


def _after_init(kind: Any, tell: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``tell`` with each new object of ``kind``; return what undoes that."""
    inner = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        tell(self)

    kind.__init__ = init
    return lambda: setattr(kind, "__init__", inner)
