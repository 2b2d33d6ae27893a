"""The local rule: how near a layer's own results in a format come to those in float32.

Of each batch one pass in float32 is noted. Then every product runs again alone, in float32 and in
the formats, from the inputs and the output gradient of the pass: a fault accuses the layer that has
it, and not those before. Compared are its result, the gradients of its inputs and those of its
weight matrices, by their cosine; the gradients of biases are not, since where they are zero by
mathematics (a bias before a norm) they are noise in any format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apex.debug.tensors import is_bad
from apex.debug.what_if.formats import FORMATS, Format, InFormat
from apex.debug.what_if.tracing import Piece, Trace

LARGEST_SCALE = 2.0**24  # amp's own limit
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Score:
    """The worst result of a layer in a format.

    Attributes:
        cosine: To the result in float32; -1 where it is not finite.
        result: Which: "result", "input gradient" or "weight gradient".
        inf: Share of its values that are not finite in the format, and are in float32.
        zero: Share that became zero.
        subnormal: Share that has less precision, because it is below the normal numbers.
    """

    cosine: float
    result: str
    inf: float = 0.0
    zero: float = 0.0
    subnormal: float = 0.0


@dataclass
class Ranges:
    """Largest magnitudes of the passes in float32; by the ids of modules where there are several.

    Attributes:
        products: Results of a module's own products.
        operands: What these multiply.
        outputs: What a module call gave.
        gradient: Of the gradients, of products and of parameters.
        weight: Of the parameters.
        small: Of the gradients of products, how many are smaller than what float16 can hold at the
            loss scale of the batch, and how many there are.
    """

    products: dict[int | None, float] = field(default_factory=dict)
    operands: dict[int | None, float] = field(default_factory=dict)
    outputs: dict[int, float] = field(default_factory=dict)
    gradient: float = 0.0
    weight: float = 0.0
    loss: float = 0.0
    small: list[tuple[int, int]] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """The largest power of two by which all gradients stay finite in float16."""
        return scale_for(self.gradient)


def scale_for(gradient: float) -> float:
    """The largest loss scale, a power of two, under which ``gradient`` is finite in float16."""
    if gradient == 0.0:
        return LARGEST_SCALE
    exponent = math.floor(math.log2(FORMATS["float16"].largest / gradient))
    return float(min(2.0**exponent, LARGEST_SCALE))


def compared(
    kind: str, exact: torch.Tensor, found: torch.Tensor, form: Format, scale: float
) -> Score:
    """How near ``found``, computed in a format under a loss scale, is to ``exact``."""
    count = max(exact.numel(), 1)
    factor = scale if form.needs_scale and kind != "result" else 1.0
    smallest = torch.finfo(form.result).tiny / factor
    sizes = found.abs()
    zero = torch.count_nonzero((sizes == 0) & (exact != 0))
    subnormal = torch.count_nonzero((sizes < smallest) & (sizes > 0))
    inf = count - torch.count_nonzero(torch.isfinite(sizes))
    shares = [float(one) / count for one in (inf, zero, subnormal)]
    return Score(-1.0 if shares[0] else cosine(exact, found), kind, *shares)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine between two tensors; 1 if both are zero, 0 if one of them is."""
    a, b = a.flatten().double(), b.flatten().double()
    norms = float(a.norm() * b.norm())
    if norms == 0.0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(a @ b) / norms


Scores = dict[int | None, Score]  # by the id of the module


