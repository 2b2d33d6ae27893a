"""Output of `apex selftest`: a progress bar, a table with a column for each path, JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from apex.bench.options import unique
from apex.bench.output.console import NOTHING
from apex.bench.output.progress import Bar
from apex.bench.selftest.check import PATHS, Check, Measured, Result, Setting

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Failures", "as_json", "show"]


class Failures(Bar):
    """Names the check that runs, and says at once what failed; a log file gets nothing else."""

    def begun(self, check: Check, setting: Setting) -> None:
        """A check begins."""
        self.doing(f"{check.area}: {check.name} ({setting.path})")

    def ended(self, result: Result) -> None:
        """It is over."""
        self._ended += 1
        self._bar.update(self._task, completed=self._ended)
        if result.status != "right":
            self._bar.console.print(_failure(result), style="red", markup=False)


def show(
    to: Console, results: Sequence[Result], content: dict[str, Any], device: torch.device
) -> None:
    """Print where it ran, a table of each area, everything that failed, and what was not run."""
    here, gpu = content["environment"], device.type == "cuda"
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("apex", "torch", "triton"))
    to.print(f"{here['device']['name']} ({device}), {versions}", style="bold", markup=False)
    for area in unique(result.area for result in results):
        _show_area(to, area, [result for result in results if result.area == area], gpu)
    failed = [result for result in results if result.status != "right"]
    for result in failed:
        to.print(_failure(result), style="red", markup=False)
    if not content["complete"]:
        to.print(f"INCOMPLETE: {len(results)} of {content['planned']} checks", style="bold red")
    seconds = sum(result.seconds for result in results)
    to.print(f"{len(results)} checks in {seconds:.0f} s, {len(failed)} failed.", style="bold")
    to.print(f"Kernels: {content['kernels']}.", markup=False)
    if not gpu:
        to.print(
            "No GPU was used: nothing was compiled, and CUDA graphs, waits and bandwidth were not "
            "checked."
        )


def _show_area(to: Console, area: str, results: Sequence[Result], gpu: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    paths = [path for path in PATHS if any(result.path == path for result in results)]
    table = Table(title=area, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", *paths):
        interpreted = heading == "kernels" and not gpu
        table.add_column("kernels, interpreted" if interpreted else heading)
    for name in unique(result.name for result in results):
        found = {result.path: result for result in results if result.name == name}
        cells = [_cell(found[path]) if path in found else NOTHING for path in paths]
        bad = any(result.status != "right" for result in found.values())
        table.add_row(*map(Text, (name, *cells)), style="red" if bad else None)
    to.print(table)


def _cell(result: Result) -> str:
    said = NOTHING if result.worst is None else _number(result.worst)
    return {"raised": "RAISED", "right": said, "wrong": f"WRONG: {said}"}[result.status]


def _number(one: Measured) -> str:
    """Show the value, what is allowed and the unit; a count of nothing is said in one word."""
    if one.allowed == 0 and one.right:
        return "exact"
    of = "" if one.allowed is None else f" of {one.allowed:.3g}"
    return f"{one.value:.3g}{of} {one.unit}".rstrip()


def _failure(result: Result) -> str:
    name = f"{result.area}: {result.name} ({result.path})"
    if result.error:
        return f"RAISED  {name}: {result.error.strip().splitlines()[-1]}"
    wrong = [f"{one.what}: {_number(one)}" for one in result.measured if not one.right]
    return f"WRONG  {name}: {'; '.join(wrong) or 'nothing was measured'}"


def as_json(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Turn results into dicts, lists, strings and numbers."""
    return [
        {
            **vars(result),
            "seconds": round(result.seconds, 3),
            "measured": [{**one._asdict(), "right": one.right} for one in result.measured],
        }
        for result in results
    ]
