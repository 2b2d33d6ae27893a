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
from apex.amp.scaler import SCALE

EVERY = 8  # replays: a copy takes 10 us of the host


class Reports:
    """The skipped steps of replays, for optimizers of which steps can be skipped."""

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        self.states = [state for state in states if state.training.is_dynamic()]
        self._known: list[float] = []  # how many steps were skipped
        self._sent: Any = None
        self._replays = 0

    def _numbers(self, state: OptimizerState) -> list[torch.Tensor]:
        counts = state.overflow.counts
        scale = state.training.loss_scalers[0]._state[SCALE]
        return [counts._steps - counts._taken, counts.in_a_row, scale]

    def forget(self) -> None:
        """Forget counts: steps without the graph report by themselves."""
        self._known, self._sent = [], None

    def after_replay(self) -> None:
        """Log what has arrived, and send for the next report.

        Raises:
            RuntimeError: Too many steps in a row were skipped.
        """
        self._replays += 1
        if not self.states or self._replays % EVERY:
            return
        arrived = None if self._sent is None else self._sent.read()
        if arrived is not None:
            self._sent = None
            self._take(arrived)
        if self._sent is None:
            found = [number for state in self.states for number in self._numbers(state)]
            sent = overflow.AsyncCopy(torch.stack([number.float() for number in found]))
            self._sent = sent if sent.arrives else None

    def _take(self, numbers: list[float]) -> None:
        before = self._known or [None] * len(self.states)  # type: ignore[list-item]
        self._known = numbers[::3]
        for state, known, place in zip(self.states, before, range(0, len(numbers), 3), strict=True):
            skipped, in_a_row, scale = numbers[place : place + 3]
            state.overflow.skipped = int(in_a_row)
            if in_a_row >= state.overflow.limit:
                report = overflow.SkippedStep(int(in_a_row), 0, 0, scale, True)
                raise RuntimeError(report.describe("(Replays of a CUDA graph report late.)"))
            new = int(skipped - known) if known is not None else int(in_a_row > 0)
            if new > 0 and state.overflow.verbosity > 0:
                _speech.say(
                    f"Gradient overflow.  {new} steps of the last replays were skipped; the loss "
                    f"scale is {scale}",
                    logging.WARNING,
                )
