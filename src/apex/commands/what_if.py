"""``apex what-if FILE.py:FUNCTION``: which number formats a task's model can be trained in."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from apex._compat.private import tree_map_only
from apex.commands.bench.training import tasks
from apex.commands.bench.training.tasks.task import Task, TaskOptions
from apex.commands.command_line import UsageError, raised
from apex.commands.options import add_device, at_least, check_file, pick_device
from apex.debug import WhatIf, what_if
from apex.debug.what_if.formats import FORMATS
from apex.debug.what_if.judging import ENOUGH

HELP = """Find out, layer by layer, in which number formats a model can be trained. apex emulates
the formats, so any machine will do. Prints an answer, a table and the reasons. FILE.py:FUNCTION
returns an object with model(), loss(model, batch) and loader(batch_size, seed)."""

OK, UNDECIDED = 0, 1  # exit codes
SECONDS = 2.0, 20.0  # between lines about progress: on a terminal, in a log file
PLOTS = (".png", ".svg", ".pdf")
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("task", metavar="TASK", help="FILE.py:FUNCTION, or a task of apex bench")
    add(
        "--batches",
        type=at_least(1),
        default=ENOUGH,
        metavar="N",
        help="batches to measure; with fewer than 8 there is no verdict",
    )
    add("--batch", type=at_least(1), default=32, metavar="N", help="samples in a batch")
    add(
        "--formats",
        nargs="+",
        choices=list(FORMATS),
        default=list(FORMATS),
        metavar="FORMAT",
        help=f"formats to try: {', '.join(FORMATS)} (default: all)",
    )
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of weights and data order")
    add("--weights", type=Path, metavar="FILE", help="load this saved state_dict() first")
    add("--save", type=Path, metavar="FILE", help="write the policy for amp.initialize(policy=...)")
    add("--plot", type=Path, metavar="FILE", help="draw the table; FILE ends in .png, .svg or .pdf")
    add("--data", type=Path, metavar="FOLDER", help="folder with the data of the task")
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, or 1 if nothing was decided: too few batches, or no layer with a product.

    Raises:
        UsageError: An option, the task or its model cannot be used.
    """
    device = pick_device(args.device)
    for option, file in (("--save", args.save), ("--plot", args.plot)):
        if file is not None:
            check_file(option, file)
    if args.plot is not None and args.plot.suffix not in PLOTS:
        raise UsageError(f"--plot {args.plot}: use a name that ends in {' or '.join(PLOTS)}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    task = tasks.load(args.task, TaskOptions(device, quick=True, data=args.data))
    try:
        found = _studied(task, args, device)
    except (OSError, RuntimeError, TypeError, ValueError, UnpicklingError) as error:
        raise UsageError(f"{args.task}: {raised(error)}") from error
    print(found)
    if args.plot is not None and found.layers:
        found.plot(args.plot)
    if not found.is_decided:
        return UNDECIDED
    if args.save is None:
        print("\n--save policy.json writes the policy for amp.initialize(policy=...).")
    else:
        found.save(args.save)
        print(f"\nPolicy written: amp.initialize(..., policy={str(args.save)!r})")
    return OK


def _studied(task: Task, args: argparse.Namespace, device: torch.device) -> WhatIf:
    torch.manual_seed(args.seed)
    model = task.model()
    if getattr(task.loss, "__func__", None) is Task.loss:
        raise TypeError(
            "the task has no loss(model, batch). Add one; apex bench ignores it if the task has a "
            "step"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            "model() returned several models. Write a task for each, or call apex.debug.what_if"
            if isinstance(model, Sequence)
            else f"model() returned a {type(model).__name__}; it must return an nn.Module"
        )
    if args.weights is not None:
        model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    model = model.to(device).train()
    kind = OPTIMIZERS.get(task.optimizer)
    optimizer = kind(model.parameters(), lr=task.lr) if kind and task.lr else None
    batches = [
        tree_map_only(torch.Tensor, lambda one: one.to(device), batch)
        for batch in islice(_epochs(task, args), args.batches)
    ]
    return what_if(
        model,
        task.loss,
        batches,
        formats=args.formats,
        optimizer=optimizer,
        limit=max(len(batches), 1),
        progress=_say_progress(),
    )


def _say_progress() -> Callable[[int, int], None]:
    """Make a function that writes a line on standard error now and then."""
    said, seconds = time.monotonic(), SECONDS[not sys.stderr.isatty()]

    def say(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > seconds:
            said = time.monotonic()
            print(f"apex what-if: {done} of {total} passes over batches", file=sys.stderr)

    return say


def _epochs(task: Task, args: argparse.Namespace) -> Iterator[Any]:
    """The batches of the task, again and again."""
    for epoch in count():
        is_empty = True
        for batch in task.loader(args.batch, args.seed + epoch):
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError(f"loader({args.batch}, {args.seed + epoch}) yielded no batch")
