"""A run that was saved and resumed is the run that was not, bit for bit.

Every continuation here is ten steps in which the scale, where it is dynamic, grows, backs off at
a poisoned gradient and grows again.
"""

import copy
import functools
import io
import itertools
import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from apex.optimizers import FusedAdam, FusedNovoGrad
from apex.parallel import LARC
from tests.amp.training import MASTERED, batches, copies, net, same
from tests.amp.training import train as train_on
from tests.checkpoints import assert_equal, reloaded

LEVELS = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O1 static": {"opt_level": "O1", "loss_scale": 128.0},
    "O2": {"opt_level": "O2"},
    "O2 static": {"opt_level": "O2", "loss_scale": 128.0},
    "O2 bfloat16": {"opt_level": "O2", "cast_model_type": torch.bfloat16},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5 dynamic": {"opt_level": "O5", "loss_scale": "dynamic"},
}
WEIGHTS = [name for name, _ in net().named_parameters()]
PLAIN = ["O0", "O1", "O2", "O3", "O4", "O5"]
DYNAMIC = ["O1", "O2", "O2 bfloat16", "O5 dynamic"]

EPS = 1e-4  # O3 steps in float16, where 1e-8 is 0
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, eps=EPS, weight_decay=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=EPS, amsgrad=True),
    "fused adam": functools.partial(FusedAdam, lr=1e-2, weight_decay=1e-3),
    "fused novograd": functools.partial(FusedNovoGrad, lr=1e-2),
}
CASES = [  # all levels; O2 with all optimizers, others where moments are not float32 or a skip is
    *((level, "adam") for level in LEVELS),
    *(("O2", name) for name in OPTIMIZERS if name != "adam"),
    *(("O3", name) for name in ("sgd", "fused adam", "fused novograd")),
    ("O5 dynamic", "adamw"),
    ("O1", "fused adam"),
]
ORDERS = [
    order
    for order in itertools.permutations(["initialize", "model", "optimizer", "amp"])
    if order.index("initialize") < order.index("amp")
]


def start(level, model, optimizer, **options):
    settings = {"init_scale": 2.0**10, "growth_interval": 3, **LEVELS[level], **options}
    return amp.initialize(model, optimizer, verbosity=0, **settings)


def train(model, optimizer, count, seed, poisoned=None):
    """``count`` steps; the gradients of step number ``poisoned`` get an inf."""
    train_on(model, optimizer, batches(count, seed), poisoned)


def checkpoint(model, optimizer):
    """What a program saves, after a trip through a file."""
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    return reloaded({name: part.state_dict() for name, part in parts.items()}, weights_only=True)


def everything(model, optimizer):
    """All that a training consists of, copied: its checkpoint, its masters, its 16-bit weights."""
    return {
        "checkpoint": checkpoint(model, optimizer),
        "stepped": copies(amp.master_params(optimizer)),
        "computed with": copies([*model.parameters(), *model.buffers()]),
    }


def go_on(level, model, optimizer):
    train(model, optimizer, 10, seed=3, poisoned=5 if level in DYNAMIC else None)


@functools.cache
def saved_and_after(level, name):
    """A checkpoint, and everything ten steps later in the run that was never interrupted."""
    model = net(0)
    model, optimizer = start(level, model, OPTIMIZERS[name](model.parameters()))
    train(model, optimizer, 5, seed=2)
    saved = checkpoint(model, optimizer)
    go_on(level, model, optimizer)
    after = everything(model, optimizer)
    amp.reset()
    return saved, after


def resume(level, name, saved, order, **options):
    model = net(7)
    optimizer = OPTIMIZERS[name](model.parameters())
    for what in order:
        if what == "initialize":
            model, optimizer = start(level, model, optimizer, **options)
        else:
            part = {"model": model, "optimizer": optimizer, "amp": amp}[what]
            part.load_state_dict(copy.deepcopy(saved[what]))
    return model, optimizer


def check(level, name, order):
    saved, after = saved_and_after(level, name)
    model, optimizer = resume(level, name, saved, order)
    go_on(level, model, optimizer)
    assert_equal(everything(model, optimizer), after)


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_a_resumed_run_is_the_run(number, case):
    """In one of the twelve orders each."""
    check(*case, ORDERS[number % 12])


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_in_every_order_with_masters(order):
    check("O2", "adam", order)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_ten_steps_hold_growth_and_a_skip(level):
    """Else the tests above would show less than they say."""
    saved, after = saved_and_after(level, "adam")
    assert saved["amp"]["loss_scaler0"] == {"loss_scale": 2.0**11, "unskipped": 2}
    # 5 land, and with the 2 before them make two growths and 1; a skip; 4 make a growth and 1
    after = after["checkpoint"]
    assert after["amp"]["loss_scaler0"] == {"loss_scale": 2.0**13, "unskipped": 1}
    assert after["optimizer"]["state"][0]["step"] == 14


