"""How weights are stored, on tiles; see :mod:`apex.ops.lists.storage`.

The weight is column 1 in and value 0 out; the storage's own column is the last one in, and its new
value is appended to what the update returned.
"""

import triton
import triton.language as tl

# by their names, with the others
from apex.kernels.multi_tensor import rounded as rounded
from apex.kernels.multi_tensor import widened as widened


@triton.jit
def _with_weight(raw, weight):
    values = (raw[0].to(tl.float32), weight)
    for i in tl.static_range(2, len(raw) - 1):
        values = values + (raw[i].to(tl.float32),)
    return values


@triton.jit
def join_low_bits(raw):
    """Codec: the weight from its bfloat16 part and the 16 low bits."""
    low = raw[len(raw) - 1].to(tl.int32)
    high = raw[1].to(tl.int16, bitcast=True).to(tl.int32)
    # A zero that was written over a weight: `split_low_bits` never makes it, and joined it is nan.
    low = tl.where(((high & 0x7FFF) == 0) & (low < 0), 0, low)
    high -= (low < 0).to(tl.int32)
    return _with_weight(raw, ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True))


@triton.jit
def split_low_bits(raw, values, new, index, seed):
    """Codec: the weight as bfloat16, rounded half up, and the 16 low bits."""
    # A GPU's own nan has all bits set: rounding up would carry it to -0.
    bits = tl.where(new[0] != new[0], 0x7FC00000, new[0].to(tl.int32, bitcast=True))
    # An unsigned shift, so that the carry out of the largest finite value ends in inf as rounding
    # does, and int32 overflow cannot occur.
    high = ((bits.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16)
    stored = (high.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True),)
    for i in tl.static_range(1, len(new)):
        stored = stored + (new[i],)
    return stored + ((bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True),)


@triton.jit
def add_error(raw):
    """Codec: the weight from its bfloat16 part and the error of rounding."""
    return _with_weight(raw, raw[1].to(tl.float32) + raw[len(raw) - 1].to(tl.float32))


@triton.jit
def keep_error(raw, values, new, index, seed):
    """Codec: the weight as bfloat16 and the error of rounding."""
    weight = new[0].to(tl.bfloat16)
    stored = (weight,)
    for i in tl.static_range(1, len(new)):
        stored = stored + (new[i],)
    return stored + (new[0] - weight.to(tl.float32),)


@triton.jit
def rounded_stochastically(raw, values, new, index, seed):
    """Codec: the weight as one of its two bfloat16 neighbours, the nearer the likelier."""
    # The counter is 32 bits wide: what is above goes into the seed.
    noise = tl.randint(seed ^ (index >> 32).to(tl.int32), (index & 0xFFFFFFFF).to(tl.uint32))
    noise = (noise & 0xFFFF).to(tl.int32)
    bits = new[0].to(tl.int32, bitcast=True)
    moved = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    stored = (tl.where(finite, moved, new[0]).to(tl.bfloat16),)
    for i in tl.static_range(1, len(new)):
        stored = stored + (new[i],)
    return stored
