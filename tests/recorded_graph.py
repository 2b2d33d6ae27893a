"""What stands for a CUDA graph on a CPU: calls of aten, recorded and replayed into their memory.

A replay calls each function, and each kernel of Triton's interpreter, with the memory of the
capture and puts the results where those of the capture are. So it sees what was written in place
meanwhile, and nothing that was replaced. As CUDA's graphs it holds the memory that it made, and no
other: a replay that reads what was freed meanwhile is refused. No Python code of the program runs
again, and no version of a tensor of the program changes. What makes the host wait is refused, as
CUDA does. Other than CUDA the capture computes, too: it is the first replay. One that has failed is
taken back.
"""

import contextlib
from functools import partial
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from apex.amp import scaler
from apex.amp.gradients import overflow
from apex.amp.graphs import device
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
        self.calls, self.before, self.made = [], [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS:
            raise HostRead(f"{func} waits for the device")
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                written = [x.data for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
                self.before += [(tensor, tensor.clone()) for tensor in written]
        out = func(*args, **kwargs)
        is_new = func is aten.lift_fresh.default  # torch.tensor(0.5)
        self.made |= {_key(x) for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)} - (
            set() if is_new else {_key(x) for x in tree_flatten((args, kwargs))[0]}
        )
        self.calls.append((func, *tree_map(self._memory, (args, kwargs, out))))
        return out

    def _memory(self, value):
        """The memory of a tensor as it is now; ``param.data = other`` does not move it.

        Writes to it change no version of the tensor.
        """
        if not isinstance(value, torch.Tensor):
            return value
        return value.data if _key(value) in {None, *self.made} else Outside(value)

    @contextlib.contextmanager
    def capture(self):
        """Record what is called in the block; apex is told that a graph is being captured."""
        from triton.runtime.interpreter import GridExecutor

        random, launch = torch.get_rng_state(), GridExecutor.__call__

        def recorded(kernel, *args, **kwargs):
            given = tree_map(self._memory, (args, kwargs))
            self.calls.append((partial(launch, kernel), *given, None))
            return launch(kernel, *args, **kwargs)

        def refused(tensor, *args, **kwargs):
            raise HostRead("the device is waited for")

        with contextlib.ExitStack() as stack:
            for owner, name, value in [
                (_runtime, "capturing", lambda: True),
                (GridExecutor, "__call__", recorded),
                (torch.Tensor, "tolist", refused),
                (torch.Tensor, "numpy", refused),
            ]:
                stack.enter_context(mock.patch.object(owner, name, value))
            try:
                with self:
                    yield self
            except BaseException:
                self.take_back()
                torch.set_rng_state(random)
                raise

    @torch.no_grad()
    def take_back(self):
        """Write what was there before the capture; what kernels have written stays."""
        for tensor, value in reversed(self.before):
            tensor.copy_(value)
        self.before.clear()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # what was recorded is below it
    def replay(self):
        for func, args, kwargs, out in self.calls:
            args, kwargs, out = tree_map(_there, (args, kwargs, out))
            now = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(now)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new.detach())


class Outside:
    """A tensor that a graph did not make: where it is, without holding its memory."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.place = (
            tensor.dtype,
            (tensor.storage_offset(), tensor.shape, tensor.stride()),
        )

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError(f"a replay reads memory that was freed: {self.dtype}, {self.place}")
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, *self.place)


def _there(value):
    return value.tensor() if isinstance(value, Outside) else value


def _key(value):
    try:
        return value.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


class RecordedDeviceGraph(device.DeviceGraph):
    """Stands for ``DeviceGraph`` of amp.capture."""

    def __init__(self, its_device):
        self.device, self.graph = its_device, None

    def on_its_stream(self):
        return contextlib.nullcontext()

    def capture(self, work, generators):
        graph = RecordedGraph()
        with graph.capture():
            found = work()
        graph.before.clear()  # which holds memory that the graph has written
        self.graph, self.is_first = graph, True
        return found

    def replay(self):
        if not self.is_first:  # else the capture was
            self.graph.replay()
        self.is_first = False

    def release(self):
        self.graph = None


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
            (device, "has_graphs", lambda device: True),
            (device, "DeviceGraph", RecordedDeviceGraph),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_runtime.use("reference"))  # no paths of the CPU, where reads are free
        yield
