"""The 2018 handles: ``handle.scale_loss``, ``handle.wrap_optimizer``, beside plain torch loops."""

import contextlib
import copy
import functools
import math
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.handle import NoOpHandle
from apex.amp.opt import OptimWrapper
from apex.optimizers import FusedAdam
from apex.parallel import LARC
from tests.amp.levels import poison
from tests.amp.training import batches, net, same


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return FusedAdam(params, lr=0.01)


def larc(params):
    return LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1))


class Plain:
    """A plain torch loop: torch.autocast, a scale for each loss, and steps that are skipped."""

    def __init__(self, model, make, losses=1):
        self.model, self.optimizer = model, make(model.parameters())
        self.scales, self.bad = [2.0**16] * losses, False

    def backward(self, x, y, number=0, bad=False):
        with torch.autocast("cpu", torch.float16):
            out = self.model(x)
        loss, params = F.cross_entropy(out.float(), y) * (number + 1), list(self.model.parameters())
        grads = torch.autograd.grad(loss * self.scales[number], params)
        if bad:
            grads[0].view(-1)[0] = math.inf
        for param, grad in zip(params, grads, strict=True):
            grad = grad / self.scales[number]
            param.grad = grad if param.grad is None else param.grad + grad
        if not all(bool(grad.isfinite().all()) for grad in grads):
            self.scales[number] /= 2
            self.bad = True

    def step(self):
        skipped, self.bad = self.bad, False
        if not skipped:
            self.optimizer.step()
        return skipped

    def zero_grad(self, set_to_none=True):
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param)
        self.bad = False


def scales(optimizer):
    return [entry["loss_scale"] for entry in amp.state_dict(optimizers=optimizer).values()]


def small(lr=1.0):
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=lr), torch.ones(2, 3)


def backward(block, model, bad=False):
    """One pass in a block of either kind."""
    with block as scaled_loss:
        scaled_loss.backward()
        if bad:
            poison(model)


def block(wrapped, model, x, bad=False):
    """One pass of a wrapped optimizer."""
    backward(wrapped.scale_loss(model(x).float().mean()), model, bad)


# -- one loss: handle.scale_loss ------------------------------------------------------------------


def test_one_loss_for_several_optimizers():
    """A loss for both, and one for each: the first one steps."""
    pairs = [small(), small()]
    handle = amp.init()
    optimizers = [optimizer for _, optimizer, _ in pairs]
    model, _, x = pairs[0]
    backward(handle.scale_loss(model(x).float().mean(), optimizers), model)
    assert torch.equal(model.bias.grad, torch.full((2,), 0.5))
    for model, optimizer, x in pairs:
        loss = model(x).float().mean()
        backward(handle.scale_loss(loss, optimizer), model, bad=model is pairs[1][0])
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.stepped(optimizer) for optimizer in optimizers] == [True, False]


def test_a_half_loss_is_scaled_in_float32():
    """In 2018 in its own type: 2.0 * 65536 is inf in float16."""
    model, optimizer, x = small()
    handle = amp.init()
    loss = model(x)[0, 0] * 0 + 2
    assert loss.dtype == torch.float16
    wrapped = amp.init(loss_scale=65536.0).wrap_optimizer(small()[1])
    for scaling in (handle.scale_loss(loss, optimizer), wrapped.scale_loss(loss)):
        with scaling as scaled_loss:
            assert (scaled_loss.dtype, scaled_loss.item()) == (torch.float32, 2 * 65536.0)


# -- several losses: handle.wrap_optimizer --------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adam, larc])
def test_random_programs_of_two_wrapped_optimizers(make):
    """Two losses for the first model, one for the second; blocks, overflows, steps, clearing."""
    chance = random.Random(0)
    handle = amp.init()
    models = [net(0), net(1)]
    plain = [Plain(net(number), make, 2 - number) for number in range(2)]
    made = [make(model.parameters()) for model in models]
    optimizers = [handle.wrap_optimizer(made[0], 2), handle.wrap_optimizer(made[1])]
    skipped = 0
    data = batches(60)
    for _ in range(20):
        for model, optimizer, exact in zip(models, optimizers, plain, strict=True):
            for index in range(len(exact.scales)):
                x, y = next(data)
                bad = chance.random() < 0.15
                exact.backward(x, y, index, bad)
                loss = F.cross_entropy(model(x), y) * (index + 1)
                backward(optimizer.scale_loss(loss), model, bad)
                if chance.random() < 0.1:  # drops what this loss gave
                    to_none = chance.random() < 0.5
                    optimizer.zero_grad(set_to_none=to_none)
                    exact.zero_grad(to_none)
            optimizer.step()
            skipped += exact.step()
            optimizer.zero_grad()
            exact.zero_grad()
            assert same(model.parameters(), exact.model.parameters())
            assert scales(optimizer) == plain[0].scales + plain[1].scales
    assert 3 < skipped < 20


