"""``apex debug SCRIPT``: run a program as it is, with a watch on what it trains."""

from __future__ import annotations

import argparse
import atexit
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from apex.commands.debugging.script import (
    add_program,
    after_import,
    check_program,
    exit_code,
    prepare,
    say,
)

if TYPE_CHECKING:
    from apex.commands.debugging.program import Program

HELP = """Run a training script as it is. At the first step whose gradients are not finite, report
on stderr and in apex-debug/ which operation made the first inf or NaN, and why. The script's own
output, files and exit code stay the same as without this command. If nothing is wrong, it writes no
file, and one line at the end. It watches the modules that the script calls and whose parameters an
optimizer updates."""

WATCH = "apex.debug.watch(model, optimizer)"
_NO_STEP = (
    "saw no step of an optimizer whose parameters are in a module that the script calls. "
    f"Add to the script: with {WATCH}:"
)
at_exit = atexit.register  # under this name for tests, whose process does not end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, default=Path("apex-debug"), help="folder for reports")
    parser.add_argument(
        "--skip",
        action="store_true",
        help="skip updates that would write an inf or NaN. The run continues with finite weights, "
        "so its output changes",
    )
    parser.add_argument(
        "--no-lines",
        action="store_true",
        help="do not trace code outside the model. Steps are faster, but a fault in the loss or "
        "in the preparation of a batch is reported without its line",
    )
    add_program(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code of the script."""
    check_program(args, WATCH)
    folder, code = Path(args.out).absolute(), 1
    programs: list[Program] = []

    def watch() -> None:
        from apex.commands.debugging.program import Program

        programs.append(Program(folder, skip=args.skip, lines=not args.no_lines))

    def end() -> None:  # after all threads and exit functions of the script
        for program in programs:
            with suppress(RuntimeError):  # of a GPU that has failed
                if said := program.end(failed=code != 0):
                    say(said)
            program.close()
        if code == 0 and not any(program.watch.steps for program in programs):
            say(_NO_STEP)

    at_exit(end)
    main = prepare(args.script, args.arguments, as_module=args.as_module)
    after_import("torch", watch)
    code = exit_code(main)
    return code
