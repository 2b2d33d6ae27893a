"""Stands for Triton's driver, and for the GPU, where there is none: launches compute nothing."""

import operator
from unittest import mock

from triton.backends.compiler import GPUTarget

LARGEST_GRID = (2**31 - 1, 65535, 65535)  # of CUDA


class Launcher:
    """The C function that Triton builds for each kernel; it refuses a grid that CUDA refuses."""

    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, *args):
        if any(map(operator.gt, (x, y, z), LARGEST_GRID)):
            raise RuntimeError(f"{self.name}: grid {(x, y, z)}, allowed is {LARGEST_GRID}")


class Hopper:
    """The driver of an H200."""

    launcher_cls = Launcher

    class utils:  # Triton's name
        """What threads and shared memory of a kernel are compared with."""

        @staticmethod
        def load_binary(name, binary, shared, device):
            return 1, 1, 32, 0, 1024  # module, function, registers, spills, most threads

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def without_machine_code(backend=None, stages=None, *_):
    """Triton's hook: leave out ptxas, whose code is not run here; a third of the time.

    ptxas compiles all kernels in test_compiled.py. What is made with the hook has keys of its own
    in Triton's cache.
    Triton 3.5 has no such hook and calls ptxas.
    """
    if stages is None:
        return "without machine code", "without machine code"
    stages["cubin"] = lambda ptx, metadata: b""
    return None


def without_plans():
    """Let every launch go through Triton's JIT, which passes tensors; plans pass addresses."""
    from apex.kernels import _plans  # imports triton

    return mock.patch.object(_plans, "JITFunction", type("Nothing", (), {}))
