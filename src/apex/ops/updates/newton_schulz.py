"""Orthogonalised matrices by Newton-Schulz iterations: what Muon does to its momentum.

An iteration brings all singular values of a matrix nearer to 1, by matrix products alone. Matrices
of one shape are stacked and multiplied together.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch


def most(device: torch.device) -> int:
    """Elements of the matrices that are multiplied together.

    On a CPU what stays near its caches: four layers of width 128 take 48 ms with 2**20, 56 with
    2**22, 90 with 2**16. Elsewhere launches cost more than that (not measured).
    """
    return 2**20 if device.type == "cpu" else 2**24


class Iteration(NamedTuple):
    """The numbers of Newton-Schulz: coefficients, least norm, steps."""

    coefficients: tuple[float, float, float]
    eps: float
    steps: int


def newton_schulz(matrices: torch.Tensor, numbers: Iteration) -> torch.Tensor:
    """Bring the singular values of matrices near to 1, those that are 0 excepted.

    Args:
        matrices: ``(rows, columns)`` or ``(batch, rows, columns)``; products are in their dtype.
        numbers: Of the iteration.

    Returns:
        As ``matrices``; with the coefficients of Jordan et al. singular values of 0.7 to 1.2.
    """
    a, b, c = numbers.coefficients
    plus = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=numbers.eps)
    for _ in range(numbers.steps):
        gram = x @ x.mT
        x = plus(x, plus(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def as_matrices(tensor: torch.Tensor, flatten: bool) -> torch.Tensor:
    """A parameter as ``(batch, rows, columns)``: 2-D, a stack, or with ``flatten`` from dim 1."""
    tensor = tensor.flatten(1) if flatten else tensor
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


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
    directions: Sequence[torch.Tensor], numbers: Iteration, flatten: bool
) -> list[torch.Tensor]:
    """Orthogonalise tensors whose matrices have one shape and dtype, as one stack."""
    each = [as_matrices(direction, flatten) for direction in directions]
    if not any(map(torch.Tensor.numel, each)):
        return [*directions]
    if len(each) == 1 and len(each[0]) == 1 and (flatten or directions[0].dim() == 2):
        # CPU: as a batch of one it takes 1.15 (768 x 768) to 2 times as long (384 x 384).
        update = newton_schulz(each[0][0].contiguous(), numbers)
        return [update.contiguous().view(directions[0].shape)]
    stack = torch.cat(each) if len(each) > 1 else each[0].contiguous()
    length = max(1, most(stack.device) // stack[0].numel())
    done = [newton_schulz(part, numbers) for part in torch.split(stack, length)]
    updates = torch.cat(done) if len(done) > 1 else done[0]
    parts = torch.split(updates.contiguous(), [len(one) for one in each])
    return [part.view(x.shape) for part, x in zip(parts, directions, strict=True)]
