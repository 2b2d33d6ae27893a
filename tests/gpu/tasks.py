"""What the tests of kernels have done in the other process; see worker.py."""

import contextlib
import dataclasses
import functools
from unittest import mock

import torch

from apex.catalogue.entry import DTYPES, Checked, Inputs, Op
from apex.catalogue.ops import OPS
from apex.commands.selftest import check, ops, optimizers, training
from apex.ops import _runtime
from tests.gpu.driver import gpu
from tests.gpu.network import losses
from tests.kernels.operations import BY_NAME, VARIANTS, made, operations

CPU = torch.device("cpu")
# Rows of one number, of an odd one, of a power of 2; more of them than a program has.
AWKWARD, MISPLACED, FEW = "awkward shapes", " at odd addresses", 3
SHAPES = ((1, 1), (1, 2), (2, 1), (3, 17), (1, 8192), (2, 70_000), (5, 1000), (5, 1024))


class Setting(check.Setting):
    """Kernels on tensors of the CPU, and not in Triton's interpreter."""

    interpreted = False


def written(name):
    """What an operation wrote, and the kernels that it launched."""
    torch.manual_seed(0)
    with gpu() as running:
        tensors = dict(operations())[name]()
    return [tensor.detach() for tensor in tensors], running.launched


def checks():
    """Checks of `apex selftest` by their names, and of ops at awkward shapes."""
    every = [*ops.checks(), *optimizers.checks(), *training.checks()]
    found = {f"{one.area}: {one.name}": one for one in every}
    for op in OPS:
        for rows, columns in SHAPES if op.operator else ():
            least = 4 if "rotary" in op.name else 1  # of which three quarters are rotated
            columns = columns * least if columns < FEW else columns + columns % least
            shape = op.of_matrix((rows, columns))
            small = dataclasses.replace(op, checked=Checked((shape,), ()))
            for end in ("", MISPLACED) if (rows, columns) == (5, 1000) else ("",):
                one = _Misplaced(**vars(small)) if end else small
                run = functools.partial(ops._op, one, DTYPES[op.dtypes[-1]], True)
                name = f"{op.name}, {rows} x {columns}{end}"
                found[f"{AWKWARD}: {name}"] = check.Check(AWKWARD, name, run)
    return found


class _Misplaced(Op):
    """An op whose tensors begin at odd addresses."""

    def inputs(self, *of):
        made = super().inputs(*of)
        return Inputs([_moved(leaf) for leaf in made.leaves], made.rest)


def _moved(x):
    """A copy with the same strides, an element behind the start of its memory."""
    return x.new_empty(x.numel() + 1)[1:].as_strided(x.shape, x.stride()).copy_(x)


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


def trained(level):
    """Losses of a training, those by definition, and the kernels that were launched."""
    with gpu(seed=2) as running:
        found = losses(level)
    with _runtime.use("reference"):
        return found, losses(level), running.launched


def counted(name, shape=(64, 1024), dtype="bf16", misplaced=False):
    """What forward and backward of an op move, or a step of an optimizer over one tensor."""
    if name in VARIANTS:
        param, grad = (torch.randn(shape, dtype=DTYPES[dtype]) for _ in range(2))
        if misplaced:
            param, grad = (x.new_empty(x.numel() + 1)[1:].view(shape) for x in (param, grad))
        param = torch.nn.Parameter(param)
        param.grad = grad
        work = made(name, [param]).step
    else:
        op = BY_NAME[name]
        leaves, rest = op.inputs(op.of_matrix(shape), DTYPES[dtype], CPU)
        leaves = [leaf.requires_grad_() for leaf in leaves]

        def work():
            y = op.ours(*leaves, *rest)
            torch.autograd.grad(y, leaves, torch.ones_like(y))

    with gpu(count=True) as running:
        work()
    return running.counters
