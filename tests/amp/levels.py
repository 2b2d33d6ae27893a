"""The levels, and what tests of one level need."""

import math

import torch

from apex import amp
from tests.amp.training import scaled_backward

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {"O1": torch.float16, "O4": torch.bfloat16}  # levels that cast functions, and to what
MODEL = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}  # ... that cast the model


def cast(level, model, **options):
    """A model without optimizer, initialised."""
    return amp.initialize(model, opt_level=level, verbosity=0, **options)


def train_step(model, optimizer, x):
    scaled_backward(model(x).float().square().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def poison(model):
    """Write an inf into the model's first gradient."""
    next(model.parameters()).grad.view(-1)[0] = math.inf


def product():
    """The type that a matrix product has here."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def assert_same(left, right):
    """Assert that two sequences of tensors have equal types and bits."""
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
