"""Rotary position embedding: pairs of channels are rotated by the angles of their position.

With ``r`` half of the rotated channels, ``i < r``, and ``cos`` and ``sin`` of the position::

    y[i]     = t[i] * cos[i] - t[i + r] * sin[i]
    y[i + r] = t[i + r] * cos[i + r] + t[i] * sin[i + r]

Channels from ``2 r`` on are copied. The gradient is the transposed map, the same formula with the
halves of ``sin`` exchanged and negated, also where halves differ. ``cos`` and ``sin`` are float32
(float64 for float64) and get no gradient; results are rounded once.

Source: Su et al., arXiv:2104.09864, eq. 34, with the channels of a pair ``r`` apart as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._by_row import by_row
from apex.ops._check import FLOATS, ArgumentError, check_tensors
from apex.ops._dtypes import Optional, wide
from apex.ops._op import UNSURE, op

Tensor = torch.Tensor

# Elements that a CPU rotates at a time, so that float32 copies stay in its cache. 1024 x 1 x 128 x
# 128, forward and backward, one thread of a busy EPYC, over `t * cos + cat((-t2, t1)) * sin` in the
# dtype of t: float32 0.25, bfloat16 0.39, float16 0.43; the definition 0.90, 2.59 and 2.25.
PIECE = 2**18


def reference(t: Tensor, cos: Tensor, sin: Tensor, positions: Optional, dim: int) -> Tensor:
    """The definition.

    Args:
        t: 4-dimensional; the last two dimensions are heads and channels.
        cos: ``(rows, rotated)``, and ``sin`` like it.
        sin: Of the same angles.
        positions: ``(positions, groups)``: the row for each position and for each of ``groups``
            equal parts of the channels. None: row 0, 1, ..., and one part.
        dim: The dimension of ``t`` along which positions run, 0 or 1.
    """
    groups, rotated = 1 if positions is None else positions.shape[1], cos.shape[1]
    x, rest = t, None
    if groups > 1:
        x = t.unflatten(3, (groups, -1))  # type: ignore[no-untyped-call]
    if x.shape[-1] > rotated:
        x, rest = x[..., :rotated], x[..., rotated:]
    shape = [1] * x.dim()
    shape[dim], shape[-2 if groups > 1 else -1], shape[-1] = t.shape[dim], groups, rotated
    cos, sin = (_at(table, positions, t).view(shape) for table in (cos, sin))
    y = _turned(x.to(cos.dtype), cos, sin).to(t.dtype)
    y = y if rest is None else torch.cat([y, rest], -1)
    y = y.flatten(3) if groups > 1 else y
    return y.contiguous()  # products have the strides of t, and the caller may ask for others


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x_1, x_2 = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([-x_2, x_1], -1), sin)


def _at(table: Tensor, positions: Optional, t: Tensor) -> Tensor:
    """The row of each position, in what is computed."""
    table = table if positions is None else table[positions]
    return table if table.dtype == wide(t) else table.to(wide(t))


def transposed(sin: Tensor) -> Tensor:
    """The ``sin`` of the gradient."""
    return -sin.roll(sin.shape[-1] // 2, -1)


def _forward(t: Tensor, cos: Tensor, sin: Tensor, positions: Optional, dim: int) -> Tensor:
    y, count = t.new_empty(t.shape), t.shape[dim]
    step = max(1, PIECE * count // t.numel())
    for start in range(0, count, step):
        rows, part = slice(start, start + step), (dim, start, min(step, count - start))
        angles: tuple[Tensor, Tensor, Optional] = (cos[rows], sin[rows], None)
        if positions is not None:
            angles = (cos, sin, positions[rows])
        y.narrow(*part).copy_(reference(t.narrow(*part), *angles, dim))
    return y


def _backward(
    dy: Tensor, needs: Sequence[bool], *, cos: Tensor, sin: Tensor, positions: Optional, dim: int
) -> list[Tensor]:
    return [_forward(dy, cos, transposed(sin), positions, dim)]


OP = op(
    "rotary(Tensor t, Tensor cos, Tensor sin, Tensor? positions, int dim) -> Tensor y",
    reference,
    grads=("t",),
    saves=("cos", "sin", "positions"),
    gradient=lambda dy, cos, sin, **rest: [reference(dy, cos, transposed(sin), **rest)],
    pieces=SimpleNamespace(forward=_forward, backward=_backward, above=PIECE),
    contiguous=False,
    takes=(lambda t: t.shape[:2].numel() < 2**31, 2**31),  # programs are counted in 32 bits
    compiles_to_operator=lambda *args: False,
)
by_row(OP, reference)


class Rotation(NamedTuple):
    """What to rotate by; see :func:`reference`."""

    cos: Tensor
    sin: Tensor
    positions: Optional
    dim: int

    def rotate(self, t: Tensor, implementation: Any = UNSURE) -> Tensor:
        """Rotate ``t`` by what ``OP.choose`` said, if it was asked.

        A method by name, because Dynamo of torch 2.9 calls no named tuple.
        """
        packed, swapped = t.dim() == 3, self.dim and self.positions is None
        if packed:
            t = t[:, None]
        elif swapped:  # positions first, and second in memory
            t = t.transpose(0, 1)
        if implementation is UNSURE or not type(self.cos) is type(self.sin) is torch.Tensor:
            y = OP(t, *self)
        elif implementation is None:
            y = reference(t, *self)
        else:
            y = OP.compute(t, *self[:3], (implementation, self.dim))
        if packed:
            return y[:, 0]
        return y.transpose(0, 1) if swapped else y

    def back(self, dy: Tensor) -> Tensor:
        """The gradient of ``t`` from that of the result."""
        return self._replace(sin=transposed(self.sin)).rotate(dy)


def rotate_by_angles(t: Tensor, freqs: Tensor, transpose: bool) -> Tensor:
    """Rotate by :func:`by_angles`; of few elements by torch's functions, after one decision."""
    implementation = OP.choose(t)
    if implementation is None and not transpose and _fit(t, freqs):
        return _rotated(t, freqs.cos(), freqs.sin())
    return by_angles(t, freqs, transpose).rotate(t, implementation)


