"""``apex.contrib.openfold_triton``: attention, layer norm and FusedAdamSWA, against float64."""

import copy

import pytest
import torch

from apex.catalogue.optimizers import adam_swa, averaged
from apex.contrib.openfold_triton import (
    AttnBiasJIT,
    AttnNoBiasJIT,
    AttnTri,
    CanSchTriMHA,
    LayerNormSmallShapeOptImpl,
    _layer_norm_config_ampere,
    _tuneable_triton_kernels,
    mha,
    sync_triton_auto_tune_cache_across_gpus,
)
from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA
from apex.ops import _runtime
from apex.ops.lists import multi_tensor
from tests.optimizers.common import PATHS, check_steps, on, parameters
from tests.tolerance import ATTENTION_GRADIENTS, PRODUCTS, assert_close_in_rms, assert_one_rounding

paths = pytest.mark.parametrize("path", PATHS)
FLOAT, BRAIN = torch.float32, torch.bfloat16


# -- attention -------------------------------------------------------------------------------------


def formula(q, k, v, mask, bias, inf):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores + (mask - 1) * inf
    return torch.softmax(scores if bias is None else scores + bias, -1) @ v


def inputs(lead, dtype):
    """Of which a query sees no key at all, where there are masks."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (made(*lead, 3, 4, length, 16) for length in (5, 7, 7))
    mask = (torch.rand(*lead, 3, 1, 1, 7, generator=generator) > 0.3).to(dtype)
    return q, k, v, mask, made(*lead, 1, 4, 5, 7)


@pytest.mark.onednn
@pytest.mark.parametrize("given", ["mask bias", "bias", "mask", ""])
@pytest.mark.parametrize("dtype", [FLOAT, torch.float16, BRAIN], ids=str)
@pytest.mark.parametrize("lead", [(), (1,)])
def test_attention(lead, dtype, given):
    q, k, v, mask, bias = inputs(lead, dtype)
    mask, bias = mask if "mask" in given else None, bias if "bias" in given else None
    leaves = [x.requires_grad_() for x in (q, k, v, bias) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    y = AttnTri(q, k, v, mask, bias, 1e9, True)
    wide = None if mask is None else mask.double()
    wanted = formula(*exact[:3], wide, exact[3] if bias is not None else None, 1e9)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert (y.shape, y.dtype) == (q.shape, dtype)
    assert_close_in_rms(y, wanted.detach(), PRODUCTS[dtype])
    found = torch.autograd.grad(y, leaves, dy)
    for actual, other in zip(found, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        assert actual.dtype == dtype
        assert_close_in_rms(actual, other, ATTENTION_GRADIENTS[dtype])
    if mask is not None:
        plain = AttnNoBiasJIT(q, k, v, mask, 1e9) if bias is None else None
        plain = AttnBiasJIT(q, k, v, mask, bias, 1e9) if plain is None else plain
        assert torch.equal(plain, y)


@pytest.mark.parametrize("dtype", [FLOAT, torch.float16, BRAIN], ids=str)
def test_a_query_that_sees_no_key_gets_finite_numbers(dtype):
    q, k, v, mask, bias = inputs((), dtype)
    y = AttnTri(q.requires_grad_(), k, v, mask.zero_(), bias)
    y.sum().backward()
    assert y.isfinite().all()
    assert q.grad.isfinite().all()


def test_which_attention_is_taken():
    q, k, v, mask, bias = inputs((1,), FLOAT)
    assert CanSchTriMHA([*q.shape])
    assert CanSchTriMHA([1, 2, 3, 4, 5], has_bias=False, inf=1e4, training=False)
    assert not CanSchTriMHA([2, 3, 4, 5, 16])
    assert not CanSchTriMHA([3, 4, 5, 16])
    for given, words in (
        ((q.expand(2, *q.shape[1:]), k, v), r"q is torch.float32 of shape \[2, 3, 4, 5, 16\]"),
        ((q, k[0], v), r"k is torch.float32 of shape \[3, 4, 7, 16\]"),
        ((q, k, v.double()), "v is torch.float64"),
        ((q, k, v, mask[None]), r"mask is torch.float32 of shape \[1, 1, 3, 1, 1, 7\]"),
        ((q, k, v, None, bias.int()), "bias is torch.int32"),
        ((q, k, None), "v is a NoneType"),
    ):
        with pytest.raises(ValueError, match=words):
            AttnTri(*given)


def test_the_switch_is_what_programs_read():
    assert not mha.is_enabled()
    mha.enable()
    assert mha.is_enabled()
    mha.disable()
    assert not mha.is_enabled()


def test_nothing_is_tuned():
    assert not _tuneable_triton_kernels
    assert not _layer_norm_config_ampere._auto_tuned_config_ampere["any"]
    sync_triton_auto_tune_cache_across_gpus(strict=True, verbose=True)


# -- layer norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "weights"), [(FLOAT, FLOAT), (BRAIN, BRAIN), (BRAIN, FLOAT)])
def test_layer_norm(dtype, weights):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 33, 5, 64, generator=generator).to(dtype) for _ in range(2))
    x = x.transpose(1, 2)  # four dimensions need not be contiguous
    leaves = [x, *(torch.randn(64, generator=generator).to(weights) for _ in range(2))]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = LayerNormSmallShapeOptImpl.apply(leaves[0], (64,), *leaves[1:])
    wanted = torch.nn.functional.layer_norm(exact[0], (64,), *exact[1:])
    assert y.dtype == dtype
    assert_one_rounding(y.detach(), wanted.detach())
    found = torch.autograd.grad(y, leaves, dy.transpose(1, 2))
    grads = torch.autograd.grad(wanted, exact, dy.transpose(1, 2).double())
    for actual, other, leaf in zip(found, grads, leaves, strict=True):
        assert actual.dtype == leaf.dtype
        assert_close_in_rms(actual, other, ATTENTION_GRADIENTS[leaf.dtype])


def test_layer_norm_of_what_is_not_contiguous():
    weight, bias = torch.ones(4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"inputs of shape \[3, 4\] are not contiguous"):
        LayerNormSmallShapeOptImpl.apply(torch.ones(4, 3).T, (4,), weight, bias)
    with pytest.raises(ValueError, match="expected scalar type|normalized_shape"):
        LayerNormSmallShapeOptImpl.apply(torch.ones(2, 3), (4,), weight, bias)


# -- FusedAdamSWA ----------------------------------------------------------------------------------


def lists(dtype=BRAIN, shapes=((), (7,), (0,), (33, 5))):
    """Weights, what the model computes with, and averages that were never written."""
    weights = [param.detach() for param in parameters(shapes=shapes)]
    computes = [torch.nn.Parameter(weight.to(dtype)) for weight in weights]
    return weights, computes, [torch.full_like(weight, torch.nan) for weight in weights]


def give(computes, number):
    generator = torch.Generator().manual_seed(number)
    for param in computes:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@paths
@pytest.mark.parametrize("mode", AdamMathType)
def test_formula_of_the_weights(mode, path):
    options = {"lr": 0.02, "weight_decay": 0.1, "adam_math_mode": mode}
    optimizer = averaged(parameters(), **options)
    check_steps(optimizer, adam_swa, 2 if path == "triton" else 20, path)


@paths
@pytest.mark.parametrize("dtype", [BRAIN, torch.float16, FLOAT], ids=str)
def test_weights_of_the_model_and_averages(dtype, path):
    """The rounded weights, and the average of the weights as they are stored; by torch's Adam."""
    weights, computes, averages = lists(dtype)
    optimizer = FusedAdamSWA(weights, computes, averages, 0.75, lr=0.02, weight_decay=0.1)
    wanted = None
    for number in range(3):
        give(computes, number)
        clip = 0.5 if number else torch.tensor([0.5])
        before = [average.double() for average in averages]
        with on(path):
            optimizer.step(grad_clip_scale=clip)
        for weight, compute, average, old in zip(weights, computes, averages, before, strict=True):
            if path != "triton":  # whose interpreter truncates
                assert torch.equal(compute.detach(), weight.to(dtype))
            wide = weight.double()
            wanted = wide if number == 0 else old + 0.25 * (wide - old)
            assert_one_rounding(average, wanted, interpreted=path == "triton")
    assert optimizer.param_groups[0]["step"] == 3
    assert optimizer.swa_param_groups[0]["n_averaged"] == 3
    assert optimizer.compute_param_groups[0]["params"] == computes
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in computes)
    optimizer.zero_grad()
    assert all(param.grad is None for param in computes)


