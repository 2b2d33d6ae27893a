"""Output of `apex selftest`: what failed, at once, and a table of each area; torch is enough."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from apex.bench.options import unique
from apex.bench.output.tables import NOTHING, aligned
from apex.bench.selftest.check import PATHS, Measured, Result

__all__ = ["show_failed", "show_running", "show"]

CLEAR = "\r\x1b[K"  # of a terminal's line


def show_running(what: str) -> None:
    """Name the check that runs, or clear the line; a log file gets nothing."""
    if sys.stderr.isatty():
        print(f"{CLEAR}{what[:79]}", end="", file=sys.stderr, flush=True)


def show_failed(result: Result) -> None:
    """Say at once that a check has failed."""
    show_running("")
    print(_failure(result), file=sys.stderr)


def show(results: Sequence[Result], content: dict[str, Any], *, gpu: bool) -> None:
    """Print where it ran, a table of each area, everything that failed, and what was not run."""
    show_running("")
    here = content["environment"]
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("apex", "torch", "triton"))
    print(f"{here['device']['name']} ({here['device']['device']}), {versions}")
    for area in unique(result.area for result in results):
        print("", area, *aligned(_rows([r for r in results if r.area == area], gpu)), sep="\n")
    failed = [result for result in results if result.status != "right"]
    print("", *map(_failure, failed), sep="\n")
    if not content["complete"]:
        print(f"INCOMPLETE: {len(results)} of {content['planned']} checks")
    seconds = sum(result.seconds for result in results)
    print(f"{len(results)} checks in {seconds:.0f} s, {len(failed)} failed.")
    print(f"Kernels: {content['kernels']}.")
    if not gpu:
        print("No GPU was used: nothing was compiled, and CUDA graphs and waits were not checked.")


def _rows(results: Sequence[Result], gpu: bool) -> Iterator[list[str]]:
    paths = [path for path in PATHS if any(result.path == path for result in results)]
    yield ["check", *(p if gpu or p != "kernels" else "kernels, interpreted" for p in paths)]
    for name in unique(result.name for result in results):
        found = {result.path: result for result in results if result.name == name}
        yield [name, *(_cell(found[path]) if path in found else NOTHING for path in paths)]


def _cell(result: Result) -> str:
    said = NOTHING if result.worst is None else _number(result.worst)
    return {"raised": "RAISED", "right": said, "wrong": f"WRONG: {said}"}[result.status]


def _number(one: Measured) -> str:
    """Show the value, what is allowed and the unit; a count of nothing is said in one word."""
    if one.allowed == 0 and one.right:
        return "exact"
    return f"{one.value:.3g} of {one.allowed:.3g} {one.unit}".rstrip()


def _failure(result: Result) -> str:
    name = f"{result.area}: {result.name} ({result.path})"
    if result.error:
        return f"RAISED  {name}: {result.error.strip().splitlines()[-1]}"
    wrong = [f"{one.what}: {_number(one)}" for one in result.measured if not one.right]
    return f"WRONG  {name}: {'; '.join(wrong) or 'nothing was measured'}"
