"""Parts of a batch norm: all together, on three processes' worth of data, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from apex.ops._dtypes import wide
from apex.ops.norms import batch_norm
from tests.tolerance import TORCH_IN_FLOAT64, assert_close_to_largest, assert_one_rounding

CHANNELS, EPS = 24, 1e-3
SHAPES = [(8, 24), (3, 24, 11), (4, 24, 5, 3), (2, 24, 3, 2, 5)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SUMMED = {torch.float32: 2.0**-20, torch.float64: TORCH_IN_FLOAT64}


class PretendsCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def _stats(input, eps):
    _assert_dense(input)
    variance, mean = torch.var_mean(input.to(wide(input)), _dims(input), correction=0)
    return mean, (variance + eps).rsqrt()


def _elemt(input, weight, bias, mean, invstd, eps):
    _assert_dense(input)
    assert weight is None or weight.dtype in (input.dtype, mean.dtype)
    y = (input.to(mean.dtype) - _at(mean, input)) * _at(invstd, input)
    y = y if weight is None else y * _at(weight.to(mean.dtype), input)
    return (y if bias is None else y + _at(bias.to(mean.dtype), input)).to(input.dtype)


def _reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    _assert_dense(grad_out, input)
    assert (weight, input_g, weight_g, bias_g) == (None, True, False, False)
    dy = grad_out.to(mean.dtype)
    empty = mean.new_empty(0)
    xmu = input.to(mean.dtype) - _at(mean, input)
    return dy.sum(_dims(input)), (dy * xmu).sum(_dims(input)), empty, empty


def _backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    _assert_dense(grad_out, input)
    assert weight is None or weight.dtype == mean.dtype
    assert (count.dtype, count.dim()) == (torch.int32, 1)
    n = count.sum()
    xmu = input.to(mean.dtype) - _at(mean, input)
    dx = grad_out - _at(sum_dy / n, input) - xmu * _at(invstd**2 * sum_dy_xmu / n, input)
    scale = invstd if weight is None else invstd * weight
    return (dx * _at(scale, input)).to(input.dtype)


def _at(values, x):
    return values.view(-1, *[1] * (x.dim() - 2))


def _dims(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def _assert_dense(*tensors):
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    for tensor in tensors:
        assert tensor.numel() > 0
        assert any(tensor.is_contiguous(memory_format=f) for f in formats)


@pytest.fixture(params=["functions", "kernels"])
def place(request, monkeypatch):
    """What moves tensors to where functions, or the fused kernels of a GPU, are taken.

    Without a GPU stand-ins check what the kernels are given.
    """
    if request.param == "functions":
        return lambda tensor: tensor
    if torch.cuda.is_available():
        return lambda tensor: tensor.cuda()
    for name, stand_in in [
        ("batch_norm_stats", _stats),
        ("batch_norm_elemt", _elemt),
        ("batch_norm_backward_reduce", _reduce),
        ("batch_norm_backward_elemt", _backward_elemt),
    ]:
        monkeypatch.setattr(torch, name, stand_in)
    return lambda tensor: tensor.as_subclass(PretendsCuda)


def _assert_right(actual, exact):
    actual = actual.as_subclass(torch.Tensor).cpu()
    if actual.dtype == torch.float64:
        assert_close_to_largest(actual, exact, TORCH_IN_FLOAT64)
    else:
        assert_one_rounding(actual, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_processes_together(place, shape, dtype, strided):
    """The first of three has twice as many elements as the second, the third none."""
    spread = torch.linspace(0.02, 4, CHANNELS).view(-1, *[1] * (len(shape) - 2))
    xs = [(torch.randn(n * shape[0], *shape[1:]) + 0.5).mul(spread).to(dtype) for n in (2, 1, 0)]
    dys = [torch.randn(x.shape).to(dtype) for x in xs]
    weight, bias = (torch.randn(CHANNELS).to(wide(xs[0])) for _ in range(2))
    wide_x = torch.cat(xs).double().requires_grad_()
    wide_weight, wide_bias = (t.double().requires_grad_() for t in (weight, bias))
    exact = F.batch_norm(wide_x, None, None, wide_weight, wide_bias, True, 0.0, EPS)
    exact_dx, exact_dw, exact_db = torch.autograd.grad(
        exact, (wide_x, wide_weight, wide_bias), torch.cat(dys).double()
    )

    if strided:
        xs, dys = ([t.mT.contiguous().mT for t in tensors] for tensors in (xs, dys))
    if strided and len(shape) == 4:
        xs = [x.contiguous(memory_format=torch.channels_last) for x in xs]
    xs, dys = [place(x) for x in xs], [place(dy) for dy in dys]
    weight, bias = place(weight), place(bias)
    found = zip(*map(batch_norm.moments, xs), strict=True)
    means, variances = (torch.stack(column) for column in found)
    counts = means.new_tensor([[x[:, 0].numel()] for x in xs])
    mean, variance, total = batch_norm.merge(means, variances, counts)
    rstd = (variance + EPS).rsqrt()
    assert total.item() == wide_x[:, 0].numel()
    assert mean.dtype == rstd.dtype == wide(xs[0])

    ys = [batch_norm.normalize(x, mean, rstd, weight, bias) for x in xs]
    sums = [batch_norm.gradient_sums(dy, x, mean, rstd) for dy, x in zip(dys, xs, strict=True)]
    sum_dy, sum_dy_xmu = (sum(parts) for parts in zip(*sums, strict=True))
    dxs = [
        batch_norm.input_gradient(dy, x, mean, rstd, weight, sum_dy, sum_dy_xmu, counts)
        for dy, x in zip(dys, xs, strict=True)
    ]
    assert [y.dtype for y in ys] == [dx.dtype for dx in dxs] == [dtype] * 3
    _assert_right(torch.cat(ys), exact.detach())
    _assert_right(torch.cat(dxs), exact_dx)
    # Sums of terms of both signs: compared with the largest, in roundings of float32 (2**-24).
    for found, expected in ((sum_dy, exact_db), (sum_dy_xmu * rstd, exact_dw)):
        assert_close_to_largest(found.as_subclass(torch.Tensor).cpu(), expected, SUMMED[mean.dtype])


def test_constant_channels(place):
    """The variance is 0, or next to it after the kernels' reciprocal of its root."""
    mean, variance = batch_norm.moments(place(torch.full((4, 3, 5), 7.5)))
    assert torch.equal(mean.cpu(), torch.full((3,), 7.5))
    assert ((variance.cpu() >= 0) & (variance.cpu() <= 2 * batch_norm._TINY)).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38])
def test_overflow_is_not_hidden(place, bad):
    x = torch.randn(4, 1, 5)
    x[0, 0, 0] = bad
    _, variance = batch_norm.moments(place(x))
    assert not variance.isfinite().any()
