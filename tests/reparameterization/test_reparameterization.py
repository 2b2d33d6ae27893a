"""Reparameterizations in general: rules, a program's own classes, removal."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from apex.reparameterization import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)


class Product(Reparameterization):
    """Written as for the original: it looks for the module and the name itself."""

    def compute_weight(self, module=None, name=None):
        if module is None:
            module = self.module
        if name is None:
            name = self.name
        module, name = Reparameterization.get_module_and_name(module, name)
        return getattr(module, name + "_left") * getattr(module, name + "_right")

    def reparameterize(self, name, weight, dim):
        left = nn.Parameter(weight.data / dim)
        return [name + "_left", name + "_right"], [left, nn.Parameter(torch.full_like(weight, dim))]


def nested():
    return nn.ModuleDict({"head": nn.Linear(3, 2), "body": nn.Sequential(nn.Linear(3, 3))})


def names(module):
    return [*module.state_dict()]


@pytest.mark.parametrize("hook_child", [True, False])
def test_a_programs_own_class(hook_child):
    model = nested()
    weight = model["body"][0].weight
    found = apply_reparameterization(model, Product, "body.0.weight", 2, hook_child)
    assert found is model
    assert names(model["body"]) == ["0.bias", "0.weight_left", "0.weight_right"]
    assert names(model["head"]) == ["weight", "bias"]
    layer = model["body"][0]
    assert torch.equal(layer.weight, weight)
    layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(layer.weight_left.grad, torch.full((3, 3), 2.0))
    remove_reparameterization(model, Product, "body.0.weight")
    assert torch.equal(layer.weight, weight)


def test_attributes_of_the_object():
    layer = nn.Linear(3, 2)
    fn = Reparameterization.apply(layer, "weight", 2, Product)
    assert (fn.name, fn.dim, fn.module, fn.retain_forward) == ("weight", 2, layer, True)
    assert fn.reparameterization_names == ["weight_left", "weight_right"]
    assert (fn.evaluated, fn.backward_hook_key) == (False, None)
    assert [*map(id, fn.get_params(layer))] == [id(layer.weight_left), id(layer.weight_right)]
    assert torch.equal(fn.compute_weight(), layer.weight)
    assert fn(layer, ()) is fn.backward_hook(layer, (), ()) is None
    root = nn.Sequential(layer)
    assert torch.equal(fn.compute_weight(root, "0.weight"), layer.weight)
    assert fn.get_module_and_name(root, "0.weight") == (layer, "weight")
    with pytest.raises(ValueError, match="Product of 'weight' is not installed in this Sequential"):
        fn.remove(root)
    fn.remove(layer)
    assert names(layer) == ["bias", "weight"]


def test_all_parameters_but_some():
    """Embeddings, vectors and buffers are skipped; a buffer was a KeyError in the original."""
    model = nn.ModuleDict({
        "embedding": nn.Embedding(5, 3),
        "bag": nn.EmbeddingBag(5, 3),
        "norm": nn.LayerNorm(3),
        "bilinear": nn.Bilinear(2, 3, 4),
        "linear": nn.Linear(3, 3, bias=False),
    })  # fmt: skip
    model.register_buffer("table", torch.ones(2, 2))
    assert apply_weight_norm(model) is model
    changed = [name for name in names(model) if name.endswith(("_g", "_v"))]
    assert changed == [f"{layer}.weight_{x}" for layer in ("bilinear", "linear") for x in "gv"]
    assert model["bilinear"].weight_g.shape == (4, 1, 1)
    for name in ("embedding.weight", "norm.bias"):
        assert apply_weight_norm(model, name) is model
    assert WeightNorm.apply(model, "norm.bias", 0, WeightNorm) is None
    assert [name for name in names(model) if name.endswith("_g")] == changed[::2]


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("head.nothing", AttributeError, "has no parameter 'head.nothing'. Its parameters: "),
        ("tail.weight", AttributeError, "tail"),
        ("table", AttributeError, "table is not a parameter of this ModuleDict"),
        ("head", AttributeError, "head is not a parameter"),
        ("twins.0.weight", ValueError, "twins.0.weight is shared by several modules"),
        ("", ValueError, "twins.0.weight is shared by several modules"),
        ("lazy.weight", ValueError, "lazy.weight has no shape yet. Run the model on a batch"),
        ("used.weight", ValueError, "adds a parameter 'weight_g', and the Linear has an attribute"),
        ("done.weight", ValueError, r"'weight' is computed from \['weight_g', 'weight_v'\]"),
        ("done.weight_v", ValueError, "done.weight_v is reparameterized already.* Call remove_rep"),
    ],
)
def test_errors_change_nothing(name, error, match):
    model = nested()
    model.register_buffer("table", torch.ones(2, 2))
    model["twins"] = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model["twins"][1].weight = model["twins"][0].weight
    model["lazy"] = nn.LazyLinear(2)
    model["used"] = nn.Linear(2, 2)
    model["used"].weight_g = None
    model["done"] = apply_weight_norm(nn.Linear(2, 2))
    before, class_before = names(model), type(model["head"])
    with pytest.raises(error, match=match):
        apply_weight_norm(model, name)
    assert names(model) == before
    assert type(model["head"]) is class_before


def test_classes_that_are_none():
    for wrong in (None, Product("weight", 0, nn.Linear(1, 1)), nn.Linear):
        with pytest.raises(TypeError, match="pass a subclass of Reparameterization"):
            apply_reparameterization(nn.Linear(3, 2), wrong)
    layer = nn.Linear(3, 2)
    with pytest.raises(NotImplementedError, match="Reparameterization does not define repar"):
        apply_reparameterization(layer, Reparameterization, "weight")
    with pytest.raises(NotImplementedError, match="does not define compute_weight"):
        Reparameterization("weight", 0, layer).compute_weight()
    assert names(layer) == ["weight", "bias"]


class Wrong(Product):
    def reparameterize(self, name, weight, dim):
        return [name + "_left"], super().reparameterize(name, weight, dim)[1]


class Typo(Product):
    def compute_weight(self, module=None, name=None):
        return module.wait_left


def test_mistakes_in_a_programs_class():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"the names \['weight_left'\] and 2 parameters"):
        apply_reparameterization(layer, Wrong, "weight", 2)
    assert names(layer) == ["weight", "bias"]
    apply_reparameterization(layer, Typo, "weight", 2)
    with pytest.raises(RuntimeError, match="'weight' cannot be computed: .*'wait_left'"):
        layer(torch.ones(1, 3))


@pytest.mark.parametrize("hook_child", [True, False])
def test_removal_by_name(hook_child):
    """In the original a dotted name was found only if ``hook_child`` had been False."""
    for root, name in (("", "body.0.weight"), ("body", "0.weight"), ("body.0", "weight")):
        model = apply_weight_norm(nested(), hook_child=hook_child)
        remove_weight_norm(model.get_submodule(root), name)
        assert names(model["body"]) == ["0.bias", "0.weight"]
        assert names(model["head"]) == ["bias", "weight_g", "weight_v"]


def test_the_parameter_that_comes_back_requires_a_gradient_if_one_did():
    for left, right in itertools.product((True, False), repeat=2):
        layer = nn.Linear(3, 2)
        fn = Reparameterization.apply(layer, "weight", 2, Product)
        layer.weight_left.requires_grad_(left)
        layer.weight_right.requires_grad_(right)
        fn.remove(layer)
        assert (layer.weight.requires_grad, layer.weight.is_leaf) == (left or right, True)


def test_removal_of_one_class():
    model = apply_weight_norm(nested(), "head.weight")
    apply_reparameterization(model, Product, "body.0.weight", 2)
    with pytest.raises(
        ValueError, match="body.0.weight is not reparameterized by WeightNorm, but by Product"
    ):
        remove_weight_norm(model, "body.0.weight")
    with pytest.raises(ValueError, match="head.bias is not reparameterized by WeightNorm."):
        remove_weight_norm(model, "head.bias")
    with pytest.raises(AttributeError, match="no parameter 'head.nothing'"):
        remove_weight_norm(model, "head.nothing")
    assert remove_weight_norm(model) is model
    assert names(model)[-2:] == ["body.0.weight_left", "body.0.weight_right"]
    remove_reparameterization(model, name="head.weight", remove_all=True)
    assert names(model) == ["head.bias", "head.weight", "body.0.bias", "body.0.weight"]
    assert remove_weight_norm(model) is model  # there is none


def test_one_of_two_in_a_module():
    rnn = apply_weight_norm(nn.LSTM(3, 4))
    x = torch.randn(5, 2, 3)
    y = rnn(x)[0]
    remove_weight_norm(rnn, "weight_ih_l0")
    assert "weight_ih_l0" in names(rnn)
    assert "weight_hh_l0_g" in names(rnn)
    torch.testing.assert_close(rnn(x)[0], y)
    rnn.weight_hh_l0_g.data.mul_(2)
    assert not torch.equal(rnn(x)[0], y)


def test_a_class_derived_by_somebody_else():
    """As FSDP2 does: it works, and cannot be removed or added to."""
    layer = apply_weight_norm(nn.LSTM(3, 2), "weight_hh_l0")
    layer.__class__ = type("Derived", (type(layer),), {})
    layer(torch.ones(1, 1, 3))[0].sum().backward()
    assert layer.weight_hh_l0_g.grad is not None
    before = names(layer)
    with pytest.raises(RuntimeError, match="class of this Derived was changed"):
        remove_weight_norm(layer)
    with pytest.raises(RuntimeError, match="class of this Derived was changed"):
        apply_weight_norm(layer, "weight_ih_l0")
    assert names(layer) == before
    layer(torch.ones(1, 1, 3))


class Final(nn.Linear):
    def __init_subclass__(cls):
        raise TypeError("Final is final")


def test_a_class_that_cannot_be_derived_from_leaves_the_whole_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 2), Final(2, 2))
    weight = model[0].weight
    with pytest.raises(TypeError, match="Final is final"):
        apply_weight_norm(model)
    assert names(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert model[0].weight is weight


def test_layers_of_a_kind_share_a_class():
    """So that torch.compile compiles them once; and it goes with the last of them."""
    first, second = apply_weight_norm(nn.Linear(3, 2)), apply_weight_norm(nn.Linear(5, 4))
    assert type(first) is type(second)
    assert type(first) is not type(apply_weight_norm(nn.Conv1d(3, 2, 1)))
    local = weakref.ref(type(apply_weight_norm(type("Local", (nn.Linear,), {})(3, 2))))
    gc.collect()
    assert local() is None
