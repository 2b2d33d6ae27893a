"""The local rule: how near a layer's own results in a format come to those in float32.

Of each batch one pass in float32 is noted. Then every product runs again alone, in float32 and in
the formats, from the inputs and the output gradient of the pass: a fault accuses the layer that has
it, and not those before. Compared are its result, the gradients of its inputs and those of its
weight matrices, by their cosine; the gradients of biases are not, since where they are zero by
mathematics (a bias before a norm) they are noise in any format.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from apex.debug.calls import random_states, set_random_states, version_of
from apex.debug.tensors import tensors_of
from apex.debug.what_if.formats import Format, Rounding
from apex.debug.what_if.tracing import (
    RESULT,
    GradientSizes,
    ProductCall,
    ProductTrace,
    Results,
    largest,
)

LARGEST, LARGEST_SCALE = torch.finfo(torch.float16).max, 2.0**24  # amp's own limit
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


class Score(NamedTuple):
    """The worst result of a layer in a format.

    Attributes:
        cosine: To the result in float32; -1 where it is not finite.
        result: Which: "result", "input gradient" or "weight gradient".
        batch: The number of the batch.
        inf: Share of its values that are not finite in the format.
        zero: Share that became zero.
        subnormal: Share that has less precision, because it is below the normal numbers.
    """

    cosine: float
    result: str
    batch: int
    inf: float
    zero: float
    subnormal: float


class Ranges:
    """Largest magnitudes of the passes in float32, by the ids of modules.

    Attributes:
        products: Results of a module's own products; ``operands`` what these multiply, where that
            or the result is beyond a format.
        outputs: What a module call gave.
        gradient: Of the gradients of products and of parameters; ``loss`` of the losses.
        small: How many gradients of products become zero in float16 at the loss scale, of how many.
    """

    def __init__(self) -> None:
        self.products, self.operands, self.outputs = (defaultdict[int, float](float) for _ in "123")
        self.gradient = self.loss = 0.0
        self.small = (0, 0)

    def note(self, trace: ProductTrace, gradients: Gradients) -> None:
        """Add a pass, and the gradients of its parameters."""
        noted = [(self.outputs, key, [size]) for key, size in trace.outputs]
        noted += [(self.products, id(one.owner), one.results) for one in trace.pieces]
        for table, key, found in noted:
            table[key] = max(table[key], *map(float, found), 0.0)
        inside = [one for piece in trace.pieces for one in piece.gradients.values()]
        self.note_gradients(map(largest, inside), gradients, trace.loss)

    def note_gradients(
        self, sizes: Iterable[torch.Tensor], gradients: Gradients, loss: float
    ) -> None:
        """Add the largest gradients of products, the gradients of parameters, and the loss."""
        numbers = [*map(float, sizes), *(float(largest(x)) for x in gradients if x is not None)]
        if not math.isfinite(sum(numbers, loss)):
            raise ValueError(
                "apex.debug.what_if: the loss or a gradient is not finite in float32; "
                "apex.debug.watch and apex debug SCRIPT find the cause"
            )
        self.loss, self.gradient = max(self.loss, abs(loss)), max(self.gradient, *numbers, 0.0)

    def note_small(self, gradients: Iterable[torch.Tensor]) -> None:
        """Add the gradients of a product."""
        for one in gradients:
            kept = torch.count_nonzero(one.abs() > 2.0**-25 / self.scale)
            lost = int(torch.count_nonzero(one) - kept)
            self.small = (self.small[0] + lost, self.small[1] + one.numel())

    @property
    def scale(self) -> float:
        """The largest loss scale, a power of two, by which all gradients are finite in float16."""
        exponent = math.floor(math.log2(LARGEST / max(self.gradient, 1e-30)))
        return float(min(2.0**exponent, LARGEST_SCALE))


def shares(exact: torch.Tensor, found: torch.Tensor, smallest: float) -> list[float]:
    """Which shares of ``found`` are not finite, became zero, and are below normal numbers."""
    bad = 0 if math.isfinite(found.sum()) else torch.count_nonzero(~found.isfinite())
    before, after, below = map(torch.count_nonzero, (exact, found, found.abs() < smallest))
    counts = (bad, before - after, below + after - found.numel())
    return [max(int(one), 0) / max(found.numel(), 1) for one in counts]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine between two tensors; 1 if both are zero, 0 if one is; -1 if not finite."""
    a, b = a.flatten(), b.flatten()
    sizes = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    if not all(1e-15 < one < 1e15 for one in sizes):  # their squares are beyond float32
        a, b = a.double(), b.double()
        sizes = float(a.norm()), float(b.norm())
    if 0.0 in sizes:
        return float(sizes[0] == sizes[1])
    found = float(a @ b) / sizes[0] / sizes[1]
    return -1.0 if math.isnan(found) else found