@pytest.mark.parametrize("path", PATHS[1:])
def test_one_launch(path, monkeypatch):
    weights, computes, averages = lists()
    optimizer = FusedAdamSWA(weights, computes, averages, 0.9)
    give(computes, 0)
    ran, run = [], multi_tensor._fused if path == "triton" else multi_tensor._reference
    monkeypatch.setattr(multi_tensor, run.__name__, lambda call: ran.append(call) or run(call))
    with on(path):
        optimizer.step()
    assert [len(call.columns) for call in ran] == [6]


def test_a_gradient_of_the_weights_themselves_is_not_read():
    weights, computes, averages = lists(FLOAT)
    optimizer = FusedAdamSWA(weights, computes, averages, 0.9)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before = copy.deepcopy(weights)
    optimizer.step()
    assert all(map(torch.equal, weights, before))
    assert not optimizer.state


@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
def test_from_optim(theirs):
    """Two steps of torch's, then two of ours, are four of torch's; so are saved and loaded ones."""
    weights, computes, averages = lists(FLOAT)
    alone = [torch.nn.Parameter(weight.clone()) for weight in weights]
    first = theirs(alone, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    for number in range(2):
        give(alone, number)
        first.step()
    weights = [param.detach().clone() for param in alone]
    ours = FusedAdamSWA.from_optim(first, weights, computes, averages, 0.9)
    assert (ours.param_groups[0]["step"], ours.param_groups[0]["lr"]) == (2, 0.02)
    for number in range(2, 4):
        give(alone, number)
        give(computes, number)
        first.step()
        if number == 3:  # a program that was stopped, and goes on
            saved = copy.deepcopy(ours.state_dict())
            ours = FusedAdamSWA(weights, computes, averages, 0.9)
            ours.adam_math_mode = AdamMathType["PyTorchAdam" if theirs is torch.optim.Adam
                                               else "ApexAdamW"]  # fmt: skip
            ours.load_state_dict(saved)
            assert ours.swa_param_groups[0]["n_averaged"] == 1
            assert "n_averaged" not in ours.param_groups[0]
        ours.step()
    assert all(map(torch.equal, weights, alone))
    first.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="from_optim: the optimizer has 2 groups"):
        FusedAdamSWA.from_optim(first, weights, computes, averages, 0.9)


