"""`Applied`: public autograd functions that call a function, and what inherits from them."""

import pytest
import torch

from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.fused_dense import FusedDenseFunc
from apex.normalization.fused_layer_norm import FusedLayerNormFunction
from apex.transformer.functional.fused_softmax import ScaledSoftmax


class Doubled(FusedDenseFunc):
    """Arguments in another order, and twice the result."""

    @staticmethod
    def forward(ctx, weight, x):
        return 2 * FusedDenseFunc.forward(ctx, x, weight, None)

    @staticmethod
    def backward(ctx, dy):
        dx, dweight, _ = FusedDenseFunc.backward(ctx, 2 * dy)
        return dweight, dx


class Clipped(FusedDenseFunc):
    """The gradient of the input is clipped."""

    @staticmethod
    def backward(ctx, dy):
        dx, *rest = FusedDenseFunc.backward(ctx, dy)
        return dx.clamp(-0.5, 0.5), *rest


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, 4, dtype=dtype, generator=generator) for size in (3, 2)]
    return [tensor.requires_grad_() for tensor in made]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_subclass_calls_forward_and_backward(autocast):
    weight, x = tensors()
    # No cache: that of torch 2.9 has the weights without gradients once forward has cast them.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        y, wanted = Doubled.apply(weight, x), 2 * FusedDenseFunc.apply(x, weight, None)
    dy = torch.ones_like(y)
    assert torch.equal(y, wanted)
    found = torch.autograd.grad(y, (weight, x), dy)
    wanted = torch.autograd.grad(wanted, (weight, x), dy)
    assert all(map(torch.equal, found, wanted))


def test_a_subclass_with_a_backward_alone():
    weight, x = tensors()
    y = Clipped.apply(x, weight, None)
    assert torch.equal(y, FusedDenseFunc.apply(x, weight, None))
    assert torch.autograd.grad(y.sum(), x)[0].abs().max() == 0.5


def test_derivatives_of_a_subclass():
    weight, x = tensors(torch.float64)
    assert torch.autograd.gradcheck(Doubled.apply, (weight, x))
    assert torch.autograd.gradgradcheck(Doubled.apply, (weight, x))
    y = Doubled.apply(x[:1], x)  # partial ones, where one argument comes from the other
    found = [
        torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=create)[0]
        for create in (True, False)
    ]
    assert torch.equal(*found)


def test_they_are_autograd_functions_whose_apply_leaves_autocast_out():
    _, x = tensors()
    assert issubclass(FastLayerNormFN, torch.autograd.Function)
    with torch.autocast("cpu", torch.bfloat16):
        assert FastLayerNormFN.apply(x, torch.ones(4), torch.ones(4), 1e-5).dtype == torch.float32
        assert FusedLayerNormFunction.apply(input=x, normalized_shape=(4,)).dtype == torch.float32
        assert FusedDenseFunc.apply(x, torch.ones(3, 4), None).dtype == torch.bfloat16


def script_norm(x: torch.Tensor, weight: torch.Tensor):
    return FastLayerNormFN.apply(x, weight, weight, 1e-5, False)


def script_softmax(x: torch.Tensor, weight: torch.Tensor):
    return ScaledSoftmax.apply(x[None, None], 0.5)


def script_dense(x: torch.Tensor, weight: torch.Tensor):
    return FusedDenseFunc.apply(x, x, None)


@pytest.mark.parametrize("caller", [script_norm, script_softmax, script_dense])
def test_scripted_callers_call_back(caller):
    _, x = tensors()
    arguments = (x, torch.ones(4))
    assert torch.equal(torch.jit.script(caller)(*arguments), caller(*arguments))
