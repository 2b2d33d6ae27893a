"""What an entry of an op holds, and the sizes at which ops are checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from apex.ops._op import op

__all__ = ["DTYPES", "Checked", "Function", "Inputs", "Leaf", "Op", "Shape", "Sizes", "Timed"]
__all__ += ["random"]
__all__ += ["ATTENTION", "CAUSAL", "IMAGES", "LISTS", "MATRICES", "ROTARY", "ROWS", "SCORES"]

Shape = tuple[int, ...]
Function = Callable[..., torch.Tensor]
Sizes = Mapping[str, Callable[[bool], list[Shape]]]  # shapes by name, full size or a CPU's

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def random(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    scale: float = 1.0,
    mean: float = 0.0,
) -> torch.Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(tuple(shape), generator=generator, device="cpu", dtype=torch.float32)
    return made.mul_(scale).add_(mean).to(dtype).to(device)


class Leaf(NamedTuple):
    """An input that gets a gradient: its shape, how its numbers are distributed, its own dtype."""

    shape: Sequence[int]
    scale: float = 1.0
    mean: float = 0.0
    dtype: torch.dtype | None = None


class Inputs(NamedTuple):
    """The arguments of a call: tensors that get gradients, and everything else behind them."""

    leaves: list[torch.Tensor]
    rest: tuple[Any, ...]


class Checked(NamedTuple):
    """Shapes for checks on every device, and those at which a GPU is ``busy``.

    The ``small`` have several programs of a kernel, blocks that are full and blocks that are not.
    """

    small: tuple[Shape, ...]
    busy: tuple[Shape, ...]


@dataclass(frozen=True)
class Timed:
    """How `python -m benchmarks.kernels` times an op.

    Attributes:
        sizes: The sets of shapes by name.
        columns: Numbers that have to be read or written for an element, forward and backward;
            ``None`` where products of matrices and not the memory decide.
        written_out: The expression that people write instead of torch's function.
        liger: The same by Liger-Kernel, from its functions and the arguments.
    """

    sizes: Sizes
    columns: tuple[float, float] | None
    written_out: Function | None = None
    liger: Function | None = None


@dataclass(frozen=True)
class Op:
    """An op, or one of its variants.

    Attributes:
        name: What users choose it by; a variant's has a comma.
        ours: The public function, of all inputs.
        theirs: The fastest expression of torch's functions that computes the same. In float64 it is
            what results are compared with; in the dtype of the inputs it is what we are timed with.
        leaves: The inputs that get gradients, from the shape of the first.
        rest: The arguments behind them, from the first tensor.
        checked: Shapes for the self-test. Without any the op is only timed.
        dtypes: Names of `DTYPES`.
        in_eps: Allowed errors in eps of the inputs' dtype times the result's rms, where sums of
            terms of both signs decide; else roundings are counted. By dtype of the inputs.
        layout: Of the first tensor in memory.
        timed: How it is timed, if it is.
        operator: The operator of `apex.ops` that it is, if the tests of operators are to run.
        arguments: The operator's, from all inputs.
        of_matrix: The shape of the first input, from the shapes of one to three dimensions that
            these tests try.
        widens: Whether the result is float32 at least.
        terms: How many terms of both signs make a gradient of a gradient in these tests.
        fused_by: Who fuses it in a graph compiled for a GPU: "us", in one operator, or the
            "compiler", with its neighbours. Which moves fewer bytes is in docs/kernels.md.
    """

    name: str
    ours: Function
    theirs: Function
    leaves: Callable[[Shape], Sequence[Leaf]]
    rest: Callable[[torch.Tensor], tuple[Any, ...]] = lambda x: ()
    checked: Checked = Checked((), ())
    dtypes: tuple[str, ...] = tuple(DTYPES)
    in_eps: Mapping[torch.dtype, float] = field(default_factory=dict)
    layout: torch.memory_format = torch.contiguous_format
    timed: Timed | None = None
    operator: op | None = None
    arguments: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs
    of_matrix: Callable[[Shape], Shape] = tuple
    widens: bool = False
    terms: int = 1
    fused_by: str = "us"

    @property
    def title(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    def inputs(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Make the arguments, with random numbers that are the same on every device."""
        leaves = [
            random(size, own or dtype, device, seed=seed, scale=scale, mean=mean)
            for seed, (size, scale, mean, own) in enumerate(self.leaves(shape))
        ]
        leaves[0] = leaves[0].contiguous(memory_format=self.layout)
        return Inputs(leaves, self.rest(leaves[0]))


# --- sizes ---------------------------------------------------------------------------------------

# The sets of shapes that `python -m benchmarks.kernels` times. Each is asked whether the full size
# is wanted, which a GPU needs to be busy and which takes too long on a CPU.

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
