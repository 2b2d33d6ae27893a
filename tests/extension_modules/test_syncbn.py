"""``syncbn``: positional functions of compiled Apex, put together as its SyncBatchNorm did."""

import pytest
import syncbn
import torch
import torch.nn.functional as F

from tests.tolerance import TORCH_IN_FLOAT64, assert_close_to_largest, assert_one_rounding

EPS = 1e-5


def _exact(x, z, weight, shift, dy, relu):
    """Output and gradients in float64, of channels in dimension 1."""
    given = [None if t is None else t.double().requires_grad_() for t in (x, z, weight, shift)]
    wide_x, wide_z, *parameters = given
    y = F.batch_norm(wide_x, None, None, *parameters, True, 0.0, EPS)
    y = y if z is None else y + wide_z
    y = y.relu() if relu else y
    wanted = [t for t in given if t is not None]
    grads = iter(torch.autograd.grad(y, wanted, dy.double()))
    return y.detach(), *(None if t is None else next(grads) for t in given)


def _assert_right(actual, exact, dtype):
    assert actual.dtype == dtype
    assert_close_to_largest(actual, exact, TORCH_IN_FLOAT64)


@pytest.mark.parametrize("affine", [True, False])
def test_channels_in_dimension_1(affine):
    """Two processes of 5 and 3 images, in float64."""
    x, dy = torch.randn(2, 8, 6, 4, 3, dtype=torch.float64)
    weight, shift = torch.randn(2, 6, dtype=torch.float64) if affine else (None, None)
    y, dx, _, dweight, dshift = _exact(x, None, weight, shift, dy, False)

    parts = [(x[:5], dy[:5]), (x[5:], dy[5:])]
    nodes = [syncbn.welford_mean_var(part) for part, _ in parts]
    means, variances = (torch.stack(column) for column in zip(*nodes, strict=True))
    count = torch.tensor([60, 36], dtype=torch.int32)
    mean, variance, inv_std = syncbn.welford_parallel(means, variances, count, EPS)
    _assert_right(mean, x.mean((0, 2, 3)), x.dtype)
    _assert_right(variance, x.var((0, 2, 3), correction=0), x.dtype)
    _assert_right(inv_std, (variance + EPS).rsqrt(), x.dtype)
    forwards = [syncbn.batchnorm_forward(p, mean, inv_std, weight, shift) for p, _ in parts]
    _assert_right(torch.cat(forwards), y, x.dtype)

    sums = [syncbn.reduce_bn(g, p, mean, inv_std, weight) for p, g in parts]
    sum_dy, sum_dy_xmu, found_dweight, found_dshift = (sum(c) for c in zip(*sums, strict=True))
    if affine:
        _assert_right(found_dweight, dweight, x.dtype)
        _assert_right(found_dshift, dshift, x.dtype)
    else:
        assert found_dweight.numel() == found_dshift.numel() == 0
    rest = (mean, inv_std, weight, sum_dy, sum_dy_xmu, count)
    found = torch.cat([syncbn.batchnorm_backward(g, p, *rest) for p, g in parts])
    _assert_right(found, dx, x.dtype)


@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_channels_last(has_z, relu):
    x, z, dy = torch.randn(3, 7, 4, 3, 6, dtype=torch.float64)
    z = z if has_z else None
    weight, shift = torch.randn(2, 6, dtype=torch.float64)
    first = [None if t is None else t.movedim(-1, 1) for t in (x, z)]
    exact = _exact(*first, weight, shift, dy.movedim(-1, 1), relu)
    y, dx, dz = (None if t is None else t.movedim(1, -1) for t in exact[:3])

    count = torch.tensor([84], dtype=torch.int32)
    mean, variance = syncbn.welford_mean_var_c_last(x)
    _, _, inv_std = syncbn.welford_parallel(mean[None], variance[None], count, EPS)
    found = syncbn.batchnorm_forward_c_last(x, z, mean, inv_std, weight, shift, relu)
    _assert_right(found, y, x.dtype)
    if relu:
        dy = syncbn.relu_bw_c_last(dy, x, z, mean, inv_std, weight, shift)
    if has_z:
        _assert_right(dy, dz, x.dtype)
    sum_dy, sum_dy_xmu, dweight, dshift = syncbn.reduce_bn_c_last(dy, x, mean, inv_std, weight)
    for one, other in ((dweight, exact[3]), (dshift, exact[4])):
        _assert_right(one, other, x.dtype)
    rest = (mean, inv_std, weight, sum_dy, sum_dy_xmu, count)
    _assert_right(syncbn.batchnorm_backward_c_last(dy, x, *rest), dx, x.dtype)


