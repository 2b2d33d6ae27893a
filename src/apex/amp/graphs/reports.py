"""What replays tell the host: skipped steps, without waiting for the device.

A replay runs no code of the host, so it sends no report as an eager step does. Every few replays a
copy of the counts is sent, and what an earlier one has brought is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from apex.amp import _speech
from apex.amp.gradients import overflow
from apex.amp.optimizer import OptimizerState

EVERY = 8  # replays: a copy takes 10 us of the host


class Reports:
    """The skipped steps of replays, for optimizers of which steps can be skipped."""

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        self._states = [state for state in states if state.training.is_dynamic()]
        self._sent: Any = None
        self._replays = 0

    def after_replay(self) -> None:
        """Log what has arrived, and send for the next report.

        Raises:
            RuntimeError: Too many steps in a row were skipped.
        """
        self._replays += 1
        if self._replays % EVERY or not self._states:
            return
        arrived = [] if self._sent is None else self._sent.read()
        if arrived is None:
            return
        states = [(one.overflow, one.training.loss_scalers[0].numbers) for one in self._states]
        sent = [x for one, scale in states for x in (one.counts.numbers.float(), scale[:1])]
        copy = overflow.AsyncCopy(torch.cat(sent))
        self._sent = copy if copy.arrives else None
        for place, state in zip(range(0, len(arrived), 4), self._states, strict=False):
            _tell(state.overflow, *arrived[place : place + 4])


def _tell(
    known: overflow.Overflow, taken: float, steps: float, in_a_row: float, scale: float
) -> None:
    skipped, before = int(steps - taken), known.told
    known.told = skipped
    if in_a_row >= known.limit:
        report = overflow.SkippedStep(int(in_a_row), 0, 0, scale, True)
        raise RuntimeError(report.describe("(Replays of a CUDA graph report late.)"))
    if skipped > before and known.verbosity > 0:
        _speech.say(
            f"Gradient overflow.  {skipped} of {int(steps)} steps were skipped so far; the loss "
            f"scale is {scale}",
            logging.WARNING,
        )
