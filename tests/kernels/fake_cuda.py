"""CUDA tensors on a machine without a GPU: what would be launched, uploaded and waited for.

torch's ``FakeTensorMode`` has tensors on ``cuda:0`` and ``cuda:1`` with shapes and no memory. What
it lacks has stand-ins here: the guards, streams and properties of devices, addresses, pinned
memory, whether a CUDA graph is being captured, and Triton's driver, which notes launches and
computes nothing and refuses what is too large for CUDA (see driver.py). Noted as well are

* uploads: copies to a device from memory that is not pinned, which make the host wait and which a
  capture forbids; so are copies that index with a CPU tensor or a list, and
  ``torch.tensor(..., device="cuda")``;
* waits: ``.item()``, ``bool()``, ``.cpu()``, ``nonzero()`` and whatever else needs the numbers, and
  copies without ``non_blocking=True``;
* sources of uploads in a captured graph that are freed after the call.

torch's autograd engine asks for a real device, so nothing here runs backward.
"""

import contextlib
import ctypes
import os
import re
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton._C.libtriton import llvm
from triton.runtime import driver

from apex.kernels import multi_tensor
from tests.kernels.driver import Hopper, Launcher, without_machine_code, without_plans

aten = torch.ops.aten
READS = (DataDependentOutputException, DynamicOutputShapeException)
# Numbers of c10::DeviceType; the array of device guards is indexed by them.
CUDA, META, DEVICE_TYPES = 1, 14, 22


@dataclass
class Log:
    """What happened.

    Attributes:
        launches: Kernel, device of its tensors, device that was the current one, stream.
        uploads: Operations that copied from pageable memory.
        waits: Operations that waited for a device.
        sources: Weak references to what was uploaded while a graph was being captured.
    """

    launches: list = field(default_factory=list)
    uploads: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    sources: list = field(default_factory=list)

    def noted(self):
        """What happened so far; ``freed``: how many sources are gone, which replays read again."""
        return {
            "launches": [*self.launches],
            "uploads": [*self.uploads],
            "waits": [*self.waits],
            "freed": sum(source() is None for source in self.sources),
        }


class Devices:
    """The current device and stream, and whether a graph is captured."""

    def __init__(self):
        self.current = 0
        self.capturing = False
        self.pinned = {}  # address of a storage -> the storage, which keeps it from being reused

    def exchange(self, index):
        before = self.current
        self.current = index if index >= 0 else before
        return before

    def stream(self, device=None):
        index = self.current if device is None else torch.device(device).index
        return SimpleNamespace(cuda_stream=0x1000 * (index + 1), device_index=index)


class Event:
    """An event that has passed when it is asked for, which CUDA refuses in a capture."""

    def __init__(self, devices):
        self._devices = devices

    def record(self, stream):
        assert not self._devices.capturing

    def query(self):
        assert not self._devices.capturing
        return True


class Driver(Hopper):
    """Triton's driver, for whichever device is the current one."""

    def __init__(self, devices, log):
        self._devices = devices

        class Noting(Launcher):
            def __call__(self, x, y, z, stream, *args):
                super().__call__(x, y, z, stream, *args)
                tensors = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
                where = sorted({str(tensor.device) for tensor in tensors})
                log.launches.append((self.name, where, f"cuda:{devices.current}", stream))

        self.launcher_cls = Noting

    def get_current_device(self):
        return self._devices.current

    def get_current_stream(self, device):
        return self._devices.stream(f"cuda:{device}").cuda_stream


class Pinning(TorchFunctionMode):
    """Pinned memory, which no allocator can give here."""

    def __init__(self, devices):
        super().__init__()
        self._pinned = devices.pinned

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        pins = kwargs.pop("pin_memory", False)
        if func is torch.Tensor.is_pinned:
            return args[0].untyped_storage()._cdata in self._pinned
        if func is torch.Tensor.pin_memory:
            pins, made = True, args[0].clone()
        else:
            made = func(*args, **kwargs)
        if pins:
            storage = made.untyped_storage()
            self._pinned[storage._cdata] = storage
        return made


