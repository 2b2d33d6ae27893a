"""Scaling, clipping and stepping together: the same numbers, fewer passes, nobody waits."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.gradients import overflow
from apex.amp.gradients.ledger import State
from apex.ops import _runtime
from apex.ops.unscale import takes
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex.parallel import LARC
from tests.amp.training import Delayed, backward, batches, copies, net, no_waits, same
from tests.tolerance import CLIPPED, assert_close_to_largest

MAKERS = {
    "adam": FusedAdam,
    "sgd": lambda params, lr, eps: FusedSGD(params, lr=lr, momentum=0.9),
    "lamb": FusedLAMB,
    "novograd": FusedNovoGrad,
    "adagrad": FusedAdagrad,
}


def spoil(model):
    model[4].weight.grad.view(-1)[5] = float("inf")


def on(path):
    return _runtime.use(path) if path else contextlib.nullcontext()


def start(level, make=FusedAdam, **options):
    model = net()
    optimizer = make(model.parameters(), lr=1e-2, eps=1e-2)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def stays_scaled(optimizer):
    return optimizer._amp_stash.ledger.state is State.FOR_STEP


def clip(optimizer, how):
    if how == "amp":
        return amp.clip_grad_norm_(optimizer, 0.1)
    if how == "torch":
        params = list(amp.master_params(optimizer))
        return torch.nn.utils.clip_grad_norm_(params, 0.1)
    if how == "read":
        total = amp.clip_grad_norm_(optimizer, 0.1)
        grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        norm = torch.stack([g.float().norm() for g in grads]).norm()
        assert not norm.isfinite() or norm < 0.101
        return total
    if how == "value":
        amp.clip_grad_norm_(optimizer, 0.1)
        amp.clip_grad_value_(optimizer, 0.01)
    return torch.zeros(())


def train(level, how, path, fused, each=1, bad=None, make=FusedAdam):
    """Weights, scales, moments and norms after six passes, and how many were kept scaled."""
    amp.reset()
    model, optimizer = start(level, make, fused_step=fused)
    norms, kept = [], 0
    with on(path):
        for number, batch in enumerate(batches(6)):
            if number % each == 0:
                optimizer.zero_grad()
            backward(model, optimizer, batch, spoil if number == bad else None)
            if number % each == each - 1:
                norms.append(clip(optimizer, how))
                kept += stays_scaled(optimizer)
                optimizer.step()
    state = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    weights, halves = copies(amp.master_params(optimizer)), copies(model.parameters())
    # what amp.clip_grad_norm_ changes by an ulp may flip the last bit of a 16-bit weight
    halves = halves if how in ("none", "torch") else []
    return [*weights, *halves, *state], amp.state_dict(), norms, kept


@pytest.mark.parametrize(
    ("level", "how", "each", "bad"),
    [
        ("O0", "none", 1, None),
        ("O1", "none", 1, 2),
        ("O1", "amp", 2, 2),
        ("O1", "torch", 1, None),
        ("O1", "read", 2, None),
        ("O1", "value", 1, 2),
        ("O2", "none", 2, 2),
        ("O2", "amp", 1, 2),
        ("O2", "torch", 2, None),
        ("O2", "read", 1, 2),
        ("O2", "value", 1, None),
        ("O3", "none", 1, None),
        ("O4", "amp", 1, None),
        ("O5", "none", 1, None),
        ("O5", "amp", 2, None),
    ],
)
def test_fused_step_gives_the_same_run(level, how, each, bad):
    plain = train(level, how, "reference", False, each, bad)
    fused = train(level, how, "reference", True, each, bad)
    # Two passes of different sizes at O2 add up in float32 either way: nothing is kept then.
    expected = 6 // each if how in ("none", "amp") and level in ("O1", "O2", "O5") else 0
    assert fused[3] == (expected if each == 1 or level == "O1" else 0)
    assert plain[1] == fused[1]
    assert_same_run(how, plain[0], fused[0])


def assert_same_run(how, plain, fused):
    """Bit for bit, but for norms whose squares were added up in another order."""
    if how in ("none", "torch"):
        assert same(plain, fused)
        return
    for left, right in zip(plain, fused, strict=True):
        assert_close_to_largest(left, right, CLIPPED)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "adam"])
def test_every_optimizer_takes_scaled_gradients(name, level):
    plain = train(level, "none", "reference", False, bad=2, make=MAKERS[name])
    fused = train(level, "none", "reference", True, bad=2, make=MAKERS[name])
    assert fused[3] == 6
    assert same(plain[0], fused[0])
    assert plain[1] == fused[1]


def sgd_on_scaled(params, lr, eps):
    return FusedSGD(params, lr=lr, momentum=0.9, materialize_master_grads=False)


@pytest.mark.parametrize("bad", [None, 1])
def test_sgd_asks_for_scaled_gradients_by_its_own_argument(bad):
    """Two losses whose scales come to differ: each gradient is divided by the scale it had."""
    results = []
    for make in (MAKERS["sgd"], sgd_on_scaled):
        amp.reset()
        model, optimizer = start("O2", make, num_losses=2)
        kept = 0
        with on("reference"):
            for number, batch in enumerate(batches(6)):
                optimizer.zero_grad()
                backward(
                    model, optimizer, batch, spoil if number == bad else None, loss_id=number % 2
                )
                kept += stays_scaled(optimizer)
                if number == 4:  # a second loss on top, with the other scale
                    backward(model, optimizer, batch, loss_id=1)
                optimizer.step()
        assert kept == (6 if make is sgd_on_scaled else 0)
        weights = copies(optimizer._amp_stash.ledger.params.stepped)
        results.append((weights, amp.state_dict()))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(("level", "how"), [("O1", "amp"), ("O2", "none")])
def test_the_kernels_do_the_same(level, how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interpreter's numpy speaks of inf
        plain = train(level, how, "triton", False, bad=2)
        fused = train(level, how, "triton", True, bad=2)
    assert fused[3] == 6
    assert_same_run(how, plain[0], fused[0])
    assert plain[1] == fused[1]


@pytest.mark.parametrize(("level", "how"), [("O1", "read"), ("O2", "amp"), ("O5", "none")])
def test_a_fused_step_is_the_same_where_no_kernel_runs(level, how):
    usual, fused = train(level, how, None, False), train(level, how, None, True)
    assert fused[3] == (0 if how == "read" else 6)
    assert_same_run(how, usual[0], fused[0])


def test_fused_step_is_refused_with_an_optimizer_that_cannot():
    model = net()
    pair = [FusedSGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[4].parameters(), lr=0.1)]
    with pytest.raises(RuntimeError, match="fused_step=True was given with SGD"):
        amp.initialize(model, pair, verbosity=0, fused_step=True)
    assert not hasattr(pair[0], "_amp_stash")


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
        before = [p.grad.clone() for p in amp.master_params(optimizer)]
        grads = [p.grad for p in amp.master_params(optimizer)]
        optimizer.step()
        assert same(grads, before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_pass_finds_the_first_one_clipped(fused):
    passes = list(batches(2))
    results = []
    for how in ("amp", "torch"):
        amp.reset()
        model, optimizer = start("O1", fused_step=fused)
        with on("reference"):
            for batch in passes:
                backward(model, optimizer, batch)
                clip(optimizer, how)
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for left, right in zip(*results, strict=True):
        assert_close_to_largest(left, right, CLIPPED)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_step_pre_hooks_and_closures_see_unscaled_gradients(level):
    weights = []
    for fused in (False, True):
        amp.reset()
        model, optimizer = start(level, FusedAdam, fused_step=fused)

        def clamp(optimizer, args, kwargs):
            for param in optimizer.param_groups[0]["params"]:
                param.grad.clamp_(-1e-3, 1e-3)

        optimizer.register_step_pre_hook(clamp)
        for batch in batches(2):
            optimizer.zero_grad()
            backward(model, optimizer, batch)
            optimizer.step()
        weights.append([p.detach() for p in amp.master_params(optimizer)])
    assert same(*weights)


def test_clipping_can_insist_on_a_finite_norm():
    model, optimizer = start("O1", fused_step=True)
    with on("reference"):
        backward(model, optimizer, *batches(1), spoil)
        with pytest.raises(RuntimeError, match="total norm of the gradients is inf"):
            amp.clip_grad_norm_(optimizer, 0.1, error_if_nonfinite=True)


# -- a device that the host does not wait for ------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "fused", "path"), [("O1", False, "reference"), ("O2", True, None), ("O5", True, None)]
)
@pytest.mark.parametrize("name", MAKERS)
def test_a_whole_step_never_waits(name, level, fused, path):
    with torch.device("meta"):
        model = net()
    optimizer = MAKERS[name](model.parameters(), lr=1e-2, eps=1e-2)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale="dynamic",
        num_losses=2,
        verbosity=0,
        fused_step=fused,
    )
    with on(path), no_waits():
        for _ in range(3):
            optimizer.zero_grad()
            for loss_id in range(2):
                loss = model(torch.empty(8, 1, 6, 6, device="meta")).float().sum()
                with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
    if name not in ("sgd", "adagrad"):
        assert optimizer.param_groups[0]["step"].is_meta  # it advances where the flags are


@pytest.fixture
def lagging(monkeypatch):
    """Treat the CPU as a device that runs behind the host."""
    monkeypatch.setattr(overflow, "runs_behind", lambda device: True)
    monkeypatch.setattr(overflow, "AsyncCopy", Delayed)
    monkeypatch.setattr(Delayed, "arrived", False)


def fused_adamw(params, lr, eps):
    return torch.optim.AdamW(params, lr, eps=eps, weight_decay=0.0, fused=True)


@pytest.mark.parametrize("make", [FusedAdam, fused_adamw], ids=["ours", "torch's"])
@pytest.mark.parametrize(("level", "each"), [("O1", 2), ("O2", 1)])
def test_a_device_that_decides_gives_the_same_run(level, each, make, lagging, monkeypatch):
    with mock.patch.object(
        overflow.Overflow, "read", side_effect=AssertionError("the host waited")
    ):
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


def small(level, make=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    make = make or (lambda params: FusedSGD(params, lr=0.1))
    return amp.initialize(
        model,
        make(model.parameters()),
        opt_level=level,
        loss_scale="dynamic",
        verbosity=0,
        **options,
    )


X = torch.linspace(-1, 1, 128).reshape(16, 8)


def block(model, optimizer, factor=1.0):
    loss = factor * model(X).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def weights_after(level, body, path, **options):
    """The float32 weights after ``body``, which has changed them."""
    amp.reset()
    model, optimizer = small(level, **options)
    before = copies(amp.master_params(optimizer))
    with on(path):
        body(model, optimizer)
    after = [p.detach() for p in amp.master_params(optimizer)]
    assert not same(before, after)
    return after


def assert_moves_alike(level, body, **options):
    expected = weights_after(level, body, None, **options)
    actual = weights_after(level, body, "reference", **options)
    for left, right in zip(actual, expected, strict=True):
        assert_close_to_largest(left, right, CLIPPED)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_around_an_initialised_optimizer_sees_the_gradients(level, fused):
    def body(model, optimizer):
        larc = LARC(optimizer)
        block(model, optimizer)
        amp.clip_grad_norm_(larc.optim, 0.1)
        larc.step()

    assert_moves_alike(level, body, fused_step=fused)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_a_fused_step_readers_and_passes_find_unscaled_gradients(level, clipped):
    def body(model, optimizer):
        block(model, optimizer)
        if clipped:
            amp.clip_grad_norm_(optimizer, 0.01)
        optimizer.step()
        block(model, optimizer)  # without zero_grad
        optimizer.step()

    assert_moves_alike(level, body, fused_step=True)


def test_a_fused_step_frees_the_gradients_taken_or_skipped():
    model, optimizer = small("O1", fused_step=True)
    for factor in (1.0, float("inf")):
        block(model, optimizer, factor)
        optimizer.step()
        assert amp.stepped(optimizer) == (factor == 1.0)
        assert all(p.grad is None for p in amp.master_params(optimizer))
        assert model.weight.grad is None


def bare(model):
    model(X.to(model.weight.dtype)).float().mean().backward()


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
    model, optimizer = small(level, fused_step=True)
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
    amp.reset()
    model, optimizer = small("O1", fused_step=True)
    before = model.weight.detach().clone()
    with on("reference"):
        block(model, optimizer)
        model.zero_grad()
        optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("fused", [False, True])
def test_masters_of_the_optimizers_own_give_way(fused):
    def make(params):
        return FusedAdam(params, lr=0.1, capturable=True, master_weights=True)

    amp.reset()
    torch.manual_seed(0)
    model = nn.Linear(8, 4).half()
    optimizer = make(model.parameters())
    with pytest.warns(UserWarning, match="half"):
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", verbosity=0, fused_step=fused
        )
    before = model.weight.detach().clone()
    with on("reference"):
        block(model, optimizer)
        optimizer.step()
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, next(iter(amp.master_params(optimizer))).half())


def test_a_wrapper_of_gradients_is_left_to_torch():
    class Wrapper(torch.Tensor):
        pass

    with on("reference"):
        assert takes([torch.ones(2)])
        assert not takes([torch.ones(2).as_subclass(Wrapper)])
