"""What holds for every fused optimizer: gradients, groups, layouts, skipping, copies, bad input."""

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from torch.optim.optimizer import required
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp, optimizers
from apex.catalogue.optimizers import OPTIMIZERS
from apex.commands.selftest.gpu import waits_refused
from apex.contrib import optimizers as contrib
from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb
from apex.parallel import LARC
from tests.optimizers import common
from tests.optimizers.common import (
    EVERY,
    MODES,
    OLD,
    PATHS,
    WAYS,
    check_closure,
    give_grads,
    maker,
    on,
    parameters,
    same,
    started,
    train,
    values,
)
from tests.tolerance import THREE_STEPS, assert_close_to_largest

SMALL = ((7,), (33, 5))
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())
# Muon steps matrices apart from the rest: a group that has both becomes two.
UNDIVIDED = {name: make for name, make in EVERY.items() if name != "FusedMuon"}
undivided = pytest.mark.parametrize("make", UNDIVIDED.values(), ids=UNDIVIDED.keys())
# Not those that have no step_scaled, or whose gradients are clipped as well.
SCALED = [name for name in WAYS if "apex.contrib" not in name and "clipped" not in name]
every_way = pytest.mark.parametrize("make", [*map(maker, SCALED)], ids=SCALED)
paths = pytest.mark.parametrize("path", PATHS)


@contextlib.contextmanager
def lagging_device(path="reference"):
    """Take the CPU for a device that lags behind the host: reading it would wait."""

    def refused(*_):
        raise AssertionError("the host waits for the device")

    with pytest.MonkeyPatch.context() as patch, _runtime.use(path):
        patch.setattr(_runtime, "waits", lambda device: True)
        if path == "triton":  # whose interpreter reads
            yield
            return
        for name in ("item", "tolist", "cpu", "numpy", "nonzero"):
            patch.setattr(torch.Tensor, name, refused)
        for kind in ("bool", "float", "int", "index"):
            patch.setattr(torch.Tensor, f"__{kind}__", refused)
        yield


# -- which parameters ----------------------------------------------------------------------------


@every
@paths
def test_parameters_without_gradients_are_left_alone(make, path):
    params = parameters(shapes=(*SMALL, (4,)))
    params[2].requires_grad_(False)
    optimizer = make(params)
    give_grads(params[:2], 0)
    params[0].grad = None
    before = values(params)
    common.take_step(path, optimizer)
    unchanged = [torch.equal(a, b) for a, b in zip(before, values(params), strict=True)]
    assert unchanged == [True, False, True]
    assert params[0] not in optimizer.state


@every
def test_a_step_without_gradients(make):
    params, optimizer = started(make)
    before = values(params)
    optimizer.step()
    assert same(before, values(params))


@every
def test_an_empty_group_is_skipped(make):
    params = parameters(shapes=SMALL)
    optimizer = make([{"params": params}, {"params": []}])
    train(optimizer, params, range(1))
    assert "step" not in optimizer.param_groups[1]


@every
def test_an_empty_group_is_saved_with_the_greatest_step(make):
    """For a rank that has parameters there. In memory it has none: what is added begins anew."""
    first, second, late, alone = parameters(shapes=[(7,), (5,), (4,), (4,)])
    kind = {"algorithm": "adam"} if make is EVERY["FusedMuon"] else {}  # its matrices have no step
    optimizer = make([{"params": [first]}, {"params": [], **kind}])
    train(optimizer, [first], range(2))
    optimizer.add_param_group({"params": [second]})
    train(optimizer, [first, second], range(1))
    saved = optimizer.state_dict()
    steps = [group.get("step") for group in saved["param_groups"]]
    assert [*map(int, filter(None, steps))] == ([3, 3, 1] if optimizer._counts_steps else [])
    # There, with a parameter that has no state yet.
    groups = copy.deepcopy(saved["param_groups"])
    for number, group in enumerate(groups):
        group["params"] = [number]
        group.pop("exp_avg_sq", None)  # norms of NovoGrad's parameters, which have a state
    other = make([{"params": [param], **kind} for param in parameters(shapes=[(7,), (4,), (5,)])])
    other.load_state_dict({"state": {}, "param_groups": groups})
    assert int(other.param_groups[1].get("step", 3)) == 3
    # Here.
    optimizer.load_state_dict(saved)
    optimizer.param_groups[1]["params"].append(late)
    first.grad = second.grad = None
    alone.data.copy_(late.data)
    new = make([{"params": [alone], **kind}])
    assert same(train(optimizer, [late], range(2)), train(new, [alone], range(2)))


def test_steps_of_empty_groups_are_found_on_the_device():
    first, second = parameters(shapes=SMALL)
    optimizer = FusedAdam([{"params": [first]}, {"params": []}, {"params": [second]}])
    optimizer.param_groups[2]["step"] = 4
    give_grads([first, second], 0)
    with lagging_device():
        optimizer.step_scaled(1.0, torch.zeros(()))
        optimizer.param_groups[0]["step"] = 1  # one that the host has counted
        saved = optimizer.state_dict()
    assert torch.equal(saved["param_groups"][1]["step"], torch.tensor([5], dtype=torch.int32))


COUNTING = {"contrib.FusedAdam": OLD["contrib.FusedAdam"], **EVERY}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING.keys())
def test_steps_are_the_same_wherever_they_are_counted(make):
    """In step 4 NovoGrad's correction has another last bit if it is rounded before the root."""
    found = []
    for skips in (None, torch.zeros(())):
        params, optimizer = started(make, shapes=SMALL, lr=1.0)
        with lagging_device():
            for number in range(6):
                give_grads(params, number)
                optimizer.step_scaled(1.0, skips)
        found.append(values(params))
    assert same(*found)


