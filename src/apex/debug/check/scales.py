"""Rules of loss scales: each gradient is scaled, unscaled once, and clipped and stepped after that."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from apex.debug.check.facts import Facts, Mark, Passed, Rule, key_of
from apex.debug.check.finding import Place
from apex.debug.check.values import Call, is_in_place
from apex.debug.tracing import key_of as memory_of

_FP16 = "Attempting to unscale FP16 gradients"  # torch's error
_CLAMPS = ("clamp", "clip", "hardtanh", "minimum")


class ScalerSteps(Rule):
    """What a GradScaler steps, divides or refuses.

    Sees the scale of each backward in the gradients that it wrote. Prints the factor by which they
    are wrong, and in how many parameters. Silent for gradients that the program has written since,
    where it has read the scale itself, at a scale of 1, and of optimizers that amp manages.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._cast: list[tuple[weakref.ref[torch.nn.Module], Place]] = []

    def backward_begins(self, roots: list[Any], scales: set[float | None], place: Place) -> None:
        """Say that a part of a sum of losses is not scaled."""
        scaled = [one for one in scales if one not in (None, 1.0)]
        if None in scales and scaled and not self.facts.asked:
            text = f"a part of the loss is multiplied by {scaled[0]:g} and another one is not"
            self.facts.tell("one-loss-unscaled", text, place=place, size=scaled[0] or 0)

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """Compare the passes of all gradients with the scale by which they are divided."""
        facts = self.facts
        live = [m for m in facts.of(optimizer) if m.passes and not m.touched]
        scale = scaler._init_scale if scaler._scale is None else float(scaler._scale)
        if scale == 1.0 or facts.asked:
            return
        bare = [(m, p) for m in live if not m.unscaled or m.mixed for p in m.passes if not p.scale]
        if bare and len({id(m) for m, _ in bare}) == len(live) == len({id(m) for m, _ in bare}):
            is_all = all(p.scale is None for m in live for p in m.passes)
        else:
            is_all = False
        if is_all:
            text = f"the gradients were divided by {scale:g}: they are {scale:g} times too small"
            sentence = (
                f"divides gradients by the loss scale; the loss of {bare[0][1].place} was not"
            )
            facts.tell("step-without-scale", text, size=scale, sentence=f"{sentence} multiplied")
        elif bare:
            number = len({id(m) for m, _ in bare})
            text = (
                f"its gradients are {scale:g} times too small in {number} of {len(live)} parameters"
            )
            facts.tell("one-loss-unscaled", text, place=bare[0][1].place, size=scale)
        mixed = [m for m in live if m.mixed]
        if mixed:
            text = f"what came after unscale_() has {scale:g} times the weight of what came before"
            text += f", in {len(mixed)} of {len(live)} parameters"
            facts.tell("added-after-unscale", text, place=mixed[0].passes[-1].place, size=scale)

    def unscales(self, scaler: Any, optimizer: Any, marks: list[Mark]) -> None:
        """Compare the scale with that of the backward."""
        last = next((m.passes[-1] for m in marks if m.scale() is not None), None)
        if last is None or last.updates == self.facts.updates or last.scale is None:
            return
        now = float(scaler._scale)
        text = f"gradients were multiplied by {last.scale:g} and divided by {now:g}: "
        text += f"{last.scale / now:g} times their size"
        if now == last.scale:
            text = f"the scale was {now:g} at both; at its next change gradients are wrong by 2"
        self.facts.tell("update-before-step", text, size=abs(last.scale - now))

    def casts(self, module: torch.nn.Module, place: Place) -> None:
        """Remember where weights became float16."""
        self._cast.append((weakref.ref(module), place))

    def refuses(self, error: ValueError) -> None:
        """Say why ``unscale_`` raised, at the line that made float16 weights."""
        if _FP16 not in str(error):
            return
        params = self.facts.params()
        number = sum(param.dtype == torch.float16 for param in params)
        text = f"{number} of {len(params)} parameters are float16, and unscale_() raised: {error}"
        lines = [place for ref, place in self._cast if ref() is not None]
        self.facts.tell("float16-weights-under-scaler", text, place=lines[-1] if lines else None)