@pytest.mark.parametrize("own", [torch.float16, torch.float32])
def test_half_rounds_once(own):
    """Statistics and sums are float32; gradients of weights have the weights' dtype."""
    x, z, dy = torch.randn(3, 9, 5, 32).half()
    weight, shift = torch.randn(2, 32).to(own)
    mean, variance = syncbn.welford_mean_var_c_last(x)
    inv_std = (variance + EPS).rsqrt()
    y = syncbn.batchnorm_forward_c_last(x, z, mean, inv_std, weight, shift, True)
    first = [t.movedim(-1, 1) for t in (x, z)]
    exact = _exact(*first, weight, shift, dy.movedim(-1, 1), True)[0].movedim(1, -1)
    assert (mean.dtype, variance.dtype, y.dtype) == (torch.float32, torch.float32, torch.float16)
    assert_one_rounding(y, exact)
    sum_dy, sum_dy_xmu, dweight, dshift = syncbn.reduce_bn_c_last(dy, x, mean, inv_std, weight)
    assert (sum_dy.dtype, sum_dy_xmu.dtype) == (torch.float32, torch.float32)
    assert (dweight.dtype, dshift.dtype) == (own, own)
    assert dshift.data_ptr() != sum_dy.data_ptr()  # the sums are then added up in place


def test_relu_has_gradient_0_at_0():
    x, zero, one = torch.tensor([[-1.0], [0.0], [2.0]]), torch.zeros(1), torch.ones(1)
    found = syncbn.relu_bw_c_last(torch.ones(3, 1), x, None, zero, one, one, zero)
    assert found.tolist() == [[0.0], [0.0], [1.0]]


def test_a_process_without_elements():
    mean, variance = syncbn.welford_mean_var(torch.ones(0, 3, 2))
    assert mean.tolist() == variance.tolist() == [0, 0, 0]
    means, variances = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    found = syncbn.welford_parallel(means, variances, torch.tensor([0, 5]), 0.0)
    assert [t.item() for t in found] == [2.0, 4.0, 0.5]


def test_bad_input():
    x, three, four = torch.randn(2, 3, 5), torch.ones(3), torch.ones(4)
    with pytest.raises(ValueError, match=r"welford_mean_var: input has shape \[3\]. Pass at least"):
        syncbn.welford_mean_var_c_last(three)
    with pytest.raises(ValueError, match=r"mean has shape \[4\] and input .*2, 3, 5.*Pass \[3\]"):
        syncbn.batchnorm_forward(x, four, three, None, None)
    with pytest.raises(TypeError, match="reduce_bn: mean is a NoneType; pass a tensor"):
        syncbn.reduce_bn(x, x, None, three, None)
    with pytest.raises(ValueError, match="relu_bw_c_last: grad_output has shape"):
        syncbn.relu_bw_c_last(x[:1], x, None, *[torch.ones(5)] * 2, None, None)
    with pytest.raises(ValueError, match="batchnorm_backward: count is torch.float32; pass an int"):
        syncbn.batchnorm_backward(x, x, three, three, None, three, three, torch.ones(1))
    with pytest.raises(ValueError, match=r"numel has shape \[2\] and .*Pass \[1\]"):
        syncbn.welford_parallel(three[None], three[None], torch.tensor([1, 1]), EPS)
