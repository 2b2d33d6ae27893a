"""``group_norm_cuda``: positional functions of compiled Apex."""

import group_norm_cuda
import pytest
import torch
import torch.nn.functional as F

from apex.ops import _runtime
from tests.tolerance import GROUP_NORM, assert_close_in_rms, each


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("swish", [False, True])
def test_forward_and_backward(path, swish):
    x = torch.randn(2, 8, 5, 3).contiguous(memory_format=torch.channels_last)
    weight, bias, grad = torch.randn(8), torch.randn(8), torch.randn(2, 8, 5, 3)
    with _runtime.use(path):
        y, sums = group_norm_cuda.forward(x, 4, weight, bias, 1e-5, 1, swish)
        found = group_norm_cuda.backward(grad, sums, x, 4, weight, bias, 1e-5, 2, swish)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact = F.group_norm(wide[0], 4, *wide[1:])
    exact = F.silu(exact) if swish else exact
    assert (sums.shape, sums.dtype) == ((16,), torch.float32)
    expected = torch.autograd.grad(exact, wide, grad.double())
    each(assert_close_in_rms, (y, *found), (exact.detach(), *expected), GROUP_NORM)


def test_without_weights():
    x = torch.randn(2, 8, 5, 3)
    y, sums = group_norm_cuda.forward(x, 4, None, None, 1e-5, 1, False)
    dx, dweight, dbias = group_norm_cuda.backward(x, sums, x, 4, None, None, 1e-5, 1, False)
    torch.testing.assert_close(y, F.group_norm(x, 4))
    assert dx.shape == x.shape
    assert dweight.numel() == dbias.numel() == 0


def test_bad_input():
    x = torch.randn(2, 8, 5, 3)
    with pytest.raises(ValueError, match="Pass .images, channels"):
        group_norm_cuda.forward(x, 3, None, None, 1e-5, 1, False)
    with pytest.raises(RuntimeError, match="Pass the input's shape, .2, 8, 5, 3., and the sums"):
        group_norm_cuda.backward(x, torch.ones(4), x, 4, None, None, 1e-5, 1, False)
