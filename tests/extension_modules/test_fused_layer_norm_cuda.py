"""``fused_layer_norm_cuda`` and ``fast_layer_norm``: layer norm and RMS norm without autograd."""

import fast_layer_norm
import fused_layer_norm_cuda as cuda
import pytest
import torch

from tests.norms import layer_norm_reference, rms_norm_reference
from tests.tolerance import assert_one_rounding, each

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def _inputs(dtype, weight_dtype=None):
    weight_dtype = weight_dtype or dtype
    x = torch.randn(3, 5, 4, 6).to(dtype)
    gamma, beta = (torch.rand(4, 6) + 0.5).to(weight_dtype), torch.randn(4, 6).to(weight_dtype)
    return x, gamma, beta, torch.randn(3, 5, 4, 6).to(weight_dtype)


def _exact(reference, *tensors, dy):
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    arguments = [*leaves, None, None][: 3 if reference is layer_norm_reference else 2]
    y = reference(*arguments, (4, 6), EPS)
    return y.detach(), torch.autograd.grad(y, leaves, dy.double())


def _all_one_rounding(actual, exact):
    each(assert_one_rounding, actual, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype):
    x, gamma, beta, dy = _inputs(dtype)
    exact, gradients = _exact(layer_norm_reference, x, gamma, beta, dy=dy)
    y, mean, invvar = cuda.forward_affine(x, (4, 6), gamma, beta, EPS)
    assert_one_rounding(y, exact)
    rows = x.double().flatten(2).flatten(0, 1)
    assert_one_rounding(mean, rows.mean(-1))
    assert_one_rounding(invvar, (rows.var(-1, correction=0) + EPS).rsqrt())
    assert mean.dtype == invvar.dtype == torch.float32
    found = cuda.backward_affine(dy, mean, invvar, x, (4, 6), gamma, beta, EPS, False)
    assert isinstance(found, list)
    _all_one_rounding(found, gradients)

    exact, (gradient,) = _exact(layer_norm_reference, x, dy=dy)
    y, mean, invvar = cuda.forward(x, (4, 6), EPS)
    assert_one_rounding(y, exact)
    assert_one_rounding(cuda.backward(dy, mean, invvar, x, (4, 6), EPS, False), gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype):
    x, gamma, _, dy = _inputs(dtype)
    exact, gradients = _exact(rms_norm_reference, x, gamma, dy=dy)
    y, invvar = cuda.rms_forward_affine(x, (4, 6), gamma, EPS)
    assert_one_rounding(y, exact)
    found = cuda.rms_backward_affine(dy, invvar, x, (4, 6), gamma, EPS, False)
    assert isinstance(found, list)
    _all_one_rounding(found, gradients)

    exact, (gradient,) = _exact(rms_norm_reference, x, dy=dy)
    y, invvar = cuda.rms_forward(x, (4, 6), EPS)
    assert_one_rounding(y, exact)
    assert_one_rounding(cuda.rms_backward(dy, invvar, x, (4, 6), EPS, False), gradient)


