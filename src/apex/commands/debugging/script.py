"""Runs a script or a module as ``python`` itself would: names, paths, errors and exit codes."""

from __future__ import annotations

import argparse
import builtins
import os
import pkgutil
import runpy
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from apex.commands.command_line import UsageError, of_notebook


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a program."""
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program, as after 'python'")
    rest = parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments"
    )
    rest.required = False  # else an error without SCRIPT names both


def check_program(args: argparse.Namespace, block: str) -> None:
    """Refuse a script that does not exist or is a notebook, where a ``block`` does the same."""
    if not args.as_module and not Path(args.script).exists():
        raise UsageError(f"{args.script}: no such file")
    if not args.as_module and (text := of_notebook(args.script)):
        raise UsageError(f"{text}, or put its training into `with {block}:`")


def prepare(script: str, arguments: list[str], *, as_module: bool) -> Callable[[], None]:
    """Set ``sys`` up for a program; return what runs it.

    ``__main__`` stays in ``sys.modules`` at the end, for threads and exit functions of the program
    that pickle its classes.
    """
    sys.argv = [script, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    # Private, and what the interpreter itself calls for -m, a folder or a zip file.
    run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    if as_module:
        _search_first(os.getcwd())
        return partial(run_as_main, script)
    if pkgutil.get_importer(script) is not None:
        _search_first(os.path.abspath(script))
        return partial(run_as_main, "__main__", alter_argv=False)
    _search_first(os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    vars(main).update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    return lambda: exec(
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main)
    )


def _search_first(folder: str) -> None:
    """Put the folder of the program where that of this command was; not under ``python -P``."""
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11
        sys.path[0] = folder


def exit_code(main: Callable[[], None]) -> int:
    """Run a program, and show its error as Python does; return the exit code."""
    try:
        main()
    except SystemExit as stop:
        return _code_of(stop)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # whatever it raises
        frames = error.__traceback__
        while frames and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            frames = frames.tb_next
        try:
            sys.excepthook(type(error), error.with_traceback(frames), frames)
        except SystemExit as stop:
            return _code_of(stop)
        return 1
    return 0


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return int(stop.code or 0)
    print(stop.code, file=sys.stderr)
    return 1


def say(text: str, front: str = "apex debug: ") -> None:
    """Print a line to stderr, if the program has left that open."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"{front}{text}", file=sys.stderr)


def after_import(name: str, tell: Callable[[], None]) -> None:
    """Call ``tell`` as soon as the module ``name`` has been imported: at once if it has been."""
    if name in sys.modules:
        tell()
    else:
        sys.meta_path.insert(0, _Finder(name, tell))


class _Finder(MetaPathFinder):
    """Finds modules as the others do, and tells when one has run.

    If an import of apex's own loads that module, in the main thread, it tells after that import has
    ended or failed: apex's modules are half made before.
    """

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        self._name, self._tell = name, tell
        self._depth, self._has_run = 0, False  # the first: imports of apex's in the main thread

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_ours = name.startswith("apex.")
        if name != self._name and not is_ours:
            return None
        others = (getattr(one, "find_spec", None) for one in sys.meta_path if one is not self)
        found = (find(name, path, target) for find in others if find is not None)
        spec: ModuleSpec | None = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                del loader.exec_module
                is_main = threading.current_thread() is threading.main_thread()
                self._depth += is_ours and is_main
                try:
                    run(module)
                    self._has_run = self._has_run or name == self._name
                finally:
                    self._depth -= is_ours and is_main
                    is_due = self._has_run and not (is_main and self._depth)
                    if is_due and self in sys.meta_path:
                        sys.meta_path.remove(self)
                        self._tell()

            loader.exec_module = exec_module
        return spec
