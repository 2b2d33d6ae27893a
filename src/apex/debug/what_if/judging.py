"""The local rule: how near a layer's own results in a format come to those in float32.

Of each batch one pass in float32 is noted. Then every product runs again alone, in float32 and in
the formats, from the inputs and the output gradient of the pass: a fault accuses the layer that has
it, and not those before. Compared are its result, the gradients of its inputs and those of its
weight matrices, by their cosine; the gradients of biases are not, since where they are zero by
mathematics (a bias before a norm) they are noise in any format. A layer that is not safe is then
tried alone in its format, in the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from apex import _precision_policy as policies
from apex._compat.private import tree_map_only
from apex.debug import calls
from apex.debug.tensors import largest
from apex.debug.what_if.formats import Format, InFormat, Products, Rounding, State, nonzero
from apex.debug.what_if.tracing import INPUT, RESULT, ProductCall, ProductTrace, Results

ENOUGH = 8  # batches
SUSPECTS = 8  # of a format, the worst, that are tried in the whole model
LARGEST, LARGEST_SCALE = torch.finfo(torch.float16).max, 2.0**24  # amp's own limit
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


@dataclass
class LayerVerdict:
    """On one layer in one format: the worst result of all batches.

    Attributes:
        cosine: To the result in float32; -1 where it is not finite.
        result: Which: "result", "input gradient" or "weight gradient".
        batch: The number of the batch.
        inf: Share of its values that are not finite in the format.
        zero: Share that became zero.
        subnormal: Share that has less precision, because it is below the normal numbers.
        state: One of "safe", "look", "not safe" and "not decided".
        why: The reason, where it is not safe or to be looked at.
        whole: Of a suspect, alone in its format in the whole model and the first batch: the loss in
            float32, the loss, and the median cosine of the gradients of weight matrices.
    """

    cosine: float
    result: str
    batch: int
    inf: float
    zero: float
    subnormal: float
    state: State = "not decided"
    why: str = ""
    whole: tuple[float, float, float] | None = None

    @property
    def cell(self) -> str:
        """For a table: the state, and the worst cosine or inf."""
        return f"{self.state} {'inf' if self.inf else f'{self.cosine:.4f}'}"


@dataclass
class Layer:
    """What was measured of a module, and the verdicts on it, if it has products of its own.

    Attributes:
        name: As in ``named_modules()``, without what compile and wrappers add.
        kind: The class of the module.
        keep: The module that a policy names to keep this one out of a format: itself, or the
            nearest around it that was called and whose weights nobody else has or reads; else None.
        verdicts: By format, in the order in which these were asked for.
        batches: The numbers of those in which its products gave numbers.
        product: The largest magnitude of what its products gave in float32.
        operand: Of what they multiply, where that or the result is beyond a format.
        output: Of what its calls gave.
        is_attention: Whether products of it were judged together.
    """

    name: str
    kind: str
    keep: str | None = None
    verdicts: dict[str, LayerVerdict] = field(default_factory=dict)
    batches: set[int] = field(default_factory=set)
    product: float = 0.0
    operand: float = 0.0
    output: float = 0.0
    is_attention: bool = False

    def compare(self, number: int, form: Format, exact: Results, found: Results) -> float:
        """Keep the worst of results in a format, if none was worse; return its cosine."""
        near = {key: cosine(exact[key], found[key]) for key in exact}
        key = min(near, key=near.__getitem__)
        before = self.verdicts.get(form.name)
        if before is None or near[key] < before.cosine:
            numbers = shares(exact[key], found[key], torch.finfo(form.result).tiny)
            self.verdicts[form.name] = LayerVerdict(near[key], key[0], number, *numbers)
        return near[key]


class Ranges:
    """Largest magnitudes of the passes in float32.

    Attributes:
        product: Of what products gave; ``output`` of what modules gave; ``loss`` of the losses.
        gradient: Of the gradients of products, of what they multiply, and of parameters.
        small: How many gradients of products become zero in float16 at the loss scale, of how many.
    """

    product = output = loss = gradient = 0.0
    small = (0, 0)

    @property
    def scale(self) -> float:
        """The largest loss scale, a power of two, by which all gradients are finite in float16."""
        exponent = math.floor(math.log2(LARGEST / max(self.gradient, 1e-30)))
        return float(min(2.0**exponent, LARGEST_SCALE))


def shares(exact: torch.Tensor, found: torch.Tensor, smallest: float) -> tuple[float, float, float]:
    """Which shares of ``found`` are not finite, became zero, and are below normal numbers."""
    bad = 0 if math.isfinite(found.sum()) else int(torch.count_nonzero(~found.isfinite()))
    before, after, normal = map(nonzero, (exact, found, (found / smallest).trunc_()))
    total = max(found.numel(), 1)
    return bad / total, max(before - after, 0) / total, max(after - normal, 0) / total


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine between two tensors; 1 if both are zero, 0 if one is; -1 if not finite."""
    a, b = a.flatten(), b.flatten()
    sizes = float(a @ a) ** 0.5, float(b @ b) ** 0.5  # on a CPU a third of vector_norm's time
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
        layers: Of each module, by its id, in the order of the model; of ``None`` the products
            outside of modules.
        ranges: See :class:`Ranges`.
        trace: The passes in float32.
        called: The ids of the modules that were called for every batch.
        reached: The ids of the parameters that had a gradient other than zero.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Loss, batches: Sequence[Any], forms: Sequence[Format]
    ) -> None:
        self.model, self.loss, self.batches, self.forms = model, loss, batches, forms
        self.random, self.ranges, self.trace = calls.random_states(), Ranges(), ProductTrace()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.called, self.reached = {id(one) for one in model.modules()}, set[int]()
        self.layers = dict[int, Layer]()
        for name, module in policies.named_modules(model):
            self.layers.setdefault(id(module), Layer(name, type(module).__name__))
        self.layers[id(None)] = Layer("(outside of modules)", "function")

    def run(self, after: Callable[[Gradients], None]) -> list[Layer]:
        """Look at every batch; ``after`` gets the gradients of the parameters of each.

        Returns:
            The layers with products of their own, with verdicts.
        """
        has_scale, trace = any(one.name == "float16" for one in self.forms), self.trace
        for number in range(len(self.batches)) if has_scale else ():  # the scale is found first
            self._note_gradients(number, first := ProductTrace(), self.passed(number, first))
        roundings = [Rounding(form, self.ranges.scale) for form in self.forms]
        with trace.on(self.model):
            for number in range(len(self.batches)):
                gradients = self.passed(number, trace)
                self.called &= {key for key, _ in trace.calls}
                for key, sizes in trace.calls:
                    self.layers[key].output = max([self.layers[key].output, *map(float, sizes)])
                if not has_scale:
                    self._note_gradients(number, trace, gradients)
                for piece in trace.pieces:
                    self._judge(number, piece, roundings)
                trace.forget()
                after(gradients)
        found = [one for one in self.layers.values() if one.verdicts]
        self._decide(found)
        if any(verdict.why for one in found for verdict in one.verdicts.values()):
            self._try_whole(found, roundings)
        return found

    def passed(self, number: int, context: Products, scale: float = 1.0) -> Gradients:
        """One pass over a batch in a context; the gradients of the parameters times ``scale``."""
        calls.set_random_states(self.random)
        with context:  # a copy: what the loss scales in place would be so in each pass
            batch = tree_map_only(torch.Tensor, _copy, self.batches[number])
            loss: Any = self.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = f" of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else ""
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
        pieces = [(*piece.gradients.values(), *piece.seen(INPUT)) for piece in trace.pieces]
        inside = [float(largest(one)) for every in pieces for one in every]
        if not math.isfinite(sum(inside, trace.loss) + sum(own.values())):
            raise ValueError(
                f"apex.debug.what_if: the loss or a gradient of batch {number} is not finite in "
                "float32; apex.debug.watch and apex debug SCRIPT find the cause"
            )
        self.reached |= {key for key, size in own.items() if size > 0.0}
        ranges.loss = max(ranges.loss, abs(trace.loss))
        ranges.gradient = max(ranges.gradient, 0.0, *inside, *own.values())

    def _judge(self, number: int, piece: ProductCall, roundings: Sequence[Rounding]) -> None:
        """Note the sizes of a product's results, and compare them in the formats."""
        layer, ranges = self.layers[id(piece.owner)], self.ranges
        layer.product = max([layer.product, *(float(largest(one)) for one in piece.seen(RESULT))])
        exact = {} if piece.is_part else piece.exact()
        if not any(one.numel() for (kind, _), one in exact.items() if kind == RESULT):
            return  # an empty batch
        layer.batches.add(number)
        layer.is_attention |= bool(piece.chosen)
        for rounding in roundings:
            if layer.compare(number, rounding.form, exact, piece.run(rounding)) == -1.0:
                layer.operand = max([layer.operand, *piece.sizes()])
            for one in piece.gradients.values() if rounding.form.name == "float16" else ():
                lost, total = ranges.small
                ranges.small = (lost + rounding.zeroed(one), total + one.numel())

    def _decide(self, layers: Sequence[Layer]) -> None:
        """Set the verdicts, and which module a policy can name."""
        keep = policies.keepers(self.model, self.called, self.trace.readers)
        for layer, form in product(layers, self.forms):
            verdict, layer.keep = layer.verdicts[form.name], keep.get(layer.name)
            state = form.state(verdict.cosine)
            measured = self.batches if state == "not safe" else layer.batches
            if len(measured) >= ENOUGH:
                verdict.state = state
                verdict.why = "" if state == "safe" else _why(layer, verdict, form)
        self.ranges.product = max(one.product for one in self.layers.values())
        self.ranges.output = max(one.output for one in self.layers.values())

    def _try_whole(self, layers: Sequence[Layer], roundings: Sequence[Rounding]) -> None:
        """Run the first batch with one suspect in its format, and the rest in float32."""
        trace = ProductTrace()
        with trace.on(self.model):
            exact = self.passed(0, trace)
        owners = [self.layers[id(one.owner)] for one in trace.pieces if not one.chosen]
        for rounding in roundings:
            name = rounding.form.name
            suspects = [(one, one.verdicts[name]) for one in layers if one.verdicts[name].why]
            suspects.sort(key=lambda pair: pair[1].cosine)
            for layer, verdict in suspects[:SUSPECTS]:
                alone = InFormat(rounding, {n for n, one in enumerate(owners) if one is layer})
                both = zip(exact, self.passed(0, alone, rounding.scale), strict=True)
                pairs = [(a, b) for a, b in both if a is not None and b is not None and a.dim() > 1]
                middle = statistics.median([cosine(a, b) for a, b in pairs] or [1.0])
                verdict.whole = (trace.loss, alone.loss, middle)

    def unseen(self) -> list[str]:
        """Modules with a weight matrix of which no product, or no gradient, was seen."""
        missing = {id(p) for p in self.parameters} - self.reached
        missing |= {id(p) for p in self.model.parameters()} - self.trace.readers.keys()
        named = policies.named_modules(self.model)
        rows = [(n or type(m).__name__, p) for n, m in named for p in m.parameters(recurse=False)]
        return list(dict.fromkeys(name for name, p in rows if p.dim() > 1 and id(p) in missing))


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _why(layer: Layer, verdict: LayerVerdict, form: Format) -> str:
    end = torch.finfo(form.result).max
    result = "scores reach" if layer.is_attention else "result reaches"
    for what, size in ((result, layer.product), ("input or weight reaches", layer.operand)):
        if verdict.inf and size > end:
            return f"its {what} {size:.2g}, {form.name} ends at {end:g}"
    if verdict.inf:
        return f"{verdict.inf:.1%} of its {verdict.result} is beyond {form.name}"
    text = f"the cosine of its {verdict.result} to float32's is {verdict.cosine:.3f}"
    return text + (f", {verdict.zero:.0%} of it became zero" if verdict.zero >= 0.01 else "")
