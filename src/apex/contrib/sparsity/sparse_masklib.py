"""Masks of n:m structured sparsity: of m consecutive weights at most n are kept.

Sparse tensor cores multiply 2:4 matrices: of each 4 consecutive entries of a row 2 are zero
(Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021). Masks keep the largest
magnitudes: ``m4n2_1d`` the 2 largest of each 4 in a row; of each 4x4 block ``m4n2_2d_best`` keeps 2
in each row and column, with the largest sum of 90 choices, and ``m4n2_2d_greedy`` at most 2, the
largest first. A 2d mask is one of the transposed matrix too, which the backward pass multiplies by.

Of equal magnitudes the first in the row, or of the block in row-major order, is kept; of equal sums
the first of :func:`compute_valid_2d_patterns`. nan counts as the largest. Rows (and columns, for
2d) are padded with zeros to a multiple of m. All of it runs on the weight's device.
"""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

_BLOCKS_AT_ONCE = 2**16  # of 4x4: their products with 90 patterns take 24 MB


def fill(x: torch.Tensor) -> float:
    """Return the share of entries of ``x`` that are not zero, 0.0 to 1.0."""
    return float(torch.count_nonzero(x)) / x.numel()


def reshape_1d(matrix: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Size]:
    """Cut rows into groups of ``m``; return ``(groups, m)`` and the shape of the padded matrix."""
    if matrix.dim() != 2:
        raise ValueError(
            f"the tensor has the shape {list(matrix.shape)}; it must be a matrix. For tensors of "
            "other ranks use create_mask."
        )
    padded = F.pad(matrix, (0, -matrix.shape[1] % m))
    return padded.reshape(-1, m), padded.shape


def compute_valid_1d_patterns(m: int, n: int) -> torch.Tensor:
    """Return the ways to keep ``n`` of ``m``: ``(m choose n, m)``, float32, first ones first."""
    kept = list(itertools.combinations(range(m), n))
    columns = torch.tensor(kept, dtype=torch.int64, device="cpu")
    zeros = torch.zeros(len(kept), m, dtype=torch.float32, device="cpu")
    return zeros.scatter_(1, columns, 1.0)


def compute_valid_2d_patterns(m: int, n: int) -> torch.Tensor:
    """Return the ways to keep ``n`` in each row and column of ``m`` x ``m``, float32 0 and 1.

    Returns:
        ``(count, m, m)``, ordered by rows as :func:`compute_valid_1d_patterns`: 90 for 2:4, and
        297,200 for 3:6.
    """
    rows = [tuple(map(int, row)) for row in compute_valid_1d_patterns(m, n).tolist()]
    found: list[tuple[tuple[int, ...], ...]] = [()]
    for _ in range(m):
        longer = ((*start, row) for start in found for row in rows)
        found = [some for some in longer if max(map(sum, zip(*some, strict=True))) <= n]
    return torch.tensor(found, dtype=torch.float32, device="cpu")


