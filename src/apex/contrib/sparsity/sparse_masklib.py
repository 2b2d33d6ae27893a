"""Masks of n:m structured sparsity: of m consecutive weights at most n are kept.

NVIDIA's sparse tensor cores multiply 2:4 matrices: of each 4 consecutive entries of a row 2 are
zero (Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021). The masks keep the entries
of largest magnitude. All of it is tensor operations on the weight's device.

==================  ============================================================================
pattern             what is kept
==================  ============================================================================
``m4n2_1d``         the 2 largest of each 4 in a row
``m4n2_2d_best``    of each 4x4 block 2 in each row and column: the largest sum of the 90 choices
``m4n2_2d_greedy``  of each 4x4 block at most 2 in each row and column, the largest first
==================  ============================================================================

A 2d mask is also one of the transposed matrix, which the backward pass multiplies by. Where
magnitudes are equal, the entry of the lower column is kept (2d: the first in row-major order; with
``best`` the first pattern of :func:`compute_valid_2d_patterns`). nan counts as the largest. Sizes
that are no multiple of m are padded with zeros for the choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = [
    "compute_valid_1d_patterns",
    "compute_valid_2d_patterns",
    "create_mask",
    "fill",
    "m4n2_1d",
    "m4n2_2d_best",
    "m4n2_2d_greedy",
    "mn_1d_best",
    "mn_2d_best",
    "mn_2d_greedy",
    "reshape_1d",
]

_BLOCKS_AT_ONCE = 2**16  # of 4x4: their products with 90 patterns take 24 MB


def fill(x: torch.Tensor) -> float:
    """Return the share of entries of ``x`` that are not zero, 0.0 to 1.0.

    Example:
        >>> fill(torch.tensor([0.0, 2.0, 0.0, 1.0]))
        0.5
    """
    return float(torch.count_nonzero(x)) / x.numel()


def reshape_1d(matrix: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Size]:
    """Cut the rows of a matrix into groups of ``m``, padded with zeros at the end of a row.

    Args:
        matrix: ``(rows, columns)``.
        m: Entries of a group.

    Returns:
        The groups ``(rows * groups, m)``, and the shape of the padded matrix.
    """
    _check_matrix("reshape_1d", matrix)
    padded = F.pad(matrix, (0, -matrix.shape[1] % m))
    return padded.reshape(-1, m), padded.shape


def compute_valid_1d_patterns(m: int, n: int) -> torch.Tensor:
    """Return the ways to keep ``n`` of ``m``: ``(m choose n, m)``, float32, first ones first."""
    patterns = torch.zeros(math.comb(m, n), m)
    for row, kept in zip(patterns, itertools.combinations(range(m), n), strict=True):
        row[list(kept)] = 1
    return patterns


def compute_valid_2d_patterns(m: int, n: int) -> torch.Tensor:
    """Return the ways to keep ``n`` in each row and column of ``m`` x ``m``, float32 0 and 1.

    Returns:
        ``(count, m, m)``: 90 for 2:4. In the order of :func:`compute_valid_1d_patterns`, row by
        row. Counts grow fast: m = 6 has 297,200 for n = 3.
    """
    rows = [tuple(map(int, row)) for row in compute_valid_1d_patterns(m, n).tolist()]
    found: list[tuple[tuple[int, ...], ...]] = [()]
    for _ in range(m):
        longer = ((*start, row) for start in found for row in rows)
        found = [some for some in longer if max(map(sum, zip(*some, strict=True))) <= n]
    return torch.tensor(found, dtype=torch.float32)


def mn_1d_best(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Keep the ``n`` largest of each ``m`` consecutive entries of a row.

    Args:
        matrix: ``(rows, columns)``.
        m: Entries of a group.
        n: How many of them are kept.

    Returns:
        The mask, int32 0 and 1, of the matrix's shape.
    """
    groups, shape = reshape_1d(matrix.detach(), m)
    # How many others of its group come before each entry. Comparing all pairs takes 0.2 times the
    # time of torch.sort (4096x4096, one CPU thread), and sums, as of patterns, would round.
    columns = _magnitudes(groups).t().contiguous()
    before = torch.zeros(columns.shape, dtype=torch.int16, device=matrix.device)
    for left, right in itertools.combinations(range(m), 2):
        is_larger = columns[right] > columns[left]
        before[left] += is_larger
        before[right] += ~is_larger
    kept = (before < n).t().reshape(shape)
    return kept[:, : matrix.shape[1]].to(torch.int32)