def test_a_block_too_many():
    model, optimizer, x = small()
    optimizer = amp.init().wrap_optimizer(optimizer, num_loss=2)
    for _ in range(2):
        for _ in range(2):
            block(optimizer, model, x)
        with pytest.raises(AssertionError, match=r"3 times .*num_loss=2\. Call step\(\), or pass"):
            block(optimizer, model, x)
        optimizer.step()


def test_an_exception_in_a_block_changes_nothing():
    model, optimizer, x = small()
    optimizer = amp.init().wrap_optimizer(optimizer, num_loss=2)
    block(optimizer, model, x)
    before = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        with (
            contextlib.suppress(KeyError),
            optimizer.scale_loss(model(x).float().mean()) as scaled_loss,
        ):
            scaled_loss.backward()
            raise KeyError
    assert same(before, [p.grad for p in model.parameters()])
    block(optimizer, model, x, bad=True)  # still the second loss
    assert scales(optimizer) == [2.0**16, 2.0**15]
    assert model(x).dtype == torch.float16


@pytest.mark.parametrize("scale", [128.0, "128"])
def test_a_static_scale_is_that_of_every_scaler(scale):
    model, optimizer, x = small()
    handle = amp.init(loss_scale=scale)
    loss = model(x).float().mean()
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == 128.0 * loss.item()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), num_loss=2)
    for _ in range(2):
        loss = model(x).float().mean()
        with optimizer.scale_loss(loss) as scaled_loss:
            assert scaled_loss.item() == 128.0 * loss.item()
            scaled_loss.backward()
    assert torch.equal(model.bias.grad, torch.ones(2))
    optimizer.step()


# -- handles that do nothing, or no longer --------------------------------------------------------


def test_an_inactive_handle_passes_the_loss_through():
    model, optimizer, x = small()
    handle = amp.init()
    wrapped = handle.wrap_optimizer(small()[1])
    for inactive in (handle._disable_casts, handle._deactivate):
        with inactive() or contextlib.nullcontext():
            assert not handle.is_active()
            loss = model(x).mean()
            assert loss.dtype == torch.float32
            for block in (wrapped.scale_loss(loss), handle.scale_loss(loss, optimizer)):
                with block as same_loss:
                    assert same_loss is loss
        if inactive == handle._disable_casts:
            assert handle.is_active()
            assert model(x).dtype == torch.float16
    loss.backward()
    before = model.bias.clone()
    optimizer.step()
    assert torch.equal(model.bias, before - model.bias.grad)


@pytest.mark.parametrize("way", ["_deactivate", "_disable_casts", "amp.init(False)"])
def test_a_closure_while_the_handle_is_inactive(way):
    """The optimizer steps as if amp had never been; an active handle takes it again."""
    model, optimizer, x = small()
    handle = amp.init()
    wrapped = handle.wrap_optimizer(optimizer)
    if way == "_deactivate":
        handle._deactivate()
    if way == "amp.init(False)":
        wrapped = amp.init(False).wrap_optimizer(optimizer)

    def closure():
        wrapped.zero_grad()
        loss = model(x).mean()
        loss.backward()
        return loss

    before = model.bias.clone()
    with handle._disable_casts():
        assert wrapped.step(closure).dtype == torch.float32
    assert torch.equal(model.bias, before - 0.5)
    if way == "_disable_casts":
        block(wrapped, model, x, bad=True)
        wrapped.step()
        assert not amp.stepped(wrapped)
        assert scales(wrapped) == [2.0**15]


def test_disabled_handle_passes_everything_through():
    model, optimizer, x = small()
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)
    loss = F.mse_loss(model(x), torch.zeros(2, 2))
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    wrapped = handle.wrap_optimizer(optimizer, num_loss=1)
    assert isinstance(wrapped, OptimWrapper)
    for _ in range(2):  # num_loss counts nothing here
        with wrapped.scale_loss(loss) as scaled:
            assert scaled is loss
    loss.backward()
    wrapped.step()
    assert wrapped.step(lambda: 3.0) == 3.0
    with handle._disable_casts():
        pass
    handle._clear_cache()
    handle._deactivate()
    assert not amp._amp_state.__dict__.get("handle")