@every
def test_a_parameter_that_is_twice_in_a_group_is_stepped_once(make):
    once, twice = (parameters(shapes=SMALL) for _ in range(2))
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        repeated = make([*zip("abcd", [*twice, *twice], strict=True)])
    wanted = make([*zip("ab", once, strict=True)])
    assert same(train(repeated, twice, range(2)), train(wanted, once, range(2)))
    names = [group["param_names"] for group in wanted.param_groups]
    assert [group["param_names"] for group in repeated.param_groups] == names


@every
@paths
def test_empty_tensors_alone(make, path):
    params = parameters(shapes=((0,), (3, 0)))
    train(make(params), params, range(2), path)


@every
def test_gradients_of_another_dtype(make):
    """As amp has them: 16-bit gradients for float32 weights."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    plain, optimizer = make(expected), make(params)
    give_grads(expected, 0)
    for other in expected:
        other.grad = other.grad.half().float()
    halves = {p: other.grad.half() for p, other in zip(params, expected, strict=True)}
    with on("reference"):
        plain.step()
    with on("triton"):
        optimizer.step_scaled(grads=halves)
    common.assert_rounded(params, expected)


@every
@paths
def test_copies_get_the_new_values(make, path):
    params, optimizer = started(make, shapes=SMALL)
    give_grads(params, 0)
    copies = {param: torch.zeros_like(param, dtype=torch.float16) for param in params}
    with on(path):
        optimizer.step_scaled(copies=copies)
    for param, half in copies.items():
        assert torch.equal(half, param.detach().half())


# -- memory layouts ------------------------------------------------------------------------------


# Shape, strides of the weight, strides of its gradient; the first five in one order without gaps.
LAYOUTS = [
    ((7,), (1,), (1,)),
    ((9, 6), (1, 9), (1, 9)),
    ((4, 3, 5), (1, 20, 4), (1, 20, 4)),
    ((3, 1, 4), (1, 7, 3), (1, 3, 3)),  # a dimension of one element may have any stride
    ((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),
    ((2, 3, 4, 5), (60, 1, 15, 3), (60, 20, 5, 1)),
    ((9, 6), (1, 9), (6, 1)),
    ((9, 5), (10, 2), (5, 1)),
    ((9, 5), (10, 2), (10, 2)),
]


@every
@paths
@pytest.mark.parametrize("chosen", [range(9), range(5, 9)], ids=["all", "odd"])
def test_layouts(make, path, chosen, monkeypatch):
    """Any strides; those in one order without gaps stay in one launch."""
    layouts = [LAYOUTS[number] for number in chosen]
    twins = parameters(shapes=[shape for shape, _, _ in layouts])
    params = [
        torch.nn.Parameter(_strided(twin.detach(), strides))
        for twin, (_, strides, _) in zip(twins, layouts, strict=True)
    ]
    odd, plain = make(params), make(twins)
    launched = []
    if path == "triton":
        kernels = importlib.import_module("apex.kernels.multi_tensor")
        launch = kernels.launch

        def noted(layout, tables, *args, **kwargs):
            launched.append((layout.tensors, len(tables)))
            return launch(layout, tables, *args, **kwargs)

        monkeypatch.setattr(kernels, "launch", noted)
    for number in range(2):
        give_grads(twins, number)
        for param, twin, (_, _, strides) in zip(params, twins, layouts, strict=True):
            param.grad = _strided(twin.grad, strides)
        common.take_step(path, plain)
        launched.clear()
        common.take_step(path, odd)
    steps = [tensors for tensors, columns in launched if columns > 1]
    if make in UNDIVIDED.values():
        assert {*steps} == ({5} if path == "triton" and len(layouts) == 9 else set())
    assert [param.stride() for param in params] == [strides for _, strides, _ in layouts]
    common.assert_rounded(params, twins)


def _strided(values, strides):
    return torch.empty_strided(values.shape, strides).copy_(values)


def _negated(values):
    """The same values with the negative bit: memory has the other signs, with gaps."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


@every
@paths
@pytest.mark.parametrize("shapes", [((4, 3), (1,)), ((1,), (1, 1))], ids=str)
def test_gradients_with_the_negative_bit(make, path, shapes):
    """One element is contiguous all the same. What is written has its sign, too."""
    twins, params = (parameters(shapes=(*shapes, (5,))) for _ in range(2))
    give_grads(twins, 0)
    held = [_negated(twin.grad) for twin in twins[:-1]]
    for param, grad in zip(params, [*held, twins[-1].grad.clone()], strict=True):
        param.grad = grad
    with on(path):
        make(twins).step_scaled(0.5, write_grads=True)
        make(params).step_scaled(0.5, write_grads=True)
    assert all(grad.is_neg() for grad in held)
    found, wanted = ([*some, *(param.grad for param in some)] for some in (params, twins))
    common.assert_rounded([one.detach().resolve_neg() for one in found], wanted)