def mn_2d_greedy(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Keep at most ``n`` in each row and column of each block, entry by entry, the largest first.

    An entry is left out where its row or column has ``n`` already, so some may have fewer.
    Arguments and result as :func:`mn_1d_best`; blocks are ``m`` x ``m``.
    """
    blocks = _magnitudes(_blocks(matrix, m))
    kept = torch.zeros(blocks.shape, dtype=torch.int32, device=blocks.device)
    in_row, in_column = (kept.new_zeros(len(blocks), m) for _ in range(2))
    for entry in blocks.argsort(dim=1, descending=True, stable=True).split(1, dim=1):
        row, column = entry // m, entry % m
        rows, columns = in_row.gather(1, row), in_column.gather(1, column)
        is_kept = ((rows < n) & (columns < n)).int()
        kept.scatter_(1, entry, is_kept)
        in_row.scatter_(1, row, rows + is_kept)
        in_column.scatter_(1, column, columns + is_kept)
    return _from_blocks(kept, matrix, m)


def mn_2d_best(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Keep ``n`` in each row and column of each block: those whose magnitudes have the largest sum.

    All patterns are compared; sums run in float32 (float64 for float64). Arguments and result as
    :func:`mn_1d_best`; blocks are ``m`` x ``m``.
    """
    blocks = _magnitudes(_blocks(matrix, m))
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    blocks = blocks.clamp(max=torch.finfo(blocks.dtype).max / (n * m))  # 0 * inf would be nan
    patterns = compute_valid_2d_patterns(m, n).flatten(1).to(blocks)
    best = [(part @ patterns.t()).argmax(dim=1) for part in blocks.split(_BLOCKS_AT_ONCE)]
    return _from_blocks(patterns[torch.cat(best)], matrix, m).to(torch.int32)


def m4n2_1d(mat: torch.Tensor, density: float) -> torch.Tensor:
    """Return :func:`mn_1d_best` of 2:4; ``density`` must be 0.5."""
    _check_density(density)
    return mn_1d_best(mat, 4, 2)


def m4n2_2d_greedy(mat: torch.Tensor, density: float) -> torch.Tensor:
    """Return :func:`mn_2d_greedy` of 2:4; ``density`` must be 0.5."""
    _check_density(density)
    return mn_2d_greedy(mat, 4, 2)


def m4n2_2d_best(mat: torch.Tensor, density: float) -> torch.Tensor:
    """Return :func:`mn_2d_best` of 2:4; ``density`` must be 0.5."""
    _check_density(density)
    return mn_2d_best(mat, 4, 2)


_PATTERNS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "m4n2_1d": m4n2_1d,
    "m4n2_2d_best": m4n2_2d_best,
    "m4n2_2d_greedy": m4n2_2d_greedy,
}


def create_mask(
    tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5
) -> torch.Tensor:
    """Return the 2:4 mask of a weight, along its input channels.

    Args:
        tensor: A weight: ``(entries,)``; ``(out, in)``; of convolutions ``(out, in, *kernel)``,
            of which each position of the kernel is a matrix ``(out, in)``.
        pattern: ``"m4n2_1d"``, ``"m4n2_2d_best"`` or ``"m4n2_2d_greedy"``.
        density: The share that is kept; 0.5, as in the original, which did not look at it.

    Returns:
        0 and 1, of the tensor's shape, dtype and device.

    Raises:
        ValueError: Another pattern or density, or a tensor without dimensions.

    Example:
        >>> create_mask(torch.tensor([[0.1, -0.4, 0.3, 0.2]]))
        tensor([[0., 1., 1., 0.]])
    """
    if pattern not in _PATTERNS:
        raise ValueError(
            f"create_mask: pattern was {pattern!r}; allowed are {', '.join(_PATTERNS)}."
        )
    if tensor.dim() == 0:
        raise ValueError("create_mask: the tensor has no dimensions; a weight has one or more.")
    weight = tensor.detach()
    if tensor.dim() == 1:
        weight = weight[None]
    else:
        weight = weight.movedim((0, 1), (-2, -1))  # (*kernel, out, in)
    matrix = weight.reshape(math.prod(weight.shape[:-1]), weight.shape[-1])
    mask = _PATTERNS[pattern](matrix, density).view(weight.shape)
    mask = mask[0] if tensor.dim() == 1 else mask.movedim((-2, -1), (0, 1))
    return mask.to(tensor.dtype, memory_format=torch.contiguous_format)


def _check_matrix(function: str, matrix: torch.Tensor) -> None:
    if matrix.dim() != 2:
        raise ValueError(
            f"{function}: the tensor has the shape {list(matrix.shape)}; it must be a matrix. "
            "create_mask takes others."
        )


def _check_density(density: float) -> None:
    if density != 0.5:
        raise ValueError(f"density was {density}; masks that keep 2 of 4 have 0.5.")


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    values = values.abs()
    return (
        values.nan_to_num_(nan=math.inf, posinf=math.inf) if values.is_floating_point() else values
    )


def _blocks(matrix: torch.Tensor, m: int) -> torch.Tensor:
    """The blocks of ``m`` x ``m``, each a row: ``(blocks, m * m)``, padded with zeros."""
    _check_matrix("a 2d mask", matrix)
    rows, columns = matrix.shape
    padded = F.pad(matrix.detach(), (0, -columns % m, 0, -rows % m))
    return padded.unflatten(1, (-1, m)).unflatten(0, (-1, m)).movedim(1, 2).reshape(-1, m * m)


def _from_blocks(blocks: torch.Tensor, like: torch.Tensor, m: int) -> torch.Tensor:
    """The matrix of the shape of ``like`` whose blocks are given."""
    down, across = (-(-size // m) for size in like.shape)
    whole = blocks.view(down, across, m, m).movedim(2, 1).reshape(down * m, across * m)
    return whole[: like.shape[0], : like.shape[1]]
