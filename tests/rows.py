"""Operations on a batch of equal rows: whatever place a row has, it is computed like the first.

`CASES` has a function for each operation: ``case(length, dtype, batch)`` returns results and
gradients of the inputs, with the rows in the first dimension. ``batch(row)`` makes rows of one.
"""

import functools

import torch

from apex.normalization import fused_layer_norm as norms
from apex.ops.layers import scaled_softmax as softmax
from apex.ops.layers.swiglu import swiglu
from apex.ops.losses.cross_entropy import cross_entropy
from apex.transformer import functional

QUERIES = 5


def some(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def batch_of(count, row):
    """Contiguous rows."""
    return row.expand(count, *row.shape).clone()


def strided(count, row):
    """Rows whose numbers are not side by side in memory, and start at an odd address."""
    flat = row.reshape(-1)
    made = torch.empty(flat.numel() + 1, count, dtype=row.dtype, device=row.device)[1:]
    return made.copy_(flat[:, None].expand_as(made)).t().view(count, *row.shape)


def _with_gradients(y, dy, *inputs):
    return [y, *torch.autograd.grad(y, inputs, dy)]


def _norm(function, parameters, length, dtype, batch):
    """Of a norm with some parameters."""
    x = batch(some(length, dtype=dtype)).requires_grad_()
    weights = [some(length, dtype=of or dtype, seed=1 + n) for n, of in enumerate(parameters)]
    y = function(x, *weights, (length,))
    return _with_gradients(y, batch(some(length, dtype=y.dtype, seed=5)), x)


def _efficient(function):
    return functools.partial(function, memory_efficient=True)


def _cross_entropy(smoothing, length, dtype, batch):
    row = 2 * some(length, dtype=dtype)
    row[length // 2] = 14  # the loss is what the other classes add, and has its own digits
    x = batch(row).requires_grad_()
    labels = torch.full((len(x),), length // 2, device=x.device)
    y = cross_entropy(x, labels, smoothing=smoothing)
    return _with_gradients(y, torch.full_like(y, 0.3), x)


def _swiglu(length, dtype, batch):
    gate, up = (batch(some(length, dtype=dtype, seed=n)).requires_grad_() for n in (0, 1))
    return _with_gradients(swiglu(gate, up), batch(some(length, dtype=dtype, seed=5)), gate, up)


def _softmax(kind, length, dtype, batch):
    queries = length if kind == "causal" else QUERIES
    heads = () if kind == "causal" else (2,)
    x, dy = (batch(some(*heads, queries, length, dtype=dtype, seed=n)) for n in (0, 5))
    x.requires_grad_()
    if kind == "causal":
        y = softmax.scaled_softmax(x, None, 0.7, causal=True, name="causal")
    elif kind == "masked":
        mask = some(1, queries, length, seed=1) > 0.8
        y = softmax.scaled_softmax(x, batch(mask), 0.7, name="masked")
    else:
        y = softmax.scaled_softmax(x, None, 0.7, name="generic")
    return _with_gradients(y, dy, x)


def _rotary(length, dtype, batch):
    """A row is a sequence: (s, b, h, d)."""
    length += length % 2
    freqs = 3 * some(QUERIES, 1, 1, length, seed=1)
    x, dy = (batch(some(QUERIES, 2, length, dtype=dtype, seed=n)) for n in (0, 5))
    x.requires_grad_()
    y = functional.fused_apply_rotary_pos_emb(x.transpose(0, 1), freqs)
    return _with_gradients(y.transpose(0, 1), dy, x)


CASES = {
    "layer norm": functools.partial(_norm, norms.fused_layer_norm_affine, (None, None)),
    "layer norm without weights": functools.partial(_norm, norms.fused_layer_norm, ()),
    "layer norm, memory_efficient": functools.partial(
        _norm, _efficient(norms.fused_layer_norm_affine), (None, None)
    ),
    "RMS norm": functools.partial(_norm, norms.fused_rms_norm_affine, (None,)),
    "RMS norm without weight": functools.partial(_norm, norms.fused_rms_norm, ()),
    "RMS norm, memory_efficient": functools.partial(
        _norm, _efficient(norms.fused_rms_norm_affine), (None,)
    ),
    "RMS norm, mixed": functools.partial(
        _norm, norms.mixed_dtype_fused_rms_norm_affine, (torch.float32,)
    ),
    "cross-entropy": functools.partial(_cross_entropy, 0.0),
    "cross-entropy, smoothed": functools.partial(_cross_entropy, 0.1),
    "SwiGLU": _swiglu,
    "softmax": functools.partial(_softmax, "generic"),
    "softmax, masked": functools.partial(_softmax, "masked"),
    "softmax, causal": functools.partial(_softmax, "causal"),
    "rotary": _rotary,
}


def differing(name, length, dtype, counts, make=batch_of):
    """Which numbers of rows give a row other bits than it has alone, in any place."""
    alone = CASES[name](length, dtype, functools.partial(batch_of, 1))
    return [count for count in counts if not _same(name, length, dtype, count, make, alone)]


def _same(name, length, dtype, count, make, alone):
    found = CASES[name](length, dtype, functools.partial(make, count))
    each = zip(found, alone, strict=True)
    return all(torch.equal(rows, row.expand_as(rows)) for rows, row in each)
