"""``apex check SCRIPT``: run a program as it is, and list the precision mistakes that it makes."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.commands.command_line import INTERRUPTED, UsageError, suggestion
from apex.commands.debugging.script import (
    add_program,
    after_import,
    check_program,
    exit_code,
    prepare,
    say,
)
from apex.debug.check.mistakes import KINDS

if TYPE_CHECKING:
    from apex.debug.check.run import CheckRun

HELP = """Run a training script as it is, look at its first steps, and list each precision mistake
with its line, what was measured in this run, and its fix. The script's output and files stay the
same as without this command."""

FOUND, NO_STEP, NOT_FINITE = 3, 4, 5
VERSION = 1  # of the JSON
_WAIT = timedelta(seconds=60)  # for other ranks
_REACHABLE = ("checkpoint", "resume", "schedule")
at_exit = atexit.register  # under this name for tests, whose process does not end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="steps to measure (default: %(default)s)"
    )
    parser.add_argument("--stop", action="store_true", help="end the script after these steps")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KIND",
        help="do not report this kind; you can repeat the option",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")
    add_program(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    _check(args)
    runs: list[CheckRun] = []

    def watch() -> None:
        from apex.debug.check.run import CheckRun

        runs.append(CheckRun(args.steps, stop=args.stop, ignored=args.ignore))

    lines: list[str] = []

    def end() -> None:  # after exit functions of the script
        for line in lines:
            say(line, front="")

    at_exit(end)
    main = prepare(args.script, args.arguments, as_module=args.as_module)
    after_import("torch", watch)
    try:
        code = exit_code(main)
    except KeyboardInterrupt:
        code = INTERRUPTED
    end_pools()
    for thread in threading.enumerate():  # as Python does next: they may train
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    result = CheckResult.of(runs[0] if runs else None, args.script, code)
    with _ranks(result) as tells:
        if tells:
            lines += result.lines()
        if tells and args.json:
            result.write(args.json)
    return result.code()


def end_pools() -> None:  # under this name for tests, whose process does not end
    """Let pools finish what they were given and end their threads, as Python does at its end."""
    for end in reversed(getattr(threading, "_threading_atexits", [])):
        end()


@contextmanager
def _ranks(result: CheckResult) -> Iterator[bool]:
    """Under torchrun let rank 0 tell what all have found; whether this rank tells.

    The others wait until it has: torchrun ends all ranks when one has ended with an error.
    """
    if result.ended or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield True
        return
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if size < 2:
        yield True
        return
    import torch

    distributed: Any = torch.distributed  # without types

    for one in result.found:
        one.ranks = [rank]
    prefix = f"apex check/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = distributed.TCPStore(*address, is_master=False, timeout=_WAIT)
        told = {"found": [one.as_dict() for one in result.found], "ends": result.not_finite}
        store.set(f"{prefix}/{rank}", json.dumps(told))
        for other in range(1, size) if rank == 0 else ():
            told = json.loads(store.get(f"{prefix}/{other}"))
            result.add(told["found"], other)
            if told["ends"] and not result.not_finite:
                result.not_finite = f"on rank {other} {told['ends']}"
    except RuntimeError as error:  # a rank that did not come, or an agent that is gone
        say(f"the findings of some ranks did not arrive: {error}", front="apex check: ")
    yield rank == 0
    with suppress(RuntimeError):
        if rank == 0:
            store.set(f"{prefix}/told", "")
        else:
            store.wait([f"{prefix}/told"], _WAIT)


def _check(args: argparse.Namespace) -> None:
    check_program(args, "apex.debug.check(model, optimizer) as found")
    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: must be 1 or more")
    for kind in args.ignore:
        if kind not in KINDS:
            hint = suggestion(kind, KINDS) or "docs/check.md lists all"
            raise UsageError(f"--ignore {kind}: there is no such kind; {hint}")


@dataclass
class CheckResult:
    """What a run has found, and how it ended.

    Attributes:
        program: Its name.
        ended: Its own exit code.
        stopped: Whether ``--stop`` has ended it.
        not_finite: What was not finite when it ended: losses, steps, weights.
    """

    program: str
    ended: int
    stopped: bool = False
    steps: int = 0
    found: list[Any] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=lambda: list(_REACHABLE))
    failed: list[str] = field(default_factory=list)
    ignored: int = 0
    not_finite: str = ""

    @classmethod
    def of(cls, run: CheckRun | None, program: str, ended: int) -> CheckResult:
        """The result of a run; ``None`` where torch was not imported."""
        if run is None:
            return cls(program, ended)
        found, facts = run.finish(), run.facts
        missing = [one for one in _REACHABLE if one not in facts.reached]
        counts = (facts.steps, found, missing, run.failed, len(facts.silenced), facts.not_finite)
        return cls(program, ended, run.stopped, *counts)

    def add(self, found: list[dict[str, Any]], rank: int) -> None:
        """Add what another rank has found."""
        from apex.debug.check.finding import Finding

        for one in found:
            key = one["kind"], one["file"], one["line"]
            same = [own for own in self.found if (own.kind, own.file, own.line) == key]
            if same:
                same[0].ranks.append(rank)
            else:
                self.found.append(Finding.of(one))

    def status(self) -> str:
        """``"found"``, ``"failed"``, ``"not finite"``, ``"no step"`` or ``"nothing found"``."""
        if self.found:
            return "found"
        if self.ended:
            return "failed"
        if self.not_finite:
            return "not finite"
        return "nothing found" if self.steps else "no step"

    def code(self) -> int:
        """The exit code of the command."""
        codes = {"found": FOUND, "no step": NO_STEP, "not finite": NOT_FINITE}
        return codes.get(self.status(), self.ended)

    def lines(self) -> list[str]:
        """What is printed: findings, and a line that says how it ended."""
        many = f"{self.steps} step{'s' * (self.steps != 1)} of {self.program}"
        number = f"{len(self.found)} precision mistake{'s' * (len(self.found) != 1)} in {many}"
        lines = [f"apex check: {number}"] if self.found else []
        for place, one in enumerate(self.found, 1):
            lines += one.lines(place)
        none = f"no precision mistakes in {many}"
        if not self.steps:
            none = f"nothing was checked: no optimizer made a step in {self.program}"
        texts = {
            "found": f"exit {FOUND}; the script "
            + ("was stopped" if self.stopped else f"ended with {self.ended}"),
            "failed": f"{none}, which ended with {self.ended}",
        }
        last = texts.get(self.status(), none)
        if self.not_finite:
            last += f", but {self.not_finite}"
            last += "" if self.found else f": to find out why, run apex debug {self.program}"
        more = [f"{', '.join(self.not_reached)}: not reached"] if self.not_reached else []
        more += [f"{self.ignored} ignored"] if self.ignored else []
        more += [
            f"apex failed in one of its checks, please report it: {one}" for one in self.failed
        ]
        return [
            *lines,
            f"apex check: {last}" + (f" ({'; '.join(more)})" if more else ""),
        ]

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        whole = {
            "version": VERSION,
            "status": self.status(),
            "exit": None if self.stopped else self.ended,
            "steps": self.steps,
            "not_finite": self.not_finite,
            "found": [one.as_dict() for one in self.found],
            "not_reached": self.not_reached,
            "ignored": self.ignored,
            "failed_rules": self.failed,
        }
        try:
            file.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        except OSError as error:
            say(f"{file} was not written: {error}", front="apex check: ")
