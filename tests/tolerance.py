"""The one place where tolerances live; those that `apex selftest` has too are the library's."""

import torch

from apex.catalogue import tolerance
from apex.catalogue.tolerance import ROUNDINGS, errors_in_eps, rms, roundings, ulps

GROUP_NORM = tolerance.GROUP_NORM
PRODUCTS = tolerance.PRODUCTS
# Of linear_cross_entropy(acc_policy="compact"): the gradient of a 16-bit weight is rounded after
# each of up to nine pieces and after the factor of the backward, as a part of PRODUCTS.
ADDED_IN_PIECES = 2.0

# The gradient of a class of probability 1 - 1e-2 to 1 - 1e-6 in float32, in eps: 102 at most, 312
# on a CPU without vectors, where torch adds up 32,000 probabilities one after the other. The
# exponentials of torch's softmax on a CPU have an error of tens of eps; p - 1 would be off by 1e6.
NEAR_PROBABILITY_1 = 1024.0
# The share of stochastically rounded moments and of weights that kernel and definition share: a
# value that is off by an ulp before it is rounded draws other bits.
SAME_DITHER = 0.9
# In 16 bits: one rounding. Triton's interpreter truncates bfloat16, which is two.
NEAR_PROBABILITY_1_IN_16_BITS = 1.05

# Eight iterations of Polar Express in float64, where singular values are 0.01 to 1 before: how far
# they are from 1. Its factors of 1.01 for rounding leave 0.0003.
POLAR_EXPRESS = 1e-3

# Losses of eight steps with float16 weights and a scaler, relative, beside float32: seen 1.1e-3.
HALF_WEIGHTS = 5e-3
# One rounding of float16.
HALF_ROUNDING = 2.0**-11

# Delayed passes at O2 add up in float16: three additions of one rounding (2**-11) each, and the
# gradients themselves are within one. Largest over 20 seeds of the test that uses it: 2**-10.36.
HALF_ACCUMULATION = 2.0**-9

# 500 SGD steps of T2's regression at O1 against float32: final losses differed by at most 4.2e-6
# of their size over 3 seeds.
O1_REGRESSION = 2e-5

# 30 steps of SGD (rate 0.5) of a small classifier at O1, and with torch's own float16 on a CPU
# without float16 instructions, which rounds in other places: weights (up to 2) differ by 3.1e-4.
TORCHS_FLOAT16 = 2e-3

# Six clipped SGD steps (rate 0.05) of a small vision transformer in float16, losses and gradients'
# norms against float64, relative. The first step is within roundings: at most 2.5e-4 at O1 and O2,
# over 48 draws of the first weights. Then the error grows with the trajectory: at most 6.4e-3 at
# O1, 9.5e-3 at O2, and 7.1e-3 with torch's autocast, which was above 1e-3 for 20 of the 48.
FIRST_FLOAT16_STEP = 2.0**-11
SIX_FLOAT16_STEPS = 2e-2

# examples/tutorials, largest difference of a weight over four seeds: FusedLayerNorm and FusedAdam
# beside torch's after 50 steps of 1e-2, 3.6e-7; three steps at O1 whose gradients were rounded to
# float16 in four parts or in one, 5.3e-6. On an H200 the first is 1.2e-6.
TUTORIAL_FUSED = 3e-6
TUTORIAL_ACCUMULATED = 1.5e-5

# Losses of 200 SGD steps by FP16_Optimizer on a float16 model against float32 (examples), over five
# seeds: at most 4.1e-4 off with one loss (without masters 0.2), 4.1e-3 with two losses.
MASTERS_REGRESSION = 1e-3
TWO_LOSSES_REGRESSION = 1e-2

# 20 steps of Adam in float64 against torch's own, which decays before it updates: some four
# roundings (2**-53) in each step. Largest seen: 2**-50.5.
TORCH_IN_FLOAT64 = 2.0**-47

# Three steps of Adam (eps 1e-2) clipped by a norm whose squares were added up in another order:
# the norms differ by an ulp or two (2**-23 each), the weights by at most 4e-7 of the largest. LAMB
# divides two more such norms in each step. Largest over three orders of summation: 1.5e-6.
CLIPPED = 4e-6


