"""Converters of models, and copies between model and master parameters."""

import typing

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from apex.fp16_utils.fp16util import (
    BN_convert_float,
    FP16_Module,
    FP16Model,
    backwards_debug_hook,
    clip_grad_norm,
    convert_module,
    convert_network,
    fp16_to_fp32,
    fp32_to_fp16,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from apex.parallel import SyncBatchNorm

HALVES = [torch.float16, torch.bfloat16]
THIRD = 1 / 3  # no float16


def network():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.PReLU()
    made = nn.Sequential(*layers, nn.InstanceNorm2d(4, affine=True), SyncBatchNorm(4))
    for tensor in [*made.parameters(), *made.buffers()]:
        if tensor.is_floating_point():
            nn.init.constant_(tensor, THIRD)
    return made


def dtypes(model):
    return [
        {tensor.dtype for tensor in layer.state_dict().values() if tensor.is_floating_point()}
        for layer in model
    ]


def has_unrounded_norms(model):
    norm = model[1]
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return all((tensor == torch.tensor(THIRD)).all() for tensor in tensors)


@pytest.mark.parametrize("dtype", HALVES)
def test_convert_network(dtype):
    model = network()
    params, buffers = [*model.parameters()], [*model.buffers()]
    assert convert_network(model, dtype) is model
    wide = {torch.float32}
    assert dtypes(model) == [{dtype}, wide, {dtype}, {dtype}, {dtype}, wide]
    assert has_unrounded_norms(model)
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    assert all(new is old for new, old in zip(model.buffers(), buffers, strict=True))
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_convert_module_is_for_its_own_tensors():
    layer = nn.TransformerEncoderLayer(4, 2).self_attn
    layer.register_buffer("table", torch.ones(2))
    layer.register_buffer("ids", torch.ones(2, dtype=torch.int64))
    layer.in_proj_weight.grad = torch.ones(12, 4)
    assert convert_module(layer, torch.float16) is None
    assert layer.in_proj_weight.dtype == layer.in_proj_weight.grad.dtype == torch.float16
    assert (layer.table.dtype, layer.ids.dtype) == (torch.float16, torch.int64)
    assert layer.out_proj.weight.dtype == torch.float32
    assert layer.in_proj_weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.int8, "half", float])
def test_dtypes_that_are_refused(dtype):
    model = network()
    for convert in (convert_network, convert_module):
        with pytest.raises(TypeError, match=f"{convert.__name__}: dtype was"):
            convert(model, dtype)
    assert dtypes(model) == [{torch.float32}] * 3 + [{torch.float32}] * 3


