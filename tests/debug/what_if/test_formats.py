"""The emulated formats: every 16-bit number against a table, and what a product rounds."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apex.debug.what_if.formats import FORMATS, InFormat, Rounding, largest, rounded, rounded_
from tests.tolerance import EIGHT_BIT_FORMAT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# target -> bits of the fraction, smallest exponent of a normal number, largest number, saturates
TARGETS = {
    torch.float16: (10, -14, 65504.0, False),
    torch.bfloat16: (7, -126, torch.finfo(torch.bfloat16).max, False),
    E4M3: (3, -6, 448.0, True),
    E5M2: (2, -14, 57344.0, False),
}


def nearest(x, fraction, lowest, largest, saturates):
    """Round float64 numbers to the nearest of a format, ties to an even fraction."""
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, lowest)
        step = np.ldexp(1.0, exponent - fraction)
        found = np.rint(x / step) * step  # exact: a power of two, and rint is to even
        beyond = np.abs(found) > largest
    return np.where(beyond, np.copysign(largest if saturates else np.inf, x), found)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_16_bit_number_is_rounded_as_the_table_says(source, target):
    bits = torch.arange(-(2**15), 2**15, device="cpu").to(torch.int16)
    x = bits.view(source).float()
    found = rounded(x, target).numpy()
    expected = nearest(x.double().numpy(), *TARGETS[target])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    zero = expected == 0
    np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(expected[zero]))


def tensor(numbers):
    return torch.tensor(numbers, device="cpu", dtype=torch.float32, requires_grad=True)


def test_operands_results_and_gradients_are_rounded_and_the_sum_is_in_float32():
    x, w = tensor([[1 + 2**-9, 1.0]]), tensor([[1.0, 2**-8], [0.0, 1.0]])
    with InFormat(Rounding(FORMATS["bfloat16"])):
        y = F.linear(x, w)
    # 1 + 2**-9 becomes 1, and 1 + 2**-8, a tie, is computed exactly and then rounded to 1
    assert y.tolist() == [[1.0, 1.0]]
    y.backward(tensor([[1 + 2**-7, 1 + 2**-8]]).detach())
    # the gradient's 1 + 2**-8 becomes 1; x.grad[1] is 2**-8 + 2**-15 + 1, a little above the tie
    assert x.grad.tolist() == [[1 + 2**-7, 1 + 2**-7]]
    assert w.grad.tolist() == [[1 + 2**-7, 1 + 2**-7], [1.0, 1.0]]


def test_float16_loses_small_gradients_that_a_loss_scale_keeps():
    gradient = tensor([2.0**-30]).detach()
    for scale, left in ((1.0, 0.0), (2.0**16, 2.0**-14)):
        x = tensor([1.0])
        with InFormat(Rounding(FORMATS["float16"])):
            y = F.linear(x, tensor([[1.0]]))
        y.backward(gradient * scale)
        assert x.grad.tolist() == [left]


@pytest.mark.parametrize("of", [torch.Tensor.t, torch.Tensor.contiguous], ids=["view", "own"])
def test_gradients_are_rounded_in_place_or_copied(of):
    """A transposed gradient may be the memory of something else."""
    x = of(tensor([[1.0, 1 + 2**-9], [math.inf, -0.0]]).detach())
    expected = rounded(x, torch.bfloat16)
    assert rounded_(x, torch.bfloat16).equal(expected)


def test_the_largest_magnitude():
    assert largest(tensor([1.0, -3.0])) == 3.0
    assert largest(tensor([])) == 0.0
    assert largest(tensor([math.inf, 1.0])) == math.inf
    assert math.isnan(largest(tensor([1.0, math.nan, -math.inf])))


def test_8_bits_have_a_scale_for_each_tensor():
    x = tensor([1e-6, 2e-6, 448e-6])
    with InFormat(Rounding(FORMATS["e4m3"])):
        y = F.linear(x, torch.eye(3, device="cpu", dtype=torch.float32))
    torch.testing.assert_close(y, x, rtol=EIGHT_BIT_FORMAT, atol=0.0)


def test_masks_biases_and_integers_are_left_as_they_are():
    q = torch.randn(1, 2, 4, device="cpu", dtype=torch.float32)
    mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]], device="cpu", dtype=torch.float32)
    with InFormat(Rounding(FORMATS["e4m3"])):
        assert torch.isfinite(F.scaled_dot_product_attention(q, q, q, mask)).all()
        assert torch.isfinite(F.scaled_dot_product_attention(q, q, q, attn_mask=mask)).all()
        table = torch.eye(3, device="cpu", dtype=torch.float32)
        place = torch.tensor([1], device="cpu")
        assert F.embedding(place, table).tolist() == [[0.0, 1.0, 0.0]]
        bias = torch.nn.Parameter(tensor([1.0, 1 + 2**-7]).detach())  # bfloat16, as the result
        assert F.linear(tensor([0.0, 0.0]), tensor([[1.0, 0.0]] * 2), bias).equal(bias)


def test_only_the_chosen_products_compute_in_the_format():
    x = tensor([1 + 2**-9])
    with InFormat(Rounding(FORMATS["bfloat16"]), chosen={1}):
        found = [F.linear(x, tensor([[1.0]])).item() for _ in range(3)]
    assert found == [1 + 2**-9, 1.0, 1 + 2**-9]