def test_what_old_code_reads_off_a_handle():
    handle = amp.init(loss_scale=128.0, enable_caching=False, verbose=False)
    assert (handle.has_cache, handle.verbose, handle.cache) == (False, False, {})
    for name in ("has_cache", "verbose", "cache"):
        with pytest.raises(AttributeError):  # it would change nothing
            setattr(handle, name, True)
    assert handle._default_scaler.loss_scale() == 128.0
    handle._save_func(torch, "no_such_name", 3)
    handle._deactivate()
    assert torch.no_such_name == 3
    del torch.no_such_name
    handle.remove_cache(nn.Parameter(torch.ones(1)))
    handle._clear_cache()
    with pytest.raises(KeyError), handle._disable_casts():
        raise KeyError
    assert not handle.is_active()  # as it was


def test_a_new_handle_takes_an_optimizer_over():
    """A notebook's cell that is run again: neither twice scaled nor by the old scale."""
    model, optimizer, x = small()
    for number in range(3):
        handle = amp.init(loss_scale=2.0**number)
        loss = model(x).float().mean()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss.item() == 2.0**number * loss.item()
            scaled_loss.backward()
        assert torch.equal(model.bias.grad, torch.full((2,), 0.5))
        wrapped = handle.wrap_optimizer(optimizer)
        wrapped.step()
        wrapped.zero_grad()
    amp.reset()
    assert "step" not in vars(optimizer)
    block(wrapped, model, x)
    assert torch.equal(model.bias.grad, torch.full((2,), 0.5))


# -- what a wrapped optimizer is ------------------------------------------------------------------


@pytest.mark.parametrize("made", ["of the wrapper", "of the optimizer before", "and after"])
def test_schedulers(made):
    """They refused the original's. The first step is skipped, of which nothing may warn."""
    model, optimizer, x = small(lr=1.0)
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    scheduler = make(optimizer) if made == "of the optimizer before" else None
    wrapped = amp.init().wrap_optimizer(optimizer)
    assert isinstance(wrapped, torch.optim.Optimizer)
    scheduler = scheduler or make(wrapped if made == "of the wrapper" else optimizer)
    step_lr = torch.optim.lr_scheduler.StepLR(wrapped, 2, gamma=0.1)
    for number in range(3):
        wrapped.zero_grad()
        block(wrapped, model, x, bad=number == 0)
        wrapped.step()
        scheduler.step()
    step_lr.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert wrapped.param_groups is optimizer.param_groups


def test_what_is_the_optimizers():
    model, optimizer, _ = small()
    wrapped = amp.init().wrap_optimizer(optimizer)
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert len(optimizer.param_groups) == 2
    for of in (repr, lambda one: one.state, lambda one: one.defaults):
        assert of(wrapped) == of(optimizer)
    assert wrapped._optimizer is wrapped.optim is optimizer
    optimizer.own = 3
    assert wrapped.own == 3
    with pytest.raises(AttributeError, match="own_not"):
        _ = wrapped.own_not
    params = [*model.parameters(), *wrapped.param_groups[1]["params"]]
    assert [*amp.master_params(wrapped)] == params


def train(model, wrapped, numbers):
    for number in numbers:
        x, y = next(batches(1, seed=number))
        for index in range(2):
            loss = F.cross_entropy(model(x), y) * (index + 1)
            backward(wrapped.scale_loss(loss), model, bad=(number, index) in ((1, 1), (4, 0)))
        wrapped.step()
        wrapped.zero_grad()