def test_shared_and_lazy_parameters_and_recurrent_networks():
    shared = nn.Linear(4, 4)
    twin = nn.Linear(4, 4)
    twin.weight = shared.weight
    model = convert_network(nn.Sequential(shared, twin), torch.float16)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float16
    lazy = convert_network(nn.LazyLinear(2), torch.float16)
    assert lazy(torch.ones(1, 3).half()).dtype == torch.float16
    recurrent = convert_network(nn.LSTM(3, 4), torch.bfloat16)
    assert recurrent(torch.ones(2, 1, 3, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_network_to_half():
    inner = network()
    model = network_to_half(inner)
    assert model[1] is inner
    assert isinstance(model[0], tofp16)
    assert all(key.startswith("1.") for key in model.state_dict())
    half, wide = {torch.float16}, {torch.float32}
    assert dtypes(inner) == [half, wide, half, half, half, wide]
    assert has_unrounded_norms(inner)
    assert model(torch.ones(2, 1, 8, 8)).dtype == torch.float16


def test_norms_of_a_half_network():
    assert network_to_half(network().half())[1][1].weight.dtype == torch.float32
    model = network().half()
    assert BN_convert_float(model) is model
    half, wide = {torch.float16}, {torch.float32}
    assert dtypes(model) == [half, wide, half, half, half, wide]


class Language(nn.Embedding):
    def forward(self, ids, scale, *, options):
        assert (scale.dtype, options["mask"].dtype) == (torch.float16, torch.bool)
        assert options["name"] == "x"
        return super().forward(ids) * scale


def test_fp16_model_leaves_token_ids_alone():
    """30001 is no float16."""
    model = FP16Model(Language(60000, 4))
    ids = torch.tensor([30001])
    scale = torch.ones(4, dtype=torch.float64)
    options = {"mask": torch.tensor([True]), "name": "x"}
    y = model(ids, scale, options=options)
    assert y.dtype == torch.float16
    assert torch.equal(y[0], model.network.weight[30001])
    assert [*model.state_dict()] == ["network.weight"]


def test_fp16_model_casts_inside_of_containers():
    class Sum(nn.Module):
        def forward(self, pair, number):
            return pair[0] + pair[1]["x"] + number

    assert FP16Model(Sum())([torch.ones(2), {"x": torch.ones(2)}], 3).dtype == torch.float16


def test_small_helpers():
    exec("from apex.fp16_utils import *", names := {})  # as the ImageNet example of 2018
    assert {
        "network_to_half",
        "prep_param_lists",
        "clip_grad_norm",
        "FP16_Optimizer",
    } < names.keys()
    assert to_python_float(torch.tensor(2.5)) == to_python_float([2.5]) == 2.5
    assert type(to_python_float(torch.tensor([2]))) is int
    param = torch.ones(4, requires_grad=True)
    param.grad = torch.ones(4)
    assert clip_grad_norm([param], 1.0) == 2.0
    torch.testing.assert_close(param.grad, torch.full((4,), 0.5))
    param.register_hook(backwards_debug_hook)
    with pytest.raises(RuntimeError, match="master parameter received a gradient"):
        param.sum().backward()


def mixed(dtype=torch.float16):
    """Three parameters, one of them frozen and one float32; values that float16 does not have."""
    model = nn.Module()
    model.matrix = nn.Parameter(torch.randn(4, 3).to(dtype))
    model.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    model.vector = nn.Parameter(torch.full((5,), THIRD))
    return model


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64])
def test_masters(dtype):
    """Those of float64 are not rounded."""
    model = mixed(dtype)
    params, masters = prep_param_lists(model)
    assert [*map(id, params)] == [id(model.matrix), id(model.vector)]
    for param, master in zip(params, masters, strict=True):
        wide = torch.promote_types(param.dtype, torch.float32)
        assert (type(master), master.dtype, master.grad) == (torch.Tensor, wide, None)
        assert master.requires_grad
        assert master.is_leaf
        assert torch.equal(master, param.to(wide))
        assert master.data_ptr() != param.data_ptr()


@pytest.mark.parametrize("dtype", HALVES)
def test_flat_master(dtype):
    model = mixed(dtype)
    params, (master,) = prep_param_lists(model, flat_master=True)
    assert type(master) is nn.Parameter
    assert master.dtype == torch.float32
    assert torch.equal(master, torch.cat([model.matrix.float().reshape(-1), model.vector]))
    assert master.grad.tolist() == [0.0] * 17
    with torch.no_grad():
        master.copy_(torch.arange(17.0) / 3)
    master_params_to_model_params(params, [master], flat_master=True)
    assert torch.equal(model.matrix, (torch.arange(12.0) / 3).view(4, 3).to(dtype))
    assert torch.equal(model.vector, torch.arange(12.0, 17.0) / 3)


def test_a_flat_master_of_nothing():
    model = nn.Linear(3, 2).requires_grad_(False)
    assert prep_param_lists(model) == ([], [])
    with pytest.raises(ValueError, match="there are none. Pass flat_master=False"):
        prep_param_lists(model, flat_master=True)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2, device="meta")])
    with pytest.raises(ValueError, match=r"they are on \['cpu', 'meta'\]"):
        prep_param_lists(model, flat_master=True)


def give_grads(params, *sizes):
    for param, size in zip(params, sizes, strict=True):
        param.grad = None if size is None else torch.full_like(param, size)


def test_gradients_are_copied_and_never_stale():
    params, masters = prep_param_lists(mixed())
    give_grads(params, 0.1, 7.0)
    model_grads_to_master_grads(params, masters)
    assert torch.equal(masters[0].grad, torch.full((4, 3), 0.1).half().float())
    assert torch.equal(masters[1].grad, torch.full((5,), 7.0))
    kept = masters[0].grad
    give_grads(params, 0.2, None)
    model_grads_to_master_grads(iter(params), iter(masters))
    assert masters[0].grad is kept
    assert torch.equal(kept, torch.full((4, 3), 0.2).half().float())
    assert masters[1].grad is None
    give_grads(params, None, None)
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None


def test_flat_gradients():
    params, (master,) = prep_param_lists(mixed(), flat_master=True)
    give_grads(params, 3.0, 7.0)
    model_grads_to_master_grads(params, [master], flat_master=True)
    assert master.grad.tolist() == [3.0] * 12 + [7.0] * 5
    give_grads(params, None, 8.0)
    model_grads_to_master_grads(params, [master], flat_master=True)
    assert master.grad.tolist() == [0.0] * 12 + [8.0] * 5
    master.grad = None
    model_grads_to_master_grads(params, [master], flat_master=True)
    assert master.grad.tolist() == [0.0] * 12 + [8.0] * 5
    give_grads(params, None, None)
    model_grads_to_master_grads(params, [master], flat_master=True)
    assert master.grad is None


