"""What the host learns late: numbers on their way from a device that runs behind it.

A step that waits for a GPU to say whether a gradient was finite stops the host from running ahead.
With an optimizer whose kernels can skip by themselves the step need not know: :class:`Word` carries
the flags to the host meanwhile, and whoever wants to speak of them looks whether they are there.
"""

from __future__ import annotations

import torch


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
