"""The local rule: how near a layer's own results in a format come to those in float32.

Of each batch one pass in float32 is noted. Then every product runs again alone, in float32 and in
the formats, from the inputs and the output gradient of the pass: a fault accuses the layer that has
it, and not those before. Compared are its result, the gradients of its inputs and those of its
weight matrices, by their cosine; the gradients of biases are not, since where they are zero by
mathematics (a bias before a norm) they are noise in any format.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from apex.debug.calls import random_states, set_random_states, version_of
from apex.debug.tensors import tensors_of
from apex.debug.what_if.formats import Format
from apex.debug.what_if.tracing import ProductCall, ProductTrace, Results, largest

LARGEST, LARGEST_SCALE = torch.finfo(torch.float16).max, 2.0**24  # amp's own limit
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


class Score(NamedTuple):
    """The worst result of a layer in a format.

    Attributes:
        cosine: To the result in float32; -1 where it is not finite.
        result: Which: "result", "input gradient" or "weight gradient".
        inf: Share of its values that are not finite in the format.
        zero: Share that became zero.
        subnormal: Share that has less precision, because it is below the normal numbers.
    """

    cosine: float
    result: str
    inf: float
    zero: float
    subnormal: float


class Ranges:
    """Largest magnitudes of the passes in float32, by the ids of modules.

    Attributes:
        products: Results of a module's own products; ``operands`` what these multiply.
        outputs: What a module call gave.
        gradient: Of the gradients of products and of parameters; ``loss`` of the losses.
        small: Of the gradients of products, how many are smaller than what float16 can hold at the
            loss scale, and how many there are; of each batch.
    """

    def __init__(self) -> None:
        self.products, self.operands, self.outputs = (defaultdict[int, float](float) for _ in "123")
        self.gradient = self.loss = 0.0
        self.small: list[tuple[int, int]] = []

    def note(self, trace: ProductTrace, gradients: Gradients) -> None:
        """Add a pass, and the gradients of its parameters."""
        sizes = [largest(one) for one in gradients if one is not None]
        noted = [(self.outputs, key, [size]) for key, size in trace.outputs]
        for piece in trace.pieces:
            noted.append((self.products, id(piece.owner), piece.results))
            noted.append((self.operands, id(piece.owner), piece.operands))
            sizes += map(largest, piece.gradients.values())
        for table, key, found in noted:
            table[key] = max(table[key], *map(float, found), 0.0)
        self.loss = max(self.loss, abs(trace.loss))
        self.gradient = max(self.gradient, *map(float, sizes), 0.0)
        if not math.isfinite(sum(map(float, sizes), trace.loss)):
            raise ValueError(
                "apex.debug.what_if: the loss or a gradient is not finite in float32; "
                "apex.debug.watch and apex debug SCRIPT find the cause"
            )

    @property
    def scale(self) -> float:
        """The largest loss scale, a power of two, by which all gradients are finite in float16."""
        exponent = math.floor(math.log2(LARGEST / max(self.gradient, 1e-30)))
        return float(min(2.0**exponent, LARGEST_SCALE))


def _worst(exact: Results, found: Results, form: Format, scale: float) -> Score:
    """The result in a format, under a loss scale, that is least like the one in float32."""
    near = {key: cosine(exact[key], found[key]) for key in exact}
    key = min(near, key=lambda one: -2.0 if math.isnan(near[one]) else near[one])  # NaN: not finite
    return compared(key[0], near[key], exact[key], found[key], form, scale)


def compared(kind: str, near: float, exact: Any, found: Any, form: Format, scale: float) -> Score:
    """How near a tensor ``found``, computed in a format under a loss scale, is to ``exact``."""
    factor = scale if form.result == torch.float16 and kind != "result" else 1.0
    normal = found.abs() >= torch.finfo(form.result).tiny / factor
    inf = 0 if math.isfinite(near) else int(torch.count_nonzero(~torch.isfinite(found)))
    counts = [int(torch.count_nonzero(one)) for one in (exact, found, normal)]
    numbers = (inf, max(counts[0] - counts[1], 0), max(counts[1] - counts[2] - inf, 0))
    shares = [one / max(exact.numel(), 1) for one in numbers]
    return Score(-1.0 if inf else near, kind, *shares)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine between two tensors; 1 if both are zero, 0 if one is; NaN if not finite."""
    a, b = a.flatten(), b.flatten()
    sizes = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    if not all(1e-15 < one < 1e15 for one in sizes):  # their squares are beyond float32
        a, b = a.double(), b.double()
        sizes = float(a.norm()), float(b.norm())
    if 0.0 in sizes:
        return float(sizes[0] == sizes[1])
    return float(a @ b) / sizes[0] / sizes[1]


class Study:
    """The passes over the batches.

    Attributes:
        scores: Of each format, of each batch, by the ids of modules.
        ranges: See :class:`Ranges`.
        trace: Of the last batch: what belongs to which module.
        called: The ids of the modules that were called for every batch.
        readers: Of each parameter, by id, the ids of the modules that multiplied with it.
        reached: The ids of the parameters that had a gradient.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Loss, batches: Sequence[Any], forms: Sequence[Format]
    ) -> None:
        self.model, self.loss, self.batches, self.forms = model, loss, batches, forms
        self.random = random_states()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.ranges, self.trace, self.reached = Ranges(), ProductTrace(), set[int]()
        self.called: set[int] = set()
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.scores: dict[str, list[dict[int, Score]]] = {form.name: [] for form in forms}

    def run(self, after: Callable[[Gradients], None]) -> None:
        """Look at every batch; ``after`` gets the gradients of the parameters of each."""
        scales, halves = [], [form for form in self.forms if form.name == "float16"]
        for number in range(len(self.batches)):
            self.trace, gradients = self.passed(number)
            self.called = self.called & self.trace.called if number else self.trace.called
            for key, owners in self.trace.readers.items():
                self.readers[key] |= owners
            self.ranges.note(self.trace, gradients)
            scales.append(self.ranges.scale)
            if halves:
                self.ranges.small.append(_too_small(self.trace.pieces, self.ranges.scale))
            both = zip(self.parameters, gradients, strict=True)
            self.reached |= {id(weight) for weight, one in both if one is not None}
            after(gradients)
            for form, scores in self._judged(self.forms):
                self.scores[form].append(scores)
        for number, scale in enumerate(scales):
            if halves and scale != self.ranges.scale:  # a later batch asked for a smaller one
                self.trace, _ = self.passed(number)
                self.ranges.small[number] = _too_small(self.trace.pieces, self.ranges.scale)
                for form, scores in self._judged(halves):
                    self.scores[form][number] = scores

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

    def _judged(self, forms: Sequence[Format]) -> list[tuple[str, dict[int, Score]]]:
        found: dict[str, dict[int, Score]] = {form.name: {} for form in forms}
        scale = self.ranges.scale
        for piece in [one for one in self.trace.pieces if not one.is_part]:
            exact, key = piece.exact(), id(piece.owner)
            for form in forms:
                worst = _worst(exact, piece.run(form, scale), form, scale)
                before = found[form.name].get(key, worst)
                found[form.name][key] = min(worst, before, key=lambda one: one.cosine)
        return list(found.items())


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


def _too_small(pieces: Sequence[ProductCall], scale: float) -> tuple[int, int]:
    """How many gradients of products become zero in float16 at a loss scale, of how many."""
    sizes = [one.abs() for piece in pieces if not piece.is_part for one in piece.gradients.values()]
    lost = [torch.count_nonzero((one <= 2.0**-25 / scale) & (one > 0)) for one in sizes]
    return sum(map(int, lost)), sum(one.numel() for one in sizes)
