"""Random sequences of what programs do with gradients, done by amp and by a reference.

The gradients are what a sequence asks for, whatever the weights are: small multiples of 0.5, so
that sums are exact in 16 bits too, of one size in all elements, so that norms are exact.
"""

import random
import warnings

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.casting import switches as casting
from apex.amp.gradients.ledger import State

BOUNDS = {"growth_interval": 2, "min_loss_scale": 16.0, "max_loss_scale": 1024.0}
HALF = {"O2": torch.float16, "O5": torch.bfloat16}  # of weights with masters
OWNED = {  # the parameters of each optimizer
    "one": [["linear", "norm"]],
    "two": [["linear", "norm"], ["other"]],
    "shared": [["linear", "norm"], ["linear", "other"]],
    "same": [["linear"], ["linear"]],
    "three": [["linear"], ["norm"], ["other"]],  # each loss feeds one or two of them
}


class Scale:
    """The rule of a dynamic scale, in float32 as on any device."""

    def __init__(self, value, window, floor, ceiling, growth=2.0, backoff=0.5):
        self.value, self.window = value, window
        self.floor, self.ceiling = rounded(floor), rounded(ceiling)
        self.growth, self.backoff = rounded(growth), rounded(backoff)
        self.clean, self.steps = 0, 0  # since the last change, and ever

    def finish_pass(self, overflow):
        if overflow:
            self.clean = 0
            self.value = max(rounded(self.value * self.backoff), self.floor)

    def finish_step(self, taken):
        """Of one pass."""
        self.finish_pass(not taken)
        if taken:
            self.count()

    def count(self):
        self.clean, self.steps = self.clean + 1, self.steps + 1
        if self.clean >= self.window:
            grown = max(rounded(self.value * self.growth), self.floor)
            self.value, self.clean = min(grown, self.ceiling), 0


def rounded(value):
    """A number in float32."""
    return torch.tensor(value, dtype=torch.float32).item()


class Static(Scale):
    """A scale that never changes, for which nothing is checked."""

    def __init__(self, value):
        super().__init__(value, 1, value, value)