# Numbers within CLIPPED of each other, rounded to bfloat16: neighbours at most.
NEXT_BFLOAT16 = 2.0**-7


# Three steps of DistributedFusedAdam, of the largest weight or moment, where weights are rounded to
# a dtype after each (half an ulp), or moments to float16. Seen: 6.4e-4 in float16, 4.6e-3 in
# bfloat16, 0 in float32; float64 weights beside float32 masters 2.1e-7.
ROUNDED_WEIGHTS = {
    torch.float64: 1e-6,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}


# Three steps of DistributedFusedAdam and of torch's Adam under DistributedDataParallel, of the
# largest element. float32: gradients of several passes are added up in another order; seen: 8.7e-8.
# float16: none seen. bfloat16: DDP rounds the mean gradient, and so a weight or an output becomes
# its neighbour; seen: 7.6e-3.
ADAM_UNDER_DDP = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}


# Three float32 steps of each optimizer, clipped where it clips, against float64.
# Largest over four seeds: 4.5e-7 of the largest element.
THREE_STEPS = 1e-6

# Random programs of float32 steps, ours against torch's foreach=False. Largest over 150 seeds of 25
# actions: 2.4e-7 of the largest element.
RANDOM_PROGRAM = 6e-7

# Float32 images of 8x8 resampled with coordinates in [-1, 1] against their exact pixels: each
# coordinate is off by a rounding or two, times 4 pixels. Largest over 200 seeds: 4.8e-7.
RESAMPLED = 1e-6


# A mean loss of 88 words from float32 scores, in pieces and whole: a loss is off by some four
# roundings (2**-24), a mean of 88 that are added up one after the other by 88 at most, of its size.
# States that are not kept from piece to piece change it by 3e-5.
MEAN_LOSS = 92 * 2.0**-24


def integers(*shape: int, limit: int = 4) -> torch.Tensor:
    """Return random integers from ``-limit`` to ``limit``, in float32.

    Sums of products of them are exact in every order, so two ways to compute them are compared bit
    by bit on every processor: up to 16 products with a limit of 1,000, which bfloat16 rounds.
    """
    return torch.randint(-limit, limit + 1, shape).float()


def assert_close_to_largest(actual: torch.Tensor, exact: torch.Tensor, relative: float) -> None:
    """Assert that no element is off by more than ``relative`` times the largest of ``exact``."""
    assert actual.shape == exact.shape
    assert torch.isfinite(actual).all()
    error = (actual.double() - exact.double()).abs().max()
    allowed = relative * exact.double().abs().max()
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


# Triton's interpreter truncates float32 to bfloat16: off by up to an ulp, which is sqrt(12) times
# the rms error of rounding; nearly reached where a small update is taken from a bfloat16 weight.
INTERPRETED_BFLOAT16 = 3.5


# Roundings of a float32 sum of n terms of both signs that are added one after the other, over the
# root of n. Torch's layer norm on a CPU adds up weight gradients so: 11.4 of 300 rows, 31 of 2,048,
# 45 of 4,096, but with other seeds up to 1.24 times the root: its own tests compare with it.
ADDED_ONE_BY_ONE = 0.8


# ROUNDINGS are an rms. One float32 number may have all of its some ten half ulps in one direction:
# five ulps, each sqrt(12) roundings. Largest seen: 7.4, the loss of one row of 9,000 logits.
FEW_NUMBERS, ONE_NUMBER = 500, 5 * 12**0.5

# NumPy computes for Triton's interpreter; its float32 exp is up to 2.6 ulps off, otherwise on each
# processor. Largest seen of a product of three such factors: 7.7 with AVX2, 6.0 without.
EXPONENTIAL = 2.6 * 12**0.5


