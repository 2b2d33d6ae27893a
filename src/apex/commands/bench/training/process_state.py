"""What amp has changed in this process and thread, taken off and put back.

For ``apex bench``, which runs levels by turns in one process: float32's training and that of
``torch.autocast`` must not pass through amp's kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex.amp.casting import cpu_float16, dispatcher, switches

__all__ = ["ProcessState", "put_back", "take_off"]


class ProcessState(NamedTuple):
    """What was in force: the thread's casts, with their device types, and which kernels."""

    casts: tuple[switches.Casts, tuple[str, ...]] | None
    autocast_kernels: tuple[torch.dtype, ...]
    float16_kernels: bool


NOTHING = ProcessState(None, (), float16_kernels=False)


def take_off() -> ProcessState:
    """Switch casts off in this thread and take amp's kernels off in the process.

    Only where no other thread runs torch's operations: torch frees a kernel that is taken off.
    Functions that were replaced in modules stay: they cast only where casts are on.
    """
    own = switches.thread.casts if switches.thread.before is not None else None
    devices = tuple(filter(torch.is_autocast_enabled, switches.device_types()))
    found = ProcessState(
        None if own is None else (own, devices), dispatcher.installed(), cpu_float16.is_on()
    )
    switches.disable_for_thread()
    dispatcher.uninstall()
    cpu_float16.remove()
    return found


def put_back(found: ProcessState) -> None:
    """Bring back what `take_off` has found."""
    for dtype in found.autocast_kernels:
        dispatcher.install(dtype)
    if found.float16_kernels:
        cpu_float16.begin(torch.float16, ["cpu"])
    if found.casts is not None:
        switches.enable_for_thread(*found.casts)
