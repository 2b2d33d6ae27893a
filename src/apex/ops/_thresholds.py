"""From which size on an operation's own code replaces torch's: data, with its source.

Below, the host's work for a launch from Python costs more than the better kernel saves. One row an
operation; replace a number by a measured one and say where it comes from.
"""

from __future__ import annotations

# Elements of the input. Not measured here (no GPU was at hand) but derived from published medians
# of forward plus backward of layer norm in bfloat16, 4096 wide, on a B200 (Liger-Kernel,
# benchmark/data/all_benchmark_data_cutile.csv): at 2**22 elements torch takes 0.060 ms and a Triton
# autograd function 0.212 ms, nearly all of it the host's; at 2**25 they take 0.264 and 0.218 ms.
# Torch's time is linear in between, about 0.03 ms + 7 ps an element, so that 0.1 ms, a guess at
# two launches forward and backward without the dispatcher in between, is reached near 2**23.
# RMS norm: H100 medians of the same collection agree (bfloat16, 4096 x 1024: 0.074 against 0.300).
SMALLEST = {
    "layer_norm": 2**23,
    "rms_norm": 2**23,
    # Bytes an element, forward and backward, in 16 bits: torch 36 (through float32 copies), the
    # kernels 6. At 4 TB/s 30 bytes are worth the 0.06 ms that launches cost from 2**23 on; half of
    # it because the copies are memory too.
    "cross_entropy": 2**22,
    # Torch's kernels want channels first, so that channels-last images are copied there, normalized
    # and activated: 14 bytes an element against 6, forward alone. From 2**22 on 8 bytes are worth
    # 0.01 ms at 4 TB/s and the three launches; backward the more.
    "group_norm": 2**22,
}

# Elements of the input from which on our autograd function replaces torch's on a CPU, where it
# costs some 30 us more, forward and backward. Measured with one thread on a server's CPU.
SMALLEST_ON_CPU = {
    "layer_norm": 2**16,  # 16 bits; below, torch's in float32 between two casts
    "rms_norm": 2**17,
    # Channels last, forward and backward in float32; below, torch's with copies of channels first:
    # 1.33 against 1.38 of torch's time with channels last at 5120 elements (57 us), 1.35 against
    # 1.30 at 20480, 1.57 against 1.11 at 81920. Groups of few channels: ops/group_norm.py.
    "group_norm": 2**14,
}