def rotate_by_tables(t: Tensor, cos: Tensor, sin: Tensor, transpose: bool) -> Tensor:
    """The same by :func:`by_tables`."""
    implementation = OP.choose(t)
    small = implementation is None and not transpose
    if small and _fit(t, cos) and _fit(t, sin) and cos.shape == sin.shape:
        return _rotated(t, cos, sin)
    return by_tables(t, cos, sin, transpose).rotate(t, implementation)


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition where tables have a row for each position and broadcast as they are."""
    rotated, dtype = cos.shape[-1], t.dtype
    x = t if t.shape[-1] == rotated else t[..., :rotated]
    y = _turned(x if dtype == torch.float32 else x.float(), cos, sin).to(dtype)
    return (y if x is t else torch.cat([y, t[..., rotated:]], -1)).contiguous()


def _fit(t: Tensor, table: Tensor) -> bool:
    """Whether plain tensors are such: the usual case, for which nothing else has to be asked."""
    if type(table) not in _runtime.TENSOR_TYPES or t.dim() != 4 or table.dim() != 4:
        return False
    rows, one, other, rotated = table.shape
    return (
        one == other == 1
        and rows == t.shape[0]
        and rotated % 2 == 0
        and 0 < rotated <= t.shape[3]
        and table.dtype == torch.float32
        and t.dtype in _runtime.DTYPES
        and table.device == t.device
        and not table.requires_grad
    )


# -- what to rotate by, with checks; all raise ArgumentError --------------------------------------


def by_angles(t: Tensor, freqs: Tensor, transpose: bool) -> Rotation:
    """For ``t`` ``(s, b, h, d)``; with ``transpose`` the result is ``(b, s, h, d)`` in memory."""
    (angles,) = _tables(t, "s, b, h, d", freqs=freqs)
    return Rotation(angles.cos(), angles.sin(), None, int(transpose))


def by_tables(t: Tensor, cos: Tensor, sin: Tensor, transpose: bool) -> Rotation:
    """The same by ``cos`` and ``sin``."""
    cos, sin = _tables(t, "s, b, h, d", cos=cos, sin=sin)
    return Rotation(cos, sin, None, int(transpose))


def by_sequences(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Rotation:
    """For ``t`` ``(tokens, h, d)``, whose positions start at 0 at each number of ``cu_seqlens``.

    The host knows no number on a device. So, on every device, tokens before the first and from the
    last number on, which are in no sequence, are rotated by 0, and those of a position that
    ``freqs`` does not reach become nan.
    """
    (angles,) = _tables(t, "tokens, h, d", freqs=freqs)
    tensors = {"t": t, "cu_seqlens": cu_seqlens}
    check_tensors("rotary", tensors, floating=["t"], required=tensors)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ArgumentError(
            f"rotary: cu_seqlens is {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}. Pass "
            "int32 or int64 of shape [sequences + 1]: 0, then the end of each sequence."
        )
    bounds = cu_seqlens.contiguous()
    ends = torch.arange(1, len(t) + 1, device=t.device, dtype=bounds.dtype)
    starts = F.pad(bounds[:-1], (1, 1), value=len(t))  # leads to row 0, of no sequence
    rows = (ends - starts[torch.searchsorted(bounds, ends)]).clamp(0, len(angles) + 1)
    angles = F.pad(F.pad(angles, (0, 0, 1, 0)), (0, 0, 0, 1), value=float("nan"))
    return Rotation(angles.cos(), angles.sin(), rows.long()[:, None], 0)


def by_places(
    t: Tensor, img_h: int, img_w: int, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor
) -> Rotation:
    """For ``t`` ``(b, img_h * img_w, h, d)``, half of the channels by row and half by column."""
    cos_h, sin_h, cos_w, sin_w = _tables(
        t, "b, img_h * img_w, h, d", (img_h, img_h, img_w, img_w),
        cos_h=cos_h, sin_h=sin_h, cos_w=cos_w, sin_w=sin_w,
    )  # fmt: skip
    if img_h * img_w != t.shape[1] or img_h < 0 or t.shape[3] % 2:
        raise ArgumentError(
            f"rotary: t has shape {list(t.shape)}, img_h is {img_h} and img_w {img_w}. Pass "
            "[b, img_h * img_w, h, d] with an even d."
        )
    place = torch.arange(t.shape[1], device=t.device)
    rows = torch.stack([place // max(1, img_w), img_h + place % max(1, img_w)], 1)
    return Rotation(torch.cat([cos_h, cos_w]), torch.cat([sin_h, sin_w]), rows, 1)


def _tables(t: Tensor, layout: str, counts: Sequence[int] = (), **tables: Tensor) -> list[Tensor]:
    """Check all; ``(positions, rotated)`` of each table, as far as needed and without gradient."""
    plain = type(t) in _runtime.TENSOR_TYPES and t.dtype in FLOATS
    for table in tables.values():
        plain = plain and type(table) in _runtime.TENSOR_TYPES and table.dtype in FLOATS
        plain = plain and table.device == t.device
    if not plain:
        tensors = {"t": t, **tables}
        check_tensors("rotary", tensors, floating=tensors, required=tensors)
    if t.dim() != layout.count(",") + 1:
        raise ArgumentError(f"rotary: t has shape {list(t.shape)}. Pass [{layout}].")
    most, found = t.shape[-1] // (2 if counts else 1), []
    to = torch.float64 if t.dtype == torch.float64 else torch.float32
    counts = counts or [0 if t.dim() == 3 else t.shape[0]] * len(tables)  # 3: not known here
    width = next(iter(tables.values())).shape[-1:]
    for (key, table), count in zip(tables.items(), counts, strict=True):
        a, b, c, channels = table.shape if table.dim() == 4 else (0, 0, 0, 0)
        flat = (a != 1) + (b != 1) + (c != 1) < 2
        even = channels % 2 == 0 and 0 < channels <= most
        if not (flat and even) or table.shape[3:] != width or a * b * c < count:
            raise ArgumentError(
                f"rotary: {key} has shape {list(table.shape)} and t {list(t.shape)}. Pass "
                f"[positions, 1, 1, channels] with at least {count} positions. The number of "
                f"channels must be even, at most {most}, and the same in all tables."
            )
        rows = (table.detach() if table.requires_grad else table).flatten(0, 2)
        # No `if` about the sizes: torch.export and jit.trace would keep its answer.
        rows = rows if t.dim() == 3 else rows[:count]
        found.append(rows if rows.dtype == to else rows.to(to))
    return found
