"""The ``apex`` command: finds the sub-command, and turns what users get wrong into one line.

A sub-command is one word, or two as in ``apex bench plot``, and a module with ``HELP`` (its
description), ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). The module is
imported only once it has been chosen. ``run`` reports a bad combination of options by raising
`UsageError`; whatever else it raises is a defect and keeps its traceback.
"""

import argparse
import difflib
import importlib
import importlib.util
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import apex
from apex.commands import streams

__all__ = ["Parser", "UsageError", "main", "of_notebook", "raised", "suggestion"]

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
MOST = 70  # characters of the choices that an error names


class UsageError(Exception):
    """A request that cannot be met; the message is one line for the user."""


def raised(error: BaseException) -> str:
    """Name an error in one line, and where it came from: the last line of the user's."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    ours = (*apex.__path__, *importlib.import_module("torch").__path__, "<frozen ")
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(ours)]
    return f"{text} ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else text


def of_notebook(file: Path | str) -> str:
    """Say how to make a program of a notebook; empty if the file is none."""
    if Path(file).suffix != ".ipynb":
        return ""
    how = f"jupyter nbconvert --to script {file}"
    return f"{file} is a notebook: make a program of it with `{how}`"


class Command(NamedTuple):
    """A sub-command: its module, its line in the list of commands, packages it needs beside torch.

    ``needs`` has the names by which they are imported. They are looked for before anything runs.
    """

    module: str
    summary: str
    needs: tuple[str, ...] = ()


RESULTS = ("jinja2", "matplotlib", "msgspec", "numpy", "rich", "scipy")
COMMANDS = {
    "info": Command(
        "apex.commands.info.command", "show what is installed and which code path runs"
    ),
    "bench": Command(
        "apex.commands.bench.training.command", "compare time, memory and accuracy of the levels",
        (*RESULTS, "sklearn"),
    ),
    "bench plot": Command(
        "apex.commands.bench.training.report", "draw earlier results again", RESULTS
    ),
    "debug": Command(
        "apex.commands.debugging.command",
        "find the operation of a training script that made the first NaN"
    ),
    "debug repro": Command("apex.commands.debugging.repro_command", "show a saved report again"),
    "check": Command(
        "apex.commands.check", "find precision mistakes in a training script"
    ),
    "what-if": Command(
        "apex.commands.what_if", "find the number formats that a model can be trained in"
    ),
    "selftest": Command(
        "apex.commands.selftest.command", "check that this installation computes correct numbers"
    ),
}  # fmt: skip
MOVED = {  # commands that are elsewhere now: what their word is answered with
    "kernels": "is a developers' tool now: run ./dev kernels in a checkout of apex; "
    "python -m benchmarks.kernels times them",
    "bench kernels": "is a developers' tool now: run python -m benchmarks.kernels in a checkout of "
    "apex",
}
INSTALLED_AS = {"sklearn": "scikit-learn"}  # where pip has another name


class Parser(argparse.ArgumentParser):
    """argparse, except that an error is exactly one line, with a long list of choices cut short."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and end with the exit code 2."""
        found = re.search(r"argument (.+?): invalid choice: '(.+?)' \(choose from (.+)\)", message)
        if found:
            known = found[3].replace("'", "").split(", ")
            some = textwrap.shorten(", ".join(known), MOST, placeholder=" ...")
            hint = suggestion(found[2], known) or f"use {some} "
            message = f"{found[1]} {found[2]} is unknown: {hint}".rstrip()
        self.exit(2, f"{self.prog}: {_one_line(message)} (see '{self.prog} --help')\n")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Ask whether another word was meant, if one is like it."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0 for success, 2 for a request that cannot be met, 130 after Ctrl-C, 141 if
        the reader of standard output or error has gone.
    """
    streams.open_closed()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # --help ends by SystemExit
            streams.flush()
    except BrokenPipeError:  # of a stream: nobody reads what would be said about it
        streams.discard()
        return BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    """Find the command and run it; what a user got wrong is one line."""
    if " ".join(arguments[:2]) in (*COMMANDS, *MOVED):  # a command of two words
        arguments[:2] = [" ".join(arguments[:2])]
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    if chosen in MOVED:
        return _complain(chosen, MOVED[chosen], 2)
    missing = _missing(chosen)
    try:
        args, unknown = _parser(chosen).parse_known_args(arguments)
        if unknown:  # argparse itself would name the whole program, not the command
            Parser(prog=f"apex {chosen}").error(f"unrecognized arguments: {' '.join(unknown)}")
        if missing:
            raise UsageError(missing)
        code: int = args.module.run(args)
    except UsageError as error:
        return _complain(chosen, str(error), 2)
    except KeyboardInterrupt:
        return _complain(chosen, "interrupted", INTERRUPTED)
    except ModuleNotFoundError:  # of the module of the command
        if not missing:
            raise
        return _complain(chosen, missing, 2)
    return code


def _parser(chosen: str) -> Parser:
    """Build the parser; only the chosen command's own options are in it."""
    parser = Parser(prog="apex", description="Mixed-precision training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"apex {apex.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary)
        if name == chosen:
            module = importlib.import_module(command.module)
            subparser.description = module.HELP
            module.add_arguments(subparser)
            further = [f"apex {other}" for other in COMMANDS if other.startswith(f"{name} ")]
            subparser.epilog = f"see also: {', '.join(further)}" if further else None
            subparser.set_defaults(module=module)
    return parser


def _missing(chosen: str) -> str:
    """Name every package that a command needs and that is not here, and how to install them."""
    needs = COMMANDS[chosen].needs if chosen in COMMANDS else ()
    names = [INSTALLED_AS.get(n, n) for n in needs if importlib.util.find_spec(n) is None]
    if not names:
        return ""
    return (
        f"{', '.join(names)} not installed: pip install {' '.join(names)} (in a clone of apex: pip "
        "install '.[bench]')"
    )


def _complain(chosen: str, message: str, code: int) -> int:
    print(f"apex {chosen}".rstrip() + f": {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(message: str) -> str:
    return " ".join(message.split())
