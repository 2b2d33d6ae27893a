"""Trainings whose step is captured, and what is seen of them: for tests of amp.capture."""

import copy

import torch
from torch import nn

from apex import amp, optimizers
from apex.catalogue.optimizers import makers
from tests.amp.training import started

STATIC = 64.0
# `eps` is one that float16 holds.
MAKERS = {
    **makers(lr=2**-7, eps=1e-4),
    "FusedAdam_capturable": lambda p: optimizers.FusedAdam(p, lr=2**-7, capturable=True),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=2**-7),
    "torch_SGD": lambda p: torch.optim.SGD(p, lr=2**-7, momentum=0.9, fused=True),
    "torch_AdamW": lambda p: torch.optim.AdamW(p, lr=2**-7, eps=1e-4, fused=True, capturable=True),
}
STEPS = 24
OVERFLOWS = (1, 6, 7, 15)  # in the warm-up, twice in a row in replays, after an odd batch
ODD = 14  # a batch of another size
RATES = {5: 2**-8, 10: 2**-9, 11: 2**-7}  # set before these steps


def batch(number, *, overflows):
    rows = 3 if number == ODD else 6
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))
    if overflows and number in OVERFLOWS:
        x[0, 0] = float("inf")
    return x


class Program:
    """A training whose function can be captured; ``busy`` with clipping, two passes and dropout."""

    def __init__(self, level, kind, scale=STATIC, *, busy=False, **options):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.25 * busy), nn.Linear(16, 4)]
        options = {"growth_interval": 3, "loss_scale": scale, "init_scale": 256.0, **options}
        self.busy, self.dynamic = busy, scale == "dynamic"
        self.model, self.optimizer = started(level, nn.Sequential(*layers), kind, **options)

    def step(self, x):
        self.optimizer.zero_grad()
        for turn in range(1 + self.busy):
            loss = self.model(x).float().square().mean() * (1 + turn)
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        if self.busy:
            amp.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()
        return {"loss": loss, "none": None}

    def seen(self):
        state = copy.deepcopy((self.optimizer.state_dict(), self.model.state_dict()))
        return amp.state_dict(), amp.outcome(self.optimizer).numbers(), state

    def rate(self, value):
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


def leaves(value):
    """Numbers and tensors; a count of steps is one number, on the host or the device."""
    found = torch.utils._pytree.tree_leaves(value)
    return [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in found]


def equal(first, second):
    pairs = list(zip(leaves(first), leaves(second), strict=True))
    return [
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y or (x != x and y != y)
        for x, y in pairs
    ] == [True] * len(pairs)


def trained(program, step, steps=STEPS, between=lambda number: None):
    """Take steps; return losses and what was seen after some of them."""
    found = []
    for number in range(steps):
        between(number)
        if number in RATES:
            program.rate(RATES[number])
        loss = step(batch(number, overflows=program.dynamic))["loss"]
        found.append(loss.item())
        if number % 4 == 3 or number == steps - 1:
            found.append(program.seen())
    amp.reset()
    return found


def repeat(work, arguments):
    for argument in arguments:
        work(argument)


def both_ways(*arguments, steps=STEPS, **options):
    """What is seen in steps without a graph, in captured ones, and the captured step."""
    program = Program(*arguments, **options)
    single = trained(program, program.step, steps)
    program = Program(*arguments, **options)
    step = amp.capture(program.step)
    return single, trained(program, step, steps), step
