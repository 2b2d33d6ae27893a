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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from apex._compat.private import tree_map_only
from apex.amp.casting.kept_modules import named_modules
from apex.debug import calls
from apex.debug.tensors import largest
from apex.debug.undisturbed import unchanged
from apex.debug.what_if import spread, whole
from apex.debug.what_if.formats import Format, InFormat, Rounding, State, nonzero
from apex.debug.what_if.spread import Spread
from apex.debug.what_if.tracing import (
    INPUT,
    RESULT,
    ProductCall,
    ProductTrace,
    Results,
    keepers,
)
from apex.debug.what_if.whole import Gradients, Level, SinglePass, Whole, cosine

ENOUGH = 8  # batches
SUSPECTS = 8  # of a format, the worst, that are tried in the whole model
OFFSETS = 16  # and layers whose spread may be lost: of each a third of a pass
LARGEST, LARGEST_SCALE = torch.finfo(torch.float16).max, 2.0**24  # amp's own limit
# Relative, of the gradient that reaches a result whose spread is lost, where a cosine of 0.999 is
# safe; in e4m3, where 0.98 is, 4.5 times as much.
OWN_ERROR = 0.05
OUTSIDE = "(outside of modules)"  # the name of the layer of such products
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


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
        whole: Of a suspect, alone in its format in the whole model and the first batch.
        is_needed: Whether it has to be in float32: it overflows, or damages the whole pass.
        spread: Of its result, where an offset may hide from the cosine what is lost.
    """

    cosine: float
    result: str
    batch: int
    inf: float
    zero: float
    subnormal: float
    state: State = "not decided"
    why: str = ""
    whole: Whole | None = None
    is_needed: bool = False
    spread: Spread | None = None

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

    def compare(
        self, number: int, form: Format, exact: Results, found: Results, channel: int
    ) -> float:
        """Keep the worst of results in a format, if none was worse; return its cosine."""
        near = {key: cosine(exact[key], found[key]) for key in exact}
        key = min(near, key=near.__getitem__)
        before = self.verdicts.get(form.name)
        if before is None or near[key] < before.cosine:
            numbers = shares(exact[key], found[key], torch.finfo(form.result).tiny)
            now = self.verdicts[form.name] = LayerVerdict(near[key], key[0], number, *numbers)
            now.spread = None if before is None else before.spread
        if near[key] != -1.0:
            verdict = self.verdicts[form.name]
            results = [key for key in exact if key[0] == RESULT]
            if not _is_lost(verdict):  # one batch is enough to try the layer in the whole model
                lost = [spread.compared(exact[key], found[key], channel, form) for key in results]
                known = [one for one in (verdict.spread, *lost) if one is not None]
                verdict.spread = min(known, key=lambda one: one.kept, default=None)
        return near[key]


Suspect = tuple[Layer, LayerVerdict]


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
        self,
        model: torch.nn.Module,
        loss: Loss,
        batches: Sequence[Any],
        forms: Sequence[Format],
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self.model, self.loss, self.batches, self.forms = model, loss, batches, forms
        self._progress = progress
        self._first: SinglePass | None = None  # over the first batch
        self.random, self.ranges, self.trace = calls.random_states(), Ranges(), ProductTrace()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.called, self.reached = {id(one) for one in model.modules()}, set[int]()
        self.layers = dict[int, Layer]()
        for name, module in named_modules(model):
            self.layers.setdefault(id(module), Layer(name, type(module).__name__))
        self.layers[id(None)] = Layer(OUTSIDE, "function")

    def run(self, after: Callable[[Gradients], None]) -> list[Layer]:
        """Look at every batch; ``after`` gets the gradients of the parameters of each.

        Returns:
            The layers with products of their own, with verdicts.
        """
        has_scale, trace = any(one.name == "float16" for one in self.forms), self.trace
        for number in range(len(self.batches)) if has_scale else ():  # the scale is found first
            self._note_gradients(number, first := ProductTrace(), self.passed(number, first))
            self._progress(number + 1, 2 * len(self.batches))
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
                if self._first is None:
                    self._first = SinglePass(trace.loss, gradients)
                after(gradients)
                before = len(self.batches) if has_scale else 0
                self._progress(before + number + 1, before + len(self.batches))
        found = [one for one in self.layers.values() if one.verdicts]
        self._decide(found)
        self._try_whole(found, roundings)
        return found

    def levels(self, policy: Any) -> list[Level]:
        """Run the first batch at the levels of the formats, with a policy."""
        names = {one.name: whole.LEVELS.get(one.name, ()) for one in self.forms}
        if not any(names.values()):
            return []
        from apex.amp.frontend import preserved  # a watch does without amp
        from apex.amp.functions import disable_casts

        exact = self._first
        if exact is None or any(True for _ in self.model.buffers()):  # which each pass may change
            with unchanged(self.model):
                exact = self._plain_pass(self.model, 1.0)
        compare = partial(whole.compared, exact, usual=self.ranges.loss)
        found = []
        with preserved():
            for form, level in [(key, one) for key, levels in names.items() for one in levels]:
                # a dynamic scale falls until gradients are finite
                below = (0, 5, 10, 15, 20) if form == "float16" else ()
                scales = [self.ranges.scale * 2.0**-down for down in below] or [1.0]
                run = partial(self._plain_pass, around=disable_casts)  # as scale_loss does
                found.append(whole.at_level(level, self.model, policy, run, scales, compare))
        return found

    def _plain_pass(
        self, model: torch.nn.Module, scale: float, around: Callable[[], Any] = nullcontext
    ) -> SinglePass:
        """The first batch through a model, as the program runs it; a context around backward."""
        context = Plain()
        gradients = self.passed(0, context, scale, model, around)
        return SinglePass(context.loss, [_unscaled(one, scale) for one in gradients])

    def passed(
        self,
        number: int,
        context: Any,
        scale: float = 1.0,
        model: torch.nn.Module | None = None,
        around: Callable[[], Any] = nullcontext,
        ends: Sequence[torch.Tensor] | None = None,
    ) -> Gradients:
        """One pass over a batch in a context; the gradients of the parameters times ``scale``.

        Args:
            number: Of the batch.
            context: A context that gets the loss as an attribute.
            scale: Of the loss.
            model: Another one than the study's.
            around: Makes a context for the backward.
            ends: A list that the forward fills: their gradients are computed, and no others.
        """
        calls.set_random_states(self.random)
        parameters = self.parameters
        if model is None:
            model = self.model
        else:
            parameters = [p for p in model.parameters() if p.requires_grad]
        with context:  # a copy: what the loss scales in place would be so in each pass
            batch = tree_map_only(torch.Tensor, _copy, self.batches[number])
            loss: Any = self.loss(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = f" of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else ""
            raise TypeError(
                f"apex.debug.what_if: loss returned a {type(loss).__name__}{shape}; it must return "
                "only a tensor of one element that depends on the weights"
            )
        context.loss, loss = float(loss.detach()), loss.reshape(()) * scale
        if calls.is_reentrant([loss]):  # its forwards run again in the backward, which is noted
            with context, around():
                found = calls.by_backward([loss], [torch.ones_like(loss)], parameters, keep=False)
        else:
            with around():
                found = [*torch.autograd.grad(loss, ends or parameters, allow_unused=True)]
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
            found = piece.run(rounding)
            if layer.compare(number, rounding.form, exact, found, piece.channel) == -1.0:
                layer.operand = max([layer.operand, *piece.sizes()])
            for one in piece.gradients.values() if rounding.form.name == "float16" else ():
                lost, total = ranges.small
                ranges.small = (lost + rounding.zeroed(one), total + one.numel())

    def _decide(self, layers: Sequence[Layer]) -> None:
        """Set the verdicts, and which module a policy can name."""
        keep = keepers(self.model, self.called, self.trace.readers)
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
        listed = {one.form.name: self._suspects(layers, one.form) for one in roundings}
        if not any(listed.values()):
            return
        trace = ProductTrace()
        with trace.on(self.model):
            gradients = self.passed(0, trace)
        exact, products = (
            SinglePass(trace.loss, gradients),
            [one for one in trace.pieces if not one.chosen],
        )
        for rounding in roundings:
            suspects = listed[rounding.form.name]
            by_offset = [pair for pair in suspects if not pair[1].why]
            others = [pair for pair in suspects if pair[1].why]
            together = partial(self._alone, products, exact, rounding)
            for pair in others[:SUSPECTS]:
                together([pair])
            if others[SUSPECTS:]:
                together(others[SUSPECTS:])
            is_cleared = partial(self._is_cleared, products, exact, rounding)
            _try_offsets(by_offset, rounding.form, together, is_cleared)
        for layer in layers:
            for name, verdict in layer.verdicts.items():
                _accuse(verdict, next(one.form for one in roundings if one.form.name == name))

    def _alone(
        self,
        products: Sequence[ProductCall],
        exact: SinglePass,
        rounding: Rounding,
        group: Sequence[Suspect],
    ) -> Sequence[Suspect]:
        """Run the first batch with a group of layers in a format; note what becomes of it."""
        ids = {id(layer) for layer, _ in group}
        own = {n for n, one in enumerate(products) if id(self.layers[id(one.owner)]) in ids}
        by_offset = not group[0][1].why
        for down in (0, 5) if rounding.scale != 1.0 else (0,):  # a dynamic scale would fall
            scale = rounding.scale * 2.0**-down
            alone = InFormat(Rounding(rounding.form, scale), own, is_centred=by_offset)
            unscaled = [_unscaled(one, scale) for one in self.passed(0, alone, scale)]
            if not math.isfinite(alone.loss) or whole.is_finite(unscaled):
                break
        found = whole.compared(exact, SinglePass(alone.loss, unscaled), self.ranges.loss)
        for layer, verdict in group:
            is_off = self._is_off(products, alone, layer, verdict)
            verdict.is_needed = bool(verdict.inf or found.why or is_off)
            verdict.whole = found
        return group

    def _is_cleared(
        self, products: Sequence[ProductCall], exact: SinglePass, rounding: Rounding, one: Suspect
    ) -> bool:
        """Whether a layer whose spread may be lost changes little of the first batch, alone.

        Asked of a layer whose group left the gradients of the weights right: the backward goes as
        far as its own results, which takes a third of the time.
        """
        layer, verdict = one
        own = {n for n, x in enumerate(products) if self.layers[id(x.owner)] is layer}
        alone = InFormat(rounding, own, is_centred=True)
        self.passed(0, alone, rounding.scale, ends=alone.results)
        is_near = abs(alone.loss - exact.loss) <= whole.LOSS * self.ranges.loss
        is_off = self._is_off(products, alone, layer, verdict)
        verdict.is_needed = bool(verdict.inf or is_off or not is_near)
        return not verdict.is_needed

    def _is_off(
        self, products: Sequence[ProductCall], alone: InFormat, layer: Layer, verdict: LayerVerdict
    ) -> bool:
        """Whether the gradients that reach the results of a layer are, where its spread is lost."""
        if verdict.spread is None or not verdict.spread.is_lost:
            return False
        off = size = 0.0
        for (number, place), found in alone.gradients.items():
            exact = products[number].gradients.get(place)
            if exact is not None and self.layers[id(products[number].owner)] is layer:
                off += float((found / alone.rounding.scale - exact).square().sum())
                size += float(exact.square().sum())
        allowed = OWN_ERROR * math.sqrt((1.0 - alone.rounding.form.safe) / 0.001)
        return bool(size) and not math.sqrt(off / size) * verdict.spread.times <= allowed

    @staticmethod
    def _suspects(layers: Sequence[Layer], form: Format) -> list[Suspect]:
        """Layers that are not safe, or whose spread may be lost; the worst first."""
        every = [(one, one.verdicts[form.name]) for one in layers]
        found = [(one, v) for one, v in every if v.why or (v.state == "safe" and _is_lost(v))]
        return sorted(found, key=lambda pair: pair[1].cosine if pair[1].why else 1.0)

    def unseen(self) -> list[str]:
        """Modules with a weight matrix of which no use, or no gradient, was seen."""
        missing = {id(p) for p in self.parameters} - self.reached
        hidden = set[int]().union(*[ids for _, ids in self.trace.hidden.values()])
        missing |= hidden - self.trace.readers.keys()
        named = named_modules(self.model)
        rows = [(n or type(m).__name__, p) for n, m in named for p in m.parameters(recurse=False)]
        return list(dict.fromkeys(name for name, p in rows if p.dim() > 1 and id(p) in missing))


class Plain(nullcontext[None]):
    """Context of a pass that is not looked into.

    Attributes:
        loss: Of the pass.
    """

    loss = 0.0


def _try_offsets(
    pairs: Sequence[Suspect],
    form: Format,
    together: Callable[[Sequence[Suspect]], Sequence[Suspect]],
    is_cleared: Callable[[Suspect], bool],
) -> None:
    """Try layers whose spread may be lost: together, since most often none is needed in float32.

    But the errors of one reach the others. So those that were not cleared are tried alone, the
    nearest to the loss first. What is left after OFFSETS of them is to be looked at.
    """
    if len(pairs) > 1:
        pairs = [pair for pair in together(pairs) if pair[1].is_needed]
    for pair in pairs[::-1][:OFFSETS]:
        by_group = pair[1].whole
        if by_group is None or by_group.why or not is_cleared(pair):
            together([pair])
    for _, verdict in pairs[::-1][OFFSETS:]:
        if verdict.spread is not None:
            verdict.is_needed = False
            verdict.state, verdict.why = "look", verdict.spread.why(form)


def _is_lost(verdict: LayerVerdict) -> bool:
    return verdict.spread is not None and verdict.spread.is_lost


def _accuse(verdict: LayerVerdict, form: Format) -> None:
    """Call a layer not safe whose spread is lost, if it is needed in float32."""
    if verdict.is_needed and _is_lost(verdict) and not verdict.inf:
        assert verdict.spread is not None
        verdict.state, verdict.why = "not safe", verdict.spread.why(form)
        verdict.cosine = min(verdict.cosine, verdict.spread.kept)


def _unscaled(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    if gradient is None:
        return None
    return gradient.float() if scale == 1.0 else gradient.float().div_(scale)


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
