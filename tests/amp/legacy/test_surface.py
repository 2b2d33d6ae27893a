"""What old programs may rely on to the letter: names, signatures, defaults, formats, rules."""

import importlib
import inspect
import math
import sys

import pytest
import torch
from torch import nn

import apex
from apex import amp
from apex.amp import handle, opt, scaler
from apex.amp.frontend import Properties, opt_levels
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from tests.amp.levels import cast
from tests.amp.training import scaled_backward, started

SIGNATURES = {
    amp.initialize: "models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, "
    "patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, "
    "cast_model_outputs=None, num_losses=1, verbosity=1, min_loss_scale=None, "
    "max_loss_scale=16777216.0",
    amp.scale_loss: "loss, optimizers, loss_id=0, model=None, delay_unscale=False, "
    "delay_overflow_check=False",
    amp.disable_casts: "",
    amp.state_dict: "destination=None",
    amp.load_state_dict: "state_dict",
    amp.master_params: "optimizer",
    amp.init: "enabled=True, loss_scale='dynamic', enable_caching=True, verbose=False, "
    "allow_banned=False",
    amp.half_function: "fn",
    amp.float_function: "fn",
    amp.promote_function: "fn",
    amp.register_half_function: "module, name",
    amp.register_float_function: "module, name",
    amp.register_promote_function: "module, name",
    handle.AmpHandle: "loss_scale='dynamic', enable_caching=True, verbose=False",
    handle.AmpHandle.wrap_optimizer: "self, optimizer, num_loss=1",
    handle.AmpHandle.scale_loss: "self, loss, optimizer",
    handle.AmpHandle._save_func: "self, mod, fn, func",
    handle.AmpHandle.remove_cache: "self, param",
    handle.NoOpHandle: "",
    handle.NoOpHandle.wrap_optimizer: "self, optimizer, num_loss=1",
    handle.NoOpHandle.scale_loss: "self, loss, optimizer",
    opt.OptimWrapper: "optimizer, amp_handle, num_loss",
    opt.OptimWrapper.scale_loss: "self, loss",
    opt.OptimWrapper.step: "self, closure=None",
    opt.OptimWrapper.add_param_group: "self, param_group",
    opt.OptimWrapper.load_state_dict: "self, state_dict",
    scaler.LossScaler: "loss_scale, init_scale=65536.0, scale_factor=2.0, scale_window=2000, "
    "min_loss_scale=None, max_loss_scale=16777216.0",
    scaler.LossScaler.unscale: "self, model_grads, master_grads, unused_scale, "
    "models_are_masters=False, scale_override=None",
    scaler.LossScaler.unscale_with_stashed: "self, model_grads, stashed_master_grads, "
    "master_grads, scale_override=None",
    scaler.LossScaler.unscale_python: "self, model_grads, master_grads, scale",
    scaler.LossScaler.unscale_with_stashed_python: "self, model_grads, stashed_master_grads, "
    "master_grads, a, b",
    scaler.LossScaler.loss_scale: "self",
    scaler.LossScaler.clear_overflow_state: "self",
    scaler.LossScaler.update_scale: "self",
    Properties: "",
    amp._initialize.O2StateDictHook: "fn",
    amp._initialize.applier: "value, fn",
    amp._initialize.to_type: "dtype, t",
    amp._amp_state.warn_or_err: "msg",
    amp._amp_state.maybe_print: "msg, rank0=False",
}