class Study:
    """The passes over the batches.

    Attributes:
        scores: Of each format, by the ids of modules.
        ranges: See :class:`Ranges`.
        attentions: The ids of the modules that are judged as one attention.
        called: The ids of the modules that were called for every batch.
        readers: Of each parameter, by id, the ids of the modules that multiplied with it.
        reached: The ids of the parameters that had a gradient.
        others: How often products were called that are not judged, by name.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Loss, batches: Sequence[Any], forms: Sequence[Format]
    ) -> None:
        self.model, self.loss, self.batches, self.forms = model, loss, batches, forms
        self.random, self.ranges = random_states(), Ranges()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.called = {id(one) for one in model.modules()}
        self.attentions, self.reached, self.others = set[int](), set[int](), Counter[str]()
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.scores: dict[str, dict[int, Score]] = {form.name: {} for form in forms}

    def run(self, after: Callable[[Gradients], None]) -> None:
        """Look at every batch; ``after`` gets the gradients of the parameters of each."""
        if "float16" in self.scores:  # first its loss scale
            for number in range(len(self.batches)):
                sizes = GradientSizes()
                trace, gradients = self.passed(number, sizes)
                self.ranges.note_gradients(sizes.found, gradients, trace.loss)
        roundings = [Rounding(form, self.ranges.scale) for form in self.forms]
        for number in range(len(self.batches)):
            trace, gradients = self.passed(number)
            self._note(trace, gradients)
            self._judge(number, trace, roundings)
            del trace  # it keeps all activations
            after(gradients)

    def _note(self, trace: ProductTrace, gradients: Gradients) -> None:
        """Add what a pass tells to what is known of all."""
        self.called &= trace.called
        self.others += trace.others
        self.attentions |= {id(one.owner) for one in trace.pieces if one.is_part}
        for key, owners in trace.readers.items():
            self.readers[key] |= owners
        both = zip(self.parameters, gradients, strict=True)
        self.reached |= {id(weight) for weight, one in both if one is not None}
        self.ranges.note(trace, gradients)

    def passed(self, number: int, context: Any = None) -> tuple[ProductTrace, Gradients]:
        """One pass over a batch, noted or in a context; and the gradients of the parameters."""
        set_random_states(self.random)
        trace, batch = ProductTrace(), self.batches[number]
        with _given_back(batch):
            with trace.of(self.model) if context is None else context:
                loss: Any = self.loss(self.model, batch)
            return trace, self._differentiated(trace, loss)

    def _differentiated(self, trace: ProductTrace, loss: Any) -> Gradients:
        """The gradients of the parameters, of a loss that is checked and noted."""
        shape = tuple(getattr(loss, "shape", (0,)))
        if math.prod(shape) != 1 or not loss.requires_grad:
            raise TypeError(
                f"apex.debug.what_if: loss gave a {type(loss).__name__} of shape {shape}; it must "
                "give a tensor of one element that depends on the weights"
            )
        trace.loss = float(loss.detach())
        found = torch.autograd.grad(loss.reshape(()), self.parameters, allow_unused=True)
        return [None if one is None else one.to_dense() for one in found]

    def _judge(self, number: int, trace: ProductTrace, roundings: Sequence[Rounding]) -> None:
        """Compare each layer's results in the formats, and keep the worst."""
        for piece in [one for one in trace.pieces if not one.is_part]:
            exact = piece.exact()
            for rounding in roundings:
                self._compare(number, piece, exact, rounding)
            if "float16" in self.scores:
                self.ranges.note_small(piece.gradients.values())

    def _compare(self, number: int, piece: ProductCall, exact: Results, rounding: Rounding) -> None:
        found, form, owner = piece.run(rounding), rounding.form, id(piece.owner)
        near = {key: cosine(exact[key], found[key]) for key in exact}
        key = min(near, key=near.__getitem__)
        before = self.scores[form.name].get(owner)
        if before is None or near[key] < before.cosine:
            smallest = torch.finfo(form.result).tiny
            smallest /= 1.0 if key[0] == RESULT else rounding.scale
            numbers = shares(exact[key], found[key], smallest)
            self.scores[form.name][owner] = Score(near[key], key[0], number, *numbers)
        if near[key] == -1.0:
            sizes = map(float, piece.sizes())
            self.ranges.operands[owner] = max(self.ranges.operands[owner], *sizes, 0.0)


@contextmanager
def _given_back(batch: Any) -> Iterator[None]:
    """Undo what a pass writes into its batch: one scaled in place would be so in each pass.

    After the backward pass, which reads what the forward has left there.
    """
    given = [(x, x.detach().clone(), version_of(x)) for x in tensors_of(batch)]
    try:
        yield
    finally:
        for x, value, version in given:
            if version_of(x) != version:
                x.data.copy_(value)
