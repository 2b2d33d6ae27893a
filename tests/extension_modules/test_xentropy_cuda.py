"""``xentropy_cuda``: positional functions of compiled Apex."""

import pytest
import torch
import torch.nn.functional as F
import xentropy_cuda

from apex.ops import _runtime
from tests.tolerance import assert_one_rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("half_to_float", [False, True])
def test_forward_and_backward_in_every_dtype(dtype, half_to_float):
    """The original's backward raised for 16 bits unless half_to_float was set."""
    logits, labels, grad = torch.randn(6, 40).to(dtype), torch.randint(40, (6,)), torch.rand(6)
    losses, lse = xentropy_cuda.forward(logits, labels, 0.1, half_to_float)
    found = xentropy_cuda.backward(grad, logits, lse, labels, 0.1)
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
    (expected,) = torch.autograd.grad(exact, wide, grad.double())
    assert losses.dtype == lse.dtype == torch.float32
    assert found.dtype == dtype
    assert_one_rounding(losses, exact.detach())
    assert_one_rounding(lse, torch.logsumexp(logits.double(), 1))
    assert_one_rounding(found, expected)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("least", [-torch.inf, -30000.0, -20.0])
def test_lse_of_labels_that_are_ruled_out(least, dtype, path):
    logits = torch.randn(4, 300).to(dtype)
    labels = torch.tensor([0, 7, 200, 299])
    logits[[0, 1, 3], labels[[0, 1, 3]]] = least
    with _runtime.use(path):
        losses, lse = xentropy_cuda.forward(logits, labels, 0.0, False)
    exact = F.cross_entropy(logits.double(), labels, reduction="none")
    assert_one_rounding(lse, logits.double().logsumexp(1))
    assert_one_rounding(losses, exact)


def test_label_0_counts():
    """Padding is the caller's, as in the original."""
    losses, _ = xentropy_cuda.forward(torch.zeros(2, 4), torch.tensor([0, 1]), 0.0, False)
    assert losses.tolist() == pytest.approx([1.38629436] * 2)


def test_bad_input():
    x, labels = torch.ones(2, 3), torch.tensor([0, 3])
    with pytest.raises(IndexError, match="label of row 1 is 3; allowed are 0 to 2"):
        xentropy_cuda.forward(x, labels, 0.0, False)
    with pytest.raises(IndexError, match="label of row 1 is 3; allowed are 0 to 2"):
        xentropy_cuda.backward(torch.ones(2), x, torch.ones(2), labels, 0.0)
    with pytest.raises(ValueError, match=r"max_log_sum_exp has shape \[1\] and labels \[2\]. Pass"):
        xentropy_cuda.backward(torch.ones(2), x, torch.ones(1), labels // 2, 0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_labels_too_narrow_for_the_classes(dtype):
    logits, labels = torch.randn(3, 300), torch.tensor([0, 100, 5])
    losses, _ = xentropy_cuda.forward(logits, labels.to(dtype), 0.0, False)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected)