class PlainStep(Rule):
    """Steps of scaled gradients without the scaler.

    Sees scaled passes at a step that is not called by a scaler. Prints the factor, and in how many
    parameters. Silent for gradients that the program has written since, and where amp or a flag on
    the optimizer unscales.
    """

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Look for gradients that are still scaled."""
        facts = self.facts
        managed = hasattr(optimizer, "_amp_stash") or hasattr(optimizer, "grad_scale")
        if facts.inside is optimizer or managed:
            return
        live = [m for m in facts.of(optimizer) if m.passes]
        scaled = [m for m in live if m.scale() not in (None, 1.0)]
        if scaled:
            scale = scaled[0].scale() or 0
            text = f"gradients are {scale:g} times too large in {len(scaled)} of {len(live)} "
            facts.tell("scaled-step", f"{text}parameters", size=scale)


@dataclass
class _Change:
    """What a line did to scaled gradients, step by step."""

    is_clamp: bool
    factors: dict[int, float] = field(default_factory=dict)
    texts: list[tuple[int, str, float]] = field(default_factory=list)


class Clipping(Rule):
    """Clipping of gradients that are still scaled, by torch's functions or by hand.

    Sees torch's clipping, and functions of the program that write to a scaled gradient or replace
    it: a clamp that changes elements; or a factor below 1 that differs from step to step after a
    norm of these gradients was taken. Prints the norm, that of the gradients, and the limit that
    resulted. Silent for factors that undo the scale or are the same in each step, and where the
    program has read the scale.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._of: dict[int, tuple[Any, Mark, float]] = {}  # memory of gradients that are scaled
        self._made: dict[int, tuple[Any, Any, Call]] = {}  # results from these
        self._norm_read = False
        self._changes: dict[tuple[str, int], tuple[Place, _Change]] = {}

    def clips(self, params: list[Any], limit: float, was: torch.Tensor | None) -> None:
        """Look at what torch has clipped."""
        marks = self.facts.marks_of(params)
        scale = next((s for m in marks if (s := m.scale()) not in (None, 1.0)), None)
        if scale is None:
            return
        text = f"elements were clipped to {limit / scale:.2g} and not {limit:g}"
        if isinstance(was, torch.Tensor):
            norm = float(was)
            text = f"the norm was {norm:.4g}, that of the gradients is {norm / scale:.4g}"
            text += f"; clipped to {limit / scale:.2g} and not {limit:g}"
        self.facts.tell("clip-before-unscale", text, size=scale)

    # -- by hand -----------------------------------------------------------------------------------

    def backward_ends(self, written: list[Any], place: Place) -> None:
        """Look at gradients that a scaled loss has given."""
        self._norm_read = False
        self._made.clear()
        for param in written:
            mark = self.facts.marks[id(param)]
            scale = mark.scale()
            if scale not in (None, 1.0) and scale is not None:
                self._of[memory_of(param.grad)] = param, mark, scale

    def unscales(self, scaler: Any, optimizer: Any, marks: list[Mark]) -> None:
        """Look at these no more."""
        self._forget(marks)

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Look at gradients of the next step."""
        self._forget(self.facts.marks_of(self.facts.params(optimizer)))

    def _forget(self, marks: list[Mark]) -> None:
        gone = set(map(id, marks))
        self._of = {key: one for key, one in self._of.items() if id(one[1]) not in gone}

    def _scaled(self, call: Call) -> list[tuple[torch.Tensor, Any, Mark, float]]:
        first = call.args[0] if call.args else None
        found = []
        for one in first if isinstance(first, list | tuple) else [first]:
            known = self._of.get(memory_of(one)) if isinstance(one, torch.Tensor) else None
            if known is not None and known[0].grad is not None:
                found.append((one, *known))
        return found

    def writes(self, call: Call) -> None:
        """Note how a function changes a scaled gradient."""
        if not self._of or not (found := self._scaled(call)):
            return
        call.before = [(one.detach().clone(), *rest) for one, *rest in found]  # type: ignore[attr-defined]

    def function(self, call: Call) -> None:
        """Note norms, results from scaled gradients, and changes of these."""
        if not self._of:
            return
        before = getattr(call, "before", None)
        if before is not None:
            for (old, _, mark, scale), (one, *_) in zip(before, self._scaled(call), strict=False):
                self._change(call, old, one, mark, scale)
            return
        if is_in_place(call.name):
            return
        known = self._scaled(call) or [
            made[1] for one in call.given if (made := self._made.get(id(one))) and made[0]() is one
        ]
        if not known:
            return
        self._norm_read |= any(not one.dim() for one in call.got)
        for one in call.got:
            if one.dim():
                self._made[id(one)] = weakref.ref(one), known[0], call

    def _change(
        self, call: Call, old: torch.Tensor, new: torch.Tensor, mark: Mark, scale: float
    ) -> None:
        mark.touched = True
        is_clamp = any(word in call.name for word in _CLAMPS)
        size = float(old.double().norm())
        factor = float(new.detach().double().norm()) / size if size else 1.0
        if abs(factor * scale - 1) < 1e-3 or self.facts.asked:
            return
        changed = int((old != new).sum())
        if not changed or not (is_clamp or self._norm_read):
            return
        place = call.place
        _, change = self._changes.setdefault((place.file, place.line), (place, _Change(is_clamp)))
        if is_clamp:
            text = f"{changed} of {old.numel()} elements of a gradient were clipped while it was "
            text += f"{scale:g} times its size"
        else:
            text = f"a gradient with the norm {size:.4g}, which is {size / scale:.4g} without the "
            text += f"scale, was multiplied by {factor:.3g}"
        step = self.facts.now()
        if step not in change.factors:
            change.factors[step] = factor
            change.texts.append((step, text, scale))

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """Look for gradients that were replaced by results from them."""
        for param, mark, scale in list(self._of.values()):
            grad = param.grad
            made = self._made.get(id(grad)) if grad is not None else None
            if made is not None and made[0]() is grad and made[1][0] is not grad:
                self._change(made[2], made[1][0], grad, mark, scale)

    def ends(self) -> None:
        """Tell what differed from step to step."""
        for place, change in self._changes.values():
            values = change.factors.values()
            is_same = len(values) > 1 and max(values) - min(values) < 0.01 * max(values)
            if change.is_clamp or (not is_same and min(values) < 1):
                for step, text, size in change.texts:
                    self.facts.tell("clip-before-unscale", text, place=place, size=size, step=step)


class Amp(Rule):
    """apex.amp: backwards outside of every ``scale_loss`` block, and clipping without effect.

    Sees a backward that writes gradients of an optimizer of ``amp.initialize`` while none of its
    blocks is open, after an operation in float16, and whose gradients are stepped; and torch's
    clipping of 16-bit weights that have masters. Prints what is stepped. Silent at O0, O4 and O5,
    at a scale of 1, and where a float32 model of the same training is stepped.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._outside: weakref.WeakKeyDictionary[Any, Passed] = weakref.WeakKeyDictionary()

    def _managed(self) -> list[tuple[Any, Any]]:
        some = [(o, getattr(o, "_amp_stash", None)) for o in list(self.facts.optimizers)]
        return [(one, state) for one, state in some if state is not None]

    def backward_ends(self, written: list[Any], place: Place) -> None:
        """Note a backward outside of a block."""
        for optimizer, state in self._managed():
            scalers = state.training.loss_scalers
            is_scaled = any(one.dynamic or one.loss_scale() != 1 for one in scalers)
            if not is_scaled or state.ledger.state.name != "UNSCALED" or not self.facts.low:
                continue
            if any(p.grad is not None for p in state.params.targets) and state.ledger.began == 0:
                self._outside[optimizer] = Passed(None, place, 0)

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Say that a backward outside of a block is stepped."""
        outside = self._outside.pop(optimizer, None)
        if outside is not None:
            scale = optimizer._amp_stash.training.loss_scalers[0].loss_scale()
            text = f"the loss was multiplied by 1 and not by {scale:g}"
            self.facts.tell("backward-outside-scale-loss", text, place=outside.place, size=scale)

    def clips(self, params: list[Any], limit: float, was: torch.Tensor | None) -> None:
        """Look for gradients of weights that masters are stepped of."""
        given = set(map(id, params))
        for _, state in self._managed():
            pairs = zip(state.params.weights, state.params.tensors, strict=True)
            masters = [master for weight, master in pairs if id(weight) in given]
            grads = [one.grad for one in masters if one.grad is not None]
            if masters and grads:
                norm = float(torch.stack([g.detach().double().norm() for g in grads]).norm())
                seen = "elements" if was is None else f"a norm of {float(was):.4g}"
                text = (
                    f"it has seen {seen}; the masters' gradients have the norm {norm:.4g} after it"
                )
                self.facts.tell("clip-of-model-gradients", text, size=norm)


RULES = (ScalerSteps, PlainStep, Clipping, Amp)