class Net(nn.Module):
    """The gradient of each weight is the argument of its name."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(4)  # float32 at O2 and O5

    def forward(self, **grads):
        return sum((getattr(self, name).weight * grad).sum() for name, grad in grads.items())


WHO, NUMBERS = [(0,), (0,), (1,), (0, 1), (1, 0), (1, 2)], [0, 0, 1, 2]
SIZES = [0.5, 0.5, 1.0, -1.0]
NAMES, YES, NO = ["linear", "norm", "other"], [True, False], [True, False, False, False]
OPERATIONS = {  # how often, and arguments
    "open": (9, WHO, [0, 0, 0, 1], SIZES, NO, [True, True, False]),
    "backward": (9, [*NAMES, *[None] * 6]),
    "close": (9,),
    "fail": (2,),
    "bare": (1, WHO, SIZES),
    "clip": (1, NUMBERS, ["norm", "value"], [0.75, 8.0]),
    "read": (1, ["master_params", "model", "amp", "optimizer"]),
    "write": (1, NAMES, [0.5, -0.25]),
    "step": (4, NUMBERS, YES),  # and whether gradients of a skipped one are cleared
    "hooked_step": (1, NUMBERS, ["pre", "post"], NAMES, [0.5, -0.25]),
    "zero_grad": (1, NUMBERS, YES),
    "zero_model": (1,),
    "edit": (1, NAMES),
}
NOT_FUSED = ["bare", "edit", "zero_model"]  # the contract of fused_step refuses them
HOOKS = ["hooked_step"]  # they run in a step that a device skips, and unscale before a fused one


class Sequence:
    """Every operation, done by amp and by ``reference``, which a subclass names."""

    reference: type

    def __init__(self, level, loss_scale, kind, make, *, fused=None, device="cpu"):
        amp.reset()
        torch.manual_seed(0)
        owned, half, self.device = OWNED[kind], HALF.get(level), device
        self.by_contract = fused is not None  # only what fused_step allows
        self.model = Net()
        start = {name: self.of(name).detach().clone() for name in NAMES}
        self.model.to(device)
        self.model, self.optimizers = amp.initialize(
            self.model,
            [make([self.of(name) for name in names]) for names in owned],
            opt_level=level,
            loss_scale=loss_scale,
            num_losses=2,
            init_scale=256.0,
            **BOUNDS,
            max_skipped_steps=10**6,
            fused_step=bool(fused),
            verbosity=0,
        )
        weights = {name: w.to(half) if half and name != "norm" else w for name, w in start.items()}
        owns = {name for names in owned for name in names}
        masters = {n: start[n] for n in owns if weights[n].dtype != torch.float32}
        if loss_scale == "dynamic":
            scales = [Scale(256.0, *BOUNDS.values()) for _ in range(2)]
        else:
            scales = [Static(loss_scale)] * 2
        self.hand = self.reference(weights, masters, owned, scales)
        self.blocks, self.clipped = [], False

    def of(self, name):
        return getattr(self.model, name).weight

    def grads(self, who, size, first=False):
        names = self.hand.names([n % len(self.optimizers) for n in who])[: 1 if first else None]
        signs = torch.tensor([size, -size, size, size])
        return {name: signs.reshape(self.of(name).shape) for name in names}

    def loss(self, grads):
        return self.model(**{name: grad.to(self.device) for name, grad in grads.items()})

    def is_open(self, who):
        """Whether one of these, or one that shares a parameter with them, is in an open block."""
        inside = {number for *_, this in self.blocks for number in this.who}
        return bool(inside & {*self.hand.owners(self.hand.names(who))})

    def open(self, who, loss_id, size, first, delay):
        who = tuple(dict.fromkeys(number % len(self.optimizers) for number in who))
        if self.is_open(who) or (self.by_contract and self.clipped):
            return
        grads = self.grads(who, size, first)
        optimizers = (list, tuple)[loss_id](self.optimizers[number] for number in who)
        block = amp.scale_loss(self.loss(grads), optimizers, loss_id, delay_unscale=delay)
        self.hand.forward()
        loss = block.__enter__()
        self.blocks.append((block, loss, grads, delay, self.hand.open(who, loss_id)))

    def backward(self, spoiled):
        if not self.blocks:
            return
        _, loss, grads, _, this = self.blocks[-1]
        loss.backward(retain_graph=True)
        self.hand.backward(grads, this.value)
        if spoiled in grads and not isinstance(this.scale, Static):
            self.of(spoiled).grad.view(-1)[0] = torch.inf
            new = self.hand.new[spoiled] = self.hand.new[spoiled].clone()
            new.view(-1)[0] = torch.inf

    def close(self):
        if self.blocks:
            block, _, _, delay, this = self.blocks.pop()
            with warnings.catch_warnings():  # of a bare backward in the block
                warnings.filterwarnings("ignore", ".*not from the scaled loss", UserWarning)
                block.__exit__(None, None, None)
            ledger = self.optimizers[this.who[0]]._amp_stash.ledger
            waits = delay or (ledger.state is State.FOR_STEP and not self.hand.masters)
            self.hand.end(this, "delay" if waits else "close")

    def fail(self):
        if self.blocks:
            block, *_, this = self.blocks.pop()
            assert not block.__exit__(KeyError, KeyError(), None)
            self.hand.end(this, "fail")

    def bare(self, who, size):
        inside = {number for *_, this in self.blocks for number in this.who}
        listed = {number % len(self.optimizers) for number in who} <= inside  # others are refused
        if not self.clipped and (listed or not self.blocks):  # else the order of additions matters
            grads = self.grads(who, size)
            self.hand.forward()
            self.loss(grads).backward()
            self.hand.backward(grads)

    def clip(self, number, kind, limit):
        number %= len(self.optimizers)
        exist = {*self.hand.kept, *self.hand.new, *self.hand.bare} & {*self.hand.owned[number]}
        exist -= self.hand.cleared
        if not exist or self.is_open([number]) or (self.by_contract and self.clipped):
            return
        self.clipped = True
        function = amp.clip_grad_norm_ if kind == "norm" else amp.clip_grad_value_
        function(self.optimizers[number], limit)
        self.hand.clip(number, kind, limit)

    def read(self, what):
        for optimizer in self.optimizers:
            if what == "master_params":
                list(amp.master_params(optimizer))
            elif what == "optimizer":
                optimizer.state_dict()
        if what in ("master_params", "model"):
            self.hand.take_over(self.hand.masters)
        if what == "model":
            self.model.state_dict()
        elif what == "amp" and self.device == "cpu":  # it waits
            amp.state_dict()

    def write(self, name, value):
        new = self.hand.weights[name] = self.hand.weights[name].clone()
        new.view(-1)[0] = value
        with torch.no_grad():
            self.of(name).copy_(new)

    def hooked_step(self, number, when, name, value):
        """A weight is written by a hook, before the update or after it."""
        optimizer = self.optimizers[number % len(self.optimizers)]

        @torch.no_grad()
        def hook(*_):
            self.of(name).view(-1)[0] = value

        handle = getattr(optimizer, f"register_step_{when}_hook")(hook)
        self.step(number, inside=(when, name, value))
        handle.remove()

    def step(self, number, clears=False, inside=None):
        number %= len(self.optimizers)
        if self.is_open([number]):
            return
        optimizer = self.optimizers[number]
        frees = optimizer._amp_stash.ledger.state is State.FOR_STEP
        optimizer.step()
        left = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        is_zero = [self.device == "meta" or equal(grad, None) for grad in left]
        assert not frees or (len(left) <= 1 and all(is_zero))
        skipped = self.hand.step(number, inside)
        assert amp.stepped(optimizer) == (not skipped) or self.device == "meta"
        self.compare(stepped=True)
        if (skipped and clears) or self.by_contract:
            self.zero_grad(number, True)

    def zero_grad(self, number, to_none):
        number %= len(self.optimizers)
        is_open, names = self.is_open([number]), self.hand.owned[number]
        if is_open and len(self.hand.owners(names)) > 1:
            return
        optimizer = self.optimizers[number]
        optimizer.zero_grad(set_to_none=to_none or is_open)
        self.hand.zero_grad(number)
        for name, stepped in zip(names, optimizer.param_groups[0]["params"], strict=True):
            self._note_zeros(name, self.of(name), self.hand.on_weight(name))
            self._note_zeros(name, stepped, self.hand.kept)
        self.clipped &= bool(self.hand.kept)

    def _note_zeros(self, name, tensor, grads):
        if tensor.grad is not None:
            grads[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)

    def zero_model(self):
        self.model.zero_grad()
        self.hand.zero_model()

    def edit(self, name):
        """Of a gradient on a 16-bit weight that its master contains already: has no effect.

        Zeros that are written again would count as cleared.
        """
        grad = self.of(name).grad
        has_taken = name in self.hand.masters and name not in self.hand.new
        if has_taken and grad is not None and grad.any():
            grad.mul_(2.0)

    def compare(self, *, stepped=False):
        hand = self.hand
        if self.device == "meta" or (self.by_contract and not stepped):
            return
        scales = [{"loss_scale": one.value, "unskipped": one.clean} for one in hand.scales]
        assert list(amp.state_dict().values()) == scales
        for name in NAMES:
            assert equal(self.of(name).detach(), hand.weights[name]), name
            if not self.by_contract and (name in hand.new or name not in hand.masters):
                assert equal(self.of(name).grad, hand.on_weight(name).get(name)), name
        for optimizer, names in zip(self.optimizers, hand.owned, strict=True):
            for master, name in zip(optimizer.param_groups[0]["params"], names, strict=True):
                if name in hand.masters:
                    assert equal(master.detach(), hand.masters[name]), name
                    assert self.by_contract or equal(master.grad, hand.kept.get(name)), name

    def run(self, operations):
        try:
            for name, *arguments in operations:
                getattr(self, name)(*arguments)
                self.compare()
                assert self.blocks or not casting.thread.blocks  # casts are on again
        finally:
            for block, *_ in reversed(self.blocks):
                block.__exit__(KeyError, KeyError(), None)


def equal(left, right):
    """Whether both are the same bit for bit; no gradient is like zeros."""
    if left is None or right is None:
        return not any(t is not None and t.any() for t in (left, right))
    if left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or torch.equal(left.nan_to_num(1.5), right.nan_to_num(1.5))


def draw(seed, length, without=()):
    """A random sequence of operations."""
    chance = random.Random(seed)
    names = [name for name in OPERATIONS if name not in without]
    drawn = chance.choices(names, [OPERATIONS[name][0] for name in names], k=length)
    return [(name, *map(chance.choice, OPERATIONS[name][1:])) for name in drawn]


def error_of(function, operations):
    try:
        function(operations)
    except (AssertionError, RuntimeError) as error:
        return error
    return None


def check(function, name, count, length=60, without=()):
    """Call ``function`` with ``count`` sequences; fail with a shortest part of one that fails.

    ``name`` seeds them, so that each test has sequences of its own.
    """
    for seed in (f"{name} {number}" for number in range(count)):
        operations = draw(seed, length, without)
        if error_of(function, operations) is None:
            continue
        size = length // 2
        while size:
            for place in range(len(operations) - size, -1, -1):
                fewer = operations[:place] + operations[place + size :]
                if error_of(function, fewer) is not None:
                    operations = fewer
            size //= 2
        pytest.fail(f"seed {seed}: {operations}: {error_of(function, operations)}")
