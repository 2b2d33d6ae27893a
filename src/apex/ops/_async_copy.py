"""Numbers from a device that the host does not wait for."""

from __future__ import annotations

import torch


class AsyncCopy:
    """A copy of a few numbers from a device to the host, which does not wait for it.

    It never ``arrives`` from a graph that is captured: its replay runs no host code.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.arrives = values.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        if not self.arrives:
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float] | None:
        """The numbers, or ``None`` as long as they have not arrived."""
        if torch.cuda.is_current_stream_capturing() or not self._event.query():  # type: ignore[no-untyped-call]
            return None
        values: list[float] = self._host.tolist()
        return values
