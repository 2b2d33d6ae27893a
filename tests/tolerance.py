"""The one place where tolerances live."""

import torch

# Delayed passes at O2 add up in float16: three additions of one rounding (2**-11) each, and the
# gradients themselves are within one. Largest over 20 seeds of the test that uses it: 2**-10.36.
HALF_ACCUMULATION = 2.0**-9

# 500 SGD steps of T2's regression at O1 against float32: final losses differed by at most 4.2e-6
# of their size over 3 seeds.
O1_REGRESSION = 2e-5

# 20 steps of Adam in float64 against torch's own, which decays before it updates: some four
# roundings (2**-53) in each step. Largest seen: 2**-50.5.
TWIN_IN_FLOAT64 = 2.0**-47

# Three steps of Adam (eps 1e-2) clipped by a norm whose squares were added up in another order:
# the norms differ by an ulp or two (2**-23 each), the weights by at most 4e-7 of the largest.
CLIPPED = 2e-6


# Three float32 steps of each optimizer, clipped where it clips, against float64.
# Largest over four seeds: 4.5e-7 of the largest element.
THREE_STEPS = 1e-6

# A moving average over 20 steps in float32: each rounds by half an ulp (2**-24) of the value.
AVERAGED = 20 * 2.0**-24


def assert_close_to_largest(actual: torch.Tensor, exact: torch.Tensor, relative: float) -> None:
    """Assert that no element is off by more than ``relative`` times the largest of ``exact``."""
    assert actual.shape == exact.shape
    assert torch.isfinite(actual).all()
    error = (actual.double() - exact.double()).abs().max()
    allowed = relative * exact.double().abs().max()
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


# What is allowed over the error of rounding once, by the dtype of the result. 16 bits: the float32
# computation before it moves few results to the other neighbour; over 60 seeds of a norm none went
# over 1.05, and six planted defects all did. float32 and float64: some five roundings happen on the
# way, two of them in numbers twice as large; MKL's root is up to an ulp off, float32 scalars half
# an ulp each. Largest of the optimizers' exhaustive tests: 3.1 and 4.1.
ROUNDINGS = {torch.float16: 1.05, torch.bfloat16: 1.05, torch.float32: 8.0, torch.float64: 8.0}

# Triton's interpreter truncates float32 to bfloat16: off by up to an ulp, which is sqrt(12) times
# the rms error of rounding; nearly reached where a small update is taken from a bfloat16 weight.
INTERPRETED_BFLOAT16 = 3.5


# Roundings of a float32 sum of n terms of both signs that are added one after the other, over the
# root of n, as torch's layer norm on a CPU adds up weight gradients. Seen: 11.4 of 300 rows, 31 of
# 2,048, 45 of 4,096.
ADDED_ONE_BY_ONE = 0.8


def assert_one_rounding(
    actual: torch.Tensor, exact: torch.Tensor, *, interpreted=False, added=1
) -> None:
    """Assert that ``actual`` is float64 ``exact`` but for about one rounding to its dtype.

    Args:
        actual: What was computed.
        exact: Its definition in float64.
        interpreted: Whether Triton's interpreter stored it.
        added: How many terms torch added up, one after the other, in float32.
    """
    assert actual.shape == exact.shape
    assert exact.dtype == torch.float64
    finite = exact.isfinite()
    assert torch.equal(actual.isnan(), exact.isnan())
    assert torch.equal(actual[~finite].nan_to_num().double(), _infinities(exact[~finite], actual))
    if not finite.any():
        return
    actual, exact, dtype = actual[finite], exact[finite], actual.dtype
    factor = ROUNDINGS[dtype]
    if dtype == torch.float32:
        factor = max(factor, ADDED_ONE_BY_ONE * added**0.5)
    if interpreted and dtype == torch.bfloat16 and not torch.cuda.is_available():
        factor = INTERPRETED_BFLOAT16
    floor = max(_rms(exact.to(dtype).double() - exact), _rms(_ulps(exact, dtype)) / 12**0.5)
    error = _rms(actual.double() - exact)
    assert error <= factor * floor, f"rms error {error:.3e}, {error / floor:.2f} roundings"


def _infinities(exact: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    return exact.to(actual.dtype).nan_to_num().double()


def _ulps(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of numbers at ``exact``; a single number may happen to need no rounding."""
    size = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    return torch.exp2(size.log2().floor()) * torch.finfo(dtype).eps


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


# Rms error over the rms of the result, in units of the dtype's eps, where sums of terms of both
# signs decide. Linear cross-entropy, loss and gradients, over 40 seeds and nine shapes: 0.56 (torch
# in the same dtype: 0.59), 10.2 (10.0), 16.4; the large ones are gradients of the input, in which
# the mean of 1,000 rows of the weight is what is left.
PRODUCTS = {torch.float16: 0.75, torch.bfloat16: 0.75, torch.float32: 15.0, torch.float64: 25.0}

# The same for group norm in float32, over 40 seeds: 4.1 with torch's function, 2.4 with the kernel.
GROUP_NORM = 6.0


def assert_close_in_rms(actual: torch.Tensor, exact: torch.Tensor, factor: float) -> None:
    """Assert that the rms error is at most ``factor`` eps of the rms of float64 ``exact``."""
    assert actual.shape == exact.shape
    error = _rms(actual.double() - exact)
    allowed = factor * torch.finfo(actual.dtype).eps * _rms(exact)
    assert error <= allowed, f"rms error {error:.3e}, allowed {allowed:.3e}"


def assert_rounded_after_float32(
    actual: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, *, interpreted: bool = False
) -> None:
    """Assert one rounding of what float32 could know of ``exact``, a sum that may cancel.

    Args:
        actual: What was computed.
        exact: Its definition in float64.
        terms: Sizes of what was added up, each off by a float32 rounding.
        interpreted: Whether Triton's interpreter stored it.
    """
    dtype = actual.dtype
    factor = INTERPRETED_BFLOAT16 if interpreted and dtype == torch.bfloat16 else ROUNDINGS[dtype]
    floor = max(_rms(exact.to(dtype).double() - exact), _rms(_ulps(exact, dtype)) / 12**0.5)
    allowed = factor * floor + torch.finfo(torch.float32).eps * _rms(terms)
    error = _rms(actual.double() - exact)
    assert error <= allowed, f"rms error {error:.3e}, allowed {allowed:.3e}"


# A float32 gradient by torch.func, through other functions of torch, beside autograd's.
TRANSFORMED = {"rtol": 1e-4, "atol": 1e-5}

# Losses of six steps of SGD at each level, relative, ours against torch's layer: what rounding the
# output of a norm changes. Largest seen: 1.1e-7, 2.2e-5 and 1.8e-4; a rounding's eighth.
SAME_TRAINING = {torch.float32: 2e-6, torch.float16: 2.0**-13, torch.bfloat16: 2.0**-10}


def assert_same_training(losses: list[float], others: list[float], dtype: torch.dtype) -> None:
    """Assert that two runs at a level of ``dtype`` had the same losses."""
    found, wanted = torch.tensor(losses), torch.tensor(others)
    torch.testing.assert_close(found, wanted, rtol=SAME_TRAINING[dtype], atol=0.0)


# Three steps of Adam on two ranks beside one process, relative to the largest weight: sums over
# ranks are added up in another order. Largest seen: 3.8e-7.
PARALLEL = 4e-6
