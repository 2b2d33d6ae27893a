"""What the host learns late: numbers on their way from a device that runs behind it.

A step that waits for a GPU to say whether a gradient was finite stops the host from running ahead.
With an optimizer whose kernels can skip by themselves the step need not know: :class:`Word` carries
the flags to the host meanwhile, and whoever wants to speak of them asks :class:`Reports` whether
they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from apex.amp.passes import Pass


def runs_behind(device: torch.device) -> bool:
    """Whether the host can run ahead of ``device`` and hear from it later."""
    return device.type in ("cuda", "meta")


class Word:
    """A few numbers of a device, sent for without waiting.

    Args:
        values: 1-D tensor on a device that :func:`runs_behind`.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._host: torch.Tensor | None = None
        if values.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return  # nothing will ever arrive: a graph that is replayed says nothing on the way
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_lost(self) -> bool:
        """Whether it will never arrive."""
        return self._host is None

    def read(self) -> list[float] | None:
        """The numbers, or ``None`` as long as they have not arrived."""
        if self._host is None or torch.cuda.is_current_stream_capturing():
            return None
        if not self._event.query():  # type: ignore[no-untyped-call]
            return None
        values: list[float] = self._host.tolist()
        return values


class Report(NamedTuple):
    """What a device has told of one step.

    Attributes:
        skipped: Steps in a row that were skipped; 0 for a step that was taken.
        loss_id: Number of the scaler of the first pass that was not finite.
        scale: Its scale after that.
    """

    skipped: int
    loss_id: int
    scale: float


class Reports:
    """Of an optimizer's steps that a device decided, in their order."""

    def __init__(self) -> None:
        self._skips: torch.Tensor | None = None  # steps in a row, counted on the device
        self._sent: deque[tuple[list[int], Word]] = deque()

    def order(self, passes: Sequence[Pass]) -> torch.Tensor:
        """Send for the report of a step.

        Args:
            passes: Of the step, at least one.

        Returns:
            Whether the step is to be skipped: float32, 0-dim, on the device of the first pass.
        """
        device = passes[0].found.device
        flags = [done.found.to(device, torch.float32, non_blocking=True) for done in passes]
        noop = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        skips = torch.zeros_like(noop) if self._skips is None else self._skips
        self._skips = torch.where(noop == 0, 0.0, skips.to(device) + 1)
        scales = [done.scaler._state[0].to(device, non_blocking=True) for done in passes]
        word = Word(torch.stack([self._skips, *flags, *scales]))
        if not word.is_lost:
            self._sent.append(([done.index for done in passes], word))
        return noop

    def arrived(self) -> Iterator[Report]:
        """What has arrived by now and was not given before."""
        while self._sent:
            indices, word = self._sent[0]
            values = word.read()
            if values is None:
                return
            self._sent.popleft()
            flags, scales = values[1 : 1 + len(indices)], values[1 + len(indices) :]
            told = zip(indices, flags, scales, strict=True)
            bad = [(index, scale) for index, flag, scale in told if flag]
            yield Report(int(values[0]), *(bad[0] if bad else (indices[0], scales[0])))
