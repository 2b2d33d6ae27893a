"""`FastLayerNorm`: layer norm over the last dimension, of any size."""

import inspect

import pytest
import torch

from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN, _fast_layer_norm
from tests.checkpoints import scripted
from tests.norms import layer_norm_reference as reference
from tests.tolerance import assert_one_rounding


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward_and_backward(dtype, memory_efficient):
    module = FastLayerNorm(48, memory_efficient=memory_efficient)
    torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    module.to(dtype)
    x = torch.randn(3, 5, 48).to(dtype).requires_grad_()
    y = module(x)
    exact = reference(x.detach().double(), module.weight.detach().double(), None, (48,), 1e-5)
    assert y.dtype == dtype
    assert_one_rounding(y.detach(), exact)
    y.sum().backward()
    assert x.grad.dtype == module.bias.grad.dtype == dtype
    assert torch.equal(FastLayerNormFN.apply(x, module.weight, module.bias, 1e-5), y)


def test_names():
    module = FastLayerNorm(8)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert (module.epsilon, module.memory_efficient) == (1e-5, False)
    names = inspect.getfullargspec(FastLayerNormFN.forward).args
    assert names == ["ctx", "x", "gamma", "beta", "epsilon", "memory_efficient"]


def test_dtypes():
    x, weight = torch.randn(3, 8), torch.ones(8)
    y = _fast_layer_norm(x, weight.half(), weight.half(), 1e-5, False)
    assert y.dtype == torch.float16
    with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
        _fast_layer_norm(x.half(), weight, weight, 1e-5, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert FastLayerNorm(8)(x).dtype == torch.bfloat16


def test_wrong_size():
    with pytest.raises(RuntimeError, match=r"expected input with shape \[\*, 8\]"):
        FastLayerNorm(8)(torch.randn(3, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scripted(dtype):
    """Inside of a model too; what is saved needs no Python."""
    module = FastLayerNorm(8).to(dtype)
    torch.nn.init.uniform_(module.weight)
    x = torch.randn(3, 8)
    found = scripted(torch.nn.Sequential(module))(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, module(x))


def test_compiles_as_one_graph():
    module = FastLayerNorm(8)
    x = torch.randn(3, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
