"""Inf and nan written into gradients: who skips, and what becomes of everybody else.

Losses feed several models and optimizers own several, as in NVIDIA's tests of multiple models,
optimizers and losses. Each run is compared bit for bit with ``Hands`` in lockstep.
"""

import itertools
import math
import random
from dataclasses import astuple, dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.amp.hand import Hands, Scale, same, slots

STEPS, MICRO_BATCHES, WINDOW = 3, 2, 2
VALUES = [math.inf, -math.inf, math.nan]
OPTIMIZERS = [
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2),
    lambda groups: torch.optim.Adam(groups, lr=1e-2),
]


@dataclass(frozen=True)
class Layout:
    """Which models each loss feeds, and which each optimizer owns."""

    losses: tuple
    optimizers: tuple

    def listed(self, loss):
        """The optimizers that get gradients from a loss."""
        fed = set(self.losses[loss])
        return [number for number, own in enumerate(self.optimizers) if fed & set(own)]


LAYOUTS = {
    "single": Layout(losses=((0,),), optimizers=((0,),)),
    "two losses, one optimizer": Layout(losses=((0,), (0, 1)), optimizers=((0, 1),)),
    "two apart": Layout(losses=((0,), (1,)), optimizers=((0,), (1,))),
    "chain": Layout(losses=((0, 1), (1, 2)), optimizers=((0, 1), (2,))),
    "ring": Layout(losses=((0, 1), (1, 2), (2, 0)), optimizers=((0,), (1,), (2,))),
}
# The weight of a linear layer is half at O2 and O5, that of a batchnorm has no master anywhere.
PLACES = [
    ("0.weight", "first"),
    ("0.weight", "middle"),
    ("3.weight", "last"),
    ("1.weight", "middle"),
    ("1.bias", "last"),
    ("3.bias", "first"),
]


@dataclass(frozen=True)
class Case:
    """A run, and the place in it where a gradient is spoiled.

    ``passes`` says which come first, all micro-batches of a loss or all losses of a micro-batch,
    and whether they are delayed: then only the last pass of each loss in a step unscales.
    """

    level: str
    layout: str
    loss: int
    model: int
    step: int
    weight: str
    element: str
    passes: str
    shared_scale: bool

    def __str__(self):
        return "-".join(map(str, astuple(self)))

    def choice(self, options, salt=""):
        """One of ``options``: what is spread over the cases instead of multiplying them."""
        return random.Random(f"{self}{salt}").choice(options)


def product(levels):
    fed = [
        (name, loss, model)
        for name, layout in LAYOUTS.items()
        for loss, models in enumerate(layout.losses)
        for model in models
    ]
    for level, loss, step, place, *rest in itertools.product(
        levels,
        fed,
        range(STEPS - 1),  # the last step shows what the spoiled one did
        PLACES,
        ("by batch", "by loss, delayed", "by batch, delayed"),
        (False, True),
    ):
        yield Case(level, *loss, step, *place, *rest)