class Study:
    """The passes over the batches.

    Attributes:
        scores: Of each format, of each batch.
        ranges: See :class:`Ranges`.
        trace: Of the last batch: what belongs to which module.
        gradients: Of each batch those of the parameters, for :mod:`apex.debug.what_if.updates`.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Loss, batches: Sequence[Any], forms: Sequence[Format]
    ) -> None:
        self.model, self.loss, self.batches, self.forms = model, loss, batches, forms
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.ranges = Ranges()
        self.scores: dict[str, list[Scores]] = {form.name: [] for form in forms}
        self.trace = Trace()
        self._attentions: set[int | None] = set()

    def run(self, after: Callable[[Sequence[torch.Tensor | None]], None]) -> None:
        """Look at every batch; ``after`` gets the gradients of the parameters of each."""
        scales = []
        for number in range(len(self.batches)):
            trace, gradients = self.passed(number)
            self._note_ranges(trace, gradients)
            after(gradients)
            del gradients
            scales.append(self.ranges.scale)
            judged = self._judged(trace, self.forms)
            for form in self.forms:
                self.scores[form.name].append(judged[form.name])
        self._again(scales)

    def passed(
        self, number: int, context: InFormat | None = None
    ) -> tuple[Trace, Sequence[torch.Tensor | None]]:
        """One pass over a batch, noted, or in a format; and the gradients of the parameters."""
        torch.manual_seed(number)
        trace, batch = Trace(), self.batches[number]
        with trace.of(self.model) if context is None else context:
            loss = self.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(
                f"apex.debug.what_if: loss(model, batch) returned {_described(loss)}; it must be a "
                "tensor of one element that depends on the model's weights."
            )
        trace.loss = float(loss.detach())
        if context is None and is_bad(loss):
            raise ValueError(
                f"apex.debug.what_if: the loss of batch {number} is {trace.loss} in float32. Find "
                "the cause first: apex.debug.watch, or apex debug SCRIPT."
            )
        return trace, torch.autograd.grad(loss.reshape(()), self.parameters, allow_unused=True)

    def _note_ranges(self, trace: Trace, gradients: Sequence[torch.Tensor | None]) -> None:
        ranges, self.trace = self.ranges, trace
        ranges.loss = max(ranges.loss, abs(trace.loss))
        sizes = [one.abs().amax() for one in gradients if one is not None and one.numel()]
        sizes += [g.abs().amax() for piece in trace.pieces for g in piece.gradients.values()]
        ranges.gradient = max(ranges.gradient, *map(float, sizes), 0.0)
        if not math.isfinite(ranges.gradient):
            raise ValueError(
                "apex.debug.what_if: a gradient is not finite in float32. Find the cause first: "
                "apex.debug.watch, or apex debug SCRIPT."
            )
        weights = [float(p.detach().abs().amax()) for p in self.parameters if p.numel()]
        ranges.weight = max(weights, default=0.0)
        for module, size in trace.outputs:
            _raise_to(ranges.outputs, id(module), [size])
        for piece in trace.pieces:
            key = None if piece.owner is None else id(piece.owner)
            if piece.is_part:
                self._attentions.add(key)
            _raise_to(ranges.products, key, piece.results)
            _raise_to(ranges.operands, key, piece.operands)
        ranges.small.append(_too_small(trace.pieces, ranges.scale))

    def is_attention(self, key: int | None) -> bool:
        """Whether the module has chained products of activations."""
        return key in self._attentions

    def _judged(self, trace: Trace, forms: Sequence[Format]) -> dict[str, Scores]:
        found: dict[str, Scores] = {form.name: {} for form in forms}
        for piece in trace.pieces:
            if piece.is_part:
                continue
            key = None if piece.owner is None else id(piece.owner)
            exact = piece.run(None)
            for form in forms:
                others = piece.run(form, self.ranges.scale)
                pairs = zip(exact, others, strict=True)
                scores = [
                    compared(kind, a, b, form, self.ranges.scale) for (kind, a), (_, b) in pairs
                ]
                before = found[form.name].get(key)
                scores += [] if before is None else [before]
                found[form.name][key] = min(scores, key=lambda one: one.cosine)
        return found

    def _again(self, scales: list[float]) -> None:
        """Judge float16 once more where a later batch asked for a smaller loss scale."""
        forms = [form for form in self.forms if form.needs_scale]
        for number, scale in enumerate(scales):
            if forms and scale != self.ranges.scale:
                trace, _ = self.passed(number)
                self.ranges.small[number] = _too_small(trace.pieces, self.ranges.scale)
                for name, scores in self._judged(trace, forms).items():
                    self.scores[name][number] = scores


def _raise_to(table: dict[Any, float], key: int | None, sizes: Sequence[torch.Tensor]) -> None:
    table[key] = max([table.get(key, 0.0), *map(float, sizes)])


def _too_small(pieces: Sequence[Piece], scale: float) -> tuple[int, int]:
    """How many gradients of products become zero in float16 at a loss scale, of how many."""
    lost = total = 0
    for piece in pieces:
        for gradient in piece.gradients.values() if not piece.is_part else ():
            sizes = gradient.abs()
            lost += int(torch.count_nonzero((sizes <= 2.0**-25 / scale) & (sizes > 0)))
            total += gradient.numel()
    return lost, total


def _described(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" + (
        "" if loss.requires_grad else " that depends on no weight"
    )