class Watch(TorchDispatchMode):
    """Notes uploads and waits."""

    def __init__(self, devices, log):
        super().__init__()
        self._devices, self._log = devices, log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "apex":  # by its fake function nothing would be launched
            cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
            return func.redispatch(cuda, *args, **kwargs)
        if func is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or args[0].device)
            self._copied(args[0], target, kwargs.get("non_blocking", False), None)
            if args[0].is_cpu and target.type == "cuda":  # of known numbers it would really do it
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty(args[0].shape, dtype=dtype, device=target)
        elif func is aten.copy_.default:
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._copied(args[1], args[0].device, not blocks, args[0])
        elif func.overloadpacket.__name__.lstrip("_").startswith("index"):
            self._indexed(func, [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)])
        try:
            return func(*args, **kwargs)
        except READS:
            self._log.waits.append(f"{func} reads a tensor of the device")
            raise

    def _copied(self, source, target, non_blocking, out):
        kinds = source.device.type, target.type
        if not source.numel():
            return
        if kinds == ("cpu", "cuda"):
            if not self._is_pinned(source):
                self._log.uploads.append(f"{tuple(source.shape)} of {source.dtype} to {target}")
            elif not non_blocking:
                self._log.waits.append(f"a blocking copy of {tuple(source.shape)} to {target}")
            elif self._devices.capturing:
                self._log.sources.append(weakref.ref(source))
        elif kinds == ("cuda", "cpu") and not (
            non_blocking and (out is None or self._is_pinned(out))
        ):
            self._log.waits.append(f"a copy of {tuple(source.shape)} to the CPU")

    def _indexed(self, func, tensors):
        kinds = {tensor.device.type for tensor in tensors}
        if kinds == {"cpu", "cuda"}:
            self._log.uploads.append(f"{func} with an index or a value on the CPU")

    def _is_pinned(self, tensor):
        return tensor.untyped_storage()._cdata in self._devices.pinned


def _address(tensor):
    """A number of its own for each element of each storage, a multiple of 16 at its start."""
    offset = tensor.storage_offset() * tensor.element_size()
    return (tensor.untyped_storage()._cdata << 12) + offset


def _no_guard():
    """Let torch's C++ code guard CUDA devices by doing nothing.

    torch does so itself where it was built with CUDA and finds no GPU. A build for the CPU has no
    guard for CUDA at all; that of ``meta`` does nothing.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # torch 2.9 has none
    if ensure is not None:
        ensure()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    if ensure is None or not guards[CUDA]:
        guards[CUDA] = guards[META]


def _only_checked(backend=None, stages=None, *more):
    """Triton's hook: compile as far as a launch is refused by it, for types and shared memory.

    No kernel runs: LLVM's optimization, PTX and ptxas are half of the time.
    """
    if stages is None:
        return "only checked", "only checked"
    without_machine_code(backend, stages)
    stages["ptx"] = _named
    return None


def _named(llir, metadata):
    """In the place of PTX: note the kernel's name, as that stage does."""
    (metadata["name"],) = re.findall(r"^define .*ptx_kernel .*@(\w+)\(", llir, re.MULTILINE)
    return ""


@contextlib.contextmanager
def fake_cuda():
    """Give `Devices` and a `Log`; use it in a process of its own."""
    devices, log = Devices(), Log()
    _no_guard()
    driver.set_active(Driver(devices, log))
    properties = SimpleNamespace(
        name="card", multi_processor_count=132, major=9, minor=0, warp_size=32
    )
    stand_ins = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: devices.current,
        "current_stream": devices.stream,
        "Event": lambda: Event(devices),
        "is_current_stream_capturing": lambda: devices.capturing,
        "get_device_properties": lambda device=None: properties,
        "_exchange_device": devices.exchange,
        "_maybe_exchange_device": devices.exchange,
    }
    with (
        FakeTensorMode(),  # before CUDA seems to be available: it would want to use it
        mock.patch.multiple(torch.cuda, **stand_ins),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(multi_tensor, "current_device", stand_ins["current_device"]),
        mock.patch.object(fake_tensor, "init_gpu_context"),  # torch 2.9 asks for a device there
        mock.patch.object(torch.Tensor, "data_ptr", _address),
        mock.patch.object(knobs.runtime, "add_stages_inspection_hook", _only_checked, create=True),
        mock.patch.object(llvm, "optimize_module"),
        without_plans(),
        Pinning(devices),
        Watch(devices, log),
        torch.no_grad(),
    ):
        yield devices, log
