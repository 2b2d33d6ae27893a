"""``apex completion``: a script for the shell that completes commands, options and choices."""

import argparse
import importlib
from typing import Any, cast

from apex.bench import cli

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "Print a script that lets the shell complete apex's commands and options with the tab key. "
    'bash: eval "$(apex completion bash)" in ~/.bashrc; zsh: apex completion zsh > a folder of '
    "$fpath, as _apex."
)
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex completion``."""
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex completion``."""
    import shtab

    print(shtab.complete(_whole_parser(), shell=args.shell))
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """Build a parser with the options of all commands; one of two words is below the first."""
    parser = argparse.ArgumentParser(prog="apex")
    below: dict[str, Any] = {"": parser.add_subparsers()}
    made: dict[str, argparse.ArgumentParser] = {}
    for name, command in cli.COMMANDS.items():
        first, _, second = name.partition(" ")
        parent = first if second else ""
        if parent not in below:
            below[parent] = made[parent].add_subparsers()
        made[name] = below[parent].add_parser(second or first, help=command.summary)
        module = cast(cli.CommandModule, importlib.import_module(command.module))
        module.add_arguments(made[name])
    return parser
