"""Muon: momentum whose matrices are orthogonalised, in three parts.

    g = factor * grad
    buffer    = momentum * buffer + (1 - momentum) * g
    direction = momentum * buffer + (1 - momentum) * g      (nesterov; else the buffer)
    update    = Newton-Schulz(direction)                    (near to U V^T of its U S V^T)
    param -= lr * (weight_decay * param + adjustment * update)

The first and the last part are elementwise: one launch over lists of tensors each, and on shards
each rank computes them on its own. The middle, :mod:`apex.ops.updates.newton_schulz`, needs whole
matrices. Where a step is skipped on a device it computes what nobody reads.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``"match_rms_adamw"``: Liu
et al., "Muon is Scalable for LLM Training", arXiv:2502.16982. The numbers are those of
``torch.optim.Muon``.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from apex.ops.lists.multi_tensor import WIDENED, Update, Values, run
from apex.ops.lists.storage import StepOptions, run_stored
from apex.ops.lists.tensor_lists import Scalar, TensorList
from apex.ops.updates.newton_schulz import NAMED, Iteration

# What the parts take: "rest" is 1 - momentum, "pull" the same or 0 without Nesterov's variant;
# "decay" is lr * weight_decay, "rate" lr * adjustment.
AverageScalars = namedtuple("AverageScalars", "factor rest pull")
MoveScalars = namedtuple("MoveScalars", "decay rate")


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


# As the package gram-newton-schulz calls them.
ALGORITHMS = ("standard_newton_schulz", "gram_newton_schulz")

AVERAGE = Update(average, "muon:muon_average", AverageScalars)
MOVE = Update(move, "muon:muon_move", MoveScalars)


@dataclass
class Muon:
    """The hyperparameters, as :class:`apex.optimizers.FusedMuon` has them."""

    lr: Scalar
    weight_decay: Scalar
    momentum: float
    nesterov: bool
    ns_coefficients: str | tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    flatten: bool
    split: int = 1
    iteration_dtype: torch.dtype = torch.bfloat16
    ns_algorithm: str = ALGORITHMS[0]

    @property
    def iteration(self) -> Iteration:
        """The numbers of Newton-Schulz."""
        given = self.ns_coefficients
        each = NAMED[given] if isinstance(given, str) else ((given[0], given[1], given[2]),)
        return Iteration(each, self.eps, self.ns_steps, self.ns_algorithm == ALGORITHMS[1])

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


def begin_(columns: Sequence[TensorList], hyper: Muon, options: StepOptions) -> list[torch.Tensor]:
    """Update the buffers, and return the directions; of gradients, weights, buffers."""
    grads, params, buffers = columns
    dtype = hyper.direction_dtype(params[0].dtype)
    directions = [torch.empty_like(param, dtype=dtype) for param in params]
    stores = ((1, 0), (2, 1), (0, 2)) if options.write_grads else ((1, 0), (2, 1))
    rest = 1 - hyper.momentum
    scalars = AverageScalars(options.factor, rest, rest if hyper.nesterov else 0.0)
    codec = replace(
        WIDENED, quantized=tuple(one._replace(column=1) for one in options.quantized),
        dither=options.dither and options.dither._replace(columns=(1,)),
    )  # fmt: skip
    run(
        AVERAGE, [grads, buffers, directions], stores, scalars, noop=options.noop, codec=codec,
        dense=options.dense,
    )  # fmt: skip
    return directions


def finish_(
    columns: Sequence[TensorList],
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
        run_stored(
            MOVE, some, scalars,
            options._replace(write_grads=False, extra=extra, quantized=(), dither=None),
        )  # fmt: skip
