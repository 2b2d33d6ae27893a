"""`FusedDense` and `FusedDenseGeluDense`: module rules. Numbers are in tests/ops/test_dense.py."""

import pytest
import torch
from torch import nn

from apex.fused_dense import (
    FusedDense,
    FusedDenseFunc,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)
from apex.fused_dense.fused_dense import _dense_no_bias, _fused_dense, _fused_dense_gelu_dense
from apex.mlp import mlp_function
from apex.ops._check import ArgumentError
from tests.checkpoints import scripted

MODULES = {
    "FusedDense": lambda: FusedDense(5, 3),
    "no bias": lambda: FusedDense(5, 3, bias=False),
    "FusedDenseGeluDense": lambda: FusedDenseGeluDense(5, 7, 3),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def test_initialised_as_torchs():
    """NVIDIA's parameters are uninitialised memory."""
    torch.manual_seed(0)
    ours = [*FusedDense(5, 3).parameters(), *FusedDenseGeluDense(5, 7, 3).parameters()]
    torch.manual_seed(0)
    theirs = [nn.Linear(5, 3), nn.Linear(5, 7), nn.Linear(7, 3)]
    expected = [p for linear in theirs for p in linear.parameters()]
    assert all(map(torch.equal, ours, expected))
    assert len(ours) == len(expected)


def test_parameters():
    assert [*FusedDense(5, 3).state_dict()] == ["weight", "bias"]
    assert FusedDense(5, 3, bias=False).bias is None
    shapes = {key: tuple(t.shape) for key, t in FusedDenseGeluDense(5, 7, 3).state_dict().items()}
    assert shapes == {"weight1": (7, 5), "bias1": (7,), "weight2": (3, 7), "bias2": (3,)}
    assert "in_features=5, intermediate_features=7, out_features=3" in repr(
        FusedDenseGeluDense(5, 7, 3)
    )
    for make in (lambda **k: FusedDense(5, 3, **k), lambda **k: FusedDenseGeluDense(5, 7, 3, **k)):
        for parameter in make(dtype=torch.bfloat16, device="meta").parameters():
            assert parameter.is_meta
            assert parameter.dtype == torch.bfloat16


@each_module
def test_torchscript(make):
    module, x = make(), torch.randn(2, 5)
    assert torch.equal(scripted(nn.Sequential(module))(x), module(x))
    assert torch.equal(torch.jit.trace(module, x)(x), module(x))


def test_names_of_the_functions_in_2021():
    assert fused_dense_function is _fused_dense
    assert dense_no_bias_function is _dense_no_bias
    assert fused_dense_gelu_dense_function is _fused_dense_gelu_dense


def test_functions_in_torchscript():
    def caller(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
        return _dense_no_bias(_fused_dense(x, weight, bias), weight), _fused_dense_gelu_dense(
            x, weight, bias, weight, bias
        )

    args = torch.randn(2, 5), torch.randn(5, 5), torch.randn(5)
    for found, expected in zip(torch.jit.script(caller)(*args), caller(*args), strict=True):
        assert torch.equal(found, expected)


X, W, B = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
REFUSED = {  # what F.linear takes in one case or another, and what it refuses
    "a weight of one dimension": (X, W[0], None),
    "a bias of one element": (X, W, B[:1]),
    "a bias of two dimensions": (X, W, B[None]),
    "integers": (X.int(), W.int(), B.int()),
    "complex numbers": (X + 0j, W + 0j, None),
    "a wider bias, input not contiguous": (torch.ones(2, 4, 2).half().mT, W.half(), B),
    "a wider bias": (X.half(), W.half(), B),
    "another dtype": (X.half(), W, B),
    "other features": (X[:, :3], W, B),
    "no dimension": (X[0, 0], W, None),
    "a weight elsewhere": (X, W.to("meta"), None),
    "an input elsewhere": (X.to("meta"), W, B),
    "a bias elsewhere": (torch.ones(2, 4, 2).mT, W, B.to("meta")),
    "no tensor": ([1.0], W, B),
    "no weight": (X, None, B),
}


@pytest.mark.parametrize("args", REFUSED.values(), ids=REFUSED)
def test_what_torch_would_take_is_refused_too(args):
    with pytest.raises(ArgumentError, match="FusedDense: "):
        _fused_dense(*args)
    x, weight, bias = args
    rest = (weight,) if bias is None else (weight, bias)
    with pytest.raises(ArgumentError, match="mlp_function: "):
        mlp_function(bias is not None, 1, x, *rest)


def test_a_number_without_dimensions_is_refused_by_layers_of_one_feature():
    for layer in (_fused_dense, lambda *args: mlp_function(True, 1, *args)):
        with pytest.raises(ArgumentError, match=r"input has shape \[\]"):
            layer(torch.ones(()), torch.ones(3, 1), torch.ones(3))


def test_a_layer_of_one_feature_has_a_bias_of_one_element():
    x, weight, bias = torch.ones(2, 4), torch.ones(1, 4), torch.ones(1)
    assert torch.equal(_fused_dense(x, weight, bias), torch.full((2, 1), 5.0))
    assert torch.equal(mlp_function(True, 1, x, weight, bias), torch.full((2, 1), 5.0))


@pytest.mark.parametrize("wide", range(3))
def test_float64_beside_others_is_refused_under_autocast(wide):
    args = [t.double() if at == wide else t for at, t in enumerate((X, W, B))]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArgumentError, match="float64"):
        _fused_dense(*args)


def test_errors():
    with pytest.raises(
        AssertionError, match="bias is False; allowed is True. Without biases, use "
    ):
        FusedDenseGeluDense(5, 7, 3, bias=False)
    with pytest.raises(TypeError, match="bias is on meta and input on cpu"):
        FusedDenseFunc.apply(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, device="meta"))