def assert_one_rounding(
    actual: torch.Tensor,
    exact: torch.Tensor,
    *,
    interpreted=False,
    added=1,
    exponentials=0,
    torchs: torch.Tensor | None = None,
) -> None:
    """Assert that ``actual`` is float64 ``exact`` but for about one rounding to its dtype.

    Args:
        actual: What was computed.
        exact: Its definition in float64.
        interpreted: Whether Triton's interpreter stored it.
        added: How many terms torch added up, one after the other, in float32.
        exponentials: How many factors of a float32 result come from ``exp``, if not torch's.
        torchs: What torch's own function computes in float32: ours may be as far off.
    """
    assert actual.shape == exact.shape
    assert exact.dtype == torch.float64
    allowed = ROUNDINGS[actual.dtype]
    if actual.dtype == torch.float32:
        if actual.numel() < FEW_NUMBERS:
            allowed = ONE_NUMBER
        allowed = max(allowed + exponentials * EXPONENTIAL, ADDED_ONE_BY_ONE * added**0.5)
        if torchs is not None:
            allowed = max(allowed, roundings(torchs, exact))
    if interpreted and actual.dtype == torch.bfloat16 and not torch.cuda.is_available():
        allowed = INTERPRETED_BFLOAT16
    found = roundings(actual, exact)
    assert found <= allowed, f"{found:.2f} roundings, allowed {allowed}"


def assert_close_in_rms(actual: torch.Tensor, exact: torch.Tensor, factor: float) -> None:
    """Assert that the rms error is at most ``factor`` eps of the rms of float64 ``exact``."""
    assert actual.shape == exact.shape
    found = errors_in_eps(actual, exact)
    assert found <= factor, f"rms error {found:.3g} eps, allowed {factor}"


def each(check, found, wanted, *arguments, **options):
    """Apply a check of this file to each pair of two lists of one length."""
    for actual, exact in zip(found, wanted, strict=True):
        check(actual.detach(), exact.detach(), *arguments, **options)


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
    floor = max(rms(exact.to(dtype).double() - exact), rms(ulps(exact, dtype)) / 12**0.5)
    allowed = factor * floor + torch.finfo(torch.float32).eps * rms(terms)
    error = rms(actual.double() - exact)
    assert error <= allowed, f"rms error {error:.3e}, allowed {allowed:.3e}"


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


# The recipe of docs/distributed.md: weights after five steps of Adam, the last two on one process
# instead of two ranks, which adds up float16 gradients of other parts of a batch. Largest over
# eight seeds: 4.2e-4 of the largest weight; 7.8e-4 with float16 weights, whose ulp that is.
HALF_SHARDS = 2e-3
# Weights of Muon after a few steps of lr 0.02, where products are bfloat16: an element of a
# direction that rounds the other way changes a row by some 1e-2 of a step. The largest seen against
# torch.optim.Muon: 2.5e-4, of 64 x 256; mostly it is none. Where products are float32: 1.4e-7 on
# four ranks beside one process.
MUON = {torch.bfloat16: 1e-3, torch.float32: 1e-6}
# One step of Muon in bfloat16 against float64, as a part of the learning rate: 0.035 of 5 x 7.
MUON_ROUNDED = 0.06
# What Newton-Schulz makes of singular values, in float32 and bfloat16, of some ten to thousand.
MUON_SINGULAR = (0.65, 1.25)
# Newton-Schulz in Gram form: how much farther the squares of singular values are from 1 than those
# of the standard form, in rms; of 32 x 128 and 120 x 30 over conditions of 1 to 1e6 and five seeds.
# Seen: 0.027 and 0.0083 where all singular values are equal and so round alike, else 0.0067 and
# 6.7e-4; 9.8e-7 in float32. And how much farther from the float64 numbers the matrices are, up to
# a condition of 1e2 and above, as a part of the standard form's errors: 3.3 and 1.5.
GRAM_DISTANCE = {torch.bfloat16: 0.04, torch.float16: 0.012, torch.float32: 2e-6}
GRAM_ERRORS = (4.0, 2.0)

# Three steps of Adam (eps 1e-8) in float64 on two tensor-parallel ranks beside one process. The
# gradient of the keys' bias is zero but for roundings (2**-53), which Adam divides by eps. Largest
# seen: 1.2e-9 of the largest weight of that bias; a wrong formula is off by 1e-3 and more.
TENSOR_PARALLEL = 2.0**-27

# Three float32 steps of a ResNet on two ranks with SyncBatchNorm against one process: sums over
# images are added up in another order. Largest over six seeds: 9.8e-7 of the largest element.
SYNCED_EPOCH = 4e-6