def test_mixed_dtypes():
    x, gamma, beta, dy = _inputs(torch.float32, torch.bfloat16)
    y, mean, invvar = cuda.forward_affine_mixed_dtypes(x, (4, 6), gamma, beta, EPS)
    assert (y.dtype, mean.dtype) == (torch.bfloat16, torch.float32)
    found = cuda.backward_affine(dy, mean, invvar, x, (4, 6), gamma, beta, EPS, False)
    assert [g.dtype for g in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    y, invvar = cuda.rms_forward_affine_mixed_dtypes(x, (4, 6), gamma, EPS)
    assert y.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
        cuda.forward_affine(x, (4, 6), gamma, beta, EPS)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
        cuda.rms_forward_affine(x, (4, 6), gamma, EPS)


def test_memory_efficient():
    """From the output, without a mean; the original does it in float64 for no layer norm at all."""
    for dtype in (torch.float32, torch.float64):
        x, gamma, beta, dy = _inputs(dtype)
        y, mean, invvar = cuda.forward_affine(x, (4, 6), gamma, beta, EPS)
        plain = cuda.backward_affine(dy, mean, invvar, x, (4, 6), gamma, beta, EPS, False)
        found = cuda.backward_affine(dy, None, invvar, y, (4, 6), gamma, beta, EPS, True)
        torch.testing.assert_close(found, plain)
        y, invvar = cuda.rms_forward_affine(x, (4, 6), gamma, EPS)
        plain = cuda.rms_backward_affine(dy, invvar, x, (4, 6), gamma, EPS, False)
        found = cuda.rms_backward_affine(dy, invvar, y, (4, 6), gamma, EPS, True)
        torch.testing.assert_close(found, plain)
        y, mean, invvar = cuda.forward(x, (4, 6), EPS)
        found = cuda.backward(dy, None, invvar, y, (4, 6), EPS, True)
        plain = cuda.backward(dy, mean, invvar, x, (4, 6), EPS, False)
        torch.testing.assert_close(found, plain)


def test_memory_efficient_knows_the_dtype_of_the_output_only():
    x, gamma, beta, dy = _inputs(torch.float32, torch.float16)
    y, _, invvar = cuda.forward_affine_mixed_dtypes(x, (4, 6), gamma, beta, EPS)
    found = cuda.backward_affine(dy, None, invvar, y, (4, 6), gamma, beta, EPS, True)
    assert found[0].dtype == torch.float16


def test_what_would_be_read_beyond_its_end_is_refused():
    x, gamma, beta, dy = _inputs(torch.float32)
    _, mean, invvar = cuda.forward_affine(x, (4, 6), gamma, beta, EPS)
    with pytest.raises(
        RuntimeError, match="mean has 14 elements. Pass one for each of the 15 rows"
    ):
        cuda.backward_affine(dy, mean[1:], invvar, x, (4, 6), gamma, beta, EPS, False)
    with pytest.raises(RuntimeError, match="mean has None elements"):
        cuda.backward_affine(dy, None, invvar, x, (4, 6), gamma, beta, EPS, False)
    with pytest.raises(RuntimeError, match="invvar has 14 elements"):
        cuda.rms_backward(dy, invvar[1:], x, (4, 6), EPS, False)
    with pytest.raises(RuntimeError, match="dout has shape"):
        cuda.rms_backward(dy[1:], invvar, x, (4, 6), EPS, False)
    with pytest.raises(RuntimeError, match=r"weight has shape \[2, 6\]"):
        cuda.rms_backward_affine(dy, invvar, x, (4, 6), gamma[2:], EPS, False)
    with pytest.raises(RuntimeError, match=r"bias has shape \[2, 6\]"):
        cuda.backward_affine(dy, mean, invvar, x, (4, 6), gamma, beta[2:], EPS, False)
    with pytest.raises(RuntimeError, match=r"expected input with shape \[\*, 8, 6\]"):
        cuda.backward(dy, mean, invvar, x, (8, 6), EPS, False)
    with pytest.raises(RuntimeError, match=r"expected input with shape \[\*, 5\]"):
        fast_layer_norm.ln_bwd(dy, x, mean, invvar, gamma[0, :5], None, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [768, 100])
def test_fast_layer_norm(hidden, dtype):
    x, gamma, beta = torch.randn(6, hidden).to(dtype), torch.rand(hidden), torch.rand(hidden)
    gamma, beta = gamma.to(dtype), beta.to(dtype)
    z, mu, rsigma = fast_layer_norm.ln_fwd(x, gamma, beta, EPS)
    doubles = [tensor.double().requires_grad_() for tensor in (x, gamma, beta)]
    exact = layer_norm_reference(*doubles, (hidden,), EPS)
    dz = torch.randn(6, hidden).to(dtype)
    gradients = torch.autograd.grad(exact, doubles, dz.double())
    assert_one_rounding(z, exact.detach())
    found = fast_layer_norm.ln_bwd(dz, x, mu, rsigma, gamma, None, False)
    _all_one_rounding(found[:3], gradients)
    assert [part.shape for part in found[3:]] == [(1, hidden), (1, hidden)]
    z = z.float()
    again = fast_layer_norm.ln_bwd(dz.float(), z, None, rsigma, gamma.float(), beta.float(), True)
    assert again[0].dtype == torch.float32


def test_fast_layer_norm_gives_the_weights_dtype():
    x, gamma = torch.randn(6, 768), torch.ones(768).half()
    assert fast_layer_norm.ln_fwd(x, gamma, gamma, EPS)[0].dtype == torch.float16
    with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
        fast_layer_norm.ln_fwd(x.half(), gamma.float(), gamma.float(), EPS)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_tensors_that_require_gradients_record_nothing(memory_efficient):
    x, gamma, beta, dy = (tensor.requires_grad_() for tensor in _inputs(torch.float32))
    y, mean, invvar = cuda.forward_affine(x, (4, 6), gamma, beta, EPS)
    saved = y if memory_efficient else x
    found = cuda.backward_affine(
        dy, mean, invvar, saved, (4, 6), gamma, beta, EPS, memory_efficient
    )
    rms, scale = cuda.rms_forward_affine(x, (4, 6), gamma, EPS)
    saved = rms if memory_efficient else x
    found += cuda.rms_backward_affine(dy, scale, saved, (4, 6), gamma, EPS, memory_efficient)
    rows = x.detach().view(-1, 24).requires_grad_()
    flat = gamma.detach().view(-1).requires_grad_()
    z, mu, rsigma = fast_layer_norm.ln_fwd(rows, flat, flat, EPS)
    saved = z if memory_efficient else rows
    found += fast_layer_norm.ln_bwd(
        dy.view(-1, 24), saved, mu, rsigma, flat, flat, memory_efficient
    )
    assert not any(tensor.requires_grad for tensor in [y, mean, rms, scale, z, *found])
