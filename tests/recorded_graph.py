"""What stands for a CUDA graph on a CPU: calls of aten, recorded and replayed into their memory.

A replay calls each function with the tensors of the capture and puts the results where those of the
capture are, so that it sees what was written in place meanwhile, and nothing that was replaced. No
Python code of the program runs again. What makes the host wait is refused, as CUDA does. Other than
CUDA the capture computes, too: it is the first replay.
"""

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from apex.amp import scaler
from apex.amp.gradients import overflow
from apex.ops import _runtime

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default,
    aten.masked_select.default, aten.nonzero.default, aten._unique2.default,
}  # fmt: skip


class HostRead(RuntimeError):
    """The host read a tensor while a graph was captured."""


class RecordedGraph(TorchDispatchMode):
    """Stands for ``torch.cuda.CUDAGraph``.

    Example:
        >>> graph, x = RecordedGraph(), torch.ones(())
        >>> with graph.capture():
        ...     y = x * 2
        >>> _ = x.fill_(5.0)
        >>> graph.replay()
        >>> y
        tensor(10.)
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise HostRead(f"{func} waits for the device")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, *tree_map(_memory, (args, kwargs or {}, out))))
        return out

    @contextlib.contextmanager
    def capture(self):
        """Record what is called in the block; apex is told that a graph is being captured."""
        with mock.patch.object(_runtime, "capturing", return_value=True), self:
            yield self

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # what was recorded is below it
    def replay(self):
        for func, args, kwargs, out in self.calls:
            now = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(now)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new.detach())


def _memory(value):
    """The memory of a tensor as it is now, which ``param.data = other`` does not move."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class NeverRead:
    """Stands for ``AsyncCopy`` where the host never learns of a skipped step."""

    arrives = False

    def __init__(self, values):
        pass


@contextlib.contextmanager
def like_a_gpu():
    """Let apex treat the CPU as a device that the host does not wait for."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in [
            (scaler.LossScaler, "_waits_for_nothing", False),
            (overflow, "runs_behind", lambda device: True),
            (overflow, "AsyncCopy", NeverRead),
            (_runtime, "waits", lambda device: True),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_runtime.use("reference"))  # no paths of the CPU, where reads are free
        yield
