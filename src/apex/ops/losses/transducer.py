"""RNN transducer: the sums of the joint network, and the loss over all alignments.

    h[b, t, u]  = dropout(relu(f[b, t] + g[b, u]))
    alpha[t, u] = logaddexp(alpha[t-1, u] + blank[t-1, u], alpha[t, u-1] + emit[t, u-1])
    loss[b]     = -(alpha[T-1, U-1] + blank[T-1, U-1])

``blank`` and ``emit`` are logarithms of the probabilities of the blank and of the next label; beta
is alpha from the end. Both are computed together, one anti-diagonal (t + u) after the other, and
give the slopes of the loss by ``blank`` and ``emit``, so that a backward reads the logits once.
They are float64: in float32 a loss of 1,000 is off by 6e-5, and so would be the slopes, relatively.
Source: Graves, arXiv:1211.3711, sections 2.4 and 2.5.

A tensor has a row for each cell (b, t, u): of the whole grid or, packed, of the used cells alone.
Lengths, labels or offsets out of range are an ``IndexError`` on a CPU; for another device the host
would have to wait, and the sample's results are nan there. Nothing is read out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops._dtypes import wide
from apex.ops.losses import cross_entropy

Tensor = torch.Tensor
PADDING = -1  # label of a row that is not read
INF, NAN = float("inf"), float("nan")


class Grid(NamedTuple):
    """Where the cells of samples are among the rows of a tensor: ``(B, T, U)`` and ``(B,)``."""

    row: Tensor  # its number; the number of rows where the cell is not used
    used: Tensor
    good: Tensor  # whether the sample's lengths and offset are right
    t_len: Tensor
    u_len: Tensor
    rows: int


def grid(
    name: str, sizes: tuple[int, int, int], lengths: dict[str, Tensor], more: int,
    packed: tuple[Tensor | None, int] | None,
) -> Grid:  # fmt: skip
    """Place the cells of samples of ``lengths`` in T and in U, the latter without ``more``.

    ``packed`` is the end of each sample and the number of rows.
    """
    offset, rows = packed or (None, sizes[0] * sizes[1] * sizes[2])
    tensors = {**lengths, **({"batch_offset": offset} if packed else {})}
    check_tensors(name, lengths | tensors, floating=(), integers=tensors, required=tensors)
    for key, tensor in tensors.items():
        check_shape(name, key, tensor, sizes[:1], f"there are {sizes[0]} samples")
    if 0 in sizes:
        raise ArgumentError(
            f"{name}: there are {sizes[0]} samples, {sizes[1]} time steps and {sizes[2]} "
            "positions; pass at least one of each."
        )
    (one, t_len), (other, u_len) = ((key, length.long()) for key, length in lengths.items())
    u_len = u_len + more
    t, u = (torch.arange(size, device=t_len.device) for size in sizes[1:])
    good = (t_len >= 0) & (t_len <= sizes[1]) & (u_len >= more) & (u_len <= sizes[2])
    used, ends = t[:, None] < t_len[:, None, None], (t_len * u_len).cumsum(0)
    if offset is None:
        index = torch.arange(rows, device=t_len.device).view(sizes)
    else:
        good = good & (offset == ends) & (ends <= rows)
        index = (ends - t_len * u_len)[:, None, None] + t[:, None] * u_len[:, None, None] + u
    may_read = not _runtime.waits(t_len.device)
    if may_read and not (good.all() and (offset is None or ends[-1] == rows)):
        at = int(good.long().argmin())
        said = "" if offset is None else (
            f" batch_offset is {offset.tolist()} for {rows} rows; pass the cumulative sum of {one} "
            f"* {f'({other} + 1)' if more else other}, which ends with the number of rows."
        )  # fmt: skip
        raise IndexError(
            f"{name}: sample {at} has {one} {int(t_len[at])} and {other} {int(u_len[at]) - more}; "
            f"allowed are 0 to {sizes[1]} and 0 to {sizes[2] - more}.{said}"
        )
    used = used & (u < u_len[:, None, None]) & good[:, None, None] & (index >= 0) & (index < rows)
    return Grid(index.where(used, rows), used, good, t_len, u_len, rows)


# -- joint -----------------------------------------------------------------------------------------
# Sample by sample: what is not written to h yet is small, and float32 where it is not rounded yet.


def joint_cells(
    name: str, f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor,
    packed: tuple[Tensor | None, int] | None,
) -> Grid:  # fmt: skip
    """Check the arguments of the joint; ``packed`` is offset and number of rows."""
    tensors = {"f": f, "g": g, "f_len": f_len, "g_len": g_len}
    check_tensors(name, tensors, floating=["f", "g"], required=tensors)
    alike = (len(f), f.shape[2:], f.dtype) == (len(g), g.shape[2:], g.dtype)
    if f.dim() != 3 or g.dim() != 3 or not alike:
        raise ArgumentError(
            f"{name}: f is {f.dtype} of shape {list(f.shape)} and g {g.dtype} of {list(g.shape)}. "
            "Pass (B, T, H) and (B, U, H), of one dtype."
        )
    if packed and not packed[1]:
        raise ArgumentError(f"{name}: packed_batch is 0; to pack, pass int((f_len * g_len).sum()).")
    sizes = (len(f), f.shape[1], g.shape[1])
    return grid(name, sizes, {"f_len": f_len, "g_len": g_len}, 0, packed)


def joint(
    f: Tensor, g: Tensor, cells: Grid, packed: bool, relu: bool, dropout: float | None
) -> tuple[Tensor, Tensor | None]:
    """Compute h ``(rows, H)``; with ReLU or dropout also where it is used and not set to 0.

    Cells of a whole grid that are not used hold -1.
    """
    masked, shape = relu or dropout is not None, (cells.rows + 1, f.shape[2])
    to = f.dtype if dropout is None else wide(f)  # a sum alone is rounded once in any dtype
    h = f.new_empty(shape)  # the last row is for cells that are not used
    if packed and _runtime.waits(h.device):
        h.fill_(NAN)  # where offsets are wrong, rows remain
    mask = torch.empty(shape, dtype=torch.bool, device=f.device) if masked else None
    samples = zip(f, g, cells.row.flatten(1), cells.used.flatten(1), cells.good, strict=True)
    for number, (one, other, row, used, good) in enumerate(samples):
        y = (one[:, None].to(to) + other.to(to)).flatten(0, 1)
        keep = used[:, None].expand_as(y)
        if mask is not None:
            keep = keep & ~(y <= 0) if relu else keep
            if dropout is not None:
                keep = keep & (torch.rand_like(y) >= dropout)
                y *= dropout_scale(dropout)
            y.masked_fill_(~keep, 0.0)
        if not packed:
            row = torch.arange(len(y), device=y.device) + number * len(y)
            y = y.where(used[:, None], torch.where(good, -1.0, NAN).to(y.dtype))
        h.index_copy_(0, row, y.to(h.dtype))
        if mask is not None:
            mask.index_copy_(0, row, keep)
    return h[:-1], None if mask is None else mask[:-1]


def joint_gradients(
    dh: Tensor, mask: Tensor | None, cells: Grid, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of f and g, from those of h ``(rows, H)``."""
    (batch, times, positions), width = cells.row.shape, dh.shape[1]
    df, dg = dh.new_zeros(batch, times, width), dh.new_zeros(batch, positions, width)
    if not cells.rows:
        return df, dg
    for sample, index in enumerate(cells.row.flatten(1).clamp(max=cells.rows - 1)):
        dy = dh[index].to(wide(dh)).mul_(scale)
        if mask is not None:
            dy.masked_fill_(~mask[index], 0.0)
        dy = dy.masked_fill_(~cells.used[sample].view(-1, 1), 0.0).view(times, positions, width)
        df[sample], dg[sample] = dy.sum(1), dy.sum(0)
    return df, dg