@pytest.mark.parametrize("named", [True, False])
def test_saved_and_resumed_bit_for_bit(tmp_path, named):
    """Scalers were never saved; of a single training amp.state_dict() has them."""

    def start(seed):
        amp.reset()
        model = net(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, amp.init().wrap_optimizer(optimizer, num_loss=2)

    model, wrapped = start(0)
    train(model, wrapped, range(3))
    state = amp.state_dict(optimizers=wrapped if named else None)
    saved = {"m": model.state_dict(), "o": wrapped.state_dict(), "amp": state}
    torch.save(saved, tmp_path / "saved.pt")
    train(model, wrapped, range(3, 6))

    resumed, again = start(5)
    saved = torch.load(tmp_path / "saved.pt")
    resumed.load_state_dict(saved["m"])
    again.load_state_dict(saved["o"])
    amp.load_state_dict(saved["amp"], optimizers=again if named else None)
    assert scales(again) == [2.0**16, 2.0**15]
    train(resumed, again, range(3, 6))
    assert same(model.parameters(), resumed.parameters())
    for one, other in zip(wrapped.state.values(), again.state.values(), strict=True):
        assert same(one.values(), other.values())
    assert scales(again) == [2.0**15, 2.0**15]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies(copied):
    handle = amp.init()
    model = net()
    wrapped = handle.wrap_optimizer(sgd(model.parameters()), num_loss=2)
    train(model, wrapped, range(3))
    twin, again = copied((model, wrapped))
    assert again.param_groups[0]["params"][0] is next(twin.parameters())
    assert (again._amp_handle is handle) == (copied is copy.deepcopy)
    train(twin, again, range(3, 6))
    assert not same(model.parameters(), twin.parameters())
    train(model, wrapped, range(3, 6))
    assert same(model.parameters(), twin.parameters())
    assert again._scalers[0].loss_scale() == wrapped._scalers[0].loss_scale() == 2.0**15
    inactive = amp.init(enabled=False).wrap_optimizer(sgd([*twin.parameters()]))
    assert not pickle.loads(pickle.dumps(inactive))._amp_handle.is_active()


def test_a_copy_of_an_optimizer_that_copies_itself():
    class Own(torch.optim.SGD):
        def __deepcopy__(self, memo):
            return Own([nn.Parameter(torch.ones(1))], lr=0.5)

    copied = copy.deepcopy(amp.init().wrap_optimizer(Own([nn.Parameter(torch.ones(1))], lr=0.1)))
    assert (type(copied), copied.param_groups[0]["lr"]) == (OptimWrapper, 0.5)


def test_errors_of_a_handle_beside_initialize_and_of_open_blocks():
    model, optimizer, x = small()
    wrapped = amp.init().wrap_optimizer(small()[1], num_loss=2)
    with wrapped.scale_loss(model(x).float().mean()):
        with pytest.raises(RuntimeError, match="inside the scale_loss block"):
            wrapped.step()
        with pytest.raises(RuntimeError, match="is in an open scale_loss block already"):
            block(wrapped, model, x)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    handle = amp.init()
    loss = model(x).float().mean()
    with pytest.raises(RuntimeError, match=r"SGD went through amp.initialize. Use amp.scale_loss"):
        handle.scale_loss(loss, optimizer).__enter__()
    with pytest.raises(RuntimeError, match="num_losses=... in initialize"):
        handle.wrap_optimizer(optimizer)
    backward(amp.scale_loss(loss, optimizer), model)
    optimizer.step()


# -- errors ---------------------------------------------------------------------------------------


def test_errors():
    model, optimizer, x = small()
    handle = amp.init()
    loss = model(x).float().mean()
    for number in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="num_loss was .*; it must be an integer above 0"):
            handle.wrap_optimizer(optimizer, num_loss=number)
    for other in (3, torch.optim.SGD, None):
        with pytest.raises(TypeError, match="OptimWrapper: optimizer was .*; it must be an optimi"):
            handle.wrap_optimizer(other)
    with pytest.raises(TypeError, match="handle: optimizers was or held a int"):
        handle.scale_loss(loss, 3).__enter__()
    with pytest.raises(TypeError, match="loss was a tensor of torch.int64"):
        handle.scale_loss(torch.ones(1, dtype=torch.int64), optimizer).__enter__()
    backward(handle.scale_loss(loss, optimizer), model)  # none of these has changed it
    wrapped = handle.wrap_optimizer(optimizer)
    with pytest.raises(RuntimeError, match="wrapped optimizer's own"):
        handle.scale_loss(loss, optimizer).__enter__()
    with pytest.raises(RuntimeError, match="OptimWrapper scales losses itself"):
        amp.init().scale_loss(loss, wrapped).__enter__()
    with pytest.raises(TypeError, match=r"wrapped already.*wrap_optimizer\(optimizer.optim\)"):
        handle.wrap_optimizer(wrapped)
    with pytest.raises(RuntimeError, match="initialize: an OptimWrapper scales losses itself"):
        amp.initialize(model, wrapped, verbosity=0)
    before = model.weight.clone()
    with pytest.raises(NotImplementedError, match="not accept a closure"):
        wrapped.step(lambda: 0.0)
    assert torch.equal(before, model.weight)
