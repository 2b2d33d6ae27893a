"""Runs `apex debug` and `apex check` in this process, which does not end with them."""

import sys

import pytest

from apex.commands import check
from apex.commands import command_line as cli
from apex.commands.debugging import command


def main(arguments):
    """What the command line's `main` does, and what follows when a process ends; the exit code."""
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (command, check):
            patch.setattr(module, "at_exit", ends.append)
        patch.setattr(check, "end_pools", lambda: None)
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", list(sys.path))
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        try:
            return cli.main(arguments)
        finally:
            for end in ends:
                end()
