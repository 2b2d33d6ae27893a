"""``initialize``: options, shapes, refusals."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp._initialize import O2StateDictHook, _initialize, applier, to_type
from apex.amp.frontend import O0, Properties, opt_levels
from tests.amp.levels import LEVELS, MODEL, cast, train_step
from tests.amp.training import started

# cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
DEFAULTS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
    "O4": (None, True, None, None, 1.0),
    "O5": (torch.bfloat16, False, True, True, 1.0),
}


def made():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("level", DEFAULTS)
def test_level_defaults(level):
    properties = opt_levels[level](Properties())
    assert tuple(properties.options.values()) == (True, level, *DEFAULTS[level])
    assert list(opt_levels)[:4] == ["O3", "O2", "O1", "O0"]


def test_properties_are_checked():
    properties = Properties()
    properties.no_such_option = 1
    with pytest.raises(AttributeError, match="no_such_option"):
        _ = properties.no_such_option
    with pytest.raises(ValueError, match="unexpected option nope"):
        properties._update_options_dict([("nope", 1)])
    O0()(properties)
    assert copy.deepcopy(properties).options == properties.options


def test_return_shapes():
    for level in ("O1", "O2"):
        model, optimizer = made()
        assert cast(level, model) is model
        assert amp.initialize(model, None, opt_level=level, verbosity=0) is model
        assert amp.initialize(models=model, optimizers=[], verbosity=0) == (model, [])
        got = amp.initialize(models=model, optimizers=optimizer, opt_level=level, verbosity=0)
        assert got[0] is model
        assert got[1] is optimizer
        optimizers = [optimizer]
        for models in ([model], [model, nn.Linear(2, 2)]):
            got = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
            assert got[0] is models
            assert got[1] is optimizers


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_half_weights_are_refused_by_name_where_weights_are_float32(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(RuntimeError, match=r"found parameter '1.weight'.*Remove the .half\(\)"):
        cast(level, model)
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.bfloat16()
    with pytest.raises(RuntimeError, match="found buffer 'running_mean'"):
        cast(level, model)


@pytest.mark.parametrize("level", MODEL)
def test_half_weights_are_taken_with_a_warning_where_the_model_is_cast(level):
    with pytest.warns(UserWarning, match="in 16 bits already"):
        _, optimizer = started(level, nn.Linear(2, 2).half())
    if level != "O3":
        assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_double_weights_are_refused_where_they_would_be_rounded(level):
    model = nn.Linear(2, 2).double()
    if level in MODEL:
        with pytest.raises(RuntimeError, match=r"'weight' of torch.float64"):
            cast(level, model)
    else:
        assert cast(level, model)(torch.ones(1, 2).double()).dtype == torch.float64


@pytest.mark.dist
@pytest.mark.usefixtures("_group")
def test_fsdp2_and_sharded_parameters_are_refused_where_they_would_be_cast():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    sharded, spread = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    fully_shard(sharded, mesh=mesh)
    weight = distribute_tensor(spread[0].weight.detach(), mesh, [Replicate()])
    spread[0].weight = nn.Parameter(weight)
    for model, match in ((sharded, "the model is an FSDPModule"), (spread, "'0.weight' is a D")):
        for level in LEVELS:
            if level in MODEL:
                with pytest.raises(RuntimeError, match=rf"{match}.*Use O1 or O4.*MixedPrec"):
                    cast(level, model)
            else:
                cast(level, model)
        amp.reset()


def test_switches_of_the_state_object(monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
        assert cast("O0", nn.Linear(2, 2).half()).weight.dtype == torch.float32
    monkeypatch.setattr(amp._amp_state, "hard_override", True)
    with pytest.warns(UserWarning, match="Warning: .*found parameter"):
        cast("O1", nn.Linear(1, 1, bias=False).half())


@pytest.mark.parametrize("outputs", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_cast_model_outputs(level, outputs):
    model = cast(level, nn.Linear(2, 2), cast_model_outputs=outputs)
    assert model(torch.ones(1, 2)).dtype == outputs


def test_overrides_reach_the_model():
    for dtype, kept in ((torch.float16,) * 2, (torch.bfloat16,) * 2, (False, torch.float32)):
        model, _ = started("O2", nn.Linear(2, 2), cast_model_type=dtype)
        assert model.weight.dtype == kept
        amp.reset()
    _, optimizer = started("O2", nn.Linear(2, 2), master_weights=False)
    assert [p.dtype for p in amp.master_params(optimizer)] == [torch.float16] * 2
    amp.reset()
    for options in ({"patch_torch_functions": False}, {"cast_model_type": torch.float32}):
        model, _ = started("O1", nn.Linear(2, 2), **options)
        assert model(torch.ones(1, 2)).dtype == torch.float32
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0
        amp.reset()


def test_disabled_takes_anything():
    assert amp.initialize("anything", enabled=False) == "anything"
    assert amp.initialize("a", 3, enabled=None, opt_level="nonsense") == ("a", 3)
    assert amp._amp_state.opt_properties.enabled is False
    assert amp.state_dict() == {}
    amp.load_state_dict({})


def test_wrappers():
    model = nn.Linear(2, 2)
    wrapped = cast("O2", nn.DataParallel(model))
    assert isinstance(wrapped, nn.DataParallel)
    assert model.weight.dtype == torch.float16
    assert wrapped(torch.ones(1, 2)).dtype == torch.float32


def test_parent_and_own_submodule_in_one_list():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (_, part), optimizer = amp.initialize([model, model[1]], optimizer, opt_level="O2", verbosity=0)
    train_step(model, optimizer, torch.ones(1, 2))
    assert part(torch.ones(1, 2)).dtype == torch.float32
    amp.reset()
    assert not part._forward_pre_hooks
    assert part.weight.dtype == torch.float32


def test_state_object_is_found_four_ways():
    import apex.amp._amp_state as module
    from apex.amp import _amp_state
    from apex.amp._amp_state import AmpState
    from apex.amp._amp_state import _amp_state as again

    assert _amp_state is again is amp._amp_state is module
    assert isinstance(_amp_state, AmpState)
    assert list(module.master_params(torch.optim.SGD([torch.zeros(1)], lr=1.0))) == [0]
    with pytest.raises(RuntimeError, match="why"):
        module.warn_or_err("why")
    for name in ("opt_properties", "loss_scalers", "handle", "min_loss_scale"):
        assert not hasattr(_amp_state, name)
    cast("O1", nn.Linear(2, 2), min_loss_scale=2.0)
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (2.0, 2.0**24)
    _amp_state.handle._deactivate()
    assert not torch.is_autocast_enabled("cpu")


def test_a_cast_model_that_was_converted_back_says_what_to_do():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = model[1].weight.detach().clone()
    _, optimizer = started("O2", model)
    amp.reset()  # what the error recommends
    assert torch.equal(model[1].weight, before)
    cast("O2", model)
    model.float()
    with pytest.raises(
        RuntimeError, match=r"forward of Sequential: .*Call amp.reset\(\) instead of"
    ):
        model(torch.ones(2, 4))
    amp.reset()
    assert model(torch.ones(2, 4)).dtype == torch.float32


def test_old_workers():
    model, optimizer = made()
    properties = opt_levels["O2"](Properties())
    model, optimizer = _initialize(model, optimizer, properties, 2)
    assert model.weight.dtype == torch.float16
    assert len(amp._amp_state.loss_scalers) == 2
    assert applier([1, torch.ones(1)], lambda t: t + 1) == [1, torch.full((1,), 2.0)]
    assert to_type(torch.float16, torch.ones(1)).dtype == torch.float16
    assert to_type(torch.float16, torch.ones(1, dtype=torch.int64)).dtype == torch.int64
    state = {"a": torch.ones(1).half(), "b": 3}
    O2StateDictHook(lambda t: t.float())(None, state, "", None)
    assert state["a"].dtype == torch.float32
