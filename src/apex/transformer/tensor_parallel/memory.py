"""Memory that is allocated once and used in pieces."""

import torch

from apex.ops._check import ArgumentError
from apex.transformer import parallel_state
from apex.transformer.log_util import get_transformer_logger

_LOGGER = get_transformer_logger(__name__)


class MemoryBuffer:
    """Uninitialised memory on the current device. Each ``add`` uses the next piece of it.

    Args:
        name: Name for messages.
        numel: Number of elements.
        dtype: dtype of the elements.
        track_usage: Whether to count for ``print_average_usage``.
    """

    def __init__(self, name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> None:
        self.name, self.numel, self.dtype, self.track_usage = name, numel, dtype, track_usage
        self.data = torch.empty(numel, dtype=dtype, device=parallel_state.current_device())
        self._start, self._used, self._calls = 0, 0, 0

    def reset(self) -> None:
        """Start again at the front. Later calls of ``add`` overwrite the earlier pieces."""
        self._start = 0

    def is_in_use(self) -> bool:
        """Return whether any memory was used since ``reset``."""
        return self._start > 0

    def numel_in_use(self) -> int:
        """Return the number of used elements."""
        return self._start

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into the next piece, and return the piece in the tensor's shape.

        Raises:
            ArgumentError: The tensor has another dtype, or there is too little memory left.
        """
        end = self._start + tensor.numel()
        if tensor.dtype != self.dtype or end > self.numel:
            raise ArgumentError(
                f"memory buffer {self.name!r}: {tensor.numel()} elements of {tensor.dtype} do not "
                f"fit into {self.numel - self._start} free ones of {self.dtype}."
            )
        # .data: else autograd would take each later piece for a change of those it has saved
        piece = self.data.data[self._start : end].view(tensor.shape).copy_(tensor.detach())
        self._start = end
        return piece

    def get_data(self) -> torch.Tensor:
        """Return the used memory as a 1-dimensional tensor, and count its size."""
        self._used, self._calls = self._used + self._start, self._calls + 1
        return self.data[: self._start]

    def print_average_usage(self) -> None:
        """Log, at level INFO, the average share that was in use at the calls of ``get_data``."""
        if not self.track_usage:
            raise ArgumentError(
                f"memory buffer {self.name!r} was made with track_usage=False. Make it with "
                "track_usage=True."
            )
        share = 100.0 * self._used / max(1, self._calls * self.numel)
        _LOGGER.info("memory buffer %s: %.2f %% in use on average", self.name, share)


class RingMemBuffer:
    """Several ``MemoryBuffer`` objects, used in turn. They share the other arguments."""

    def __init__(
        self, name: str, num_buffers: int, numel: int, dtype: torch.dtype, track_usage: bool
    ) -> None:
        names = [f"{name} {number}" for number in range(num_buffers)]
        self.buffers = [MemoryBuffer(each, numel, dtype, track_usage) for each in names]
        self.num_buffers, self._next = num_buffers, 0

    def get_next_buffer(self) -> MemoryBuffer:
        """Return the next buffer.

        Raises:
            ArgumentError: The buffer was not reset since its last use.
        """
        buffer = self.buffers[self._next]
        if buffer.is_in_use():
            raise ArgumentError(f"memory buffer {buffer.name!r} is in use; reset it first.")
        self._next = (self._next + 1) % self.num_buffers
        return buffer


_BUFFERS: dict[str, MemoryBuffer] = {}


def allocate_mem_buff(name: str, numel: int, dtype: torch.dtype, track_usage: bool) -> MemoryBuffer:
    """Make a ``MemoryBuffer`` that ``get_mem_buff`` finds by name.

    Raises:
        ArgumentError: There is a buffer of this name already.
    """
    if name in _BUFFERS:
        raise ArgumentError(
            f"a memory buffer {name!r} is allocated already; get it with get_mem_buff."
        )
    _BUFFERS[name] = MemoryBuffer(name, numel, dtype, track_usage)
    return _BUFFERS[name]


def get_mem_buff(name: str) -> MemoryBuffer:
    """Return the buffer of a name. Raise ``KeyError`` if there is none."""
    return _BUFFERS[name]