def test_a_copy_has_lists_of_its_own():
    weights, computes, averages = lists()
    optimizer = FusedAdamSWA(weights, computes, averages, 0.9)
    other = copy.deepcopy(optimizer)
    give(other.compute_param_groups[0]["params"], 0)
    other.step()
    assert other.swa_param_groups[0]["n_averaged"] == 1
    assert averages[1].isnan().all()
    assert not other.swa_param_groups[0]["params"][1].isnan().any()


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "master_weights"])
def test_what_it_does_not_have(name):
    with pytest.raises(NotImplementedError, match=f"{name}=True is not supported"):
        FusedAdamSWA(*lists(), 0.9, **{name: True})


def test_lists_that_do_not_fit():
    weights, computes, averages = lists()
    last = weights[3]
    for place, other, words in (
        (0, [*weights[:3], last.double()], r"params\[3\] is torch.float64"),
        (1, computes[:3], "4 params and 3 compute_params"),
        (1, [*computes[:3], torch.ones(5, 33)], r"compute_params\[3\] is torch.float32, \[5, 33\]"),
        (2, [*averages[:3], torch.ones(5, 33).T], r"swa_params\[3\] .* strides \[1, 33\]"),
        (2, [*averages[:3], last.half()], r"swa_params\[3\] is torch.float16"),
        (2, [*averages[:3], last.to("meta")], r"swa_params\[3\] .* on meta"),
    ):
        given = [weights, computes, averages]
        given[place] = other
        with pytest.raises(ValueError, match=words):
            FusedAdamSWA(*given, 0.9)
    with pytest.raises(ValueError, match="swa_decay_rate 1.5"):
        FusedAdamSWA(weights, computes, averages, 1.5)
    optimizer = FusedAdamSWA(weights, computes, averages, 0.9)
    give(computes, 0)
    averages = optimizer.swa_param_groups[0]["params"]
    kept, averages[3] = averages[3], torch.ones(2)
    before = copy.deepcopy(weights)
    with pytest.raises(ValueError, match=r"swa_params\[3\] is torch.float32, \[2\]"):
        optimizer.step()
    averages[3] = kept
    computes[1].grad = torch.ones(7, dtype=BRAIN).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert all(map(torch.equal, weights, before))
    assert not optimizer.swa_param_groups[0]["n_averaged"]


def test_gradients_that_amp_has_unscaled_are_refused():
    weights, computes, averages = lists()
    optimizer = FusedAdamSWA(weights, computes, averages, 0.9)
    with pytest.raises(RuntimeError, match="Leave it out of amp.initialize"):
        optimizer.step_scaled(grads={weights[0]: weights[0]})
    with _runtime.use("reference"):
        optimizer.step_scaled(noop=torch.ones(()))
    assert not optimizer.swa_param_groups[0]["n_averaged"]
