"""The four softmax modules: positional functions of compiled Apex."""

import generic_scaled_masked_softmax_cuda
import pytest
import scaled_masked_softmax_cuda
import scaled_softmax_cuda
import scaled_upper_triang_masked_softmax_cuda
import torch

from apex.ops import _runtime
from apex.ops.layers.scaled_softmax import gradient, reference
from tests.tolerance import assert_one_rounding

MASKED = [scaled_masked_softmax_cuda, generic_scaled_masked_softmax_cuda]
MODULES = [*MASKED, scaled_softmax_cuda, scaled_upper_triang_masked_softmax_cuda]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
each = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_in_every_dtype(module, dtype):
    causal = module is scaled_upper_triang_masked_softmax_cuda
    x = torch.randn(4, 12, 12).to(dtype) if causal else torch.randn(2, 3, 8, 10).to(dtype)
    mask = (torch.rand(2, 1, 8, 10) < 0.3) if module in MASKED else None
    rest = [] if mask is None else [mask]
    x.requires_grad_()
    y = module.forward(x, *rest, 0.3)
    dy = torch.randn(y.shape).to(dtype)
    (exact,) = gradient(dy.double(), y.double(), 0.3, causal)
    assert_one_rounding(y, reference(x.double(), mask, 0.3, causal).detach())
    dx = module.backward(dy, y, 0.3)
    assert_one_rounding(dx, exact)
    assert not y.requires_grad
    assert (dx is dy) == (module is not generic_scaled_masked_softmax_cuda)  # in place


def test_kernels():
    pytest.importorskip("triton")
    x, mask = torch.randn(2, 2, 4, 20), torch.rand(1, 1, 4, 20) < 0.3
    with _runtime.use("triton"):
        y = scaled_masked_softmax_cuda.forward(x, mask, 0.3)
        dx = scaled_masked_softmax_cuda.backward(torch.ones_like(y).cumsum(-1), y, 0.3)
    exact = reference(x.double(), mask, 0.3, False)
    assert_one_rounding(y, exact)
    assert_one_rounding(dx, gradient(torch.ones_like(y).double().cumsum(-1), exact, 0.3, False)[0])


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (scaled_masked_softmax_cuda, (2, 2, 4, 20)),
        (scaled_masked_softmax_cuda, (1, 1, 2, 8200)),  # in blocks
        (scaled_upper_triang_masked_softmax_cuda, (3, 20, 20)),
        (scaled_softmax_cuda, (2, 2, 4, 20)),
    ],
)
def test_kernels_write_over_the_gradient(module, shape, monkeypatch):
    """No tensor is allocated and none is copied; the bits are those of a result of its own."""
    kernels = pytest.importorskip("apex.kernels.scaled_softmax")
    y, dy = torch.randn(shape).softmax(-1), torch.randn(shape)
    causal = module is scaled_upper_triang_masked_softmax_cuda
    (apart,) = kernels.backward(dy, (True,), y=y, scale=0.3, causal=causal)
    given = []
    original = kernels.backward
    monkeypatch.setattr(
        kernels,
        "backward",
        lambda *args, **more: given.append(more["out"]) or original(*args, **more),
    )
    version, address = dy._version, dy.data_ptr()
    with _runtime.use("triton"):
        dx = module.backward(dy, y, 0.3)
    assert dx is dy is given[0]
    assert dy.data_ptr() == address
    assert torch.equal(dx, apart)
    assert dy._version == version + 1  # autograd knows that it was written


def test_a_gradient_that_is_not_contiguous_is_written_by_a_copy():
    pytest.importorskip("triton")
    y, dy = torch.randn(2, 2, 4, 20).softmax(-1), torch.randn(2, 2, 20, 4).transpose(2, 3)
    apart = scaled_softmax_cuda.backward(dy.contiguous(), y, 0.3)
    with _runtime.use("triton"):
        dx = scaled_softmax_cuda.backward(dy, y, 0.3)
    assert dx is dy
    assert_one_rounding(dx, apart.double())


@each
def test_bad_input(module):
    name, x = module.__name__, torch.ones(2, 2, 4, 4)
    mask = [torch.ones(2, 1, 4, 4, dtype=torch.bool)] if module in MASKED else []
    with pytest.raises(TypeError, match=f"{name}.forward: input is torch.int64; allowed are"):
        module.forward(x.long(), *mask, 1.0)
    with pytest.raises(ValueError, match=rf"{name}.backward: output_grads has shape \[2\] and so"):
        module.backward(torch.ones(2), x, 1.0)
    with pytest.raises(ValueError, match=f"{name}.backward: output_grads are torch.float16 and"):
        module.backward(x.half(), x, 1.0)
    for dy, found in ((None, "NoneType"), ([1.0], "list")):
        with pytest.raises(TypeError, match=f"{name}.backward: output_grads is a {found}; pass a"):
            module.backward(dy, x, 1.0)
    for one in (torch.ones(()), torch.ones(5)):
        with pytest.raises(
            ValueError, match=r"backward: softmax_results has shape .*; pass \(\.\.\."
        ):
            module.backward(one, one, 1.0)
    if mask:
        with pytest.raises(TypeError, match=f"{name}.forward: mask is a NoneType; pass a tensor"):
            module.forward(x, None, 1.0)
        with pytest.raises(ValueError, match=rf"{name}.forward: mask has shape \[3, 1, 4, 4\]"):
            module.forward(x, mask[0][:1].expand(3, 1, 4, 4), 1.0)


def test_a_causal_backward_takes_as_many_queries_as_keys():
    y = torch.ones(2, 3, 4)
    with pytest.raises(
        ValueError, match=r"softmax_results has shape \[2, 3, 4\]; a causal softmax"
    ):
        scaled_upper_triang_masked_softmax_cuda.backward(y, y, 1.0)


def test_rows_of_a_block():
    sizes = [scaled_masked_softmax_cuda.get_batch_per_block(8, sk, 2, 4) for sk in (8, 64, 500)]
    assert sizes == [32, 8, 4]
