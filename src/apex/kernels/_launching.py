"""What launchers share: numbers of programs, sizes of tiles, and what they ask of a device.

Triton's `cdiv` and `next_power_of_2` take 2 to 4 us a call on the host, a launch about 5. Launchers
allocate by ``x.new_empty(rows * columns)``, 0.8 us, or by `empty_like`, 0.9: with a size in a tuple
it is 1.9, and ``torch.empty(x.shape, ...)`` takes 2.6.

Triton knows of an integer argument whether it is a multiple of 16. Kernels get twice the length
of a row (``twice_cols``), and take `half`. So the compiler knows whether the length is a multiple
of 8, which is enough for 128-bit accesses to 16-bit numbers.
"""

import functools

import torch
import triton
import triton.language as tl

from apex._compat import private

# The device that is current, without a frame of Python. A build for CPUs has no such function.
current_device = private.cuda_getDevice


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


@triton.jit
def half(twice: tl.tensor) -> tl.tensor:
    """Half of an even number.

    LLVM knows that ``twice // 2`` is below 2**30: it would count loops in 64 bits, which took up
    to 1.3 times as many instructions.
    """
    return twice - twice // 2
