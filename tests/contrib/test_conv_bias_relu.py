"""``apex.contrib.conv_bias_relu`` and ``fused_conv_bias_relu`` against float64."""

import fused_conv_bias_relu as compiled
import pytest
import torch
import torch.nn.functional as F

from apex.contrib.conv_bias_relu import (
    ConvBias,
    ConvBiasMaskReLU,
    ConvBiasReLU,
    ConvFrozenScaleBiasReLU,
)
from tests.tolerance import PRODUCTS, TORCH_IN_FLOAT64, assert_close_in_rms, assert_close_to_largest

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def tensors(dtype):
    """x, weight, bias, scale, mask, the gradient; rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 6, 5), (4, 3, 3, 3), (1, 4, 1, 1), (4,), (2, 4, 3, 3), (2, 4, 3, 3))
    found = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    found[4] = (found[4] > 0).double()
    return [each.to(dtype) for each in found]


def exact(x, w, b, scale, mask):
    y = F.conv2d(x, w, None, 2, 1)
    return [(y + b).relu(), y + b, ((y + b) * mask).relu(),
            (y * scale.view(1, -1, 1, 1) + b).relu()]  # fmt: skip


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_and_compiled_module(dtype):
    x, w, b, scale, mask, dy = tensors(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    wide = [t.double().requires_grad_(i < 3) for i, t in enumerate((x, w, b, scale, mask))]
    leaves = [t.clone().requires_grad_() for t in (x, w, b, scale, mask)]
    x_, w_, b_, scale_, mask_ = leaves
    results = [
        ConvBiasReLU(x_, w_, b_, 1, 2),
        ConvBias(x_, w_, b_.flatten(), 1, 2),
        ConvBiasMaskReLU(x_, w_, b_, mask_, 1, 2),
        ConvFrozenScaleBiasReLU(x_, w_, scale_, b_, 1, 2),
    ]
    lists = ([x, w, b], [x, w, b], [x, w, b, mask], [x, w, scale, b])
    names = ("forward", "forward_no_relu", "forward_mask", "forward_cscale_cbias_relu")
    for i, (y, wanted) in enumerate(zip(results, exact(*wide), strict=True)):
        (again,) = getattr(compiled, names[i])(lists[i], 1, 2)
        assert torch.equal(again, y)
        assert not again.requires_grad
        found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        grads = torch.autograd.grad(wanted, wide[:3], dy.double(), retain_graph=True)
        frozen = 2 if i == 3 else 3
        assert all(g is None for g in found[frozen:])
        if i == 0:
            by_hand = compiled.backward([x, w, again, dy], 1, 2)
        elif i == 1:
            by_hand = compiled.backward_no_relu([x, w, dy], 1, 2)
        elif i == 2:
            by_hand = compiled.backward([x, w, again, dy], 1, 2)
        else:
            by_hand = compiled.backward_cscale_cbias_relu([x, w, scale, again, dy], 1, 2)
        pairs = [(y.detach(), wanted.detach())]
        pairs += [(g, exact) for each in (found, by_hand)
                  for g, exact in zip(each[:frozen], grads[:frozen], strict=True)]  # fmt: skip
        for actual, other in pairs:
            assert (actual.dtype, actual.shape) == (dtype, other.shape)
            if dtype == torch.float64:
                assert_close_to_largest(actual, other, TORCH_IN_FLOAT64)
            else:
                assert_close_in_rms(actual, other, PRODUCTS[dtype] * 2)


@pytest.mark.onednn
def test_autocast_and_refusals():
    x, w, b, scale, _, _ = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ConvBiasReLU(x, w, b, 1, 2).dtype == torch.bfloat16
        assert ConvFrozenScaleBiasReLU(x, w, scale, b, 1, 2).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"bias has shape \[3\] and weight \[4, 3, 3, 3\]"):
        ConvBias(x, w, scale[1:], 1, 2)
    with pytest.raises(ValueError, match=r"scale has shape \[3\]"):
        ConvFrozenScaleBiasReLU(x, w, scale[1:], b, 1, 2)
