"""The sets of shapes that `apex bench kernels` times.

Each is asked whether the full size is wanted, which a GPU needs to be busy and which takes too long
on a CPU.
"""

from __future__ import annotations

from apex.bench.catalogue.entry import Shape, Sizes

__all__ = ["ATTENTION", "CAUSAL", "IMAGES", "LISTS", "MATRICES", "ROTARY", "SCORES"]

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


LISTS: Sizes = {"one": _one, "transformer": _transformer, "tiny": _tiny}
MATRICES: Sizes = {
    "small": lambda full: [(2048, 1024)],
    "middle": lambda full: [(4096, 4096)],
    "wide": lambda full: [(2048 if full else 256, 32768)],
}

# As many elements as the matrices of the name, but for attention.
IMAGES: Sizes = {
    "small": lambda full: [(2, 64, 128, 128)],
    "middle": lambda full: [(4, 256, 128, 128)],
    "wide": lambda full: [(16 if full else 2, 256, 128, 128)],
}
SCORES: Sizes = {  # batch, heads, queries, keys
    "small": lambda full: [(1, HEADS, 128, 1024)],
    "middle": lambda full: [(1, HEADS, 256, 4096)],
    "wide": lambda full: [(1, HEADS, 128 if full else 16, 32768)],
}
CAUSAL: Sizes = {  # batch times heads, queries, keys
    "small": lambda full: [(2, 1024, 1024)],
    "middle": lambda full: [(1, 4096, 4096)],
    "wide": lambda full: [(16 if full else 2, 2048, 2048)],
}
ROTARY: Sizes = {  # sequence, batch, heads, channels
    "small": lambda full: [(2048, 1, 16, HEAD)],
    "middle": lambda full: [(4096, 1, 64, HEAD)],
    "wide": lambda full: [(2048 if full else 256, 8, 64, HEAD)],
}
ATTENTION: Sizes = {  # sequence, batch, features
    "small": lambda full: [(256, 8, 1024)],
    "middle": lambda full: [(1024, 8 if full else 1, 1024)],
    "wide": lambda full: [(4096 if full else 2048, 1, 1024)],
}
