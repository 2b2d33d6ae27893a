"""Weight normalization: the definition, its gradients, and the autograd function of 2018."""

import pytest
import torch

from apex.fp16_utils.fused_weight_norm import Fused_Weight_Norm, check_contig_cuda
from apex.ops.norms.weight_norm import norm_except, weight_norm
from tests.tolerance import assert_one_rounding, assert_rounded_after_float32

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = {  # of v, by dim; float32 needs 500 elements in each gradient
    0: ((600, 3, 5), (600, 1, 1)),
    1: ((7, 600, 5), (1, 600, 1)),
    -1: ((3, 5, 600), (1, 1, 600)),
    None: ((30, 40), ()),
}


def exact_norm(v, g, dim):
    squares = v * v
    if dim is None:
        return g * v / squares.sum().sqrt()
    for other in range(v.dim()):
        if other != dim % v.dim():
            squares = squares.sum(other, keepdim=True)
    return g * v / squares.sqrt()


def tensors(shape, length, dtype, length_dtype=None, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, length, shape)
    values = [scale * torch.randn(size, generator=generator) for size in sizes]
    v, g, grad = (
        x.to(to) for x, to in zip(values, (dtype, length_dtype or dtype, dtype), strict=True)
    )
    return v.requires_grad_(), g.requires_grad_(), grad


@pytest.mark.parametrize("dim", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding(dtype, dim):
    v, g, grad = tensors(*SHAPES[dim], dtype)
    w = weight_norm(v, g, dim)
    w.backward(grad)
    exact_v, exact_g = (x.detach().double().requires_grad_() for x in (v, g))
    exact = exact_norm(exact_v, exact_g, dim)
    exact.backward(grad.double())
    assert w.dtype == v.grad.dtype == g.grad.dtype == dtype
    assert_one_rounding(w.detach(), exact.detach())
    assert_one_rounding(v.grad, exact_v.grad)
    if dim is None:  # a single number, the sum of terms of both signs
        terms = (grad.double() * exact_v / exact_v.norm()).detach().abs().sum()
        assert_rounded_after_float32(g.grad, exact_g.grad, terms)
    else:
        assert_one_rounding(g.grad, exact_g.grad)


@pytest.mark.parametrize("scale", [0.02, 300.0])
def test_sizes_that_half_cannot_square(scale):
    """0.02**2 has few bits in float16, and 300**2 none."""
    v, g, _ = tensors(*SHAPES[0], torch.float16, scale=scale)
    assert_one_rounding(weight_norm(v, g).detach(), exact_norm(v.double(), g.double(), 0).detach())


def test_dtypes_may_differ():
    v, g, grad = tensors(*SHAPES[0], torch.float16, torch.float32)
    w = Fused_Weight_Norm.apply(v, g)
    w.backward(grad)
    assert (w.dtype, v.grad.dtype, g.grad.dtype) == (torch.float16, torch.float16, torch.float32)
    assert_one_rounding(w.detach(), exact_norm(v.detach().double(), g.detach().double(), 0))


@pytest.mark.parametrize("dim", [0, 1, None])
def test_gradients_of_gradients(dim):
    shape = {0: (3, 1), 1: (1, 4), None: ()}[dim]
    v, g, _ = tensors((3, 4), shape, torch.float64)
    for function in (weight_norm, Fused_Weight_Norm.apply):
        assert torch.autograd.gradcheck(lambda v, g, f=function: f(v, g, dim), (v, g))
        assert torch.autograd.gradgradcheck(lambda v, g, f=function: f(v, g, dim), (v, g))


def test_layouts_and_sizes():
    v, g, _ = tensors((6, 4), (1, 6), torch.float32)
    torch.testing.assert_close(weight_norm(v.t(), g, 1), weight_norm(v, g.t(), 0).t())
    one = torch.tensor([3.0, -4.0])
    assert weight_norm(one, torch.tensor([2.0, 2.0]), 0).tolist() == [2.0, -2.0]
    assert norm_except(one, None) == 5.0
    assert weight_norm(torch.ones(0, 4), torch.ones(0, 1)).shape == (0, 4)
    v = torch.tensor([[0.0, 0.0], [3.0, 4.0]])  # there is no epsilon
    w = weight_norm(v, torch.ones(2, 1))
    assert w[0].isnan().all()
    torch.testing.assert_close(w[1], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(
    ("v", "g", "dim", "error", "match"),
    [
        (torch.ones(3, 4), torch.ones(3, 1), 2, IndexError, r"dim was 2 and v has shape \[3, 4\]"),
        (torch.ones(3, 4), torch.ones(3), 0, RuntimeError, r"g has shape \[3\].* Pass \[3, 1\]"),
        (torch.ones(3, 4), torch.ones(4), 1, RuntimeError, r"Pass \[1, 4\]"),
        (torch.ones(3, 4).cfloat(), torch.ones(3, 1), 0, RuntimeError, "v is torch.complex64"),
        (torch.ones(3, 4), torch.ones(3, 1, device="meta"), 0, RuntimeError, "g is on meta"),
    ],
)
def test_errors(v, g, dim, error, match):
    with pytest.raises(error, match=match):
        weight_norm(v, g, dim)


def test_check_contig_cuda():
    check_contig_cuda((torch.ones(2, 3), torch.ones(3)), ("input", "g"))
    with pytest.raises(RuntimeError, match=r"g is not contiguous. Pass g.contiguous\(\)"):
        check_contig_cuda((torch.ones(2, 3), torch.ones(2, 3).t()), ("input", "g"))