@every
def test_parameters_with_the_negative_bit_are_refused(make):
    param = torch.nn.Parameter(_negated(torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"Make the parameter from `data.resolve_neg\(\)`"):
        make([param])
    make([torch.nn.Parameter(param.detach().resolve_neg())])


# -- what surrounds a step -----------------------------------------------------------------------


@every_way
@paths
def test_scaled_gradients(make, path):
    """A power of two is taken out exactly; gradients are left multiplied if asked."""
    expected, params = parameters(), parameters()
    train(make(expected), expected, range(2), path or "reference")
    optimizer = make(params)
    with on(path or "reference"):
        for number in range(2):
            give_grads(params, number, scale=1024.0)
            scaled = [param.grad.clone() for param in params]
            write = number == 1
            optimizer.step_scaled(torch.tensor(1 / 1024), torch.zeros(1), write_grads=write)
            for param, grad in zip(params, scaled, strict=True):
                if not isinstance(optimizer, FusedLAMB):  # which keeps something else there
                    assert torch.equal(param.grad, grad / 1024 if write else grad)
    assert same(values(params), values(expected))


@every_way
@paths
def test_a_skipped_step_changes_nothing(make, path):
    params, optimizer = started(make, steps=1, path=path)
    before = copy.deepcopy((values(params), optimizer.state_dict()))
    give_grads(params, 1)
    params[2].grad[0] = float("inf")
    grads = [param.grad.clone() for param in params]
    with on(path):
        optimizer.step_scaled(0.5, torch.ones(1), write_grads=True)
    assert same(before[0], values(params))
    assert _equal(before[1], optimizer.state_dict())
    assert same(grads, [param.grad for param in params])


def _equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right


@pytest.mark.parametrize(
    ("path", "lags"), [*((path, False) for path in PATHS), ("reference", True), ("triton", True)]
)
@pytest.mark.parametrize("name", MODES)
def test_scaled_and_skipped_steps_of_two_groups(name, path, lags):
    """Against the definition in float64, unscaled, which takes those steps that count.

    A device that lags behind the host is not waited for.
    """
    params, exact = parameters(), parameters()
    wide = [torch.nn.Parameter(param.detach().double()) for param in exact]
    groups = [
        [{"params": p[:3]}, {"params": p[3:], "lr": 0.07, "weight_decay": 0.03}]
        for p in (params, wide)
    ]
    optimizer, plain = (MODES[name](group) for group in groups)
    for number, skipped in enumerate((True, False, True, False, False)):
        give_grads(params, number, scale=8.0)
        if skipped:
            params[2].grad[0] = float("nan")
        for param, other in zip(params, wide, strict=True):
            other.grad = param.grad.double() / 8
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(skipped))
        with lagging_device(path) if lags else on(path):
            optimizer.step()
        if not skipped:
            common.take_step("reference", plain)
    for param, other in zip(params, wide, strict=True):
        pairs = [(param, other)]
        kept = [s for s in optimizer.slots if s in optimizer.state[param]]
        pairs += [(optimizer.state[param][s], plain.state[other][s]) for s in kept]
        for actual, wanted in pairs:
            if wanted.numel():
                assert_close_to_largest(actual.detach(), wanted.detach(), THREE_STEPS)
    if optimizer._counts_steps:
        groups = [group for group in optimizer.param_groups if group.get("algorithm") != "muon"]
        assert [int(group["step"]) for group in groups] == [3, 3]


CLIPPED = {"clipped": functools.partial(OLD["contrib.FusedAdam"], max_grad_norm=1.0)}
EVERY_KIND = {**EVERY, **OLD, **CLIPPED}


@pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_on_a_device_without_memory(make, dtype):
    """On meta a value that is read is an error."""
    params = [torch.nn.Parameter(torch.empty(5, device="meta", dtype=dtype)) for _ in range(2)]
    optimizer = make(params)
    for number in range(3):
        for param in params:
            param.grad = torch.empty_like(param)
        if number:
            params[0].grad = None
        optimizer.grad_scale = torch.empty((), device="meta")
        optimizer.found_inf = torch.empty((), device="meta")
        optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    if make not in EVERY.values():
        optimizer.step(scale=torch.empty((), device="meta"))


# -- groups of equal numbers -----------------------------------------------------------------------


class Functions(TorchDispatchMode):
    """Counts functions of torch; views are nothing that a device runs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def updates_of(optimizer):
    """Record how many parameters each update steps from here on."""
    found, update = [], optimizer._update

    def recorded(group, bucket, options):
        found.append(len(bucket.params))
        return update(group, bucket, options)

    optimizer._update = recorded
    return found


@undivided
@paths
def test_groups_of_equal_numbers_are_stepped_together(make, path):
    """As before, bit for bit."""
    expected, params = parameters(), parameters()
    lr = torch.tensor(0.05)  # is equal to itself only
    rates = [0.03, lr, 0.03, lr, 0.05, 0.03]
    alone = make([{"params": [p], "lr": rate} for p, rate in zip(expected, rates, strict=True)])
    alone._joins_groups = False
    optimizer = make([{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)])
    optimizer.param_groups[2]["name"] = "a key of the program's own"
    updates = updates_of(optimizer)
    assert same(train(alone, expected, range(2), path), train(optimizer, params, range(2), path))
    assert updates == 2 * [3, 2, 1]


@undivided
@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_groups_that_have_counted_other_steps(make, path, lags):
    """On the host they are stepped apart; a device's kernels read a step for each tensor."""
    results = []
    for joins in (False, True):
        params = parameters()
        optimizer = make([{"params": [param]} for param in params[:3]])
        optimizer._joins_groups = joins
        updates = updates_of(optimizer)
        for number in range(4):
            give_grads(params, number)
            if number == 2:
                optimizer.add_param_group({"params": params[3:]})
            with lagging_device(path) if lags and joins else on(path):
                optimizer.step_scaled(0.5, torch.tensor(float(number == 1)))
        results.append(values(params))
        steps = [int(group["step"]) for group in optimizer.param_groups if "step" in group]
        assert steps in ([], [3, 3, 3, 2])
    assert same(*results)
    last = [3, 3] if steps and not lags else [6]
    assert updates[-len(last) :] == last