MODULES = {
    "_amp_state": "AmpState _amp_state warn_or_err maybe_print master_params",
    "frontend": "Properties O0 O1 O2 O3 opt_levels initialize state_dict load_state_dict",
    "amp": "_DECORATOR_HANDLE _USER_CAST_REGISTRY _USER_PROMOTE_REGISTRY AmpHandle NoOpHandle init "
    "half_function float_function promote_function register_half_function register_float_function "
    "register_promote_function initialize state_dict load_state_dict Properties opt_levels",
    "handle": "scale_loss disable_casts AmpHandle NoOpHandle OptimWrapper LossScaler _amp_state "
    "master_params maybe_print",
    "opt": "OptimWrapper",
    "scaler": "LossScaler scale_check_overflow_python axpby_check_overflow_python _amp_state "
    "master_params maybe_print",
    "_initialize": "_initialize to_type applier O2StateDictHook",
    "lists.functional_overrides": "MODULE FP16_FUNCS FP32_FUNCS BANNED_FUNCS",
    "lists.torch_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS",
    "lists.tensor_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS",
}


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signature(function):
    parameters = inspect.signature(function).parameters.values()
    old = [  # new arguments may only be given by name
        p.replace(annotation=p.empty) for p in parameters if p.kind is not p.KEYWORD_ONLY
    ]
    assert ", ".join(map(str, old)) == SIGNATURES[function]


@pytest.mark.parametrize("module", MODULES)
def test_names_at_their_import_path(module):
    importlib.import_module(f"apex.amp.{module}")
    namespace = vars(sys.modules[f"apex.amp.{module}"])  # not the object of that name
    assert set(MODULES[module].split()) <= namespace.keys()


def test_names_in_the_package_itself():
    assert apex.amp is amp
    assert inspect.ismodule(amp._initialize)
    assert not inspect.ismodule(amp._amp_state)
    for name in ("Properties", "opt_levels", "AmpHandle", "OptimWrapper", "LossScaler"):
        assert not hasattr(amp, name)
    disabled = amp.init(enabled=False)
    assert not hasattr(disabled, "cache")
    assert not hasattr(disabled, "remove_cache")


# -- options --------------------------------------------------------------------------------------


