"""Triton's own launcher over a CUDA driver that computes nothing: the host's part of a launch.

``libcuda.c`` is compiled and takes the place of the driver. So a launch takes what it takes on a
GPU until the driver is called: Triton's JIT, its C launcher, arguments, addresses. Tensors are the
CPU's; their addresses are passed as if they were the device's, and nothing reads them.
"""

import atexit
import ctypes
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import Any

SOURCE = pathlib.Path(__file__).with_name("libcuda.c")


def compiler() -> str | None:
    """The C compiler that Triton would use for its launcher."""
    names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    return next((name for name in names if name and shutil.which(shlex.split(name)[0])), None)


def build(folder: str) -> Any:
    """Compile the stand-in into a folder, and load it as the driver of this process.

    Whoever asks for ``libcuda.so.1`` later gets this one.
    """
    found = compiler()
    if found is None:
        sys.exit(
            "benchmarks.stand_in: no C compiler. Triton's launcher is built by one, and so is the "
            "stand-in for CUDA's driver; install gcc or clang, or set CC."
        )
    library = pathlib.Path(folder) / "libcuda.so.1"
    soname = f"-Wl,-soname,{library.name}"
    command: list[str | pathlib.Path] = [
        *shlex.split(found),
        "-shared",
        "-fPIC",
        "-O2",
        soname,
        SOURCE,
        "-o",
        library,
    ]
    subprocess.run(command, check=True)
    shutil.copy(library, library.with_suffix(""))  # libcuda.so, for the linker
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.stand_in_launches.restype = ctypes.c_long
    return loaded


def install() -> Any:
    """Let Triton launch over the stand-in; returns what counts launches, ``stand_in_launches()``.

    Before Triton's launcher is built for the first time in this process.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    loaded = build(folder)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Hopper(nvidia.CudaDriver):  # type: ignore[misc]
        """The driver of an H100, the current device, with one stream."""

        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_device = _current_device
            self.get_current_stream = abs  # a call of C, as of torch's C++
            self.set_current_device = lambda device: None
            self.get_device_capability = lambda device=0: (9, 0)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Hopper())
    return loaded


def _lazy_init() -> None:
    """As torch.cuda asks at each call whether it is initialized."""


def _current_device() -> int:
    """As ``torch.cuda.current_device``: two frames and a call of C."""
    _lazy_init()
    return abs(0)