@pytest.mark.parametrize(
    ("name", "lrs"), [("FusedAdam", "equal"), ("FusedAdam", "different"), ("FusedLAMB", "equal")]
)
def test_small_kernels_of_a_step_that_can_be_skipped(name, lrs, monkeypatch):
    """As many for eight groups as for two: each would be a launch beside the kernels."""
    kernels = pytest.importorskip("apex.kernels.multi_tensor")

    def launched(layout, *_, sums=(), **__):
        return torch.zeros(len(sums), layout.tensors) if sums else None

    monkeypatch.setattr(kernels, "launch", launched)
    found = []
    for groups in (2, 8):
        params = parameters(shapes=[(5,)] * 8)
        each = [{"params": [*params[n::groups]], "lr": 0.1} for n in range(groups)]
        for number, group in enumerate(each if lrs == "different" else ()):
            group["lr"] = 0.1 + number
        optimizer = EVERY[name](each)
        give_grads(params, 0)
        with lagging_device("triton"):
            for _ in range(2):
                with Functions() as functions:
                    optimizer.step_scaled(torch.tensor(0.5), torch.tensor(0.0))
        found.append(functions.count)
    assert found[0] == found[1] <= 40


# -- state ---------------------------------------------------------------------------------------

LAYOUTS_OF_STATE = {  # as in the original, where it has the optimizer
    "FusedAdam": ("exp_avg exp_avg_sq", "bias_correction betas eps step"),
    "FusedSGD": ("momentum_buffer", "momentum dampening nesterov"),
    "FusedAdagrad": ("sum", "eps"),
    "FusedLAMB": (
        "exp_avg exp_avg_sq",
        "bias_correction betas eps grad_averaging max_grad_norm step",
    ),
    "FusedNovoGrad": (
        "exp_avg",
        "bias_correction betas eps grad_averaging norm_type init_zero step exp_avg_sq",
    ),
    "FusedLion": ("exp_avg", "betas"),
    "FusedMuon": (  # as in torch.optim.Muon, and what steps the rest; here of a vector
        "exp_avg exp_avg_sq",
        "adjust_lr_fn algorithm betas eps flatten momentum nesterov ns_coefficients ns_steps split "
        "step",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS_OF_STATE)
def test_layout_of_the_state(name):
    params, optimizer = started(EVERY[name], torch.float16, SMALL, steps=1)
    slots, numbers = LAYOUTS_OF_STATE[name]
    saved = optimizer.state_dict()
    assert {*saved["state"][0]} == {*slots.split()}
    assert {*saved["param_groups"][0]} == {"lr", "weight_decay", "params", *numbers.split()}
    assert saved["param_groups"][0].get("step", 1) == 1
    for slot in slots.split():
        kept = torch.float16 if slot in optimizer.narrow_slots else torch.float32
        assert saved["state"][0][slot].dtype == optimizer.state[params[0]][slot].dtype == kept


# -- state that does not fit -----------------------------------------------------------------------


@every
@pytest.mark.parametrize("size", [3, 5])
def test_the_state_of_another_shape_is_refused(make, size):
    """Else a kernel would write beyond it."""
    params, saved = started(make, shapes=[(size, 4)], steps=1)
    other, optimizer = started(make, shapes=[(4, 4)], steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"parameter 0 has shape \({size}, 4\), .* \(4, 4\)"):
        optimizer.load_state_dict(saved.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"][0].get("step") == after["param_groups"][0].get("step")
    assert _equal(before["state"], after["state"])


@every
@paths
def test_other_data_with_the_old_state_is_refused(make, path):
    params, optimizer = started(make, shapes=SMALL, steps=1, path=path)
    params[1].data = torch.ones(9)
    before = values(params)
    for what in ("gradient", optimizer.slots[0]):
        with (
            pytest.raises(RuntimeError, match=rf"the {what} of .*\(33, 5\) .* needs \(9,\) "),
            on(path),
        ):
            optimizer.step()
        assert same(values(params), before)
        params[1].grad = torch.ones(9)


@every
@paths
def test_a_transposed_gradient_is_refused(make, path):
    """As many elements, but each would meet another one's gradient."""
    params, optimizer = started(make, shapes=[(1, 6), (2, 3)])
    for param in params:
        param.grad = torch.ones(param.shape)
        param.data = torch.ones(param.shape[::-1])
    with pytest.raises(RuntimeError, match=r"the gradient of .*\(1, 6\).*\(6, 1\)"), on(path):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)
    assert not optimizer.param_groups[0].get("step")


@every
@paths
def test_state_on_another_device_is_refused(make, path):
    """A kernel would take its address for one of the weight's device."""
    params, optimizer = started(make, shapes=SMALL, steps=1, path=path)
    state = optimizer.state[params[0]]
    slot = next(slot for slot in optimizer.slots if slot in state)
    state[slot] = state[slot].to("meta")
    with pytest.raises(RuntimeError, match=f"the {slot} of .* on meta; .* on cpu"), on(path):
        optimizer.step()


@every
def test_a_parameter_begins_anew_where_its_state_was_cleared(make):
    params, optimizer = started(make, shapes=SMALL[:1], steps=1)
    params[0].data, params[0].grad = torch.ones(9), None
    optimizer.state.pop(params[0])
    before = values(params)
    assert not same(train(optimizer, params, range(2)), before)


# NovoGrad has a slot of Lion's and some of Adam's numbers, Lion a slot of all that have moments
@pytest.mark.parametrize("other", [torch.optim.Adamax, torch.optim.Rprop, *EVERY.values()])
def test_the_state_of_a_relative_is_refused(other):
    """Some of its slots have the same names."""
    params, relative = started(other, shapes=SMALL, steps=2)
    slots = getattr(relative, "slots", None)
    for make in EVERY.values():
        if make(params).slots != slots:
            with pytest.raises(ValueError, match="and this optimizer keeps|Nesterov momentum req"):
                make(params).load_state_dict(relative.state_dict())


@every
def test_what_a_program_keeps_beside_the_state_is_its_own(make):
    """An average of the weights, of a parameter without gradients too."""
    params, optimizer = started(make, shapes=SMALL)
    train(optimizer, params[:1], range(1))
    for param in params:
        optimizer.state[param].update(average=torch.ones_like(param), pair=torch.zeros(2))
    optimizer.state["epoch"] = 5
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["epoch"] == 5
    assert all(optimizer.state[param]["average"].eq(1).all() for param in params)
    train(optimizer, params, range(1))


OWN_KEYS = [(n, k) for n in EVERY for k in ("momentum", "eps")]
OWN_KEYS = [(n, k) for n, k in OWN_KEYS if k not in EVERY[n](parameters()).defaults]


@pytest.mark.parametrize(("name", "key"), OWN_KEYS)
def test_a_key_of_the_programs_own_is_saved_and_loaded(name, key):
    """Options that several optimizers share: a state is not another optimizer's for that."""
    make, saved, loaded = EVERY[name], parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, other = make([{"params": saved, key: 0.9}]), make([{"params": loaded, key: 0.5}])
    train(optimizer, saved, range(2))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0][key] == 0.9


