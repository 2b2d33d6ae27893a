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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from apex.debug.calls import random_states, set_random_states
from apex.debug.what_if.formats import Format, Products, Rounding, largest, nonzero, rounded_
from apex.debug.what_if.tracing import RESULT, ProductCall, ProductTrace, Results

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
        gradient: Of the gradients of products, of what they multiply, and of parameters; ``loss``
            of the losses.
        small: How many gradients of products become zero in float16 at the loss scale, of how many.
    """

    def __init__(self) -> None:
        self.products, self.operands, self.outputs = (defaultdict[int, float](float) for _ in "123")
        self.gradient = self.loss = 0.0
        self.small = (0, 0)

    @property
    def scale(self) -> float:
        """The largest loss scale, a power of two, by which all gradients are finite in float16."""
        exponent = math.floor(math.log2(LARGEST / max(self.gradient, 1e-30)))
        return float(min(2.0**exponent, LARGEST_SCALE))


def shares(exact: torch.Tensor, found: torch.Tensor, smallest: float) -> list[float]:
    """Which shares of ``found`` are not finite, became zero, and are below normal numbers."""
    bad = 0 if math.isfinite(found.sum()) else int(torch.count_nonzero(~found.isfinite()))
    before, after, normal = map(nonzero, (exact, found, (found / smallest).trunc_()))
    return [max(one, 0) / max(found.numel(), 1) for one in (bad, before - after, after - normal)]


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
        trace: The passes in float32.
        called: The ids of the modules that were called for every batch.
        measured: Of each module, by id, the numbers of the batches in which it gave numbers.
        reached: The ids of the parameters that had a gradient other than zero.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Loss, batches: Sequence[Any], forms: Sequence[Format]
    ) -> None:
        self.model, self.loss, self.batches, self.forms = model, loss, batches, forms
        self.random, self.ranges, self.trace = random_states(), Ranges(), ProductTrace()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.called, self.reached = {id(one) for one in model.modules()}, set[int]()
        self.measured: dict[int, set[int]] = defaultdict(set)
        self.scores: dict[str, dict[int, Score]] = {form.name: {} for form in forms}

    def run(self, after: Callable[[Gradients], None]) -> None:
        """Look at every batch; ``after`` gets the gradients of the parameters of each."""
        if "float16" in self.scores:  # first its loss scale
            for number in range(len(self.batches)):
                self._note_gradients(number, trace := ProductTrace(), self.passed(number, trace))
        roundings, trace = [Rounding(form, self.ranges.scale) for form in self.forms], self.trace
        with trace.on(self.model):
            for number in range(len(self.batches)):
                gradients = self.passed(number, trace)
                self._note_outputs()
                if "float16" not in self.scores:
                    self._note_gradients(number, trace, gradients)
                for piece in [one for one in trace.pieces if not one.is_part]:
                    self._judge(number, piece, roundings)
                trace.forget()
                after(gradients)

    def passed(self, number: int, context: Products, scale: float = 1.0) -> Gradients:
        """One pass over a batch in a context; the gradients of the parameters times ``scale``."""
        set_random_states(self.random)
        with context:  # a copy: what the loss scales in place would be so in each pass
            loss: Any = self.loss(
                self.model, tree_map_only(torch.Tensor, _copy, self.batches[number])
            )
        is_tensor = isinstance(loss, torch.Tensor)
        if not is_tensor or loss.numel() != 1 or not loss.requires_grad:
            shape = f" of shape {tuple(loss.shape)}" if is_tensor else ""
            raise TypeError(
                f"apex.debug.what_if: loss gave a {type(loss).__name__}{shape}; it must give a "
                "tensor of one element that depends on the weights, and nothing else"
            )
        context.loss, loss = float(loss.detach()), loss.reshape(()) * scale
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return [None if one is None else one.to_dense() for one in found]

    def _note_gradients(self, number: int, trace: ProductTrace, gradients: Gradients) -> None:
        """Add the loss of a pass, and the sizes of its gradients."""
        both, ranges = zip(self.parameters, gradients, strict=True), self.ranges
        own = {id(weight): float(largest(one)) for weight, one in both if one is not None}
        inside = [float(one) for piece in trace.pieces for one in piece.gradient_sizes()]
        if not math.isfinite(sum(inside, trace.loss) + sum(own.values())):
            raise ValueError(
                f"apex.debug.what_if: the loss or a gradient of batch {number} is not finite in "
                "float32; apex.debug.watch and apex debug SCRIPT find the cause"
            )
        self.reached |= {key for key, size in own.items() if size > 0.0}
        ranges.loss = max(ranges.loss, abs(trace.loss))
        ranges.gradient = max(ranges.gradient, 0.0, *inside, *own.values())

    def _note_outputs(self) -> None:
        """Add what modules and their products gave in a pass."""
        self.called &= self.trace.called
        rows = [(self.ranges.outputs, key, size) for key, size in self.trace.outputs]
        owned = [(id(piece.owner), one) for piece in self.trace.pieces for one in piece.outputs]
        rows += [(self.ranges.products, key, largest(one)) for key, one in owned]
        for table, key, size in rows:
            table[key] = max(table[key], float(size))

    def _judge(self, number: int, piece: ProductCall, roundings: Sequence[Rounding]) -> None:
        """Compare a product's results in the formats, and keep the worst."""
        exact, small = piece.exact(), self.ranges.small
        if not any(one.numel() for (kind, _), one in exact.items() if kind == RESULT):
            return  # an empty batch
        self.measured[id(piece.owner)].add(number)
        for rounding in roundings:
            self._compare(number, piece, exact, rounding)
            for one in piece.gradients.values() if rounding.form.name == "float16" else ():
                left = rounded_(one * rounding.scale, torch.float16)
                lost = nonzero(one) - nonzero(left)
                small = (small[0] + lost, small[1] + one.numel())
        self.ranges.small = small

    def _compare(self, number: int, piece: ProductCall, exact: Results, rounding: Rounding) -> None:
        found, form, owner = piece.run(rounding), rounding.form, id(piece.owner)
        near = {key: cosine(exact[key], found[key]) for key in exact}
        key = min(near, key=near.__getitem__)
        before = self.scores[form.name].get(owner)
        if before is None or near[key] < before.cosine:
            numbers = shares(exact[key], found[key], torch.finfo(form.result).tiny)
            self.scores[form.name][owner] = Score(near[key], key[0], number, *numbers)
        if near[key] == -1.0:
            sizes = map(float, piece.sizes())
            self.ranges.operands[owner] = max(self.ranges.operands[owner], *sizes, 0.0)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)
