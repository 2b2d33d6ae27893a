"""Orthogonalised matrices by Newton-Schulz iterations: what Muon does to its momentum.

An iteration brings all singular values of a matrix nearer to 1, by matrix products alone. Matrices
of one shape are stacked and multiplied together. An iteration of an ``m x n`` matrix ``X`` with
``m <= n`` has two forms; multiplications are to the right::

    standard: G = X X^T;  X <- (a I + b G + c G^2) X                      2 m^2 n + m^3

    Gram:     G = X X^T;  Q = a I + b G + c G^2                           m^2 n + m^3
              R = Q G Q;  Q <- (a I + b R + c R^2) Q    each further one  4 m^3
              X <- Q X                                                    m^2 n

``Q`` is a polynomial of ``G``, so it is symmetric and all products commute: ``Q G Q`` is the ``G``
that the standard form would compute next. Only two products of a run have the long side.

The Gram form squares singular values. Where one is below the root of a rounding, ``G`` has only its
own rounding, and each iteration multiplies that by ``a^2``: 11.9 for Jordan's coefficients. Before
it is too large ``G`` is computed anew from ``X``, which has the small ones; see :data:`GROWN`.

Each iteration may have coefficients of its own: those of Polar Express are the best polynomials for
what is left after the iterations before, where the least singular value was 1e-3.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Polar Express: Amsel et al.,
arXiv:2505.16932, with the authors' factor of 1.01 for rounding. Gram form: Zhang et al.
2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/, there with ``R`` from the ``R``
before it, in float16, and begun anew after two of five steps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch


def most(device: torch.device) -> int:
    """Elements of the matrices that are multiplied together.

    On a CPU what stays near its caches: four layers of width 128 take 48 ms with 2**20, 56 with
    2**22, 90 with 2**16. Elsewhere launches cost more than that (not measured).
    """
    return 2**20 if device.type == "cpu" else 2**24


Quintic = tuple[float, float, float]  # a, b, c
JORDAN: Quintic = (3.4445, -4.7750, 2.0315)
_POLAR: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
POLAR_EXPRESS = (
    *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR),
    (1.875, -1.25, 0.375),
)
NAMED = {"quintic": (JORDAN,), "polar_express": POLAR_EXPRESS}


class Iteration(NamedTuple):
    """The numbers of Newton-Schulz.

    Attributes:
        coefficients: Of the first iterations; later ones have the last.
        eps: Least norm.
        steps: How many iterations.
        gram: Whether they take the Gram form.
    """

    coefficients: tuple[Quintic, ...]
    eps: float
    steps: int
    gram: bool = False

    def each(self) -> list[Quintic]:
        """The coefficients of each iteration."""
        last = len(self.coefficients) - 1
        return [self.coefficients[min(step, last)] for step in range(self.steps)]


# How far a rounding may grow in a Gram matrix before that is computed anew, whatever the dtype: at
# first, where the matrix has norm 1 and all but a few squares of singular values are far below 1,
# and later, where they are near 1. bfloat16 rounds by 2**-9. Of Jordan's five steps these make runs
# of three and two: the largest singular value is 1.21 in bfloat16 and 1.20 in float64 (64 x 256,
# condition 100). With two and three it is 1.39, with four and one 1.7, with all five in a run 5.7.
GROWN = (2.0**8, 2.0**4)


def runs(numbers: Iteration) -> list[int]:
    """How many iterations go over each Gram matrix; one each is the standard form."""
    found: list[int] = []
    growths = [a * a for a, _, _ in numbers.each()]
    while growths:
        most_grown, length = GROWN[bool(found)], 1
        while length < len(growths) and math.prod(growths[:length]) <= most_grown:
            length += 1
        found.append(length)
        del growths[:length]
    return found


def multiplications(rows: int, columns: int, lengths: Sequence[int]) -> int:
    """Of one matrix, iterated in runs of these lengths."""
    short, long = sorted((rows, columns))
    # Of the Gram matrix and the result; of the polynomial, and with each further iteration three.
    return sum(short**2 * (2 * long + (4 * length - 3) * short) for length in lengths)


def chosen_runs(rows: int, columns: int, numbers: Iteration) -> list[int]:
    """:func:`runs` if the Gram form is asked for and has fewer multiplications, else the others."""
    standard = [1] * numbers.steps
    if not numbers.gram:
        return standard
    return min((standard, runs(numbers)), key=lambda some: multiplications(rows, columns, some))


def newton_schulz(matrices: torch.Tensor, numbers: Iteration) -> torch.Tensor:
    """Bring the singular values of matrices near to 1, those that are 0 excepted.

    Args:
        matrices: ``(rows, columns)`` or ``(batch, rows, columns)``; products are in their dtype.
        numbers: Of the iteration.

    Returns:
        As ``matrices``; with the coefficients of Jordan et al. singular values of 0.7 to 1.2.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=numbers.eps)
    coefficients = numbers.each()
    for length in chosen_runs(x.size(-2), x.size(-1), numbers):
        x = _advanced(x, coefficients[:length])
        del coefficients[:length]
    return x.mT if is_tall else x