def test_a_state_with_another_optimizers_slots_is_refused_with_a_key_of_the_programs_own():
    params, adam = started(FusedAdam, shapes=SMALL, steps=1)
    with pytest.raises(ValueError, match="the saved groups have eps"):
        EVERY["FusedLion"]([{"params": params, "eps": 0.5}]).load_state_dict(adam.state_dict())


@every
def test_what_makes_an_optimizer_is_freed(make):
    """Its locals, too, without the garbage collector: a sweep makes one model after the other."""

    def swept():
        others, params = torch.nn.Linear(1, 1), parameters(shapes=SMALL)
        optimizer = make(params)
        train(optimizer, params, range(1))
        return [weakref.ref(x) for x in (others, params[0], optimizer)]

    swept()  # torch's first optimizer of a process makes cycles
    gc.disable()
    try:
        assert [ref() for ref in swept()] == [None, None, None]
    finally:
        gc.enable()


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="no state and no param_groups \\(it has model\\)"):
        FusedAdam(parameters()).load_state_dict({"model": 1})


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_around_do_not_matter(make, dtype):
    """Autocast refuses to join tensors of the other 16-bit type."""
    results = []
    for on_ in (False, True):
        params, optimizer = started(make, dtype, shapes=[(3,)] * 40)
        give_grads(params, 0)
        with torch.autocast("cpu", torch.float16, enabled=on_):
            optimizer.step()
        results.append(values(params))
    assert same(*results)


@pytest.mark.gpu
@every
def test_steps_on_a_gpu_without_waiting(make):
    params = [torch.nn.Parameter(param.detach().cuda()) for param in parameters()]
    optimizer = make(params)
    flags = [torch.tensor(flag, device="cuda") for flag in (0.0, 1.0, 0.0)]
    optimizer.grad_scale = torch.tensor(2.0, device="cuda")
    for number, flag in enumerate(flags):
        give_grads(params, number)
        if number == 2:
            params[2].grad = None
        optimizer.found_inf = flag
        torch.cuda.synchronize()
        with waits_refused():
            optimizer.step()


@every
def test_lr_may_be_a_tensor(make):
    expected, params = parameters(), parameters()
    train(make(expected, lr=0.25), expected, range(3))
    assert same(values(expected), train(make(params, lr=torch.tensor(0.25)), params, range(3)))


@every
@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_lr_may_be_a_number_of_numpy(make, kind):
    np = pytest.importorskip("numpy")
    expected, params = parameters(), parameters()
    train(make(expected, lr=2.0), expected, range(1))
    assert same(values(expected), train(make(params, lr=getattr(np, kind)(2)), params, range(1)))


# -- torch's GradScaler --------------------------------------------------------------------------


DRIVEN = [
    pytest.param(make, historic, id=f"{name}-{historic}")
    for name, make in {**OLD, **EVERY}.items()
    for historic in ([False] if name in OLD else [False, True])
]


@pytest.mark.parametrize(("make", "historic"), DRIVEN)
def test_torch_grad_scaler_drives_the_step(make, historic):
    expected, params = parameters(), parameters()
    train(make(expected), expected, (0, 2), "reference")
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings(), on("reference"):
        warnings.simplefilter("error")
        for number in range(3):
            give_grads(params, number)
            for param in params:
                param.grad *= scaler.scale(torch.ones(()))
            if number == 1:
                params[2].grad[1] = float("inf")
            if historic:
                optimizer.step(grad_scaler=scaler)
            else:
                scaler.step(optimizer)
            assert number == 1 or params[1].grad.abs() < 10  # unscaled
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    assert same(values(params), values(expected))


