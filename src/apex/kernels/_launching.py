"""What launchers share: numbers of programs, sizes of tiles, and what they ask of a device.

Triton's `cdiv` and `next_power_of_2` take 2 to 4 us a call on the host, a launch about 5.
"""

import functools

import torch


def cdiv(number: int, unit: int) -> int:
    """Divide, rounded up."""
    return -(-number // unit)


def power_of_2(number: int) -> int:
    """Find the smallest power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 2 in the interpreter, for more than one partial sum.

    For tensors of the inspection an H100's.
    """
    if device.type != "cuda":
        return 132 if device.type == "meta" else 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Uninitialized float32 on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)
