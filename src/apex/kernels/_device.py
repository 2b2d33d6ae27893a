"""What launchers ask of a device."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 2 in the interpreter, for more than one partial sum."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
