"""From how many elements on an eager call on a GPU takes the kernel of an operation.

Below, the definition's launches cost the host less than ours. Where it is busy anyway, as with
small tensors, that decides; where the GPU is, bytes do. So the kernel pays from as many elements on
as take a GPU longer to move, with the bytes that the kernel saves, than ours costs the host more.
No number is from a GPU of ours.
"""

# Medians of others. Forward plus backward in bfloat16, 4096 wide, on a B200 (Liger-Kernel,
# benchmark/data/all_benchmark_data_cutile.csv): at 2**22 elements PyTorch takes 0.060 ms and a
# Triton autograd function 0.212 ms, nearly all of it Python; at 2**25 they take 0.264 and 0.218 ms.
# PyTorch's time is linear in between, about 0.03 ms + 7 ps an element, so that 0.1 ms, what a call
# of ours costs the host, is reached near 2**23. RMS norm: H100 medians of the same collection agree
# (bfloat16, 4096 x 1024: 0.074 against 0.300).
PUBLISHED = {"row_norm": 2**23}

# Us that ours costs the host more than the definition, and bytes that it saves for each element in
# 16 bits, both forward and backward, by benchmarks/launch_cost.py on a quiet EPYC (while others use
# it the gaps are up to 2.5 times as large). There tiny CPU kernels take the place of the
# definition's launches and cost the host less, so that the gap is rather too large. 0: ours costs
# no more, and takes every size.
MEASURED = {
    "swiglu": (29, 76),
    "cross_entropy": (7, 54),
    "rotary": (0, 88),
    "group_norm": (162, 78),
    "scaled_softmax": (0, 86),
    "focal_loss": (0, 295),
    "index_mul_2d": (113, 58),
}
BYTES_OF_A_US = 3.35e6  # an H100's memory

LEAST = PUBLISHED | {
    name: max(1, int(gap * BYTES_OF_A_US / saved)) for name, (gap, saved) in MEASURED.items()
}
