"""What an entry of an op holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from apex.ops._op import op

__all__ = ["DTYPES", "Checked", "Function", "Inputs", "Leaf", "Op", "Shape", "Sizes", "Timed"]
__all__ += ["random"]

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
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(tuple(shape), generator=generator).mul_(scale).add_(mean)
    return made.to(dtype).to(device)


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
    """How `apex bench kernels` times an op.

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
            "compiler", with its neighbours. Which moves fewer bytes is in docs/performance.md.
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
