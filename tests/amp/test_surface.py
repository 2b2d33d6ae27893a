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
from tests.amp.training import batches, net, same

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
    assert Properties().options == {
        "enabled": False,
        "opt_level": None,
        "cast_model_type": None,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": 1.0,
    }


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
    model = amp.initialize(nn.Linear(2, 2), opt_level="O2", master_weights=None, verbosity=0)
    assert amp._amp_state.opt_properties.master_weights is True
    model = amp.initialize(
        nn.Linear(2, 2), opt_level="O2", master_weights=False, cast_model_type=False, verbosity=0
    )
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
    assert set(tensor_overrides.FP32_FUNCS) - set(torch_overrides.FP32_FUNCS) == {
        "__ipow__",
        "__pow__",
        "__rpow__",
        "cpu",
    }


def test_the_tensor_lists_are_a_snapshot():
    torch_overrides.FP32_FUNCS.append("sigmoid")
    try:
        assert "sigmoid" not in tensor_overrides.FP32_FUNCS
    finally:
        torch_overrides.FP32_FUNCS.remove("sigmoid")


# -- gradients after a pass ------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_combination_table(level, now, earlier):
    """A parameter with and without a new gradient, with and without one from before."""
    norm = nn.BatchNorm1d(2, eps=3.0)  # which divides by exactly 2
    parts = nn.ModuleDict({"linear": nn.Linear(2, 1, bias=False), "norm": norm})
    optimizer = torch.optim.SGD(parts.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        parts, optimizer, opt_level=level, loss_scale=8.0, verbosity=0
    )
    model.eval()
    x, other = torch.ones(1, 2), torch.ones((), requires_grad=True)

    def one_pass(factor):
        loss = other * factor
        if factor:
            for part in model.values():
                loss = loss + factor * part(x.to(part.weight.dtype)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return [p.grad for p in amp.master_params(optimizer)]

    before = one_pass(1.0 * earlier)
    after = one_pass(2.0 * now)
    if not (earlier or now):
        assert after == [None] * 3
        return
    for old, grad, share in zip(before, after, (1.0, 0.5, 1.0), strict=True):
        assert torch.equal(grad, torch.full_like(grad, (earlier + 2 * now) * share))
        assert now or grad is old  # put back as it was


# -- a step that is skipped ------------------------------------------------------------------------


def overflow(model, optimizer, index=0):
    ((x, y),) = batches(1)
    loss = nn.functional.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        model[index].weight.grad.fill_(math.inf)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_touches_neither_state_nor_counters(level):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    ((x, y),) = batches(1)
    with amp.scale_loss(nn.functional.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [v.clone() for s in optimizer.state.values() for v in s.values()]
    weights = [p.clone() for p in amp.master_params(optimizer)]
    overflow(model, optimizer)
    norm_grad = model[1].weight.grad
    assert optimizer.step() is None
    assert same(before, [v for s in optimizer.state.values() for v in s.values()])
    assert same(weights, amp.master_params(optimizer))
    assert model[1].weight.grad is norm_grad  # float32 ones are for zero_grad to clear
    if level == "O2":
        assert next(amp.master_params(optimizer)).grad is None


def test_two_overflows_before_a_step_are_one_line_with_the_scale_then(caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    caplog.set_level("INFO")
    for index in (0, 4):
        overflow(model, optimizer, index)
    assert "Gradient overflow" not in caplog.text  # spoken when the step is skipped
    optimizer.step()
    lines = [line for line in caplog.messages if "Gradient overflow" in line]
    assert lines == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0"
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


def test_keys_of_the_state_dict():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    saved = amp.state_dict()
    assert type(saved).__name__ == "OrderedDict"
    assert list(saved) == ["loss_scaler0", "loss_scaler1"]
    assert all(list(entry) == ["loss_scale", "unskipped"] for entry in saved.values())
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 32.0, "unskipped": 5},
            "loss_scaler1": {"loss_scale": 64.0, "unskipped": 6},
        }
    )  # as a file of the original has it
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 64.0, "unskipped": 6}


def test_scale_numbers_in_a_training():
    """65536 at first, halved by an overflow, doubled after 2000 clean steps, at most 2**24."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._scale_seq_len) == (65536.0, 2000)

    def step(value=0.0):
        with amp.scale_loss(model(torch.zeros(1, 1)).float().sum(), optimizer) as scaled:
            scaled.backward()
            model.weight.grad.fill_(value)
        optimizer.step()
        optimizer.zero_grad()
        return scaler.loss_scale()

    assert step(math.inf) == 32768.0
    scaler._unskipped = 1998
    assert [step(), step(), step()] == [32768.0, 65536.0, 65536.0]
    scaler._loss_scale, scaler._unskipped = 2.0**24, 1999
    assert step() == 2.0**24
    assert scaler._unskipped == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_unscaling_by_hand_gives_the_bits_of_the_engine(level):
    """There is one path, so old callers of the scaler's methods get what a pass gets."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 1000.0  # no power of two: every bit counts
    ((x, y),) = batches(1)
    with amp.scale_loss(nn.functional.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
        left = [p.grad.clone() for p in model.parameters()]
    by_hand = [torch.empty(g.shape) for g in left]
    amp._amp_state.loss_scalers[0].unscale(left, by_hand, None)
    assert same(by_hand, [p.grad for p in amp.master_params(optimizer)])
