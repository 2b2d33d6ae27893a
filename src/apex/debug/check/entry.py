"""``apex.debug.check``: the same in a notebook, or around a part of a program."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from apex.debug.check.finding import Finding
from apex.debug.check.mistakes import KINDS
from apex.debug.check.run import CheckRun


@contextmanager
def check(*made: Any, steps: int = 20, ignore: Iterable[str] = ()) -> Iterator[list[Finding]]:
    """List the precision mistakes of the training in the block, as ``apex check`` does.

    The training computes the same numbers as without ``check``, bit for bit. Functions of torch
    that you imported by name before the block (``from torch.nn.utils import clip_grad_norm_``) are
    recognised by their effects.

    Args:
        made: The optimizers, and the model, that you made before the block. ``check`` finds those
            made in the block by itself.
        steps: Number of optimizer steps to measure.
        ignore: Kinds of mistakes to leave out; ``docs/check.md`` lists all kinds.

    Yields:
        A list that ``check`` fills with the findings at the end of the block.

    Warns:
        UserWarning: At the end of the block, if no optimizer made a step, if most of the last
            losses were not finite, or if most of the last steps were skipped.

    Raises:
        ValueError: ``steps`` is below 1, or ``ignore`` has an unknown kind.
        TypeError: You passed objects, but none of them is an optimizer.

    Example:
        >>> model = torch.nn.Linear(2, 2).bfloat16()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        >>> with apex.debug.check(model, optimizer) as found:
        ...     for _ in range(3):
        ...         model(torch.ones(1, 2).bfloat16()).float().sum().backward()
        ...         optimizer.step()
        >>> [(one.kind, one.count) for one in found]
        [('update-lost', 3)]
    """
    unknown = [kind for kind in ignore if kind not in KINDS]
    if steps < 1 or unknown:
        wrong = (
            f"there is no kind {unknown[0]!r}"
            if unknown
            else (f"steps was {steps}; it must be 1 or more")
        )
        raise ValueError(f"apex.debug.check: {wrong}")
    optimizers = [one for one in made if isinstance(one, Optimizer)]
    if made and not optimizers:
        raise TypeError(
            "apex.debug.check: pass the optimizers that the program made before the block"
        )
    run, found = CheckRun(steps, ignored=ignore), list[Finding]()
    for one in optimizers:
        run.add(one)
    try:
        yield found
        if not run.facts.steps:
            text = "no optimizer made a step in the block, so nothing was checked"
            warnings.warn(f"apex.debug.check: {text}", stacklevel=3)
    finally:
        found += run.finish()
        texts = [f"apex failed in one of its checks, please report it: {e}" for e in run.failed]
        if run.facts.not_finite:
            texts.append(f"{run.facts.not_finite}. apex.debug.watch finds the operation")
        for text in texts:
            warnings.warn(f"apex.debug.check: {text}", stacklevel=3)
