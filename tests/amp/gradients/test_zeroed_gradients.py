"""Zeros are gradients: momentum and decay move a weight that a pass does not reach."""

import functools

import pytest
import torch
from torch import nn

from apex import amp
from apex.ops import _runtime
from apex.optimizers import FusedSGD
from tests.amp.training import copies, same, scaled_backward

NUMBERS = [0, 1, 0, 0, 1, 1, 0]  # which expert a pass reaches
CLEARS = ["optimizer", "model", "hand"]


class Experts(nn.Module):
    """Two experts and a bias, which each pass reaches; every number is exact in 16 bits."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])
        self.bias = nn.Parameter(torch.zeros(1))
        for expert in self.experts:
            nn.init.constant_(expert.weight, 1.0)

    def forward(self, x, number):
        return self.experts[number](x) + self.bias


def clear(how, model, optimizer):
    if how == "hand":
        for param in model.parameters():
            if param.grad is not None:
                param.grad.zero_()
    else:
        {"optimizer": optimizer, "model": model}[how].zero_grad(set_to_none=False)


def trained(level, make, how, numbers=NUMBERS, also=(), **options):
    """The weights after each step of ``numbers``, in which a pass for each of ``also`` is first."""
    amp.reset()
    model = Experts()
    optimizer = make(model.parameters(), lr=0.25, momentum=0.5)
    if level:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0, **options)
    found = []
    for number in numbers:
        clear(how, model, optimizer)
        for one in (*also, number):
            loss = model(torch.ones(1, 2), one).sum()
            scaled_backward(loss, optimizer) if level else loss.backward()
        also = ()
        optimizer.step()
        found += [value.detach().float().clone() for value in model.state_dict().values()]
    return found


@pytest.mark.parametrize("how", CLEARS)
@pytest.mark.parametrize(
    ("level", "make", "options"),
    [
        ("O1", torch.optim.SGD, {}),
        ("O2", torch.optim.SGD, {}),
        ("O5", FusedSGD, {}),
        ("O1", FusedSGD, {"fused_step": True}),
        ("O2", FusedSGD, {"fused_step": True}),
    ],
)
def test_zeros_stay_zeros(level, make, options, how):
    wanted = trained(None, make, how)
    assert not torch.equal(wanted[0], wanted[3])
    assert not torch.equal(wanted[3], wanted[6])  # moved by momentum alone
    got = trained(level, make, how, **options)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("how", CLEARS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_zeros_stay_zeros_of_a_weight_that_only_the_first_of_two_passes_reaches(level, how):
    got, wanted = [
        trained(one, torch.optim.SGD, how, numbers=[0, 0, 0], also=[1]) for one in (level, None)
    ]
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_zeros_count_as_clearing_an_overflow(level):
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    scaled_backward(model(torch.full((1, 2), torch.inf), 0).sum(), optimizer)
    optimizer.step()
    assert not amp.stepped(optimizer)
    model.zero_grad(set_to_none=False)
    model(torch.ones(1, 2), 1).sum().backward()
    optimizer.step()
    assert amp.stepped(optimizer)


AFTER_AN_OVERFLOW = [  # what the program does; the first step is that of the batch that overflows
    ["step", "clear", "step"],
    ["step", "clear", "step", "clear", "step"],
    ["step", "clear", 1, "step"],
    ["step", "clear", "plain", "step"],
    ["clear", "step", "clear", "step"],
    ["clear", "plain", "step", "clear", 0, "step"],
]


def after_an_overflow(level, make, how, program):
    """The weights after each event, and which steps were taken; without a level GradScaler's."""
    amp.reset()
    model = Experts()
    optimizer = make(model.parameters(), lr=0.25, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=level is None)
    if level:
        amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", init_scale=8.0, verbosity=0
        )

    def one_pass(number, factor=1.0):
        loss = model(torch.full((1, 2), factor), number).sum()
        if level:
            scaled_backward(loss, optimizer)
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)

    def plain():
        scale = 1.0 if level else scaler.get_scale()  # by which the step divides
        (model(torch.ones(1, 2), 1).sum() * scale).backward()

    def step():
        before = copies(model.state_dict().values())
        scaler.step(optimizer)  # at a level that is step() of the optimizer
        scaler.update()
        now = copies(model.state_dict().values())
        found.append((now, not same(before, now)))

    events = {
        "step": step,
        "clear": lambda: clear(how, model, optimizer),
        "plain": plain,
        "overflow": lambda: one_pass(0, torch.inf),
    }
    found, before = [], None
    for event in [0, "step", "clear", 1, "step", "clear", "overflow", *program]:
        events.get(event, functools.partial(one_pass, event))()
        if (how, before, event) == ("optimizer", "overflow", "clear"):
            scaler.update()  # forgets the overflow with the gradients
        before = event
    return found


@pytest.mark.parametrize("program", AFTER_AN_OVERFLOW, ids=lambda one: " ".join(map(str, one)))
@pytest.mark.parametrize("how", CLEARS)
@pytest.mark.parametrize("decides", ["host", "device"])
def test_zeros_after_an_overflow_are_gradients_of_torchs_grad_scaler(
    decides, how, program, request
):
    """The scaler has unscaled before: so a step is skipped that follows an overflow of a block."""
    wanted = after_an_overflow(None, torch.optim.SGD, how, program)
    if decides == "device":
        request.getfixturevalue("runs_behind")
    for level in ("O0", "O1", "O2", "O5"):
        with _runtime.use("reference"):
            found = after_an_overflow(level, FusedSGD, how, program)
        for (now, has_moved), (values, moves) in zip(found, wanted, strict=True):
            assert has_moved == moves, level
            assert same(now, values), level


def test_a_fused_step_leaves_no_gradient_to_one_that_sets_them_to_none():
    model = Experts()
    optimizer = FusedSGD(model.parameters(), lr=0.25, momentum=0.5)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0, fused_step=True)
    for clears in (True, False):
        scaled_backward(model(torch.ones(1, 2), 0).sum(), optimizer)
        optimizer.step()
        assert [param.grad is None for param in model.parameters()] == [False, True, True]
        assert not model.bias.grad.any()
        if clears:
            model.zero_grad()
        before = [expert.weight.detach().clone() for expert in model.experts]
        scaled_backward(model(torch.ones(1, 2), 1).sum(), optimizer)
        optimizer.step()
        assert torch.equal(model.experts[0].weight, before[0])  # None: it stands still
        assert not torch.equal(model.experts[1].weight, before[1])
        optimizer.zero_grad()
