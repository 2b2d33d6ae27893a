"""The sets of shapes that `apex bench kernels` times, and what the self-test computes.

Each set is asked whether the full size is wanted, which a GPU needs to be busy and which takes too
long on a CPU.
"""

from __future__ import annotations

from apex.bench.catalogue.entry import Checked, Shape, Sizes

__all__ = ["ATTENTION", "CAUSAL", "IMAGES", "LISTS", "MATRICES", "ROTARY", "ROWS", "SCORES"]

HEADS = 16
HEAD = 64  # channels of an attention head


def _one(full: bool) -> list[Shape]:
    return [(100_000_000 if full else 10_000_000,)]


def _transformer(full: bool) -> list[Shape]:
    """Shapes of a decoder with 24 layers, 184 wide, and 1,000 tokens: 293 tensors, 10.3 million."""
    width, layers, tokens = 184, 24, 1000
    linear = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer = [shape for out, inner in linear for shape in ((out, inner), (out,))]
    layer += [(width,)] * 4  # two norms
    ends = [(tokens, width), (width, 256), (width,), (width,), (tokens, width)]
    return [*layer * layers, *ends]


def _tiny(full: bool) -> list[Shape]:
    """1,000 tensors of 1 to 100 elements: what counts is the cost of a tensor."""
    return [(1 + number % 100,) for number in range(1000)]


def _sets(small: Shape, middle: Shape, wide: Shape, wide_on_a_cpu: Shape) -> Sizes:
    return {
        "small": lambda full: [small],
        "middle": lambda full: [middle],
        "wide": lambda full: [wide if full else wide_on_a_cpu],
    }


LISTS: Sizes = {"one": _one, "transformer": _transformer, "tiny": _tiny}
MATRICES = _sets((2048, 1024), (4096, 4096), (2048, 32768), (256, 32768))

# As many elements as the matrices of the name, but for attention.
IMAGES = _sets((2, 64, 128, 128), (4, 256, 128, 128), (16, 256, 128, 128), (2, 256, 128, 128))
# Batch, heads, queries, keys.
SCORES = _sets(
    (1, HEADS, 128, 1024), (1, HEADS, 256, 4096), (1, HEADS, 128, 32768), (1, HEADS, 16, 32768)
)
# Batch times heads, queries, keys.
CAUSAL = _sets((2, 1024, 1024), (1, 4096, 4096), (16, 2048, 2048), (2, 2048, 2048))
# Sequence, batch, heads, channels.
ROTARY = _sets((2048, 1, 16, HEAD), (4096, 1, 64, HEAD), (2048, 8, 64, HEAD), (256, 8, 64, HEAD))
# Sequence, batch, features.
ATTENTION = _sets((256, 8, 1024), (1024, 1, 1024), (4096, 1, 1024), (2048, 1, 1024))

# What the self-test computes: a row that does not fill a block, one that does.
ROWS = Checked(((37, 300), (5, 1024)), ((4096, 1024), (1027, 4096)))