@every
def test_torch_grad_scaler_skips_without_calling_step(make):
    """accelerate and others tell by that whether a step was skipped."""
    params, optimizer = started(make, shapes=SMALL)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (True, False):
        scaler.scale(torch.ones(()))
        give_grads(params, 0)
        if bad:
            params[1].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert called == ([] if bad else [True])


STEPS_UNSCALE = pytest.mark.parametrize(
    "make",
    [lambda params: FusedAdam(params, capturable=True), FusedMixedPrecisionLamb],
    ids=["FusedAdam,capturable", "FusedMixedPrecisionLamb"],
)


@STEPS_UNSCALE
def test_torch_grad_scaler_leaves_the_skip_to_these(make):
    """The host does not wait for the flag: a CUDA graph could not."""
    params, optimizer = started(make, shapes=SMALL)
    before = values(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    give_grads(params, 0)
    params[1].grad[0] = float("inf")
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(True))
    scaler.step(optimizer)
    assert called
    assert same(values(params), before)


@STEPS_UNSCALE
def test_an_optimizer_without_gradients_is_passed_over(make):
    """The scaler's flag for it is the integer 0, the sum over no devices."""
    idle, busy = parameters(shapes=SMALL)
    optimizers = [make([idle]), make([busy])]
    before = values([idle, busy])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(busy.square().sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    unchanged = [torch.equal(a, b) for a, b in zip(before, values([idle, busy]), strict=True)]
    assert unchanged == [True, False]


@every
@pytest.mark.parametrize("historic", [False, True])
def test_unscaling_before_the_step(make, historic):
    """To clip, say: the scaler then says that nothing is left to divide by."""
    expected, params = parameters(), parameters()
    train(make(expected), expected, range(1))
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    give_grads(params, 0, scale=1024.0)
    scaler.unscale_(optimizer)
    if historic:
        optimizer.step(grad_scaler=scaler)
    else:
        scaler.step(optimizer)
    assert same(values(params), values(expected))


# -- copies and programs -------------------------------------------------------------------------


@every
@pytest.mark.parametrize("storage", ["plain", "low_bits"])
def test_deepcopy_and_pickle(make, storage):
    """torch's own copies forget what a subclass keeps in attributes; the original's cannot step."""
    params, optimizer = started(make, torch.bfloat16, storage=storage, steps=2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(optimizer, params, range(2, 4))
    for copied in copies:
        later = {"_warned_capturable_if_run_uncaptured", "_written", "_begun", "_apart"}
        assert {*vars(optimizer)} - {*vars(copied)} <= later | {"_shown", "_lost"}
        both = [
            [param for group in one.param_groups for param in group["params"]]
            for one in (optimizer, copied)
        ]
        of = dict(zip(*both, strict=True))
        others = [of[param] for param in params]
        assert same(train(copied, others, range(2, 4)), expected)
        copied.add_param_group({"params": parameters(torch.bfloat16), "lr": 0.1})


@every
def test_a_pickle_grows_as_the_weights_do(make):
    """torch.save writes memory once that tensors share; pickle writes it for each."""
    sizes = []
    for count in (50, 100):
        params, optimizer = started(make, shapes=[(2,)] * count, steps=2)
        optimizer.load_state_dict(optimizer.state_dict())
        sizes.append(len(pickle.dumps(optimizer)))
    assert sizes[1] < 2 * sizes[0]


DUPLICATES = [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]


@every
@pytest.mark.parametrize("duplicate", DUPLICATES, ids=["deepcopy", "pickle"])
def test_copies_have_methods_of_their_own(make, duplicate):
    """What amp and a scheduler have put in their place is bound to the original."""
    model = torch.nn.Linear(3, 2)
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level="O2", verbosity=0)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with amp.scale_loss(model(torch.ones(1, 3)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    copied = duplicate(optimizer)
    theirs = {"step", "zero_grad", "add_param_group", "_amp_stash", "_amp_lazy_init"}
    theirs |= {"_lazy_init_maybe_master_weights", "_scaled_step"}
    assert {"step", "_amp_stash"} <= {*vars(optimizer)}
    assert not theirs & {*vars(copied)}
    others = copied.param_groups[0]["params"]
    before = values(optimizer.param_groups[0]["params"])
    train(copied, others, range(1))
    assert same(before, values(optimizer.param_groups[0]["params"]))
    assert not same(before, values(others))


MIXED_LAMB = functools.partial(
    FusedMixedPrecisionLamb, lr=0.02, reduced_precision_dtype=torch.bfloat16
)
AND_MIXED_LAMB = {**EVERY, "FusedMixedPrecisionLamb": MIXED_LAMB}
every_and_mixed_lamb = pytest.mark.parametrize("make", AND_MIXED_LAMB.values(), ids=AND_MIXED_LAMB)


@every_and_mixed_lamb
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_resuming_is_bit_exact(make, dtype):
    """Through a file, into parameters that were loaded too; masters and the rate are saved."""
    params, optimizer = started(make, dtype, steps=3)
    saved, kept = common.through_a_file((optimizer.state_dict(), values(params)))
    expected = train(optimizer, params, range(3, 6))
    others = [torch.nn.Parameter(value) for value in kept]
    resumed = make(others, lr=9.0)
    resumed.load_state_dict(saved)
    assert same(train(resumed, others, range(3, 6)), expected)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 9.0


@every
def test_hooks_around_loading(make):
    """A user's hooks see the state on the way in, and what was made of it on the way out."""
    params = parameters(torch.float16, SMALL[1:])
    optimizer, other = make(params), make(params)
    train(optimizer, params, range(1))
    slot = optimizer.slots[0]

    def ones(_, given):
        given = copy.deepcopy(given)
        for state in given["state"].values():
            state[slot].fill_(1)
        return given

    seen = []
    other.register_load_state_dict_pre_hook(ones)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]][slot].dtype))
    other.load_state_dict(optimizer.state_dict())
    assert other.state[params[0]][slot].eq(1).all()
    assert seen == [optimizer.state[params[0]][slot].dtype]