# -- from level to level --------------------------------------------------------------------------


def stored(value, level):
    """``value`` as it is at ``level``: only O3 has less than float32 to keep it in."""
    value = torch.as_tensor(value)
    if not value.is_floating_point():
        return value
    return value.half().float() if level == "O3" else value.float()


def assert_model_holds(level, wanted, model, optimizer):
    """``wanted`` is in the state dict, the masters and the weights."""
    state = model.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[k], stored(v, level)) for k, v in wanted.items())
    wide = [wanted[name].float() for name, _ in model.named_parameters()]
    if level in MASTERED:
        assert same(amp.master_params(optimizer), wide)
    assert same(
        model.parameters(), [w.to(p.dtype) for w, p in zip(wide, model.parameters(), strict=True)]
    )


def assert_arrived(level, saved, model, optimizer):
    assert_model_holds(level, saved["model"], model, optimizer)
    groups = zip(saved["optimizer"]["param_groups"], optimizer.param_groups, strict=True)
    for then, now in groups:
        assert now["lr"] == then["lr"]
        for key, param in zip(then["params"], now["params"], strict=True):
            slots = saved["optimizer"]["state"][key]
            assert optimizer.state[param].keys() == slots.keys()
            for name, value in slots.items():
                wanted = torch.tensor(float(value)) if name == "step" else stored(value, level)
                assert torch.equal(torch.as_tensor(optimizer.state[param][name]).float(), wanted)
                assert name == "step" or optimizer.state[param][name].dtype == param.dtype
    if level in ("O1", "O2"):
        assert amp.state_dict() == saved["amp"]
    else:
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}


FIRST = ("initialize", "model", "optimizer", "amp")
LAST = ("optimizer", "model", "initialize", "amp")


@pytest.mark.parametrize(
    ("name", "order"),
    [("sgd", LAST), ("adamw", FIRST)],
    ids=["initialize last", "initialize first"],
)
@pytest.mark.parametrize("after", PLAIN)
@pytest.mark.parametrize("before", ["O0", "O2", "O3"])
def test_what_is_saved_at_one_level_goes_on_at_another(before, after, name, order):
    saved, _ = saved_and_after(before, name)
    model, optimizer = resume(after, name, saved, order)
    assert_arrived(after, saved, model, optimizer)
    train(model, optimizer, 1, seed=4)
    assert amp.stepped(optimizer)


# -- files of NVIDIA's Apex -----------------------------------------------------------------------

OLD_GROUP = ("lr", "betas", "eps", "weight_decay", "amsgrad")  # of Adam in the torch of 2019


