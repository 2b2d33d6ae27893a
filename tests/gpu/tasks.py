"""What the tests of kernels have done in the other process; see worker.py."""

import contextlib
import dataclasses
from unittest import mock

import torch

from apex.bench.selftest import check, ops, optimizers, training
from tests.gpu.driver import gpu
from tests.kernels.operations import operations

CPU = torch.device("cpu")


class Setting(check.Setting):
    """Kernels on tensors of the CPU, and not in Triton's interpreter."""

    interpreted = False


def written(name):
    """What an operation wrote, and how often each kernel was launched."""
    torch.manual_seed(0)
    with gpu() as running:
        tensors = dict(operations())[name]()
    return [tensor.detach() for tensor in tensors], running.launched


def checks():
    """Checks of `apex selftest` by their names."""
    every = [*ops.checks(), *optimizers.checks(), *training.checks()]
    return {f"{one.area}: {one.name}": one for one in every}


def checked(name, seed, misplaced=False):
    """Carry out a check; with ``misplaced`` over lists of `_misplaced` tensors."""
    places = _misplaced() if misplaced else contextlib.nullcontext()
    with gpu(seed=seed) as running, places:
        result = check.carry_out(checks()[name], Setting(CPU, "kernels"))
    return dataclasses.replace(result, seconds=0.0), running.launched


@contextlib.contextmanager
def _misplaced():
    """Put tensors of lists where no allocator does: at odd addresses, or with gaps."""

    def moved(tensors):
        for number, x in enumerate(tensors):
            if number % 3 == 0:
                yield x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
            else:
                yield x if number % 3 == 1 else x.new_empty(*x.shape, 2)[..., 0].copy_(x)

    tensors, give = optimizers.tensors, optimizers.give
    with (
        mock.patch.object(optimizers, "tensors", lambda *of: [*moved(tensors(*of))]),
        mock.patch.object(optimizers, "give", lambda params, of: give(params, [*moved(of)])),
    ):
        yield
