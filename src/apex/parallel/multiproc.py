"""Start a training script once per GPU: ``python -m apex.parallel.multiproc script.py args...``.

The processes are torchrun's, on this machine. The first that fails ends the others, and its exit
code is that of the command; 128 plus its number for a signal, as in a shell. Ctrl-C and SIGTERM end
all of them. The number of processes is that of the visible GPUs, or 1 without any; ``--world-size
N`` sets another, among the options here or, as in the original, among the arguments of the script.

**Ranks.** Every process has torchrun's variables (``RANK``, ``LOCAL_RANK``,
``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``). A script that declares
arguments for these numbers gets them as well, and need not be changed:

=================================  =============================  ==========================
the script declares                written for                    appended to its arguments
=================================  =============================  ==========================
``--rank`` and ``--world-size``    this launcher, in 2018         ``--rank R --world-size N``
``--local_rank``, ``--local-rank`` torch.distributed.launch       ``--local_rank R``
none of them                       torchrun                       nothing
=================================  =============================  ==========================

Arguments of these names that the user gave are replaced. A script declares an argument if the name
is a string constant in it, or in a module of its folder that it imports; nothing is executed to
find out. ``--rank`` without ``--world-size`` is not passed: it has other meanings (of a matrix).
Where the arguments are declared in an installed package, say which: ``--pass rank,world-size`` or
``--pass local_rank``; ``--pass none`` passes nothing. A line on standard error says what is passed.
(The original appended ``--rank`` and ``--world-size`` to every script and set no variables.)

**Output.** All processes write to the terminal. (The original sent the standard output of rank 1
and above to ``GPU_1.log`` and so on.) ``--log-dir FOLDER`` sends it to files below that folder,
named ``.../1/stdout.log`` and so on; standard error stays where it is.

**Several machines.** Where torchrun, mpirun or srun started this command as one of several
processes (:func:`apex.parallel.launch.environment` finds its rank), it starts none: it runs the
script in its own place, with the same variables and arguments. So a script of any year runs on two
machines of four GPUs each by one of ::

    srun -N 2 --ntasks-per-node 4 python -m apex.parallel.multiproc script.py args...
    torchrun --nnodes 2 --nproc-per-node 4 ... -m apex.parallel.multiproc script.py args...

A script that reads the variables of torchrun is best started by torchrun itself.
"""

import argparse
import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from apex.parallel.launch import Environment, environment, master_address

__all__ = ["main"]

_RANK = ("--rank",)
_WORLD_SIZE = ("--world-size", "--world_size")
_LOCAL_RANK = ("--local_rank", "--local-rank")
_LOCAL_RANK_OF_TORCHRUN = "${local_rank}"  # torchrun puts the number there, in each process its own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Options, script and its arguments, as after ``python -m apex.parallel.multiproc``.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    script, arguments = options.script, options.arguments
    if not Path(script).is_file():
        parser.error(f"{script} is no file; give the path of a Python script")
    if options.log_dir:
        try:
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--log-dir {options.log_dir}: {error.strerror}")
    strings = _strings(script)
    names = _declared(strings) if options.passed is None else options.passed
    try:
        asked = options.world_size or _asked_in(arguments)
        if not strings.intersection(_WORLD_SIZE):
            arguments = _without_world_size(arguments)  # it was for this command
        here = environment()
        if here.world_size > 1:
            _check_options(here, asked, options.log_dir)
            if here.rank == 0:
                _say(f"{here.world_size} processes by {here.launcher}", script, names)
            return _run_in_place(script, arguments, names, here)
    except ValueError as error:
        parser.error(str(error))
    processes = asked or torch.cuda.device_count() or 1
    _say(f"{processes} process{'es' if processes > 1 else ''} by torchrun", script, names)
    return _start(script, arguments, names, processes, options.log_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apex.parallel.multiproc",
        description="Start a training script once per GPU of this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size", type=_at_least_1, metavar="N",
        help="how many processes (default: one per visible GPU, or one)",
    )  # fmt: skip
    parser.add_argument(
        "--pass", dest="passed", type=_options, metavar="NAMES",
        help="which of rank,world-size,local_rank to append to the script's arguments, or none "
        "(default: those that the script declares)",
    )  # fmt: skip
    parser.add_argument(
        "--log-dir", metavar="FOLDER",
        help="where to put the standard output of all processes but the first (default: nowhere, "
        "it is shown)",
    )  # fmt: skip
    parser.add_argument("script", help="path of a Python program")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False
    return parser


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _options(text: str) -> list[str]:
    """Turn "rank,world-size" into the options ``--rank`` and ``--world-size``."""
    names = [] if text == "none" else [f"--{name.strip()}" for name in text.split(",")]
    known = (*_RANK, *_WORLD_SIZE, *_LOCAL_RANK)
    if not set(names) <= set(known):
        allowed = ", ".join(name[2:] for name in known)
        raise argparse.ArgumentTypeError(f"{text!r} is not none and not some of {allowed}")
    return names