def test_sparse_gradients():
    model = nn.Embedding(5, 2, sparse=True)
    params, masters = prep_param_lists(model)
    model(torch.tensor([1, 1, 3])).sum().backward()
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("copy", [model_grads_to_master_grads, master_params_to_model_params])
@pytest.mark.parametrize("flat", [False, True])
def test_lists_that_do_not_fit(copy, flat):
    """In the original ``zip`` ignored the rest of the longer list."""
    model = mixed()
    params, masters = prep_param_lists(model, flat)
    with torch.no_grad():
        for master in masters:
            master.fill_(9.0)
            master.grad = torch.full_like(master, 9.0)
    before = [param.clone() for param in params]
    give_grads(params, 1.0, 1.0)
    for wrong, match in [
        ((params, masters[:-1], flat), f"{len(masters) - 1} masters, and {len(masters)} are"),
        ((params, [*masters, masters[0]], flat), f"{len(masters) + 1} masters, and"),
        ((params[:1], masters, flat), "1 model parameters"),
        ((params, masters, not flat), f"flat_master={not flat}"),
        *[((params[::-1], masters), r"a master of shape \[4, 3\] instead of \[5\]")][flat:],
    ]:
        with pytest.raises(ValueError, match=f"{copy.__name__}: the masters do not .*{match}"):
            copy(*wrong)
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    assert all((master.grad == 9.0).all() for master in masters)


@pytest.mark.parametrize("flat", [False, True])
def test_training_as_with_float32_by_hand(flat):
    """Three steps of SGD on masters, bit for bit as the same steps written out."""
    model = nn.Linear(6, 3).half()
    params, masters = prep_param_lists(model, flat)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    wanted = [param.detach().float() for param in params]
    x = torch.randn(5, 6).half()
    for _ in range(3):
        model.zero_grad()
        model(x).float().square().mean().backward()
        wanted = [w - 0.1 * p.grad.float() for w, p in zip(wanted, params, strict=True)]
        model_grads_to_master_grads(params, masters, flat)
        optimizer.step()
        master_params_to_model_params(params, masters, flat)
        assert all(torch.equal(p, w.half()) for p, w in zip(params, wanted, strict=True))


# -- FP16_Module ---------------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    x: torch.Tensor
    label: str


class Echo(torch.nn.Module):
    """Returns what it was called with."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, *inputs, **kwargs):
        return [*inputs, kwargs]


def test_conversions_keep_containers_and_other_dtypes():
    other = [torch.ones(1, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)]
    value = (torch.ones(2), [torch.ones(3), Pair(torch.ones(4), "x"), *other], {"a": 1}, None)
    half = fp32_to_fp16(value)
    assert type(half) is tuple
    assert type(half[1]) is list
    assert (half[0].dtype, half[1][0].dtype, half[1][1].x.dtype) == (torch.float16,) * 3
    assert type(half[1][1]) is Pair
    assert half[1][1].label == "x"
    assert all(new is old for new, old in zip(half[1][2:], other, strict=True))
    assert half[2:] == ({"a": 1}, None)
    back = fp16_to_fp32(half)
    assert (back[0].dtype, back[1][0].dtype, back[1][1].x.dtype) == (torch.float32,) * 3
    assert all(new is old for new, old in zip(back[1][2:], other, strict=True))
    packed = fp32_to_fp16(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))
    assert type(packed) is PackedSequence
    assert (packed.data.dtype, packed.batch_sizes.dtype) == (torch.float16, torch.int64)


def test_module():
    model = FP16_Module(Echo())
    assert [*model.state_dict()][:2] == ["module.norm.weight", "module.norm.bias"]
    assert model.module.norm.weight.dtype == torch.float16
    ids, keyword = torch.tensor([7]), torch.ones(1)
    seen = []
    model.module.register_forward_pre_hook(lambda module, args: seen.extend(args))
    (x, y), found_ids, kwargs = model((torch.ones(2), torch.ones(2)), ids, keyword=keyword)
    assert [x.dtype for x in seen[0]] == [torch.float16] * 2
    assert (x.dtype, y.dtype) == (torch.float32,) * 2
    assert found_ids is ids
    assert kwargs["keyword"] is keyword
    x = torch.ones(2, requires_grad=True)
    (3 * model(x)[0]).sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [3.0, 3.0])
