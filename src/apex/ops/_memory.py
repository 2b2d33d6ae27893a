"""Memory for large results on a CPU, in huge pages where the system gives them on request.

A C library fetches what is 32 MiB or more anew from the system for every tensor and returns it
afterwards, and the system hands it over in pages of 4 KiB, each by a fault: 64 MiB of float32 take
30 ms to write where 10 ms are enough in pages of 2 MiB (one core of an EPYC; 6 ms when the pages
are there already). Under ``madvise``, the default of many a Linux distribution, a program has to
ask for them. torch does so for every tensor where ``THP_MEM_ALLOC_ENABLE=1`` is set; what can be
written piece by piece is asked for here.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch

LEAST = 2**25  # bytes; glibc keeps what is smaller (M_MMAP_THRESHOLD never exceeds 32 MiB)
PAGE = 4096
MADV_HUGEPAGE = 14
SETTING = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def _system() -> Any:
    """The C library, where huge pages have to be asked for."""
    try:
        if "[madvise]" not in SETTING.read_text():
            return None
        import ctypes  # late: not every Python has it

        library = ctypes.CDLL(None)
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    except (OSError, ImportError, AttributeError, TypeError):  # no such file, library or function
        return None
    return library


def pays(count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so many numbers are better written piece by piece into :func:`empty`."""
    return count * dtype.itemsize >= LEAST and device.type == "cpu" and _system() is not None


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like ``torch.empty``; large tensors on a CPU in huge pages if the system gives them."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if pays(out.numel(), dtype, device):
        start = -(-out.data_ptr() // PAGE) * PAGE
        size = (out.data_ptr() + out.nbytes - start) // PAGE * PAGE
        _system().madvise(start, size, MADV_HUGEPAGE)  # if it refuses, it is slower
    return out