def dropout_scale(probability: float) -> float:
    """What is kept is multiplied by this."""
    return 1.0 if probability == 1 else 1.0 / (1.0 - probability)


# -- loss ------------------------------------------------------------------------------------------


def loss_rows(
    name: str, x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int,
    packed: tuple[Tensor | None, int | None] | None,
) -> tuple[Tensor, Grid, Tensor]:  # fmt: skip
    """Check the arguments of the loss; ``packed`` is offset and number of time steps.

    Returns:
        x by rows, its cells, and the label that each row may emit: after a sample's last label the
        blank, and ``PADDING`` in rows of no used cell.
    """
    tensors = {"x": x, "label": label, "f_len": f_len, "y_len": y_len}
    check_tensors(name, tensors, floating=["x"], integers=["label"], required=tensors)
    if label.dim() != 2 or x.dim() != (4 if packed is None else 2) or not x.shape[-1]:
        raise ArgumentError(
            f"{name}: x has shape {list(x.shape)} and label {list(label.shape)}. Pass (B, T, U, "
            "classes), packed (rows, classes), and (B, U - 1)."
        )
    classes, (batch, positions) = x.shape[-1], (len(label), label.shape[1] + 1)
    if packed is None:
        wanted = (len(x), x.shape[2] - 1)
        check_shape(name, "label", label, wanted, f"x has {list(x.shape)}")
    elif packed[1] is None:
        raise ArgumentError(f"{name}: max_f_len is None; pass the largest f_len of packed input.")
    times = x.shape[1] if packed is None else int(packed[1] or 0)
    sizes, lengths = (batch, times, positions), {"f_len": f_len, "y_len": y_len}
    cells = grid(name, sizes, lengths, 1, packed and (packed[0], len(x)))
    if not 0 <= blank < classes:
        raise ArgumentError(f"{name}: blank_idx is {blank}; allowed are 0 to {classes - 1}.")
    read = torch.arange(positions - 1, device=label.device) < cells.u_len[:, None] - 1
    wrong = read & ((label < 0) | (label >= classes))
    if not _runtime.waits(label.device) and wrong.any():
        sample, at = wrong.nonzero()[0].tolist()
        raise IndexError(
            f"{name}: label {at} of sample {sample} is {int(label[sample, at])}; allowed are 0 to "
            f"{classes - 1}."
        )
    emitted = F.pad(label.long().where(read & ~wrong, blank), (0, 1), value=blank)
    labels = emitted.new_full((cells.rows + 1,), PADDING)
    labels.scatter_(0, cells.row.flatten(), emitted[:, None].expand_as(cells.row).flatten())
    cells = cells._replace(good=cells.good & ~wrong.any(1))
    return x.reshape(-1, classes), cells, labels[:-1]