def old_file(moments, *, weights, new_zip):
    """What ``torch.save`` wrote of a run at O2 of NVIDIA's Apex, read again.

    Weights are those of the float16 model, in float32 if amp wrote them; steps are ints; parameters
    are numbered by their ``id``; groups have the keys of their day.
    """
    model = net(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=EPS)
    for x, y in batches(3, seed=9):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    is_norm = {f"1.{name}" for name, _ in model[1].named_parameters()}
    is_norm |= {f"1.{name}" for name, _ in model[1].named_buffers()}
    states = OrderedDict(
        (name, value if name in is_norm else value.half().to(weights))
        for name, value in model.state_dict().items()
    )
    numbers = {index: 140_000_000_000_000 + 72 * index for index in range(6)}
    now = optimizer.state_dict()
    group = {key: now["param_groups"][0][key] for key in OLD_GROUP}
    old = {"state": {}, "param_groups": [{**group, "params": list(numbers.values())}]}
    for index, slots in now["state"].items():
        slots = {name: slot.to(moments) for name, slot in slots.items()}
        old["state"][numbers[index]] = {**slots, "step": int(slots["step"])}
    scalers = OrderedDict(loss_scaler0={"loss_scale": 2.0**12, "unskipped": 2})
    file, saved = io.BytesIO(), {"model": states, "optimizer": old, "amp": scalers}
    torch.save(saved, file, _use_new_zipfile_serialization=new_zip)
    file.seek(0)
    return torch.load(file, weights_only=True)


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("level", "moments", "weights", "new_zip", "order"),
    [
        ("O0", HALF, FLOAT, True, FIRST),
        ("O1", FLOAT, FLOAT, False, FIRST),
        ("O2", FLOAT, FLOAT, True, FIRST),
        ("O2", HALF, FLOAT, False, LAST),
        ("O2", FLOAT, HALF, True, FIRST),  # of the FP16_Optimizer, whose model was float16
        ("O1", FLOAT, HALF, True, LAST),
        ("O3", HALF, FLOAT, True, FIRST),
        ("O5", FLOAT, FLOAT, False, FIRST),
    ],
)
def test_a_file_of_nvidias_apex_is_resumed(level, moments, weights, new_zip, order):
    saved = old_file(moments, weights=weights, new_zip=new_zip)
    model, optimizer = resume(level, "adam", saved, order)
    assert_arrived(level, saved, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 5e-3
    train(model, optimizer, 1, seed=4)
    assert amp.stepped(optimizer)


# -- what cannot be loaded ------------------------------------------------------------------------


BROKEN = {  # by the key that the error names
    "4.weight": lambda model: model["4.weight"][:, 1:],  # of another shape
    "0.bias": None,  # missing
    "nobody.weight": lambda model: torch.ones(1),
    "0.weight": lambda model: "not a tensor",
}


@pytest.mark.parametrize("key", BROKEN)
@pytest.mark.parametrize(("level", "trained"), [("O0", 2), ("O2", 0), ("O2", 2), ("O3", 2)])
def test_a_model_that_loads_in_part_stays_one_model(level, trained, key):
    """torch names the key and loads the rest; masters, weights and state dict agree on what."""
    saved, _ = saved_and_after(level, "adam")
    model = net(7)
    model, optimizer = start(level, model, OPTIMIZERS["adam"](model.parameters()))
    train(model, optimizer, trained, seed=5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = dict(saved["model"])
    if BROKEN[key]:
        bad[key] = BROKEN[key](bad)
    else:
        del bad[key]
    with pytest.raises(RuntimeError, match=key):
        model.load_state_dict(bad)
    wanted = {
        name: bad[name]
        if isinstance(bad.get(name), torch.Tensor) and bad[name].shape == value.shape
        else value
        for name, value in before.items()
    }
    assert_model_holds(level, wanted, model, optimizer)
    for group in optimizer.param_groups:  # steps that move nothing must not bring anything back
        group["lr"] = group["weight_decay"] = 0.0
    train(model, optimizer, 2, seed=6)
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in WEIGHTS)
    model.load_state_dict(saved["model"])
    assert_model_holds(level, saved["model"], model, optimizer)


def with_another_group(groups):
    groups.append({"params": [6]})


def with_fewer_params(groups):
    groups[0]["params"].pop()


@pytest.mark.parametrize("change", [with_another_group, with_fewer_params, list.clear])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_an_optimizer_that_does_not_load_goes_on_as_before(level, change):
    saved, after = saved_and_after(level, "adam")
    model, optimizer = resume(level, "adam", saved, FIRST)
    bad = copy.deepcopy(saved["optimizer"])
    change(bad["param_groups"])
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(bad)
    go_on(level, model, optimizer)
    assert_equal(everything(model, optimizer), after)


GOOD = {"loss_scale": 2.0, "unskipped": 1}
NO_SCALES = (math.nan, 0.0, "x", math.inf, -2.0, 10**400, torch.ones(2))
NO_COUNTS = (math.inf, math.nan, 1.5, -1, None)


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        *((key, GOOD) for key in ("model", 0, "loss_scaler", "loss_scaler-1", "loss_scaler01")),
        ("loss_scaler\N{ARABIC-INDIC DIGIT ONE}", GOOD),
        ("foreign", {}),
        *(("loss_scaler1", entry) for entry in (None, [], list(GOOD.items()), 3.0)),
        *(("loss_scaler1", {name: value}) for name, value in GOOD.items()),
        *(("loss_scaler1", {**GOOD, "loss_scale": scale}) for scale in NO_SCALES),
        *(("loss_scaler1", {**GOOD, "unskipped": count}) for count in NO_COUNTS),
    ],
)
def test_a_bad_entry_is_refused_by_name_before_anything_is_changed(key, entry):
    model = net(0)
    start("O1", model, OPTIMIZERS["sgd"](model.parameters()), num_losses=2)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=f'"{key}"'):
        amp.load_state_dict({"loss_scaler0": GOOD, key: entry})
    assert amp.state_dict() == before


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, LARC], ids=["alone", "in LARC"])
def test_moments_keep_the_dtype_that_the_optimizer_gives_them(wrap):
    model = net(0)
    optimizer = wrap(FusedAdam(model.parameters(), lr=1e-3))
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-5)  # its square is 0 in float16
    optimizer.step()
    model, optimizer = start("O3", model, optimizer)
    kept = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert {moment.dtype for moment in kept} == {torch.float32}
    assert all((moment > 0).all() for moment in kept)
