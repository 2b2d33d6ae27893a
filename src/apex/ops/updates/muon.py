"""Muon: momentum whose matrices are orthogonalised, in three parts.

    g = factor * grad
    buffer    = momentum * buffer + (1 - momentum) * g
    direction = momentum * buffer + (1 - momentum) * g      (nesterov; else the buffer)
    update    = Newton-Schulz(direction)                    (near to U V^T of its U S V^T)
    param -= lr * (weight_decay * param + adjustment * update)

The first and the last part are elementwise: one launch over lists of tensors each, and on shards
each rank computes them on its own. The middle needs whole matrices. Those of one shape are stacked
and multiplied together: see :func:`stacks`. Where a step is skipped on a device the middle computes
what nobody reads.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``"match_rms_adamw"``: Liu
et al., "Muon is Scalable for LLM Training", arXiv:2502.16982. The numbers are those of
``torch.optim.Muon``.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from apex.ops.lists.columns import Column, Scalar
from apex.ops.lists.multi_tensor import Update, Values, run
from apex.ops.lists.storage import StepOptions, run_stored

# What the parts take: "rest" is 1 - momentum, "pull" the same or 0 without Nesterov's variant;
# "decay" is lr * weight_decay, "rate" lr * adjustment.
AverageScalars = namedtuple("AverageScalars", "factor rest pull")
MoveScalars = namedtuple("MoveScalars", "decay rate")

# Elements of the matrices that are multiplied together.
STACK = 2**22


def average(values: Values, s: AverageScalars) -> Values:
    """Compute the first part."""
    grad, buffer = values[0] * s.factor, values[1]
    buffer = buffer + s.rest * (grad - buffer)
    direction = buffer - s.pull * (buffer - grad) if s.pull else buffer
    return buffer, direction, grad


def move(values: Values, s: MoveScalars) -> Values:
    """Compute the last part."""
    update, param = values[:2]
    return param - (s.decay * param + s.rate * update), update


AVERAGE = Update(average, "muon:muon_average", AverageScalars)
MOVE = Update(move, "muon:muon_move", MoveScalars)


class Iteration(NamedTuple):
    """The numbers of Newton-Schulz: coefficients, least norm, steps."""

    coefficients: tuple[float, float, float]
    eps: float
    steps: int


@dataclass
class Muon:
    """The hyperparameters, as :class:`apex.optimizers.FusedMuon` has them."""

    lr: Scalar
    weight_decay: Scalar
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    flatten: bool
    iteration_dtype: torch.dtype = torch.bfloat16

    @property
    def iteration(self) -> Iteration:
        """The numbers of Newton-Schulz."""
        a, b, c = self.ns_coefficients
        return Iteration((a, b, c), self.eps, self.ns_steps)

    def direction_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the direction, and of the products, for a parameter of ``dtype``."""
        if self.iteration_dtype == torch.bfloat16:
            return torch.bfloat16
        return torch.promote_types(self.iteration_dtype, dtype)

    def adjustment(self, rows: int, columns: int) -> float:
        """What the learning rate of a matrix is multiplied by."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / max(1, columns)))


def newton_schulz(matrices: torch.Tensor, numbers: Iteration) -> torch.Tensor:
    """Bring the singular values of matrices near to 1, those that are 0 excepted.

    Args:
        matrices: ``(batch, rows, columns)``; products are computed in their dtype.
        numbers: Of the iteration.

    Returns:
        As ``matrices``; with the coefficients of Jordan et al. singular values of 0.7 to 1.2.
    """
    a, b, c = numbers.coefficients
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=numbers.eps)
    for _ in range(numbers.steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def as_matrices(tensor: torch.Tensor, flatten: bool) -> torch.Tensor:
    """A parameter as ``(batch, rows, columns)``: 2-D, a stack, or with ``flatten`` from dim 1."""
    tensor = tensor.flatten(1) if flatten else tensor
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def stacks(kinds: Sequence[Hashable], sizes: Sequence[int]) -> list[list[int]]:
    """Which positions are stacked: those of one kind, together ``STACK`` elements or one tensor.

    It depends on the parameters alone and not on how many ranks share them: a batched product may
    round otherwise for another size of the batch.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        stack, total = filling.get(kind, ([], 0))
        if not stack or total + size > STACK:
            found.append(stack := [])
            total = 0
        stack.append(number)
        filling[kind] = stack, total + size
    return found


def orthogonalized(
    directions: Sequence[torch.Tensor], numbers: Iteration, flatten: bool
) -> list[torch.Tensor]:
    """Orthogonalise tensors whose matrices have one shape and dtype, as one stack."""
    each = [as_matrices(direction, flatten) for direction in directions]
    if not each or not each[0][0:1].numel():
        return [*directions]
    stack = torch.cat(each) if len(each) > 1 else each[0]
    most = max(1, STACK // stack[0].numel())
    done = [newton_schulz(part, numbers) for part in torch.split(stack, most)]
    updates = torch.cat(done) if len(done) > 1 else done[0]
    parts = torch.split(updates.contiguous(), [len(one) for one in each])
    return [part.view(x.shape) for part, x in zip(parts, directions, strict=True)]


def begin_(columns: Sequence[Column], hyper: Muon, options: StepOptions) -> list[torch.Tensor]:
    """Update the buffers, and return the directions; of gradients, weights, buffers."""
    grads, params, buffers = columns
    dtype = hyper.direction_dtype(params[0].dtype)
    directions = [torch.empty_like(param, dtype=dtype) for param in params]
    stores = ((1, 0), (2, 1), (0, 2)) if options.write_grads else ((1, 0), (2, 1))
    rest = 1 - hyper.momentum
    scalars = AverageScalars(options.factor, rest, rest if hyper.nesterov else 0.0)
    run(
        AVERAGE, [grads, buffers, directions], stores, scalars, noop=options.noop,
        dense=options.dense,
    )  # fmt: skip
    return directions


def finish_(
    columns: Sequence[Column],
    updates: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, int]],
    hyper: Muon,
    options: StepOptions,
) -> None:
    """Move the weights by the updates of whole matrices of these shapes."""
    by_rate: dict[float, list[int]] = {}
    for number, shape in enumerate(shapes):
        by_rate.setdefault(hyper.adjustment(*shape), []).append(number)
    for adjustment, positions in by_rate.items():
        some = [[column[n] for n in positions] for column in (updates, columns[1])]
        extra = None if options.extra is None else [options.extra[n] for n in positions]
        scalars = MoveScalars(hyper.lr * hyper.weight_decay, hyper.lr * adjustment)
        run_stored(MOVE, some, scalars, options._replace(write_grads=False, extra=extra))
