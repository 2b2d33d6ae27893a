"""Random training programs, by seed, against the same programs written by hand in plain torch.

A program draws its level, models, optimizers and losses, then in each iteration what happens:
accumulation, clipping, spoiled gradients, exceptions, schedulers, scales set by hand, groups
added, checkpoints resumed into new objects. Both sides do everything in lockstep.
"""

import contextlib
import functools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.amp.hand import Hands, Scale, Static, same, slots

SEEDS = range(300)
LEVELS = ["O0", "O1", "O1", "O1", "O2", "O2", "O2", "O4", "O5"]
OPTIMIZERS = [
    functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-2),
    functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    torch.optim.Adam,
    functools.partial(torch.optim.AdamW, amsgrad=True),
    functools.partial(torch.optim.RMSprop, momentum=0.5),
]
PIECES = ["body", "head"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head, self.late = nn.Linear(6, 3), nn.Linear(3, 3)
        self.late.requires_grad_(False)

    def forward(self, x):
        return self.late(self.head(self.body(x)))


class Interruption(Exception):
    """Raised in a scale_loss block: ctrl-C, or memory that is full."""


def equal(left, right):
    """``same``, with nan equal to nan: gradients that were spoiled are compared too."""
    return same((t.nan_to_num(nan=1.5) for t in left), (t.nan_to_num(nan=1.5) for t in right))


class Program:
    """One random program, run by amp and by hand."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.data = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        choice = self.random.choice
        self.level = choice(LEVELS)
        self.loss_scale = choice([None, None, "dynamic", 128.0])
        self.window = choice([1, 2, 3, 2000])
        self.numbers = list(range(choice([1, 2])))  # of the models
        self.fresh = True  # no gradients since the last step: model.zero_grad() reaches all
        self.late = set()  # models whose late layer is trained
        self._draw_optimizers()
        self._draw_losses()
        self.count = 1 + max(loss_id for _, loss_id, _ in self.losses)
        value = self.loss_scale or ("dynamic" if self.level in ("O1", "O2") else 1.0)
        self.dynamic = value == "dynamic"
        scales = [Static(value)] * self.count
        if self.dynamic:
            scales = [Scale(2.0**12, window=self.window) for _ in scales]
        self.plain = value == 1.0 and self.level in ("O0", "O4")  # there a block does nothing
        self.models = [Net() for _ in self.numbers]
        self.hands = Hands(self.models, self.recipes, self.level, scales)
        self.initialize(self.build_optimizers())

    def _draw_optimizers(self):
        pieces = [(model, piece) for model in self.numbers for piece in PIECES]
        count = self.random.choice([1, 2])
        owners = [0, count - 1] + [self.random.randrange(count) for _ in pieces[2:]]
        self.random.shuffle(owners)
        self.recipes = []
        for number in range(count):
            groups = [
                (*piece, {"lr": self.random.choice([1e-2, 3e-2])})
                for piece, owner in zip(pieces, owners, strict=True)
                if owner == number
            ]
            self.recipes.append((self.random.choice(OPTIMIZERS), groups))

    def _draw_losses(self):
        """Each loss: the models it feeds, its scaler, the optimizers to list."""
        self.losses = []
        count = self.random.choice([1, 2, 3])
        for _ in range(count):
            fed = self.random.sample(self.numbers, self.random.randint(1, len(self.numbers)))
            everybody = list(range(len(self.recipes)))
            listed = [n for n in everybody if any(group[0] in fed for group in self.recipes[n][1])]
            self.random.shuffle(listed)
            if self.random.random() < 0.2:  # one that gets no gradient may be listed too
                listed = everybody
            self.losses.append((fed, self.random.randrange(count), listed))

    # -- the objects of the library ------------------------------------------------------------

    def build_optimizers(self):
        made = []
        for make, groups in self.recipes:
            params = [
                {"params": list(self.models[model].get_submodule(piece).parameters()), **options}
                for model, piece, options in groups
            ]
            made.append(make(params))
        return made

    def initialize(self, optimizers):
        _, self.optimizers = amp.initialize(
            self.models,
            optimizers,
            opt_level=self.level,
            loss_scale=self.loss_scale,
            num_losses=self.count,
            init_scale=2.0**12,
            growth_interval=self.window,
            verbosity=0,
        )
        self.decayed = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in self.optimizers
        ]

    def resume(self):
        """Save everything, forget everything, and load it into new objects in any order."""
        models = [model.state_dict() for model in self.models]
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        rates = [scheduler.state_dict() for scheduler in self.decayed]
        scales = amp.state_dict()
        amp.reset()
        self.models = [Net() for _ in self.numbers]
        for number in self.late:
            self.models[number].late.requires_grad_()
        fresh = self.build_optimizers()

        pairs = [*zip(self.models, models, strict=True), *zip(fresh, states, strict=True)]
        self.random.shuffle(pairs)
        before_initialize = self.random.randint(0, len(pairs))
        for thing, state in pairs[:before_initialize]:
            thing.load_state_dict(state)
        self.initialize(fresh)
        pairs = [*pairs[before_initialize:], *zip(self.decayed, rates, strict=True), (amp, scales)]
        self.random.shuffle(pairs)
        for thing, state in pairs:
            thing.load_state_dict(state)
        for number, _ in enumerate(self.optimizers):
            self.hands.zero_grad(number)  # a checkpoint has no gradients

    # -- what can happen ------------------------------------------------------------------------

    def set_scale(self, number):
        value = self.random.choice([2.0**4, 2.0**8, 1000.0, 2.0**15])
        amp._amp_state.loss_scalers[number]._loss_scale = value
        self.hands.scales[number].value = value

    def zero_grad(self):
        if self.fresh and self.random.random() < 0.3:
            for model in self.models:
                model.zero_grad()
            self.hands.zero_models()
            return
        for number, optimizer in enumerate(self.optimizers):
            to_none = self.random.random() < 0.6
            optimizer.zero_grad(set_to_none=to_none)
            self.hands.zero_grad(number, to_none)

    def add_group(self):
        model = self.random.choice(self.numbers)
        number = self.random.randrange(len(self.optimizers))
        feeding = [listed for fed, _, listed in self.losses if model in fed]
        if model in self.late or not all(number in listed for listed in feeding):
            return
        self.late.add(model)
        group = (model, "late", {"lr": 2e-2})
        self.recipes[number][1].append(group)
        late = self.models[model].late.requires_grad_()
        self.optimizers[number].add_param_group({"params": late.parameters(), "lr": 2e-2})
        self.hands.add_group(number, *group)

    def poison(self, fed):
        """What to write where, or None."""
        if not self.dynamic or self.random.random() > 0.12:
            return None
        model, value = self.random.choice(fed), self.random.choice([math.inf, -math.inf, math.nan])
        name = self.random.choice(["body.0.weight", "body.0.bias", "body.1.weight", "head.bias"])
        place = self.random.random()

        def write(models):
            flat = models[model].get_parameter(name).grad.view(-1)
            flat[int(place * flat.numel())] = value

        return write

    def one_pass(self, loss, delay, zero):
        fed, loss_id, listed = loss
        x = torch.randn(5, 4, generator=self.data)
        y = torch.randint(0, 3, (5,), generator=self.data)
        value = F.cross_entropy(sum(self.models[m](x).float() for m in fed), y)
        by_hand = F.cross_entropy(sum(self.hands.out(m, x) for m in fed), y)
        assert torch.equal(value, by_hand)
        if zero:  # after a forward: before it, 16-bit weights may still show old gradients
            self.zero_grad()
        optimizers = [self.optimizers[number] for number in listed]
        if len(optimizers) == 1 and self.random.random() < 0.5:
            (optimizers,) = optimizers
        block = amp.scale_loss(value, optimizers, loss_id, delay_unscale=delay)
        if self.random.random() < 0.1:
            self.interrupted(block, by_hand, loss_id, listed)
            return
        poison = self.poison(fed)
        with block as scaled:
            scaled.backward()
            if poison:
                poison(self.models)
        self.hands.backward(by_hand, loss_id, listed, delay, poison)

    def interrupted(self, block, by_hand, loss_id, listed):
        """An exception in the block: as if it had not been there, or as without amp."""
        after_backward = self.random.random() < 0.7
        with contextlib.suppress(Interruption), block as scaled:
            if after_backward:
                scaled.backward()
            raise Interruption
        this = self.hands.open(loss_id, listed)
        continues = this is self.hands.delayed[listed[0]]  # accumulates in place
        if after_backward and (self.plain or continues):
            self.hands.backward(by_hand, loss_id, listed, delay=continues)
        self.compare_scales()
        assert torch.is_autocast_enabled("cpu") == (self.level in ("O1", "O4"))

    def passes(self):
        """The passes of one iteration: a loss, and whether to delay."""
        micro_batches = self.random.choice([1, 1, 2, 3])
        delay = self.random.random() < 0.3
        passes = [
            (loss, delay and batch < micro_batches - 1)
            for loss in self.random.sample(self.losses, len(self.losses))
            for batch in range(micro_batches)
        ]
        if self.random.random() < 0.3:  # by batch, or any mixture
            self.random.shuffle(passes)
        return passes

    def clip(self, number):
        kind = self.random.choice(["none", "none", "norm", "value", "torch"])
        optimizer, hand = self.optimizers[number], self.hands.optimizers[number]
        params = [p for group in hand.param_groups for p in group["params"]]
        self.hands.collect(number)
        if kind == "none" or all(p.grad is None for p in params):
            return
        if kind == "norm":
            norm_type = self.random.choice([1.0, 2.0, math.inf])
            norm = amp.clip_grad_norm_(optimizer, 0.1, norm_type)
            by_hand = torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type)
            assert equal([norm], [by_hand])
        elif kind == "value":
            amp.clip_grad_value_(optimizer, 0.01)
            torch.nn.utils.clip_grad_value_(params, 0.01)
        else:
            amp.clip_grad_value_(optimizer, math.inf)  # brings delayed gradients in
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            torch.nn.utils.clip_grad_norm_(params, 0.1)

    def step(self, number):
        before = [p.clone() for p in amp.master_params(self.optimizers[number])]
        self.clip(number)
        self.optimizers[number].step()
        skipped = self.hands.step(number)
        assert amp.stepped(self.optimizers[number]) != skipped
        if skipped:
            assert same(before, amp.master_params(self.optimizers[number]))
        if self.random.random() < 0.3:
            scheduler, hand = self.decayed[number], self.hands.optimizers[number]
            scheduler.step()
            if scheduler.last_epoch % 2 == 0:
                for group in hand.param_groups:
                    group["lr"] *= 0.5

    def iteration(self):
        chance = self.random.random
        if self.dynamic and chance() < 0.1:
            self.set_scale(self.random.randrange(self.count))
        for number, (loss, delay) in enumerate(self.passes()):
            self.one_pass(loss, delay, zero=number == 0 or chance() < 0.03)
            self.fresh = False
        self.compare_gradients()
        order = self.random.sample(range(len(self.optimizers)), len(self.optimizers))
        stepping = [number for number in order if chance() < 0.95]
        for number in stepping:
            self.step(number)
        self.fresh = stepping == order
        self.compare()
        if chance() < 0.15:
            self.add_group()
        if chance() < 0.2:
            self.resume()
            self.compare()

    # -- comparisons -----------------------------------------------------------------------------

    def compare_scales(self):
        ours = list(amp.state_dict().values())
        expected = [{"loss_scale": s.value, "unskipped": s.clean} for s in self.hands.scales]
        assert ours == expected

    def compare_gradients(self):
        for number, (optimizer, hand) in enumerate(
            zip(self.optimizers, self.hands.optimizers, strict=True)
        ):
            expected = [p.grad for group in hand.param_groups for p in group["params"]]
            if self.hands.delayed[number] or all(grad is None for grad in expected):
                continue
            amp.clip_grad_value_(optimizer, math.inf)  # changes nothing
            ours = [p.grad for p in amp.master_params(optimizer)]
            assert [g is None for g in ours] == [g is None for g in expected]
            assert equal((g for g in ours if g is not None), (g for g in expected if g is not None))

    def compare(self):
        self.compare_scales()
        for optimizer, hand in zip(self.optimizers, self.hands.optimizers, strict=True):
            expected = [p for group in hand.param_groups for p in group["params"]]
            assert same(amp.master_params(optimizer), expected)
            assert same(slots(optimizer), slots(hand))
            rates = [[g["lr"] for g in o.param_groups] for o in (optimizer, hand)]
            assert rates[0] == rates[1]
        for model, hand in zip(self.models, self.hands.models, strict=True):
            assert same(model.parameters(), hand.parameters())
            assert same(model.buffers(), hand.buffers())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_equals_the_one_written_by_hand(seed):
    program = Program(seed)
    for _ in range(program.random.randint(3, 6)):
        program.iteration()


# -- what such programs have found, or would need more luck to find -------------------------------


def two_optimizers(level, shared):
    """Two optimizers of a linear layer each, or of one layer that both of them step."""
    layers = [nn.Linear(4, 4)] if shared else [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    optimizers = [torch.optim.SGD(layers[i].parameters(), lr=1.0) for i in (0, -1)]
    return amp.initialize(
        model, optimizers, opt_level=level, loss_scale="dynamic", init_scale=8.0, verbosity=0
    )


def block(model, optimizers, **kwargs):
    x = torch.ones(1, 4, dtype=next(model.parameters()).dtype)  # a part of a model casts nothing
    return amp.scale_loss(model(x).float().sum(), optimizers, **kwargs)


def scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


DYNAMIC = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])


@pytest.mark.parametrize("settled_by", ["step", "zero_grad", "a pass of its own"])
@DYNAMIC
def test_a_delayed_pass_is_settled_by_all_its_optimizers_together(level, settled_by):
    model, (first, second) = two_optimizers(level, shared=False)
    with block(model, [first, second], delay_unscale=True) as scaled:
        scaled.backward()
        model[0].bias.grad[1] = math.nan
    if settled_by == "zero_grad":
        first.zero_grad()
    elif settled_by != "step":
        with block(model, first) as scaled:
            scaled.backward(inputs=list(model[0].parameters()))
    second.step()
    first.step()
    assert not amp.stepped(second)  # though its own gradients are finite
    assert amp.stepped(first) == (settled_by == "zero_grad")
    assert scale() == 4.0


@DYNAMIC
def test_a_delayed_pass_around_one_that_overflows_keeps_the_scale_it_began_with(level):
    model, (first, second) = two_optimizers(level, shared=False)
    expected = [p - 1.0 - 1.0 for p in list(amp.master_params(first))[1:]]
    bias = [model[0].bias]
    with block(model[0], first, delay_unscale=True) as outer:
        with block(model[1], second) as inner:
            inner.backward()
            model[1].bias.grad.fill_(math.inf)
        outer.backward(inputs=bias)
    assert scale() == 4.0
    with block(model[0], first) as scaled:
        scaled.backward(inputs=bias)
    first.step()
    assert same(expected, list(amp.master_params(first))[1:])


@DYNAMIC
def test_an_exception_leaves_the_gradients_that_two_optimizers_share(level):
    model, optimizers = two_optimizers(level, shared=True)
    with block(model, optimizers) as scaled:
        scaled.backward()
    before = [p.grad.clone() for p in amp.master_params(optimizers[0])]
    with contextlib.suppress(Interruption), block(model, optimizers) as scaled:
        scaled.backward()
        raise Interruption
    assert same(before, [p.grad for p in amp.master_params(optimizers[0])])


@DYNAMIC
def test_delayed_gradients_that_two_optimizers_share_are_unscaled_once(level):
    model, optimizers = two_optimizers(level, shared=True)
    expected = [p - 2.0 - 2.0 for p in amp.master_params(optimizers[0])]
    for _ in range(2):
        with block(model, optimizers, delay_unscale=True) as scaled:
            scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert same(expected, amp.master_params(optimizers[0]))


@DYNAMIC
def test_gradients_set_to_zero_in_mid_accumulation_are_zero_at_every_level(level):
    model, (first, second) = two_optimizers(level, shared=False)
    with block(model, [first, second]) as scaled:
        scaled.backward()
    model(torch.ones(1, 4))
    for optimizer in (first, second):
        optimizer.zero_grad(set_to_none=False)
        grads = [p.grad for p in amp.master_params(optimizer)]
        assert same(grads, map(torch.zeros_like, amp.master_params(optimizer)))
