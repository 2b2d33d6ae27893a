"""``focal_loss_cuda``: positional functions of compiled Apex."""

import focal_loss_cuda
import pytest
import torch

from apex.contrib.focal_loss import focal_loss
from apex.ops import _runtime
from tests.tolerance import assert_one_rounding


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_forward_and_backward(dtype, path):
    """The gradient of the whole sum, which backward scales in place."""
    x = torch.randn(40, 19, generator=torch.Generator().manual_seed(3)).to(dtype)
    targets, total = torch.arange(40) % 20 - 2, torch.tensor([8.0])
    with _runtime.use(path):
        loss, partial = focal_loss_cuda.forward(x, targets, total, 18, 0.25, 2.0, 0.1)
    assert loss.shape == ()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    wide = x.double().requires_grad_()
    exact = focal_loss(wide, targets, total, 18, 0.25, 2.0, 0.1)
    assert_one_rounding(loss, exact.detach())
    found = focal_loss_cuda.backward(torch.tensor(2.0), partial, total)
    assert found is partial
    (expected,) = torch.autograd.grad(2 * exact, wide)  # a quarter of partial: no rounding
    assert_one_rounding(found, expected, interpreted=path == "triton")


def test_bad_input():
    x, targets, total = torch.ones(2, 3), torch.tensor([0, 3]), torch.ones(1)
    with pytest.raises(IndexError, match="focal_loss_cuda.forward: the target of anchor 1 is 3"):
        focal_loss_cuda.forward(x, targets, total, 3, 0.25, 2.0, 0.0)
    with pytest.raises(ValueError, match=r"grad_output has shape \[2\] and is one number"):
        focal_loss_cuda.backward(torch.ones(2), x, total)
    with pytest.raises(TypeError, match="partial_grad is torch.int64"):
        focal_loss_cuda.backward(torch.ones(1), x.long(), total)
    assert torch.equal(x, torch.ones(2, 3))