# Recurrent layers in float64 by two ways: ours and torch's, whole and step by step, compiled and
# eager. An element takes part in up to 2,000 operations (32 in a step, ten steps, three layers,
# forward and backward), each off by a rounding (2**-53) of the largest: 2**-42. Largest seen:
# 2**-49. A wrong formula is off by 2**-20 and more.
RECURRENT = 2.0**-42

# Recurrent networks of two layers over ten steps and two steps of SGD, in eps of the type that they
# compute in, against float64. Largest over ten seeds: 4.6.
RECURRENT_16_BIT = 9.0

# Gradients of a small BERT for 16 paragraphs in three passes against one, of the largest element.
# Largest over 12 seeds: 1.6e-6 and 3.1e-2. At O2 torch's CPU kernel adds up the gradient of the
# token-type embedding, one row for all 400 tokens, in float16; all others are within 5.6e-3.
BERT_ACCUMULATION = {"O0": 4e-6, "O2": 2.0**-4}

# Gradients of attention layers, in eps of the rms of each. Torch's fused CPU kernel takes the
# difference of two sums in them. Largest over 13 layers and 40 seeds: 2.2 in 16 bits (1.3 with its
# composed one), 8.9 in float32, 11.4 in float64. Outputs: 0.56, 1.8 and 2.1, within PRODUCTS.
ATTENTION_GRADIENTS = {**PRODUCTS, torch.float16: 3.0, torch.bfloat16: 3.0}

# The same as PRODUCTS for two dense layers in 16 bits, whose gradients are rounded after each
# product and each activation. Largest over 90 runs: 1.27, a weight of a sigmoid's layer in float16.
TWO_LAYERS = 1.6

# Products of float16 on a CPU, summed in float32 and rounded once: the share of elements that are
# the float64 ones rounded once. The others lie within float32's error (some 2**-22 of the sum) of
# the middle between two float16 numbers: 0.1 % of them, seen with 70 to 1,000 summands; ten times
# that is allowed. Summed in float16, fewer than 70 % are.
ROUNDED_ONCE = 0.99

# Loss of a small language model after 60 steps, the mean over three seeds, with moments in 8 bits
# and in float32. Seen: 8e-4 apart with Adam, 1e-4 with Lion, 2.4e-3 with Muon. Seeds: 0.025.
EIGHT_BIT_LOSS = 5e-3
# Losses and gradients of a transducer in float32, of the largest: the logarithms of probabilities
# are float32 and added up in float64. Largest over 25 seeds: 1.4e-7 and 3.5e-7.
TRANSDUCER = 1e-6

# apex.patch: rms errors to float64 of a patched model, as a part of the original's, over five sets
# of weights, tokens and 200 or more elements each.
PATCHED = 1.2
# The same of the five losses alone: two rms of five errors each, which differ by chance (99 % of
# the square roots of F(5, 5) are below 3.3). Largest seen: 1.24, on a Xeon.
PATCHED_FEW = 3.3
# The same norm by both, if input or weight is bfloat16: transformers rounds twice, of 2**-9 each.
PATCHED_NORM = 2.0**-7
# A loss after two steps at O1, O2 and O5; see PATCHED_NORM. Largest seen: 3e-3.
PATCHED_LOSS = 0.02

# A model at O1 to the same one in float32: two layers are float16, a rounding of 2**-11 each, and
# elements are below 1.
POLICY_AT_O1 = 2e-3
# e4m3 has three bits behind the point; numbers that it holds exactly but for the scale's rounding.
EIGHT_BIT_FORMAT = 2.0**-8

# Cosines of one product's gradients, computed in a pass and alone: the same kernels, on operands of
# other strides at most. Float32's own error is 6e-8.
COSINE = 1e-6

# The same steps by a fused function of torch and by others: an ulp of float32 (2**-23) of the
# largest weight. Seen: 5.5e-8.
ANOTHER_WAY = 2.0**-23

# Largest attention logits, and logits of clipped weights, in eps of the dtype: products of 8 to 16
# numbers of rounded factors. Seen: 1.7.
ATTENTION_LOGITS = 4.0
