"""Scaling, clipping and stepping together: the same numbers, fewer passes, nobody waits."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.gradients import overflow
from apex.amp.gradients.ledger import State
from apex.catalogue.optimizers import BY_NAME, makers
from apex.ops import _runtime
from apex.ops.lists.unscale import takes
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import LARC
from tests.amp.training import (
    Delayed,
    backward,
    batches,
    block,
    copies,
    grads_of,
    no_waits,
    row,
    same,
    scaled_backward,
    spoil,
    started,
    step,
    value,
)
from tests.tolerance import CLIPPED, assert_close_to_largest

MAKERS = makers(lr=1e-2, eps=1e-2)


def on(path):
    return _runtime.use(path) if path else contextlib.nullcontext()


def start(level, make=MAKERS["FusedAdam"], **options):
    return started(level, optimizer=make, **options)


def one(level, **options):
    """One row of weights, stepped by FusedSGD with a rate of 1."""
    return row(level, FusedSGD, loss_scale="dynamic", init_scale=8.0, **options)


def stays_scaled(optimizer):
    return optimizer._amp_stash.ledger.state is State.FOR_STEP


def clip(optimizer, how):
    if how == "torch":
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    elif how != "none":
        amp.clip_grad_norm_(optimizer, 0.1)
    if how == "value":
        amp.clip_grad_value_(optimizer, 0.01)
    if how == "read":
        norm = torch.stack([grad.float().norm() for grad in grads_of(optimizer)]).norm()
        assert not norm.isfinite() or norm < 0.101


def train(level, how, path, fused, each=1, bad=None, make=MAKERS["FusedAdam"]):
    """Weights, moments and scales after six passes, and how many passes were kept scaled."""
    amp.reset()
    model, optimizer = start(level, make, fused_step=fused)
    kept = 0
    with on(path):
        for number, batch in enumerate(batches(6)):
            if number % each == 0:
                optimizer.zero_grad()
            backward(model, optimizer, batch, spoil if number == bad else None)
            if number % each == each - 1:
                clip(optimizer, how)
                kept += stays_scaled(optimizer)
                optimizer.step()
    state = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    weights, halves = copies(amp.master_params(optimizer)), copies(model.parameters())
    # what amp.clip_grad_norm_ changes by an ulp may flip the last bit of a 16-bit weight
    halves = halves if how in ("none", "torch") else []
    return [*weights, *halves, *state], amp.state_dict(), kept


RUNS = [  # level, clipping, passes in a step, the pass that overflows, optimizer, kernels
    *((level, "none", 1, None, "FusedAdam", "reference") for level in ("O0", "O3", "O5")),
    *(("O1", how, 1, 2, "FusedAdam", "reference") for how in ("none", "value")),
    *(("O1", how, 2, bad, "FusedAdam", "reference") for how, bad in (("amp", 2), ("read", None))),
    ("O1", "torch", 1, None, "FusedAdam", "reference"),
    *(("O2", how, 2, bad, "FusedAdam", "reference") for how, bad in (("none", 2), ("torch", None))),
    *(("O2", how, 1, bad, "FusedAdam", "reference") for how, bad in (("amp", 2), ("value", None))),
    ("O5", "amp", 2, None, "FusedAdam", "reference"),
    *((level, "none", 1, 2, name, "reference") for level in ("O1", "O2") for name in [*MAKERS][1:]),
    ("O1", "amp", 1, 2, "FusedAdam", "triton"),
    ("O2", "none", 1, 2, "FusedAdam", "triton"),
    ("O1", "read", 1, None, "FusedAdam", None),  # where no kernel runs
    ("O2", "amp", 1, None, "FusedAdam", None),
    ("O5", "none", 1, None, "FusedAdam", None),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy of Triton's interpreter, about inf
@pytest.mark.parametrize(("level", "how", "each", "bad", "name", "path"), RUNS)
def test_fused_step_gives_the_same_run(level, how, each, bad, name, path):
    plain = train(level, how, path, False, each, bad, MAKERS[name])
    fused = train(level, how, path, True, each, bad, MAKERS[name])
    # Two passes of different sizes at O2 add up in float32 either way: nothing is kept then.
    expected = 6 // each if how in ("none", "amp") and level in ("O1", "O2", "O5") else 0
    assert fused[2] == (expected if each == 1 or level == "O1" else 0)
    assert plain[1] == fused[1]
    if how in ("none", "torch"):
        assert same(plain[0], fused[0])
        return
    for left, right in zip(plain[0], fused[0], strict=True):
        assert_close_to_largest(left, right, CLIPPED)  # squares of norms added in another order


def sgd(params):
    return FusedSGD(params, lr=1e-2, momentum=0.9)


def sgd_on_scaled(params):
    return FusedSGD(params, lr=1e-2, momentum=0.9, materialize_master_grads=False)


@pytest.mark.parametrize("bad", [None, 1])
def test_sgd_asks_for_scaled_gradients_by_its_own_argument(bad):
    """Two losses whose scales come to differ: each gradient is divided by the scale it had."""
    results = []
    for make in (sgd, sgd_on_scaled):
        amp.reset()
        model, optimizer = start("O2", make, num_losses=2)
        kept = 0
        with on("reference"):
            for number, batch in enumerate(batches(6)):
                optimizer.zero_grad()
                spoiled = spoil if number == bad else None
                backward(model, optimizer, batch, spoiled, loss_id=number % 2)
                kept += stays_scaled(optimizer)
                if number == 4:  # a second loss on top, with the other scale
                    backward(model, optimizer, batch, loss_id=1)
                optimizer.step()
        assert kept == (6 if make is sgd_on_scaled else 0)
        weights = copies(optimizer._amp_stash.ledger.params.stepped)
        results.append((weights, amp.state_dict()))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_fused_step_measures_once_and_multiplies_nothing_in_memory(level):
    model, optimizer = start(level, fused_step=True)
    backward(model, optimizer, *batches(1))
    grads = [p.grad for p in optimizer._amp_stash.ledger.params.targets]
    before = [(g, g._version, g.clone()) for g in grads if g is not None]
    with mock.patch("torch.nn.utils.clip_grad_norm_", side_effect=AssertionError):
        amp.clip_grad_norm_(optimizer, 0.1)
    optimizer.step()
    assert all(g._version == version and torch.equal(g, copy) for g, version, copy in before)


def square_sum(optimizer):
    return sum(p.grad.double().square().sum() for p in amp.master_params(optimizer))


@pytest.mark.parametrize(
    ("level", "path"), [("O1", None), ("O2", "reference"), ("O1", "triton"), ("O5", "reference")]
)
def test_by_default_gradients_are_unscaled_and_clipped_in_memory(level, path):
    """Whatever has written them since the block, in ways that leave no trace too."""
    model, optimizer = start(level)
    with on(path):
        backward(model, optimizer, *batches(1))
        for p in amp.master_params(optimizer):
            p.grad.data.mul_(2.0)
        norm = square_sum(optimizer).sqrt()
        assert_close_to_largest(amp.clip_grad_norm_(optimizer, 0.01), norm, CLIPPED)
        assert_close_to_largest(square_sum(optimizer).sqrt(), torch.tensor(0.01), CLIPPED)
        grads = grads_of(optimizer)
        before = copies(grads)
        optimizer.step()
        assert same(grads, before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_pass_finds_the_first_one_clipped(fused):
    model, optimizer = one("O1", fused_step=fused)
    with on("reference"):
        block(model, optimizer, 3.0)
        amp.clip_grad_norm_(optimizer, 1.0)
        step(model, optimizer)
    expected = torch.full((1, 2), -(0.5**0.5) - 1.0)
    assert_close_to_largest(model.weight.detach(), expected, CLIPPED)


def test_clipping_can_insist_on_a_finite_norm():
    model, optimizer = one("O1", fused_step=True)
    with on("reference"):
        block(model, optimizer, torch.inf)
        with pytest.raises(RuntimeError, match="total norm of the gradients is inf"):
            amp.clip_grad_norm_(optimizer, 0.1, error_if_nonfinite=True)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_step_pre_hooks_see_unscaled_gradients(level):
    def clamp(optimizer, args, kwargs):
        for param in optimizer.param_groups[0]["params"]:
            param.grad.clamp_(-0.25, 0.25)

    model, optimizer = one(level, fused_step=True)
    optimizer.register_step_pre_hook(clamp)
    step(model, optimizer)
    assert value(model) == [-0.25, -0.25]


def test_clipping_by_the_largest_element():
    model, optimizer = one("O1", fused_step=True)
    with on("reference"):
        block(model, optimizer, 3.0)
        assert amp.clip_grad_norm_(optimizer, 1.5, torch.inf) == 3.0
        optimizer.step()
        expected = torch.full((1, 2), -1.5)
        assert_close_to_largest(model.weight.detach(), expected, CLIPPED)


# -- a device that the host does not wait for ------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "fused", "path"), [("O1", False, "reference"), ("O2", True, None), ("O5", True, None)]
)
@pytest.mark.parametrize("name", MAKERS)
def test_a_whole_step_never_waits(name, level, fused, path):
    options = {"loss_scale": "dynamic", "num_losses": 2, "fused_step": fused}
    with torch.device("meta"):
        model, optimizer = start(level, MAKERS[name], **options)
    with on(path), no_waits():
        for _ in range(3):
            optimizer.zero_grad()
            for loss_id in range(2):
                loss = model(torch.empty(8, 1, 6, 6, device="meta")).float().sum()
                scaled_backward(loss, optimizer, loss_id=loss_id)
            amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
    if BY_NAME[name].make._counts_steps:
        assert optimizer.param_groups[0]["step"].is_meta  # it advances where the flags are


@pytest.fixture
def lagging(runs_behind, monkeypatch):
    monkeypatch.setattr(Delayed, "arrived", False)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2, weight_decay=0.0, fused=True)


@pytest.mark.parametrize("make", [MAKERS["FusedAdam"], fused_adamw], ids=["ours", "torch's"])
@pytest.mark.parametrize(("level", "each"), [("O1", 2), ("O2", 1)])
def test_a_device_that_decides_gives_the_same_run(level, each, make, lagging, monkeypatch):
    with mock.patch.object(overflow.Overflow, "read", side_effect=AssertionError("it waited")):
        late = train(level, "none", None, False, each, bad=2, make=make)
    monkeypatch.undo()
    read = train(level, "none", None, False, each, bad=2, make=make)
    assert same(late[0], read[0])
    assert late[1] == read[1]


def test_what_the_device_skipped_is_said_when_it_is_known(lagging, caplog):
    amp.reset()
    model, optimizer = start("O1", max_skipped_steps=2)
    optimizer._amp_stash.overflow.verbosity = 1

    def step(bad):
        optimizer.zero_grad()
        backward(model, optimizer, *batches(1), spoil if bad else None)
        optimizer.step()

    step(bad=True)
    assert not amp.stepped(optimizer)
    step(bad=False)
    assert amp.stepped(optimizer)
    assert caplog.messages == []
    Delayed.arrived = True
    step(bad=False)
    assert caplog.messages == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    ]
    step(bad=True)
    step(bad=True)
    weights = copies(model.parameters())
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        step(bad=False)
    assert same(weights, model.parameters())


# -- what others do between a block and a step -------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_around_an_initialised_optimizer_sees_the_gradients(level):
    results = []
    for fused in (False, True):
        for path in (None, "reference"):
            model, optimizer = one(level, fused_step=fused)
            with torch.no_grad():
                model.weight.fill_(1.0)
            larc = LARC(optimizer)
            with on(path):
                block(model, optimizer, 3.0)
                amp.clip_grad_norm_(larc.optim, 0.1)
                larc.step()
            results.append(model.state_dict()["weight"].clone())
    assert not torch.equal(results[0], torch.ones(1, 2))
    for other in results[1:]:
        assert_close_to_largest(other, results[0], CLIPPED)


@pytest.mark.parametrize("limit", [torch.inf, 2.0**-4])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_a_fused_step_passes_find_no_old_gradients(level, limit):
    model, optimizer = one(level, fused_step=True)
    with on("reference"):
        block(model, optimizer)
        amp.clip_grad_norm_(optimizer, limit)
        optimizer.step()
        block(model, optimizer)  # without zero_grad
        optimizer.step()
    first = min(1.0, limit / 2.0**0.5)
    expected = torch.full((1, 2), -first - 1.0)
    assert_close_to_largest(model.state_dict()["weight"], expected, CLIPPED)


def bare(model):
    model(torch.ones(1, 2)).sum().backward()


def edit(model):
    model.weight.grad.add_(1.0)


@pytest.mark.parametrize(
    ("level", "clipped", "change", "then"),
    [
        ("O1", False, bare, "step"),
        ("O2", False, bare, "step"),
        ("O1", True, edit, "step"),
        ("O2", True, edit, "step"),
        ("O1", False, edit, "clip"),
        ("O1", False, edit, "read"),
        ("O1", False, edit, "another pass"),
    ],
)
def test_gradients_changed_while_scaled_are_noticed(level, clipped, change, then):
    model, optimizer = one(level, fused_step=True)
    block(model, optimizer)
    if clipped:
        amp.clip_grad_norm_(optimizer, 0.1)
    change(model)
    following = {
        "step": optimizer.step,
        "clip": lambda: amp.clip_grad_norm_(optimizer, 0.1),
        "read": lambda: list(amp.master_params(optimizer)),
        "another pass": lambda: block(model, optimizer),
    }
    with pytest.raises(RuntimeError, match="changed while they were scaled"):
        following[then]()


def test_gradients_cleared_by_the_model_leave_nothing_to_step():
    model, optimizer = one("O1", fused_step=True)
    with on("reference"):
        block(model, optimizer)
        model.zero_grad()
        optimizer.step()
    assert value(model) == [0.0, 0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_masters_of_the_optimizers_own_give_way(fused):
    model = nn.Linear(2, 1).half()
    optimizer = FusedAdam(model.parameters(), lr=0.1, capturable=True, master_weights=True)
    with pytest.warns(UserWarning, match="half"):
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", init_scale=8.0, verbosity=0, fused_step=fused
        )
    before = model.weight.detach().clone()
    with on("reference"):
        step(model, optimizer)
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, next(iter(amp.master_params(optimizer))).half())


def test_a_wrapper_of_gradients_is_left_to_torch():
    class Wrapper(torch.Tensor):
        pass

    with on("reference"):
        assert takes([torch.ones(2)])
        assert not takes([torch.ones(2).as_subclass(Wrapper)])


@pytest.mark.parametrize("passes", [2, 3])
def test_passes_before_a_fused_step_add_up(passes):
    """No batchnorm: there are no gradients beside those of masters."""
    model, optimizer = row("O2", FusedSGD, fused_step=True)
    for number in range(passes):
        block(model, optimizer, number + 1.0)
    optimizer.step()
    assert value(model) == [-sum(range(passes + 1))] * 2