def logsumexp(x: Tensor, labels: Tensor) -> Tensor:
    """Of each row of logits, 0 where the label is ``PADDING``."""
    sums: Tensor = cross_entropy.OP.operator(x.detach(), labels, 0.0, PADDING)[1]
    return sums[:, 0]


def alignments(
    x: Tensor, labels: Tensor, lse: Tensor, cells: Grid, blank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute alpha and beta ``(B, T, U)``, -inf in cells that are not used, and losses ``(B,)``.

    ``x - lse``, ``(rows, classes)``, are the logarithms of probabilities.
    """
    blanks, emits = _on_grid(_scores(x, labels, lse, blank), cells)
    (_, times, positions), used = blanks.shape, cells.used
    t, u = (torch.arange(size, device=x.device) for size in (times, positions))
    back_t, back_u = cells.t_len[:, None] - 1 - t, cells.u_len[:, None] - 1 - u
    back = (back_t[:, :, None] * positions + back_u[:, None]).flatten(1)
    back = back.clamp(0, times * positions - 1)

    def mirrored(values: Tensor) -> Tensor:
        return values.flatten(1).gather(1, back).view_as(values).masked_fill(~used, -INF)

    from_end = mirrored(blanks)
    down = torch.cat([F.pad(blanks, (0, 0, 1, -1), value=-INF), from_end])
    right = torch.cat([F.pad(emits, (1, -1), value=-INF), mirrored(emits)])
    first = torch.cat([torch.zeros_like(from_end[:, 0, 0]), from_end[:, 0, 0]])
    alpha, beta = _sweep(down, right, first).chunk(2)
    alpha, beta = alpha.masked_fill(~used, -INF), mirrored(beta)
    return alpha, beta, losses_of(beta, cells)


def losses_of(beta: Tensor, cells: Grid) -> Tensor:
    """Losses ``(B,)``; without a time step 0 if there is no label either, and else inf."""
    nothing = torch.where(cells.u_len == 1, 0.0, -INF).to(beta)
    total = torch.where(cells.t_len == 0, nothing, beta[:, 0, 0])
    return -total.masked_fill(~cells.good, NAN)


def gradient(
    dloss: Tensor, x: Tensor, labels: Tensor, lse: Tensor, found: Sequence[Tensor],
    cells: Grid, blank: int, of_logits: bool = True,
) -> Tensor:  # fmt: skip
    """The gradient of logits x; or that of ``x - lse``, of which a row has two numbers at most.

    ``found`` are alpha, beta and losses.
    """
    alpha, beta, losses = (each.double() for each in found)
    scores = _scores(x, labels, lse, blank)
    blanks, emits = _on_grid(scores, cells)
    t, u = (torch.arange(size, device=x.device) for size in blanks.shape[1:])
    ends = (t == cells.t_len[:, None] - 1)[:, :, None] & (u == cells.u_len[:, None] - 1)[:, None]
    after_blank = F.pad(beta[:, 1:], (0, 0, 0, 1), value=-INF).masked_fill(ends, 0.0)
    after_label = F.pad(beta[:, :, 1:], (0, 1), value=-INF)
    so_far, factor = alpha + losses[:, None, None], -dloss.double()[:, None, None]
    by_blank, by_label = (
        _on_rows(factor * (so_far + step + after).exp(), cells, lse.dtype)
        for step, after in ((blanks, after_blank), (emits, after_label))
    )
    both, padded, same = by_blank + by_label, labels == PADDING, labels == blank
    to_blank, to_label = by_blank + by_label * same, by_label + by_blank * same
    if of_logits:
        to_blank, to_label = (
            d - both * score.exp() for d, score in zip((to_blank, to_label), scores, strict=True)
        )
        sums = F.pad(lse[:, None], (0, 1))  # without a sum for the label, which is written below
        known = (x, labels, sums, 0.0, PADDING)
        dx: Tensor = cross_entropy.OP.backward_operator(-both, [True], *known)
    else:
        dx = torch.zeros_like(x)
    # These two are written and not added: in 16 bits a sum would lose the digits that cancel.
    for at, d in ((labels.clamp(min=0), to_label), (torch.full_like(labels, blank), to_blank)):
        dx.scatter_(1, at[:, None], d.masked_fill(padded, 0.0).to(dx.dtype)[:, None])
    return dx


def _scores(x: Tensor, labels: Tensor, lse: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Of each row: the logarithms of the probabilities of the blank and of the label."""
    emit = x.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return x[:, blank].to(lse.dtype) - lse, emit.to(lse.dtype) - lse


def _on_grid(rows: tuple[Tensor, ...], cells: Grid) -> list[Tensor]:
    return [F.pad(each.double(), (0, 1), value=-INF)[cells.row] for each in rows]


def _on_rows(values: Tensor, cells: Grid, dtype: torch.dtype) -> Tensor:
    rows = values.new_zeros(cells.rows + 1, dtype=dtype)
    values = values.masked_fill(~cells.used, 0.0).to(dtype)
    return rows.scatter_(0, cells.row.flatten(), values.flatten())[:-1]


def _sweep(down: Tensor, right: Tensor, first: Tensor) -> Tensor:
    """``x[t, u] = logaddexp(x[t-1, u] + down[t, u], x[t, u-1] + right[t, u])``, x[0, 0] = first."""
    batch, times, positions = down.shape
    t, u = (torch.arange(size, device=down.device) for size in (times, positions))
    diagonals = torch.arange(times + positions - 1, device=down.device)
    at = diagonals[:, None] - u
    outside, at = (at < 0) | (at >= times), at.clamp(0, times - 1).expand(batch, -1, -1)
    down, right = (
        steps.gather(1, at).masked_fill(outside, -INF).transpose(0, 1) for steps in (down, right)
    )
    x = down.new_full((len(diagonals), batch, 1 + positions), -INF)  # and a column before the first
    x[0, :, 1] = first
    for n in range(1, len(diagonals)):
        before = x[n - 1]
        torch.logaddexp(before[:, 1:] + down[n], before[:, :-1] + right[n], out=x[n, :, 1:])
    return x[:, :, 1:].transpose(0, 1).gather(1, (t[:, None] + u).expand(batch, -1, -1))
