"""Norms of ``apex.transformer.layers``: their parameters are marked, and stay so."""

import copy

import pytest
import torch

import apex.contrib.layer_norm
import apex.normalization
from apex.transformer import layers
from tests.checkpoints import reloaded

PARENTS = {
    layers.FusedLayerNorm: apex.normalization.FusedLayerNorm,
    layers.MixedFusedLayerNorm: apex.normalization.MixedFusedLayerNorm,
    layers.FastLayerNorm: apex.contrib.layer_norm.FastLayerNorm,
}
each_layer = pytest.mark.parametrize("layer", PARENTS, ids=lambda layer: layer.__name__)


def _marks(module):
    return [getattr(p, "sequence_parallel_enabled", None) for p in module.parameters()]


@each_layer
def test_marked(layer):
    assert _marks(layer(8)) == [False, False]
    assert not layer(8).sequence_parallel_enabled
    module = layer(8, 1e-3, sequence_parallel_enabled=True)
    assert module.sequence_parallel_enabled
    assert _marks(module) == [True, True]
    x = torch.randn(3, 8)
    assert torch.equal(module(x), PARENTS[layer](8, 1e-3)(x))
    assert layer(8, memory_efficient=True).memory_efficient


@each_layer
def test_the_mark_is_not_taken_by_position(layer):
    """It would be another argument of the norm, and gradients would not be added up."""
    with pytest.raises(TypeError, match="positional arguments"):
        layer(8, 1e-5, *[True] * (1 + (layer is layers.FusedLayerNorm)))


@each_layer
def test_parameters_that_torch_makes_anew_are_marked(layer):
    module = layer(8, sequence_parallel_enabled=True)
    for other in (copy.deepcopy(module), reloaded(module)):
        assert other.weight is not module.weight
        assert _marks(other) == [True, True]
    assert _marks(module.to(torch.float64)) == [True, True]
    assert _marks(torch.nn.Sequential(module).to("meta")) == [True, True]
    module = module.to_empty(device="cpu")
    assert _marks(module) == [True, True]
    state = {key: torch.ones_like(value) for key, value in module.state_dict().items()}
    torch.nn.Sequential(module).load_state_dict(
        {f"0.{key}": value for key, value in state.items()}, assign=True
    )
    assert torch.equal(module.weight, torch.ones(8, dtype=torch.float64))
    assert _marks(module) == [True, True]


def test_the_rest():
    plain = layers.FusedLayerNorm(8, elementwise_affine=False, sequence_parallel_enabled=True)
    assert _marks(plain) == []
    assert layers.FusedLayerNorm((2, 3), dtype=torch.float16).weight.dtype == torch.float16
    assert layers.layer_norm.FusedLayerNorm is layers.FusedLayerNorm


@each_layer
def test_scripted_and_compiled(layer):
    module, x = layer(8, sequence_parallel_enabled=True), torch.randn(3, 8)
    torch.testing.assert_close(torch.jit.script(module)(x), module(x))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