def mn_1d_best(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Return the mask, int32, of the ``n`` largest of each ``m`` in a row of ``matrix``."""
    groups, shape = reshape_1d(matrix.detach(), m)
    # How many others come before each entry. 0.2 times the time of torch.sort (4096x4096, one CPU
    # thread); comparing the sums of patterns would round.
    columns = _magnitudes(groups).t().contiguous()
    before = torch.zeros(columns.shape, dtype=torch.int16, device=matrix.device)
    for left, right in itertools.combinations(range(m), 2):
        is_larger = columns[right] > columns[left]
        before[left] += is_larger
        before[right] += ~is_larger
    return (before < n).t().reshape(shape)[:, : matrix.shape[1]].to(torch.int32)


def mn_2d_greedy(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Return the mask, int32, of at most ``n`` in each row and column of ``m`` x ``m``.

    An entry is left out where its row or column has ``n`` larger ones, so some have fewer.
    """
    blocks = _blocks(matrix, m)
    kept = torch.zeros(blocks.shape, dtype=torch.int32, device=blocks.device)
    in_row, in_column = (kept.new_zeros(len(blocks), m) for _ in range(2))
    for entry in blocks.argsort(dim=1, descending=True, stable=True).t():
        entry = entry[:, None]
        row, column = entry // m, entry % m
        rows, columns = in_row.gather(1, row), in_column.gather(1, column)
        is_kept = ((rows < n) & (columns < n)).int()
        kept.scatter_(1, entry, is_kept)
        in_row.scatter_(1, row, rows + is_kept)
        in_column.scatter_(1, column, columns + is_kept)
    return _from_blocks(kept, matrix, m)


def mn_2d_best(matrix: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """Return the mask, int32, of ``n`` in each row and column of ``m`` x ``m``, the largest sum.

    Sums run in float32, of float64 in float64.
    """
    blocks = _blocks(matrix, m)
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    blocks = blocks.clamp(max=torch.finfo(blocks.dtype).max / (n * m))  # 0 * inf would be nan
    patterns = compute_valid_2d_patterns(m, n).flatten(1).to(blocks)
    parts = torch.split(blocks, _BLOCKS_AT_ONCE)
    best = torch.cat([(part @ patterns.t()).argmax(dim=1) for part in parts])
    return _from_blocks(patterns[best], matrix, m).to(torch.int32)


def m4n2_1d(mat: torch.Tensor, density: float) -> torch.Tensor:
    """Return :func:`mn_1d_best` of 2:4; ``density`` is not looked at."""
    return mn_1d_best(mat, 4, 2)


def m4n2_2d_greedy(mat: torch.Tensor, density: float) -> torch.Tensor:
    """Return :func:`mn_2d_greedy` of 2:4; ``density`` is not looked at."""
    return mn_2d_greedy(mat, 4, 2)


def m4n2_2d_best(mat: torch.Tensor, density: float) -> torch.Tensor:
    """Return :func:`mn_2d_best` of 2:4; ``density`` is not looked at."""
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
        tensor: A weight of shape ``(entries,)`` or ``(out, in)``, or ``(out, in, *kernel)`` of a
            convolution. Each position of the kernel is then a matrix ``(out, in)``.
        pattern: ``"m4n2_1d"``, ``"m4n2_2d_best"`` or ``"m4n2_2d_greedy"``.
        density: Share of weights to keep; must be 0.5. The original ignored it.

    Returns:
        Zeros and ones, of the tensor's shape, dtype and device.

    Raises:
        ValueError: The pattern is unknown, the density is not 0.5, or the tensor has no dimensions.

    Example:
        >>> create_mask(torch.tensor([[0.1, -0.4, 0.3, 0.2]]))
        tensor([[0., 1., 1., 0.]])
    """
    if pattern not in _PATTERNS or density != 0.5 or tensor.dim() == 0:
        raise ValueError(
            f"create_mask: pattern was {pattern!r}, density {density}, and the tensor has "
            f"{tensor.dim()} dimensions; allowed are {', '.join(_PATTERNS)}; 0.5; 1 or more."
        )
    weight = tensor.detach()
    # (*kernel, out, in)
    weight = weight[None] if tensor.dim() == 1 else weight.movedim((0, 1), (-2, -1))
    matrix = weight.reshape(math.prod(weight.shape[:-1]), weight.shape[-1])
    mask = _PATTERNS[pattern](matrix, density).view(weight.shape)
    mask = mask[0] if tensor.dim() == 1 else mask.movedim((-2, -1), (0, 1))
    return mask.to(tensor.dtype, memory_format=torch.contiguous_format)


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    sizes = values.abs()
    return sizes.nan_to_num_(nan=math.inf, posinf=math.inf) if sizes.is_floating_point() else sizes


def _blocks(matrix: torch.Tensor, m: int) -> torch.Tensor:
    """The magnitudes of the blocks of ``m`` x ``m``, each a row: ``(blocks, m * m)``."""
    groups, (rows, columns) = reshape_1d(F.pad(matrix.detach(), (0, 0, 0, -len(matrix) % m)), m)
    blocks = groups.view(rows // m, m, columns // m, m).transpose(1, 2)
    return _magnitudes(blocks.reshape(-1, m * m))


def _from_blocks(blocks: torch.Tensor, like: torch.Tensor, m: int) -> torch.Tensor:
    """The matrix of the shape of ``like`` whose blocks are given."""
    down, across = (-(-size // m) for size in like.shape)
    whole = blocks.view(down, across, m, m).transpose(1, 2).reshape(down * m, across * m)
    return whole[: like.shape[0], : like.shape[1]]
