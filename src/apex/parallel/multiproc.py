"""Start a training script once per GPU: ``python -m apex.parallel.multiproc script.py args...``.

The processes are torchrun's, on this machine. The first that fails ends the others, and its exit
code is that of the command; 128 plus its number for a signal, as in a shell. ``--world-size N``,
here or among the arguments of the script, sets their number.

**Ranks.** Every process has torchrun's variables (``RANK`` and so on). A script that was written
for an older launcher also gets the options that it declares, instead of those that the user gave:

=================================  =============================  ==========================
the script declares                written for                    appended to its arguments
=================================  =============================  ==========================
``--rank`` and ``--world-size``    this launcher, in 2018         ``--rank R --world-size N``
``--local_rank``, ``--local-rank`` torch.distributed.launch       ``--local_rank R``
none of them                       torchrun                       nothing
=================================  =============================  ==========================

It declares what is a string constant in it. ``--rank`` alone is not passed: it has other meanings.
Where another module declares them, say ``--pass rank,world-size`` or ``--pass local_rank``.

**Several machines.** Where torchrun, mpirun or srun started this command as one of several
processes (:func:`apex.parallel.launch.environment`), it becomes the script. So a script of any
year runs on two machines of four GPUs by ::

    srun -N 2 --ntasks-per-node 4 python -m apex.parallel.multiproc script.py args...
"""

import argparse
import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from apex.parallel.launch import Environment, environment, master_address

_STYLES = {  # what --pass allows: options that old scripts declare together
    "rank,world-size": ("--rank", "--world-size"),
    "rank,world_size": ("--rank", "--world_size"),
    "local_rank": ("--local_rank",),
    "local-rank": ("--local-rank",),
    "none": (),
}
_WORLD_SIZE = {"--world-size", "--world_size"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments ``argv`` and return its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    script, arguments, log_dir = options.script, options.arguments, options.log_dir
    if not Path(script).is_file():
        parser.error(f"{script} is not a file; pass the path of a Python script")
    constants = _constants(script)
    declared = [style for style in _STYLES.values() if constants.issuperset(style)]
    styles = [_STYLES[options.passed]] if options.passed else declared
    names = list(dict.fromkeys(name for style in styles for name in style))
    sizes, others = _take(arguments, _WORLD_SIZE)
    if not constants & _WORLD_SIZE:
        arguments = others  # the size was for this command
    words = [script, *_take(arguments, names)[1]]
    try:
        size = options.world_size or (_at_least_1(sizes[-1]) if sizes else None)
        here = environment()
        if here.world_size > 1:
            if log_dir or size not in (None, here.world_size):
                started = f"{here.launcher} started {here.world_size} processes"
                parser.error(f"leave out --log-dir and --world-size: {started}")
            return _run_here(words, names, here)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--world-size of the script: {error}")
    except ValueError as error:
        parser.error(str(error))
    if log_dir and Path(log_dir).is_file():
        parser.error(f"--log-dir {log_dir}: is a file; name a folder")
    return _start(words, names, size or torch.cuda.device_count() or 1, log_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apex.parallel.multiproc",
        description="Start a training script once per GPU of this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    size = "how many processes (default: one per visible GPU, or one)"
    add("--world-size", type=_at_least_1, metavar="N", help=size)
    passed = (
        "arguments to append to those of the script (default: those that it declares): "
        f"{'; '.join(_STYLES)}"
    )
    add("--pass", dest="passed", choices=_STYLES, metavar="OPTIONS", help=passed)
    logs = "folder for the standard output of rank 1 and above (default: the terminal)"
    add("--log-dir", metavar="FOLDER", help=logs)
    add("script", help="path of a Python program")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _constants(script: str) -> set[object]:
    """Return the constants of a script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            nodes = list(ast.walk(ast.parse(Path(script).read_bytes())))
        except (SyntaxError, ValueError):  # ValueError: null bytes, in Python 3.10
            return set()  # it is not Python: its error is shown when it runs
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def _take(arguments: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Separate the values of the options ``names`` from the other arguments."""
    values, others, words = [], [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in names:
            values.append(value if equals else next(words, ""))
        else:
            others.append(word)
    return values, others


def _set(names: Sequence[str], numbers: Mapping[str, str]) -> list[str]:
    return [word for name in names for word in (name, numbers[name[2:].replace("-", "_")])]


def _start(words: Sequence[str], names: Sequence[str], processes: int, log_dir: str | None) -> int:
    """Let torchrun start the processes; return the exit code when all have ended."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _say_what_starts(processes, "torchrun", words[0], names)
    options = ["--standalone", f"--nproc-per-node={processes}"]
    # If its store is shared, no process listens at the tcp:// address of a script of 2018.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if log_dir:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        redirected = ",".join(f"{rank}:1" for rank in range(1, processes)) or "0"
        options += [f"--log-dir={log_dir}", f"--redirects={redirected}"]
    rank = "${local_rank}"  # torchrun puts the number there; on one machine it is the rank
    numbers = {"rank": rank, "local_rank": rank, "world_size": str(processes)}
    options += [word.replace("$", "$$") for word in words]  # torchrun makes one of two
    options += _set(names, numbers)
    try:
        run.run(run.parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        _say(
            f"rank {number} ended {how}" + ", so multiproc ended the other ranks" * (processes > 1)
        )
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _run_here(words: Sequence[str], names: Sequence[str], here: Environment) -> int:
    """Become the script: another launcher started this process as one of several."""
    address, port = master_address()
    if here.rank == 0:
        _say_what_starts(here.world_size, here.launcher, words[0], names)
    numbers = {name: str(value) for name, value in here._asdict().items() if name != "launcher"}
    os.environ.update((name.upper(), number) for name, number in numbers.items())
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    command = [sys.executable, "-u", *words, *_set(names, numbers)]
    if os.name == "posix":
        os.execv(sys.executable, command)
    return subprocess.call(command)


def _say_what_starts(count: int, launcher: str, script: str, names: Sequence[str]) -> None:
    passed = " ".join(names) or "only its own arguments"
    _say(f"{launcher} runs {count} process{'es' * (count > 1)} of {script} with {passed}")


def _say(line: str) -> None:
    if sys.stderr is not None:  # else the caller has closed it: 2>&-
        sys.stderr.write(f"apex.parallel.multiproc: {line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