def _asked_in(arguments: Sequence[str]) -> int | None:
    """Return the number after ``--world-size`` in the arguments of the script, if it is there."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in _WORLD_SIZE:
            try:
                return _at_least_1(value if equals else following)
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{name} of the script: {error}") from None
    return None


def _check_options(here: Environment, asked: int | None, log_dir: str | None) -> None:
    """Refuse what cannot be had in a process that another launcher started."""
    if asked not in (None, here.world_size):
        raise ValueError(
            f"--world-size {asked}, but {here.launcher} started {here.world_size} processes: "
            "leave the option out"
        )
    if log_dir:
        raise ValueError(
            f"--log-dir {log_dir}, but {here.launcher} started this process: use its own option "
            "for files of output"
        )


def _without_world_size(arguments: Sequence[str]) -> list[str]:
    """Take ``--world-size N`` out of the arguments of the script."""
    done, words = [], iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in _WORLD_SIZE:
            done.append(word)
        elif not equals:
            next(words, None)
    return done


def _strings(script: str) -> set[object]:
    """Find the constants in a script and in the modules of its folder, without executing it."""
    nodes = [node for tree in _trees(Path(script).resolve()) for node in ast.walk(tree)]
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def _declared(strings: set[object]) -> list[str]:
    """Find out which of the options a script declares."""
    rank, world_size, local_rank = (
        [name for name in names if name in strings] for names in (_RANK, _WORLD_SIZE, _LOCAL_RANK)
    )
    return [*(rank + world_size if rank and world_size else []), *local_rank]


def _trees(script: Path) -> Iterator[ast.Module]:
    """Yield the syntax trees of a script and of the modules in its folder that it imports."""
    waiting, seen = [script], set()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        tree = _parsed(file)
        waiting += _imported(tree, file, script.parent)
        yield tree


def _parsed(file: Path) -> ast.Module:
    """Parse a file; where it is not Python, its error is shown when it runs, not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # ValueError: null bytes, in Python 3.10
            return ast.Module(body=[], type_ignores=[])


def _imported(tree: ast.Module, file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files that a module's imports mean, if they exist in ``folder``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [folder / alias.name.replace(".", "/") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [folder, *file.parents][min(node.level, len(file.parents))]
            package = start / (node.module or "").replace(".", "/")
            modules = [package, *(package / alias.name for alias in node.names)]
        else:
            continue
        for module in modules:
            yield from (Path(f"{module}.py"), module / "__init__.py")


def _completed(
    arguments: Sequence[str], names: Sequence[str], rank: str, local_rank: str, world_size: str
) -> list[str]:
    """Set the options ``names`` among the arguments of the script."""
    done = list(arguments)
    for name in names:
        value = rank if name in _RANK else world_size if name in _WORLD_SIZE else local_rank
        for at, word in enumerate(done):
            if word == name and at + 1 < len(done):
                done[at + 1] = value
                break
            if word.startswith(f"{name}="):
                done[at] = f"{name}={value}"
                break
        else:
            done += [name, value]
    return done


def _start(
    script: str, arguments: Sequence[str], names: Sequence[str], processes: int, log_dir: str | None
) -> int:
    """Let torchrun start the processes; return the exit code when all have ended."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", f"--nproc-per-node={processes}"]
    # If its store is shared, no process listens at the tcp:// address of a script of 2018.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if log_dir and processes > 1:
        redirected = ",".join(f"{rank}:1" for rank in range(1, processes))
        options += [f"--log-dir={log_dir}", f"--redirects={redirected}"]
    given = [word.replace("$", "$$") for word in arguments]  # torchrun makes one of two
    rank = _LOCAL_RANK_OF_TORCHRUN  # on one machine they are the same
    words = _completed(given, names, rank, rank, str(processes))
    try:
        run.run(run.parse_args([*options, script, *words]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        _write(f"rank {number} ended {how}" + ", so the others were ended" * (processes > 1))
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _run_in_place(
    script: str, arguments: Sequence[str], names: Sequence[str], here: Environment
) -> int:
    """Run the script in this process, which another launcher started as one of several."""
    address, port = master_address()
    os.environ.update(
        RANK=str(here.rank),
        LOCAL_RANK=str(here.local_rank),
        WORLD_SIZE=str(here.world_size),
        LOCAL_WORLD_SIZE=str(here.local_world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    words = _completed(arguments, names, str(here.rank), str(here.local_rank), str(here.world_size))
    command = [sys.executable, "-u", script, *words]
    if os.name == "posix":
        os.execv(sys.executable, command)
    return subprocess.call(command)


def _say(processes: str, script: str, names: Sequence[str]) -> None:
    passed = f"with {' '.join(names)}" if names else "with its own arguments alone"
    _write(f"{processes} of {script}, {passed}")


def _write(line: str) -> None:
    sys.stderr.write(f"apex.parallel.multiproc: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