@every_and_mixed_lamb
def test_closures_hooks_and_schedulers(make):
    params, optimizer = started(make, shapes=SMALL)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    lr = float(optimizer.param_groups[0]["lr"])
    check_closure(optimizer, params)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == lr / 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@every
@pytest.mark.slow
def test_a_training_step_that_is_compiled(make):
    """The step itself is a graph break."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = LARC(make(model.parameters()))

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        torch._dynamo.reset()
        run = torch.compile(step, backend="eager") if compiled else step
        losses = [run(torch.full((2, 4), float(number))) for number in range(1, 4)]
        results.append([*losses, *values(model.parameters())])
    assert same(*results)


@every
def test_named_parameters(make):
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = [group["param_names"] for group in optimizer.state_dict()["param_groups"]]
    assert names == ([["weight", "bias"]] if make in UNDIVIDED.values() else [["weight"], ["bias"]])


@every
@pytest.mark.parametrize(
    ("arguments", "left"), [({}, None), ({"set_to_none": True}, None), ({"set_to_none": False}, 0)]
)
@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad(make, arguments, left, set_grad_none):
    """The original takes no argument."""
    params, optimizer = started(make, shapes=((7,),), set_grad_none=set_grad_none)
    give_grads(params, 0)
    optimizer.zero_grad(**arguments)
    grad = params[0].grad
    assert grad is None if left is None else not grad.any()


@pytest.mark.dist
@pytest.mark.usefixtures("group_of_one")
@every
def test_parameters_of_a_mesh(make):
    """Addresses are those of the local parts."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))

    def spread(x):
        return distribute_tensor(x, mesh, [Replicate()])

    expected, plain = parameters(shapes=SMALL), parameters(shapes=SMALL)
    params = [torch.nn.Parameter(spread(param.detach())) for param in plain]
    left, right = make(expected), make(params)
    for number in range(2):
        give_grads(expected, number)
        for param, other in zip(params, expected, strict=True):
            param.grad = spread(other.grad.clone())
        common.take_step("triton", left, right)
    assert all(isinstance(param, DTensor) for param in params)
    assert same(values(expected), [param.detach().to_local() for param in params])
    saved = right.state_dict()
    make(params).load_state_dict(saved)


# -- what is refused -----------------------------------------------------------------------------


@every
def test_sparse_gradients_are_refused_and_nothing_changes(make):
    params, optimizer = started(make, shapes=SMALL)
    give_grads(params, 0)
    params[1].grad = torch.randn(33, 5).to_sparse()
    before = values(params)
    with pytest.raises(RuntimeError, match=r"sparse gradients.*SparseAdam"):
        optimizer.step()
    assert same(before, values(params))
    assert not optimizer.state
    assert "step" not in optimizer.param_groups[0]


@every
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_refused(make, layout):
    """Of strided ones torch would end the process."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    optimizer = make(parameters(shapes=SMALL[:1]))
    with pytest.raises(TypeError, match=r"parameter 1 is a nested tensor.* These can be its parts"):
        optimizer.add_param_group({"params": [*parameters(shapes=SMALL[:1]), nested]})
    assert len(optimizer.param_groups) == 1


@every
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_other_dtypes_are_refused(make, dtype):
    with pytest.raises(RuntimeError, match=rf"only support fp16 and fp32.*{dtype}"):
        make([torch.zeros(3, dtype=dtype)])


@every
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "Invalid learning rate: -0.1"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": "0.1"}, "Invalid learning rate: 0.1"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"lr": torch.ones(2)}, "must have one element"),
        ({"lr": torch.tensor(-1.0)}, "Invalid learning rate: -1.0"),
    ],
)
def test_numbers_out_of_range(make, options, words):
    params = parameters(shapes=SMALL)
    with pytest.raises(ValueError, match=words):
        make(params[:1], **options)
    optimizer = make(params[:1])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


MADE = [optimizer.make for optimizer in OPTIMIZERS if isinstance(optimizer.make, type)]
KINDS = [*dict.fromkeys(MADE), contrib.FusedLAMB]


def having(argument):
    """The optimizers whose constructor has it."""
    kinds = [kind for kind in KINDS if argument in inspect.signature(kind).parameters]
    return pytest.mark.parametrize("kind", kinds)


@having("betas")
@pytest.mark.parametrize(
    ("betas", "words"),
    [
        ((0.9,), r"Invalid betas: \(0.9,\). .* needs two"),
        (0.9, r"Invalid betas: \(0.9,\). .* needs two"),
        ((0.9, 1.0), "Invalid beta parameter at index 1: 1.0"),
        ((-0.1, 0.9), "Invalid beta parameter at index 0: -0.1"),
        (([0.9], 0.99), r"Invalid beta parameter at index 0: \[0.9\]"),
    ],
)
def test_betas(kind, betas, words):
    with pytest.raises(ValueError, match=words):
        kind(parameters(), betas=betas)


@having("eps")
def test_eps(kind):
    with pytest.raises(ValueError, match="Invalid epsilon value: -1e-08"):
        kind(parameters(), eps=-1e-8)


@having("max_grad_norm")
def test_max_grad_norm(kind):
    with pytest.raises(ValueError, match=r"Invalid max_grad_norm value: -1.0"):
        kind(parameters(), max_grad_norm=-1.0)


@having("amsgrad")
def test_amsgrad_is_refused(kind):
    with pytest.raises(RuntimeError, match=f"{kind.__name__} does not support the AMSGrad variant"):
        kind(parameters(), amsgrad=True)


@every
def test_numbers_of_a_loaded_state(make):
    params, optimizer = started(make, shapes=SMALL, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match="Invalid learning rate: -1.0"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] > 0


@every
def test_no_parameters(make):
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])


@every
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("LR", "lr"),
        ("weight_decy", "weight_decay"),
        ("stroage", "storage"),
    ],
)
def test_misspelt_keys_of_a_group(make, key, meant):
    with pytest.raises(ValueError, match=f"unknown key '{key}'. Write '{meant}'"):
        make([{"params": parameters(), key: 0.1}])


@every
def test_keys_of_a_programs_own(make):
    """timm's, Megatron's, flags of scripts, and what torch's schedulers write."""
    keys = {"lr_scale": 0.5, "wd_mult": 1.0, "is_expert_parallel": False, "no_weight_decay": True}
    keys |= {"name": "head", "max_lr": 0.1, "decay": 3, "beta1": None, "amsgrad": False}
    optimizer = make([{"params": parameters(), **keys}])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = make(parameters())
    optimizer.load_state_dict(saved)
    del keys["amsgrad"]
    assert keys.items() <= optimizer.param_groups[0].items()


