"""How far a result may be from its float64 definition: the rules of `apex selftest` and the tests.

An operation that computes in float32 and rounds once is as good as its format allows. So its error
is counted in *roundings*: its rms error over that of the exact result rounded once. 1 is perfect.
"""

from __future__ import annotations

import torch

__all__ = [
    "FROM_RESULT",
    "GROUP_NORM",
    "NORM",
    "PRODUCTS",
    "ROUNDINGS",
    "errors_in_eps",
    "rms",
    "roundings",
    "ulps",
]

# What is allowed over the error of rounding once, by the dtype of the result. 16 bits: the float32
# computation before it moves few results to the other neighbour; over 60 seeds of a norm none went
# over 1.05, and six planted defects all did. float32 and float64: some five roundings happen on the
# way, two of them in numbers twice as large; MKL's root is up to an ulp off, float32 scalars half
# an ulp each. Largest of the optimizers' exhaustive tests: 3.1 and 4.1.
ROUNDINGS = {torch.float16: 1.05, torch.bfloat16: 1.05, torch.float32: 8.0, torch.float64: 8.0}

# Rms error over the rms of the result, in units of the dtype's eps, where sums of terms of both
# signs decide. Linear cross-entropy, loss and gradients, over 40 seeds and nine shapes: 0.56 (torch
# in the same dtype: 0.59), 10.2 (10.0), 16.4; the large ones are gradients of the input, in which
# the mean of 1,000 rows of the weight is what is left.
PRODUCTS = {torch.float16: 0.75, torch.bfloat16: 0.75, torch.float32: 15.0, torch.float64: 25.0}

# The same for group norm in float32, over 40 seeds: 4.1 with torch's function, 2.4 with the kernel.
GROUP_NORM = 6.0

# The same for gradients that a softmax computes from its result, which was rounded itself. Over 60
# seeds and three shapes: 0.33 and 0.35. Triton's interpreter truncates bfloat16: 0.79.
FROM_RESULT = {torch.float16: 0.4, torch.bfloat16: 0.9}

# The same for the norm of a list of tensors, in float32: a single number, off by the additions of a
# sum. Over 40 lists of 9,000 numbers: 1.3 with torch's functions, 0.9 with the kernel.
NORM = 8.0

# A float32 state that a norm was multiplied into has the norm's error, its square twice that.
NORMED = 2 * NORM

# Weight and rounding error as two bfloat16: what the second rounds away, 2**-9 of 2**-9 at most, in
# eps of bfloat16. Seen: below 5.3e-4, and 1.3e-3 where Triton's interpreter truncates both.
KAHAN = 2.0**-9

# Stochastic rounding: how far beyond a neighbour a weight may seem, in ulps, because float32 is not
# exact (8 roundings of it are 2**-13.6); and how many standard deviations the mean may be off.
BEYOND_A_NEIGHBOUR = 2.0**-10
# The same where a step of 0.02 leaves less than 1e-5 of a weight: two spacings of float32 at 0.02.
# Seen in 4 million elements: 6, off by 1.4e-9 at most.
CANCELLED = 2.0**-28
DEVIATIONS = 5.0
# Share of the variance of stochastic rounding that is missing: 0.5 where numbers are rounded to the
# nearest. Seen: 0.03, where few are distinct.
SPREAD_LOST = 0.25

# Share of a moment's codes that are not those of the exact one. float32 is off by some 2**-22, and
# codes are 2**-9 of the value apart or more; but ratios of bfloat16 gradients are often the middle
# of two codes. Seen: 1.4e-3 in bfloat16, none of 4,250 in float32.
OTHER_CODES = 2.0**-8

# 8 steps of FusedAdam on 32 separable examples: the last loss over the first. Seen: 0.001 to 0.004.
LOSS_FALLS = 0.25

# The losses of these steps, clipped and with fused_step, relative, beside those by default: the
# clipping factor differs by a rounding, and 16-bit weights carry it on.
SAME_LOSSES = 0.05


def roundings(actual: torch.Tensor, exact: torch.Tensor, *, truncated: bool = False) -> float:
    """The rms error of ``actual`` over the error of rounding ``exact`` once.

    Args:
        actual: What was computed.
        exact: Its definition in float64.
        truncated: Whether bfloat16 was truncated rather than rounded, as Triton's interpreter does.

    Returns:
        inf where the shape differs, or inf and nan are not at the same places.
    """
    if actual.shape != exact.shape:
        return float("inf")
    finite = exact.isfinite()
    special = exact[~finite].to(actual.dtype)
    if not torch.equal(actual[~finite].isnan(), special.isnan()) or not torch.equal(
        actual[~finite].nan_to_num(), special.nan_to_num()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    actual, exact, dtype = actual[finite], exact[finite], actual.dtype
    if truncated and dtype == torch.bfloat16:
        stored, spread = _truncated(exact), 3**0.5
    else:
        stored, spread = exact.to(dtype), 12**0.5
    # The mean error of rounding too: a single number may happen to need none.
    floor = max(rms(stored.double() - exact), rms(ulps(exact, dtype)) / spread)
    error = rms(actual.double() - exact)
    return error / floor if error == error else float("inf")


def errors_in_eps(
    actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None
) -> float:
    """The rms error over the rms of float64 ``exact``, in units of a dtype's eps.

    The dtype is that of ``actual`` by default. inf where the shape differs.
    """
    if actual.shape != exact.shape:
        return float("inf")
    size = torch.finfo(dtype or actual.dtype).eps * rms(exact)
    error = rms(actual.double() - exact)
    return error / size if size else error


def ulps(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of a dtype's numbers at ``exact``."""
    size = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    return torch.exp2(size.log2().floor()) * torch.finfo(dtype).eps


def rms(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return x.square().mean().sqrt().item()


def _truncated(exact: torch.Tensor) -> torch.Tensor:
    bits = exact.float().contiguous().view(torch.int32)
    return bits.bitwise_and(-65536).view(torch.float32)
