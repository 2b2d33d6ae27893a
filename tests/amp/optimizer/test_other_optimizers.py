"""Optimizers that step in ways of their own, wait, or hold another optimizer inside."""

import functools
import math

import pytest
import torch

from apex import amp
from apex.optimizers import FusedSGD
from tests.amp.training import MASTERED, block, row, scaled_backward, step, value

mastered = pytest.mark.parametrize("level", MASTERED)


class OwnList(torch.optim.Optimizer):
    """Steps the tensors it was given, not those in its groups."""

    def __init__(self, params, lr):
        self.own = list(params)
        super().__init__(self.own, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.own:
            if param.grad is not None:
                param.add_(param.grad, alpha=-self.param_groups[0]["lr"])


class ThroughData(torch.optim.Optimizer):
    """Steps its groups in a way that moves no version, as many published optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad.data


@mastered
def test_an_optimizer_with_a_list_of_its_own_is_refused_at_its_first_step_that_shows_it(level):
    model, optimizer = row(level, OwnList)
    optimizer.step()  # without gradients: nothing to be seen
    block(model, optimizer, 0.0)
    optimizer.step()  # gradients of zero
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.0
    block(model, optimizer)
    optimizer.step()  # a warm-up from zero
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.zero_grad()
    block(model, optimizer)
    with pytest.raises(RuntimeError, match="did not change the float32 masters"):
        optimizer.step()
    assert value(model) == [0.0, 0.0]


@mastered
def test_no_optimizer_that_steps_its_groups_is_refused(level):
    for make in (ThroughData, torch.optim.Adam, FusedSGD):
        for lr in (1.0, 0.0):
            model, optimizer = row(level, make, lr=lr)
            for _ in range(2):
                step(model, optimizer)
            assert (value(model) == [0.0, 0.0]) == (lr == 0.0)


class Waiting(torch.optim.Optimizer):
    """Changes nothing for its first steps, as some variants of RAdam do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if self.calls > 5:
                    param.sub_(param.grad)


def some_steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        step(model, optimizer)


@mastered
def test_an_optimizer_may_wait_some_steps(level):
    model, optimizer = row(level, Waiting)
    some_steps(model, optimizer, 7)
    assert value(model) == [-2.0, -2.0]


@mastered
def test_an_optimizer_that_never_changes_anything_is_refused(level):
    model, optimizer = row(level, Waiting)
    optimizer.calls = -100
    some_steps(model, optimizer, 9)
    block(model, optimizer)
    with pytest.raises(RuntimeError, match="did not change the float32 masters"):
        optimizer.step()


class WithoutOutliers(torch.optim.Optimizer):
    """Leaves the element with the largest gradient alone; it moves no version, either."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                size = param.grad.abs()
                used = torch.where(size == size.max(), 0.0, param.grad)
                param.data = param.data - group["lr"] * used


@mastered
def test_an_optimizer_may_leave_the_largest_gradient_alone_and_a_hook_clamp_its_weight(level):
    model, optimizer = row(level, WithoutOutliers)
    model.load_state_dict({"weight": torch.tensor([[4.0, 4.0]])})

    @torch.no_grad()
    def clamp(*_):
        model.weight.clamp_(max=2.0)

    optimizer.register_step_post_hook(clamp)
    scaled_backward(model(torch.tensor([[1.0, 8.0]])).sum(), optimizer)
    optimizer.step()
    assert value(model) == [2.0, 2.0]
    optimizer.zero_grad()
    scaled_backward(model(torch.tensor([[1.0, 8.0]])).sum(), optimizer)
    optimizer.step()
    assert value(model) == [1.0, 2.0]


class OwnMatrices(torch.optim.Optimizer):
    """Steps matrices of a list of its own, and what else is in its groups by an inner optimizer."""

    def __init__(self, params, lr):
        params = list(params)
        self.matrices = [param for param in params if param.dim() == 2]
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for param in self.matrices:
            param.sub_(param.grad)
        for param in self.param_groups[0]["params"][len(self.matrices) :]:
            param.sub_(param.grad)


@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@mastered
def test_an_optimizer_that_steps_some_weights_instead_of_their_masters_is_refused(
    level, bias, has_closure
):
    amp.reset()
    model = torch.nn.Linear(2, 1, bias=bias)
    optimizer = OwnMatrices(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)

    def backward():
        optimizer.zero_grad()
        block(model, optimizer)

    if not has_closure:
        backward()
    with pytest.raises(RuntimeError, match="did not change the float32 masters"):
        optimizer.step(*[backward] * has_closure)


# -- one inside of another ------------------------------------------------------------------------


class Perturbing(torch.optim.Optimizer):
    """Sharpness-aware minimization as published: a step of the base after a second gradient."""

    def __init__(self, params, base):
        self.base = base(params)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad, alpha=0.5)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()

    def step(self, closure=None):
        raise AssertionError("first_step and second_step are called")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_sharpness_aware_minimization(level, whole):
    amp.reset()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    outer = Perturbing(model.parameters(), functools.partial(torch.optim.SGD, lr=0.25))
    given = outer if whole else outer.base
    amp.initialize(model, given, opt_level=level, loss_scale=8.0, verbosity=0)

    def backward():
        loss = model(torch.ones(1, 2)).float().square().sum()  # (a + b) ** 2: gradients 2 (a + b)
        scaled_backward(loss, given)
        return loss.item()

    outer.zero_grad()
    assert backward() == 4.0
    outer.first_step()  # weights 1 + 0.5 * 4
    assert backward() == 36.0
    outer.second_step()  # 1 - 0.25 * 12
    assert model.state_dict()["weight"].tolist() == [[-2.0, -2.0]]
    with torch.no_grad():
        assert model(torch.ones(1, 2)).item() == -4.0


def test_a_step_of_the_optimizer_inside_is_skipped_after_an_overflow():
    def make(params, lr):
        return Perturbing(params, functools.partial(torch.optim.SGD, lr=lr))

    model, optimizer = row("O1", make, loss_scale="dynamic", init_scale=8.0)
    for x in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        block(model, optimizer, x)
        optimizer.base.step()
        assert amp.stepped(optimizer) == math.isfinite(x)
    assert value(model) == [-2.0, -2.0]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 1}


class Wrapper:
    """Shows the attributes of an optimizer as its own."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr=lr)

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class SteppingWrapper(Wrapper):
    def step(self):
        self.inner.step()


@mastered
def test_a_step_of_the_optimizer_inside_of_a_wrapper_reaches_the_model(level):
    model, outer = row(level, Wrapper)
    block(model, outer)
    outer.inner.step()
    assert value(model) == [-1.0, -1.0]
    block(model, outer)
    with pytest.raises(RuntimeError, match=r"step\(closure\) of the SGD inside a Wrapper"):
        outer.inner.step(lambda: None)
    outer.step()
    assert value(model) == [-2.0, -2.0]
    amp.reset()
    outer.inner.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_scheduler_of_the_optimizer_inside_of_a_wrapper_stays_silent(level):
    model, outer = row(level, SteppingWrapper, loss_scale=None, init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(outer.inner, 0.5)
    for x in (math.inf if level in ("O1", "O2") else 0.0, 1.0):
        outer.zero_grad()
        step(model, outer, x)
        scheduler.step()  # a warning here would fail the test
    assert value(model) == [-0.5, -0.5]


def test_a_warm_up_from_zero_may_take_more_steps_than_are_watched():
    model, optimizer = row("O2", ThroughData, lr=0.0)
    for _ in range(12):
        step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    step(model, optimizer)
    assert value(model) == [-1.0, -1.0]