@every
@pytest.mark.parametrize("key", ["amsgrad", "maximize"])
def test_keys_that_change_the_maths(make, key):
    with pytest.raises(ValueError, match=f"{key}=True, which this optimizer does not support"):
        make([{"params": parameters(), key: True}])
    with pytest.raises(ValueError, match="lr_decay=0.1, which this"):
        EVERY["FusedAdagrad"]([{"params": parameters(), "lr_decay": 0.1}])


def test_no_optimizer_is_left_out():
    kinds = {kind.__name__ for kind in KINDS}
    assert {name for name in optimizers.__all__ if name.startswith("Fused")} <= kinds


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_the_constructor_in_a_group(kind):
    """torch's ZeroRedundancyOptimizer puts them there, which is right if they are the same."""
    defaults = inspect.signature(kind).parameters
    given = {
        name: not known.default if isinstance(known.default, bool) else known.default
        for name, known in defaults.items()
        if name not in ("params", "amsgrad", "capturable", "master_weights", "eps_inside_sqrt")
    }
    given |= {"lr": 0.1, "nesterov": False, "betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.2}
    given |= {"momentum": 0.5, "dampening": 0.25, "max_grad_norm": 2.0, "norm_type": 0}
    given = {name: value for name, value in given.items() if name in defaults}
    optimizer = kind([{"params": parameters(), **given}], **given)
    before = len(optimizer.param_groups)
    for name, value in given.items():
        if name not in ("step", *optimizer.defaults):
            with pytest.raises(ValueError, match=f"a group has {name}=.*applies to all groups"):
                optimizer.add_param_group({"params": [torch.zeros(2)], name: (value,)})
    assert len(optimizer.param_groups) == before
    numbers = kind(parameters(), **given).param_groups[-1]  # Muon's, not its Adam's
    names = numbers.keys() & given.keys() - {"lr", "step"}
    assert {name: numbers[name] for name in names} == {name: given[name] for name in names}


@every
def test_states_that_do_not_fit(make):
    optimizer = make(parameters())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(make(parameters(shapes=SMALL)).state_dict())
    train(optimizer, optimizer.param_groups[0]["params"], range(1))


@every
def test_a_group_made_like_a_scheduled_one(make):
    params = parameters(shapes=SMALL)
    optimizer = make(params[:1])
    torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=9, cycle_momentum=optimizer.defaults.get("momentum", 0)
    )
    like = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "exp_avg_sq")}
    optimizer.add_param_group({**like, "params": params[1:]})
    train(optimizer, params, range(1))


@undivided
@pytest.mark.parametrize("groups", [1, 2])
def test_a_number_deleted_from_a_group_is_named(make, groups):
    params = parameters()
    optimizer = make([{"params": params[n::groups]} for n in range(groups)])
    train(optimizer, params, range(2))
    give_grads(params, 0)
    group = optimizer.param_groups[-1]
    before, counts = values(params), [one.get("step") for one in optimizer.param_groups]
    for key in optimizer.defaults:
        number = group.pop(key)
        with pytest.raises(KeyError, match=f"group {groups - 1} has no '{key}' any more"):
            optimizer.step()
        group[key] = number
    assert same(before, values(params))
    assert [one.get("step") for one in optimizer.param_groups] == counts


@pytest.mark.parametrize(
    ("ours", "torchs", "apart"),
    [
        (optimizers.FusedAdam, torch.optim.Adam, {}),
        (optimizers.FusedAdam, torch.optim.AdamW, {"weight_decay": (0, 0.01)}),
        (optimizers.FusedSGD, torch.optim.SGD, {"lr": (required, 0.001)}),
        (optimizers.FusedAdagrad, torch.optim.Adagrad, {}),
        (optimizers.FusedMuon, torch.optim.Muon, {}),
    ],
)
def test_where_defaults_are_not_torchs(ours, torchs, apart):
    """docs/optimizers.md names these."""
    own, theirs = (inspect.signature(one).parameters for one in (ours, torchs))
    pairs = {name: (own[name].default, theirs[name].default) for name in own if name in theirs}
    assert {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} == apart