class Run:
    """amp and the hand-written equivalent, side by side."""

    def __init__(self, case):
        self.case, self.layout = case, LAYOUTS[case.layout]
        torch.manual_seed(3)
        self.models = [
            nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
            for _ in range(1 + max(map(max, self.layout.losses)))
        ]
        count = 1 if case.shared_scale else len(self.layout.losses)
        make = [case.choice(OPTIMIZERS, number) for number, _ in enumerate(self.layout.optimizers)]
        groups = [
            [(model, "", {"lr": 0.02 * (1 + model)}) for model in own]
            for own in self.layout.optimizers
        ]
        scales = [Scale(2.0 ** (8 - 2 * loss), window=WINDOW) for loss in range(count)]
        self.hands = Hands(self.models, list(zip(make, groups, strict=True)), case.level, scales)
        self.optimizers = [
            new([{"params": list(self.models[m].parameters()), **options} for m, _, options in own])
            for new, own in zip(make, groups, strict=True)
        ]
        amp.initialize(
            self.models,
            self.optimizers,
            opt_level=case.level,
            loss_scale="dynamic",
            num_losses=count,
            growth_interval=WINDOW,
            verbosity=0,
        )
        self.scalers = list(amp._amp_state.loss_scalers)
        for scaler, scale in zip(self.scalers, scales, strict=True):
            scaler._loss_scale = scale.value

    def passes(self):
        """The passes of a step: loss, micro-batch, whether it is delayed."""
        pairs = itertools.product(range(len(self.layout.losses)), range(MICRO_BATCHES))
        if self.case.passes.startswith("by batch"):
            pairs = sorted(pairs, key=lambda pair: pair[1])
        delayed = self.case.passes.endswith("delayed")
        for loss, batch in pairs:
            yield loss, batch, delayed and batch < MICRO_BATCHES - 1

    def spoil(self, models):
        weight = models[self.case.model].get_parameter(self.case.weight)
        flat = weight.grad.view(-1)
        index = {"first": 0, "middle": flat.numel() // 2, "last": -1}[self.case.element]
        flat[index] = self.case.choice(VALUES)

    def one_pass(self, loss, x, y, delay, spoil):
        listed, loss_id = self.layout.listed(loss), 0 if self.case.shared_scale else loss
        fed = self.layout.losses[loss]
        value = F.cross_entropy(sum(self.models[m](x).float() for m in fed), y)
        by_hand = F.cross_entropy(sum(self.hands.out(m, x) for m in fed), y)
        assert torch.equal(value, by_hand)
        with amp.scale_loss(
            value, [self.optimizers[n] for n in listed], loss_id, delay_unscale=delay
        ) as scaled:
            scaled.backward()
            if spoil:
                self.spoil(self.models)
        self.hands.backward(by_hand, loss_id, listed, delay, self.spoil if spoil else None)

    def step(self, expected):
        """Every optimizer's step; ``expected`` are those that must decline it."""
        for number, optimizer in enumerate(self.optimizers):
            before = [p.clone() for p in amp.master_params(optimizer)]
            optimizer.step()
            assert self.hands.step(number) == (number in expected)
            assert amp.stepped(optimizer) == (number not in expected)
            assert same(before, amp.master_params(optimizer)) == (number in expected)

    def compare(self):
        for optimizer, hand in zip(self.optimizers, self.hands.optimizers, strict=True):
            ours = amp.master_params(optimizer)
            assert same(ours, (p for group in hand.param_groups for p in group["params"]))
            assert same(slots(optimizer), slots(hand))
        for model, hand in zip(self.models, self.hands.models, strict=True):
            assert same(model.parameters(), hand.parameters())
            assert same(model.buffers(), hand.buffers())
        ours = [(scaler.loss_scale(), scaler._unskipped) for scaler in self.scalers]
        assert ours == [(scale.value, scale.clean) for scale in self.hands.scales]


def check(case):
    run = Run(case)
    generator = torch.Generator().manual_seed(5)
    spoiled_batch = case.choice(range(MICRO_BATCHES), "batch")
    for step in range(STEPS):
        for number, optimizer in enumerate(run.optimizers):
            optimizer.zero_grad()
            run.hands.zero_grad(number)
        for loss, batch, delay in run.passes():
            x = torch.randn(5, 4, generator=generator)
            y = torch.randint(0, 3, (5,), generator=generator)
            spoil = (step, loss, batch) == (case.step, case.loss, spoiled_batch)
            run.one_pass(loss, x, y, delay, spoil)
        run.step(run.layout.listed(case.loss) if step == case.step else [])
        run.compare()


def sample(levels, count):
    return random.Random(0).sample(list(product(levels)), count)


@pytest.mark.parametrize("case", sample(["O1", "O2"], 200), ids=str)
def test_exactly_the_listed_optimizers_skip(case):
    check(case)


@pytest.mark.parametrize("case", sample(["O0", "O4", "O5"], 60), ids=str)
def test_so_they_do_where_the_scale_is_dynamic_by_request(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_whole_matrix(level, layout):
    for case in product([level]):
        if case.layout == layout:
            check(case)
            amp.reset()
