"""Runs scripts as `python` and as `apex debug` would, each in a process of its own.

    python -m tests.debug.both_ways FOLDER

A script is FOLDER/NAME/script.py. Each process is forked from this one, which has imported torch,
so that 20 scripts take seconds instead of minutes. Its files are in FOLDER/NAME/plain and
FOLDER/NAME/debug, with stdout, stderr and the exit code.
"""

import builtins
import gc
import os
import pathlib
import sys
import types

import numpy  # noqa: F401  # scripts import it
import torch
import torch._dynamo

from apex import amp, debug  # noqa: F401  # one of the scripts imports amp
from apex.commands.command_line import main as command
from apex.commands.debugging import command as _command  # noqa: F401
from apex.commands.debugging import program as _program  # noqa: F401


def run_plainly():
    """What the interpreter does with a script."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=os.path.abspath("script.py"))
    sys.argv = ["script.py", "word"]
    sys.path[0] = os.getcwd()
    exec(compile(pathlib.Path("script.py").read_bytes(), main.__file__, "exec"), vars(main))


def run_debug():
    sys.argv = ["apex", "debug", "script.py", "word"]
    raise SystemExit(command())


def start(folder, run):
    """Let a new process run a script in ``folder``; return its id, and 0 in the process itself."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
    work = folder / "files"
    os.chdir(work)
    run()
    return 0


def both_ways(folder):
    """Run all scripts of a folder; yield nothing to a process of a script."""
    for script in sorted(folder.glob("*/script.py")):
        for name, run in (("plain", run_plainly), ("debug", run_debug)):
            place = script.parent / name
            (place / "files").mkdir(parents=True)
            (place / "files" / "script.py").write_bytes(script.read_bytes())
            child = start(place, run)
            if not child:
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            (place / "code").write_text(str(code))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # else the collector of each process copies all pages
    both_ways(pathlib.Path(sys.argv[1]).absolute())
