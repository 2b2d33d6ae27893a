"""The matrix of cells: in which order they run, in which processes, and what a killed run keeps.

Seeds are the outermost loop. So a disturbance of the machine affects all levels, and an
interrupted matrix has all levels at the first seeds. Each finished cell is a file in
``FOLDER/cells``, named by a digest of the cell and of all that its numbers depend on; a matrix that
finds the file takes it and trains nothing. Cells that failed are tried again.
"""

import ast
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from apex.bench.cli import UsageError
from apex.bench.output.files import save
from apex.bench.training.results import Cell, Run, run_from
from apex.bench.training.tasks.task import TaskOptions
from apex.bench.training.worker import Job, Worker

__all__ = ["Store", "plan", "run_all", "tf32_of"]

FORMAT = "apex bench cell 1"


def plan(
    tasks: Sequence[dict[str, Any]],
    levels: Sequence[tuple[str, bool | None]],
    batches: Sequence[int],
    seeds: int,
    *,
    compile: bool,
    quick: bool,
) -> tuple[Cell, ...]:
    """Make the cells in the order in which they run.

    Args:
        tasks: ``task``, ``optimizer``, ``lr``, ``epochs`` of each.
        levels: Each with whether TF32 is on.
        batches: Batch sizes.
        seeds: How many.
        compile: Whether models are compiled.
        quick: Whether the tasks take less data.
    """
    return tuple(
        Cell(level=level, tf32=tf32, batch=batch, seed=seed, compile=compile, quick=quick, **task)
        for seed in range(seeds)
        for task in tasks
        for batch in batches
        for level, tf32 in levels
    )


class Store:
    """Finished cells, a file for each."""

    def __init__(self, folder: Path, environment: dict[str, Any], options: TaskOptions) -> None:
        """Keep cells in ``folder``, apart from those of other machines, versions and data."""
        self._folder = folder
        depends = {key: value for key, value in environment.items() if key != "date"}
        data = options.data and str(options.data.resolve())
        self._depends = json.dumps([depends, data], sort_keys=True, default=str)
        self._sources: dict[str, dict[str, str]] = {}

    def get(self, cell: Cell) -> Run | None:
        """Return the run of a cell if it was finished; a damaged file counts as none."""
        try:
            content = json.loads(self._file(cell).read_text(encoding="utf-8"))
            run = run_from(content["run"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return run if run.cell == cell and run.status != "failed" else None

    def put(self, run: Run) -> None:
        """Keep a run, whole or not at all.

        Raises:
            UsageError: What it trained was edited since the first look at it: nobody knows which
                text was trained.
        """
        for name, text in self._source(run.cell.task).items():
            if _text(Path(name)) != text:
                raise UsageError(f"{name} was changed while {run.cell.task} was trained; run again")
        self._folder.mkdir(parents=True, exist_ok=True)
        save({"format": FORMAT, "run": dataclasses.asdict(run)}, self._file(run.cell))

    def forget(self, cells: Sequence[Cell]) -> None:
        """Delete what is kept of these cells."""
        for cell in cells:
            self._file(cell).unlink(missing_ok=True)

    def _file(self, cell: Cell) -> Path:
        source = json.dumps(self._source(cell.task), sort_keys=True)
        words = json.dumps(dataclasses.asdict(cell), sort_keys=True)
        text = "\0".join((FORMAT, words, self._depends, source))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        name = "".join(c if c.isalnum() else "-" for c in f"{cell.task}-{cell.label}")
        return self._folder / f"{name[:60]}-{cell.batch}-{cell.seed}-{digest}.json"

    def _source(self, task: str) -> dict[str, str]:
        """Return the text of a user's task as it was at first: an edited one is another task."""
        if task not in self._sources:
            self._sources[task] = {str(file): _text(file) for file in _files(task)}
        return self._sources[task]


def _files(task: str) -> list[Path]:
    """Return the file of a user's task, and the modules beside it that it imports, and they."""
    path, colon, _ = task.rpartition(":")
    file = Path(path).resolve()
    found: set[Path] = set()
    new = {file} if colon else set()
    while new:
        found |= new
        names = {name for each in new for name in _imports(_text(each))}
        beside = {file.with_name(f"{name}.py") for name in names}
        within = {each for name in names for each in file.with_name(name).rglob("*.py")}
        new = {each for each in beside | within if each.is_file()} - found
    return sorted(found)


def _imports(text: str) -> set[str]:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return set()
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    whole += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in whole}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run_all(
    cells: Sequence[Cell],
    options: TaskOptions,
    store: Store,
    begun: Callable[[Cell], None],
    told: Callable[[float], None],
    ended: Callable[[Run], None],
) -> None:
    """Run the cells in order, each in a process of its own; quick ones share one for each level.

    Args:
        cells: What to run.
        options: For the tasks.
        store: Where finished cells are looked up and kept.
        begun: Called before a cell is trained, and not for one that was finished before.
        told: Called with the share of the present cell that is done.
        ended: Called with every run, kept ones too.
    """
    shared: dict[tuple[str, str], Worker] = {}
    try:
        for cell in cells:
            run = store.get(cell)
            if run is None:
                begun(cell)
                worker = shared.setdefault((cell.task, cell.label), Worker())
                run = worker.run(Job(cell, options, alone=not cell.quick), told)
                if not cell.quick:
                    worker.close()
                store.put(run)
            ended(run)
    finally:
        for worker in shared.values():
            worker.close()


def tf32_of(device: torch.device) -> bool:
    """Whether a device has TF32, so that it is a choice there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