def _advanced(x: torch.Tensor, coefficients: Sequence[Quintic]) -> torch.Tensor:
    """Matrices, not tall, after iterations with these coefficients over one Gram matrix."""
    (a, b, c), *others = coefficients
    plus = torch.addmm if x.dim() == 2 else torch.baddbmm
    gram = x @ x.mT
    q = plus(gram, gram, gram, beta=b, alpha=c)
    if not others:
        return plus(x, q, x, beta=a)
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    for a, b, c in others:
        # Of Q as it is rounded: so the next polynomial corrects its roundings.
        r = q @ gram @ q
        q = plus(q, plus(r, r, r, beta=b, alpha=c), q, beta=a)
    return q @ x


def as_matrices(tensor: torch.Tensor, flatten: bool, split: int = 1) -> torch.Tensor:
    """A parameter as ``(batch, rows, columns)``: 2-D, a stack, or with ``flatten`` from dim 1.

    Each matrix is ``split`` blocks of as many rows.
    """
    tensor = tensor.flatten(1) if flatten else tensor
    *outer, rows, columns = tensor.shape
    return tensor.reshape(math.prod(outer) * split, rows // split, columns)


def stacks(kinds: Sequence[Hashable], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which positions are stacked: those of one kind, together ``limit`` elements or one tensor.

    It depends on the parameters alone and not on how many ranks share them: a batched product may
    round otherwise for another size of the batch.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        stack, total = filling.get(kind, ([], 0))
        if not stack or total + size > limit:
            found.append(stack := [])
            total = 0
        stack.append(number)
        filling[kind] = stack, total + size
    return found


def orthogonalized(
    directions: Sequence[torch.Tensor], numbers: Iteration, flatten: bool, split: int = 1
) -> list[torch.Tensor]:
    """Orthogonalise tensors whose matrices have one shape and dtype, as one stack."""
    each = [as_matrices(direction, flatten, split) for direction in directions]
    if not any(map(torch.Tensor.numel, each)):
        return [*directions]
    is_one = len(each) == 1 and len(each[0]) == 1
    if is_one and (flatten or directions[0].dim() == 2):
        # CPU: as a batch of one it takes 1.15 (768 x 768) to 2 times as long (384 x 384).
        update = newton_schulz(each[0][0].contiguous(), numbers)
        return [update.contiguous().view(directions[0].shape)]
    stack = torch.cat(each) if len(each) > 1 else each[0].contiguous()
    length = max(1, most(stack.device) // stack[0].numel())
    done = [newton_schulz(part, numbers) for part in torch.split(stack, length)]
    updates = torch.cat(done) if len(done) > 1 else done[0]
    parts = torch.split(updates.contiguous(), [len(one) for one in each])
    return [part.view(x.shape) for part, x in zip(parts, directions, strict=True)]