def test_blank_properties():
    unset = ("opt_level", "cast_model_type", "keep_batchnorm_fp32", "master_weights")
    others = {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
    assert Properties().options == {**dict.fromkeys(unset), **others}


WRONG = (RuntimeError, AssertionError, ValueError, TypeError)
OPTION_TABLE = [  # option, value given, what is stored (or the error) at O1, and at O0, O2, O3
    ("cast_model_type", False, False, False),
    ("cast_model_type", torch.float32, torch.float32, torch.float32),
    ("cast_model_type", torch.float16, RuntimeError, torch.float16),
    ("cast_model_type", torch.bfloat16, RuntimeError, torch.bfloat16),
    ("patch_torch_functions", True, True, RuntimeError),
    ("patch_torch_functions", False, False, False),
    ("keep_batchnorm_fp32", True, RuntimeError, True),
    ("keep_batchnorm_fp32", False, RuntimeError, False),
    ("keep_batchnorm_fp32", "True", RuntimeError, True),
    ("keep_batchnorm_fp32", "False", RuntimeError, False),
    ("keep_batchnorm_fp32", "true", RuntimeError, AssertionError),
    ("keep_batchnorm_fp32", 1, RuntimeError, AssertionError),
    ("master_weights", True, RuntimeError, True),
    ("master_weights", False, RuntimeError, False),
    ("loss_scale", "dynamic", "dynamic", "dynamic"),
    ("loss_scale", 128, 128.0, 128.0),
    ("loss_scale", "128.0", 128.0, 128.0),
    ("loss_scale", True, 1.0, 1.0),
    ("loss_scale", "Dynamic", ValueError, ValueError),
    ("loss_scale", [], TypeError, TypeError),
    ("enabled", "anything", "anything", "anything"),
]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(("option", "value", "at_o1", "elsewhere"), OPTION_TABLE)
def test_option_table(level, option, value, at_o1, elsewhere):
    properties = opt_levels[level](Properties())
    before = properties.options[option]
    expected = at_o1 if level == "O1" else elsewhere
    if expected in WRONG:
        with pytest.raises(expected) as caught:
            setattr(properties, option, value)
        assert caught.type is expected
        assert properties.options[option] == before
    else:
        setattr(properties, option, value)
        assert properties.options[option] == expected
        assert type(properties.options[option]) is type(expected)


def test_hard_override_stores_what_it_warns_of(monkeypatch):
    monkeypatch.setattr(amp._amp_state, "hard_override", True)
    properties = opt_levels["O2"](Properties())
    with pytest.warns(UserWarning, match="Warning:"):
        properties.patch_torch_functions = True
    assert properties.patch_torch_functions is True


def test_none_means_the_levels_own_and_false_is_an_override():
    cast("O2", nn.Linear(2, 2), master_weights=None)
    assert amp._amp_state.opt_properties.master_weights is True
    model = cast("O2", nn.Linear(2, 2), master_weights=False, cast_model_type=False)
    assert amp._amp_state.opt_properties.master_weights is False
    assert model.weight.dtype == torch.float32


# -- lists ----------------------------------------------------------------------------------------


def test_lists_are_lists_of_the_original_length():
    lengths = {
        (module.MODULE.__name__, kind): len(getattr(module, kind))
        for module in (functional_overrides, torch_overrides)
        for kind in ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS", "BANNED_FUNCS")
        if type(getattr(module, kind, None)) is list
    }
    assert lengths == {
        ("torch.nn.functional", "FP16_FUNCS"): 8,
        ("torch.nn.functional", "FP32_FUNCS"): 29,
        ("torch.nn.functional", "BANNED_FUNCS"): 1,
        ("torch", "FP16_FUNCS"): 17,
        ("torch", "FP32_FUNCS"): 23,
        ("torch", "CASTS"): 16,
        ("torch", "SEQUENCE_CASTS"): 2,
    }
    own = set(tensor_overrides.FP32_FUNCS) - set(torch_overrides.FP32_FUNCS)
    assert own == {"__ipow__", "__pow__", "__rpow__", "cpu"}


def test_the_tensor_lists_are_a_snapshot():
    torch_overrides.FP32_FUNCS.append("sigmoid")
    try:
        assert "sigmoid" not in tensor_overrides.FP32_FUNCS
    finally:
        torch_overrides.FP32_FUNCS.remove("sigmoid")


# -- a step that is skipped ------------------------------------------------------------------------


def test_two_overflows_before_a_step_are_one_line_with_the_scale_then(caplog):
    model, optimizer = started("O1", nn.Linear(2, 2), verbosity=1)
    caplog.set_level("INFO")
    for _ in range(2):
        scaled_backward(model(torch.full((1, 2), math.inf)).float().sum(), optimizer)
    assert "Gradient overflow" not in caplog.text  # spoken when the step is skipped
    optimizer.step()
    lines = [line for line in caplog.messages if "Gradient overflow" in line]
    assert lines == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0"
    ]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_skipped_step_names_the_scaler_of_the_pass_that_overflowed(
    bad, deferred, request, caplog
):
    """Also where the host learns of it at the next step."""
    if deferred:
        request.getfixturevalue("runs_behind")
    model, optimizer = started("O1", nn.Linear(2, 2), num_losses=2, verbosity=1)
    caplog.set_level("INFO")
    for loss_id in range(2):
        x = torch.full((1, 2), math.inf if loss_id == bad else 1.0)
        scaled_backward(model(x).float().mean(), optimizer, loss_id=loss_id)
    for _ in range(1 + deferred):
        optimizer.step()
    assert [line for line in caplog.messages if "Gradient overflow" in line] == [
        f"Gradient overflow.  Skipping step, loss scaler {bad} reducing loss scale to 32768.0"
    ]


# -- formats --------------------------------------------------------------------------------------


def test_options_are_spoken_in_the_old_form(caplog):
    caplog.set_level("INFO")
    amp.initialize(nn.Linear(1, 1), opt_level="O2", loss_scale=4)
    lines = "\n".join(caplog.messages).splitlines()
    assert lines[0].startswith("Selected optimization level O2:  ")
    assert lines.count("enabled                : True") == 2
    assert "loss_scale             : dynamic" in lines
    assert "loss_scale             : 4.0" in lines
    names = [line.partition(" ")[0] for line in lines if " : " in line]
    assert names == 2 * list(Properties().options)
