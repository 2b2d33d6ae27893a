"""Rules of loss scales: a gradient is scaled, unscaled once, and then clipped and stepped."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from apex.debug.check.facts import CheckRule, Facts, Mark, key_of, scale_of
from apex.debug.check.finding import Place
from apex.debug.check.values import FunctionCall
from apex.debug.tracing import key_of as memory_of

_PART = 0.05  # of the scale: a limit of that size has the scale in it
_NOT_ZEROED = "adds gradients to those of the last step, because nothing has set these to zero"
_ZERO = ("optimizer.zero_grad()", "after each scaler.update()")
_CLAMPS = ("clamp", "clip", "hardtanh", "minimum")


class Scaled(CheckRule):
    """What a GradScaler divides, steps or refuses, and what is stepped without it.

    Sees the scale of each backward in the gradients that it wrote. Prints the factor by which they
    are wrong, and in how many parameters. Silent for gradients that the program has written since,
    at a scale of 1, and where amp or a flag on the optimizer unscales.
    """

    def backward_begins(self, roots: list[Any], scales: set[float | None], at: Place) -> None:
        """Say that a part of a sum of losses is not scaled."""
        scale = max((one for one in scales if one is not None), default=1.0)
        if None in scales and scale != 1.0:
            text = f"one part of the loss is multiplied by {scale:g}, and another part is not"
            self.facts.tell("one-loss-unscaled", text, at, size=scale)

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """Look for passes that were not scaled, or that came after ``unscale_``."""
        scale = scale_of(scaler)
        marks = self.facts.marks_of(self.facts.params(optimizer))
        live = [mark for mark in marks if mark.passes and not mark.touched]
        bare = {id(m): p for m in live for p in m.passes if p.scale is None and not p.is_late}
        late = {id(m): p for m in live for p in m.passes if p.scale is not None and p.is_late}
        if scale == 1.0:
            return
        if bare and all(p.scale is None for mark in live for p in mark.passes):
            sentence = (
                "divides gradients by the loss scale, but this backward() did not multiply them: "
            )
            sentence += str(next(iter(bare.values())).place)
            text = f"gradients are {scale:g} times too small"
            self.facts.tell("step-without-scale", text, size=scale, sentence=sentence)
        elif bare:
            text = f"its gradients are {scale:g} times too small in {len(bare)} of {len(live)} "
            at = next(iter(bare.values())).place
            self.facts.tell("one-loss-unscaled", f"{text}parameters", at, size=scale)
        if late:
            one = next(iter(late.values()))
            text = f"gradients added after unscale_() count {scale:g} times as much as those "
            text += "of the last step" if one.is_stale else "added before"
            text += f", in {len(late)} of {len(live)} parameters"
            stale = (_NOT_ZEROED, _ZERO) if one.is_stale else ("", ())
            self.facts.tell("added-after-unscale", text, one.place, scale, None, *stale)

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """Compare the scale with that of the backward."""
        marks = self.facts.marks_of(self.facts.params(optimizer))
        last = next((mark.passes[-1] for mark in marks if mark.scale()), None)
        if last is None or last.scale is None or last.updates == self.facts.updates:
            return
        now = scale_of(scaler)
        text = f"gradients were multiplied by {last.scale:g} and divided by {now:g}"
        if now == last.scale:
            text += "; the next change of the scale will make them wrong by its factor"
        self.facts.tell("update-before-step", text, size=abs(last.scale - now))

    def refuses(self, error: ValueError) -> None:
        """Say why ``unscale_`` raised, at the line that made float16 weights."""
        params = self.facts.params()
        number = sum(param.dtype == torch.float16 for param in params)
        if number and "FP16" in str(error):
            text = f"{number} of {len(params)} parameters are float16, and unscale_() raised: "
            self.facts.tell("float16-weights-under-scaler", f"{text}{error}", self.facts.cast_at())

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Look for gradients that are still scaled."""
        unscales = hasattr(optimizer, "_amp_stash") or hasattr(optimizer, "grad_scale")
        live = [mark for mark in self.facts.marks_of(params) if mark.passes]
        scales = [mark.scale() for mark in live if mark.scale()]
        if scales and self.facts.inside is not optimizer and not unscales:
            text = f"gradients are {scales[0]:g} times too large in {len(scales)} of {len(live)}"
            self.facts.tell("scaled-step", f"{text} parameters", size=scales[0] or 0)


class Clipping(CheckRule):
    """Clipping of gradients that are still scaled, by torch's functions or by hand.

    Sees torch's clipping; a clamp of a scaled gradient, also in a hook, that changes elements; and
    multiplications of scaled gradients that follow a norm of them. Prints the norm, that of the
    gradients, and the limit that resulted. Silent for factors that undo the scale, are above 1 or
    the same in each step; where the program has read the scale after the backward; and for a clamp
    or a limit of the scale's size where it has read the scale before.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._scaled: dict[int, tuple[torch.Tensor, Mark, float]] = {}  # by the gradient's memory
        self._made: dict[
            int, tuple[Any, torch.Tensor, FunctionCall]
        ] = {}  # what was computed from these
        self._scale: float | None = None  # of the backward that runs
        self._norm_read = False
        self._factors: dict[Place, dict[int, tuple[float, str, float]]] = {}  # by step

    def clips(self, params: list[Any], limit: float, norm: Any) -> None:
        """Look at what torch has clipped."""
        marks = self.facts.marks_of(params)
        scale = next((one for mark in marks if (one := mark.scale())), None)
        is_meant = self.facts.asked_late or (self.facts.asked and limit >= _PART * (scale or 1.0))
        if scale and not is_meant:
            text = f"clipped to {limit / scale:.2g} instead of {limit:g}"
            if isinstance(norm, torch.Tensor):
                was = float(norm)
                text = f"the norm was {was:.4g}, without the loss scale {was / scale:.4g}; {text}"
            self.facts.tell("clip-before-unscale", text, size=scale)

    def backward_begins(self, roots: list[Any], scales: set[float | None], at: Place) -> None:
        """Note the scale, for hooks."""
        self._scale = next((one for one in scales if one not in (None, 1.0)), None)

    def hooked(self, call: FunctionCall) -> None:
        """Look for a clamp in a hook."""
        if self._scale and any(word in call.name for word in _CLAMPS) and not self.facts.asked:
            self._tell_clamp(call, call.args[0], call.got[0], self._scale)

    def _tell_clamp(self, call: FunctionCall, old: Any, new: Any, scale: float) -> None:
        changed = int((old != new).sum())
        if changed:
            text = f"clipped {changed} of {old.numel()} elements of a gradient that is multiplied "
            text += f"by {scale:g}"
            self.facts.tell("clip-before-unscale", text, call.place, size=scale)

    def backward_ends(self, written: list[torch.Tensor]) -> None:
        """Look at the gradients that a scaled loss has given."""
        self._norm_read = False
        self._made.clear()
        for param in written:
            mark = self.facts.marks[id(param)]
            if param.grad is not None and (scale := mark.scale()):
                self._scaled[memory_of(param.grad)] = param, mark, scale

    def unscales(self, scaler: Any, optimizer: Any) -> None:
        """Look at these no more."""
        self.attempt_ends(optimizer, skipped=False)

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Look at the gradients of the next step."""
        gone = set(map(id, self.facts.params(optimizer)))
        self._scaled = {key: one for key, one in self._scaled.items() if id(one[0]) not in gone}

    def writes(self, call: FunctionCall) -> None:
        """Copy scaled gradients before a function writes to them."""
        if self._scaled:
            some = [one.args[0] for one in call.each() if isinstance(one.args[0], torch.Tensor)]
            call.old["grads"] = {
                id(one): one.detach().clone() for one in some if memory_of(one) in self._scaled
            }

    def function(self, call: FunctionCall) -> None:
        """Note norms of scaled gradients, what is computed from them, and how they change."""
        if not self._scaled:
            return
        for one in call.each() if call.writes else ():
            old = call.old["grads"].get(id(one.args[0]))
            known = None if old is None else self._scaled.get(memory_of(one.args[0]))
            if known is not None:
                self._change(call, old, one.args[0], known[1], known[2])
        from_grads = [one for one in call.given if memory_of(one) in self._scaled]
        from_grads += [made[1] for one in call.given if (made := self._find(one))]
        if from_grads and not call.writes:
            self._norm_read |= any(not one.dim() for one in call.got)
            assert call.place  # of this moment, for later
            for result in call.got:
                self._made[id(result)] = weakref.ref(result), from_grads[0], call

    def _find(self, tensor: torch.Tensor | None) -> tuple[Any, torch.Tensor, FunctionCall] | None:
        found = self._made.get(id(tensor))
        return found if found is not None and found[0]() is tensor else None

    def _change(self, call: FunctionCall, old: Any, new: Any, mark: Mark, scale: float) -> None:
        mark.touched = True
        size, now = float(old.double().norm()), float(new.detach().double().norm())
        factor = now / size if size else 1.0
        if abs(factor * scale - 1) < 1e-3:
            return
        if any(word in call.name for word in _CLAMPS):
            if not self.facts.asked:
                self._tell_clamp(call, old, new, scale)
        elif self._norm_read and not self.facts.asked_late:
            text = f"a gradient with the norm {size:.4g}, which is {size / scale:.4g} without the "
            text += f"scale, was multiplied by {factor:.3g}"
            steps = self._factors.setdefault(call.place, {})
            steps.setdefault(self.facts.now(), (factor, text, scale))

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """Look for gradients that were replaced by what was computed from them."""
        for param, mark, scale in list(self._scaled.values()):
            made = self._find(param.grad)
            if made is not None and param.grad is not made[1]:
                self._change(made[2], made[1], param.grad, mark, scale)

    def ends(self) -> None:
        """Tell of factors that differ from step to step."""
        for at, steps in self._factors.items():
            factors = [factor for factor, *_ in steps.values()]
            is_same = len(factors) > 1 and max(factors) - min(factors) < 0.01 * max(factors)
            for step, (_, text, scale) in steps.items():
                if not is_same and min(factors) < 1:
                    self.facts.tell("clip-before-unscale", text, at, size=scale, step=step)


class Amp(CheckRule):
    """apex.amp: a backward outside of every ``scale_loss`` block, and clipping without effect.

    Sees a backward that writes gradients of an optimizer of ``amp.initialize`` while none of its
    blocks is open (:mod:`apex.amp.unnoticed`, whose warning amp gives, says what that is), after an
    operation in float16, and that these are stepped; and torch's clipping
    of 16-bit weights that have masters. Prints the scale that is missing, or the norm of what is
    stepped. Silent at a scale of 1 and for models without float16.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._outside: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._before: dict[Any, list[Any]] = {}  # by optimizer: gradients before a backward
        self._at: Place | None = None  # of that

    def _managed(self) -> list[tuple[Any, Any]]:
        some = list(self.facts.optimizers)
        return [(one, one._amp_stash) for one in some if hasattr(one, "_amp_stash")]

    def backward_begins(self, roots: list[Any], scales: set[float | None], at: Place) -> None:
        """Note the gradients before a backward outside of every block."""
        from apex.amp import unnoticed  # a run without amp does not import it

        managed = self._managed()
        is_open = any(state.ledger.state.name == "OPEN" for _, state in managed)
        low = [one.dtype == torch.float16 or unnoticed.has_casts(one.grad_fn) for one in roots]
        is_bare = self.facts.low and all(low) and scales == {None} and not is_open
        bare = [
            one
            for one in managed
            if is_bare and unnoticed.is_outside(one[1].training, one[1].ledger)
        ]
        self._at, self._before = at, {one: _grads(state) for one, state in bare}

    def backward_ends(self, written: list[torch.Tensor]) -> None:
        """Note whose gradients it wrote: those of the model, also where masters are stepped."""
        for optimizer, grads in self._before.items():
            if _grads(optimizer._amp_stash) != grads and self._at:
                self._outside[optimizer] = self._at
        self._before = {}

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Say that its gradients are stepped."""
        at = self._outside.pop(optimizer, None)
        scale = 1.0 if at is None else optimizer._amp_stash.training.loss_scalers[0].loss_scale()
        if at is not None and scale != 1.0:
            text = f"the loss was not multiplied by the loss scale, {scale:g}"
            self.facts.tell("backward-outside-scale-loss", text, at, size=scale)

    def clips(self, params: list[Any], limit: float, norm: Any) -> None:
        """Look for weights of which masters are stepped."""
        given = set(map(id, params))
        for _, state in self._managed():
            pairs = zip(state.params.weights, state.params.tensors, strict=True)
            grads = [one.grad for weight, one in pairs if id(weight) in given]
            if norms := [one.double().norm() for one in grads if one is not None]:
                text = (
                    f"the norm of the masters' gradients is {torch.stack(norms).norm():.4g} after "
                )
                text += f"it, and the limit is {limit:g}"
                self.facts.tell("clip-of-model-gradients", text)


def _grads(state: Any) -> list[Any]:
    return [key_of(weight) for weight in state.params.targets]


RULES = (Scaled, Clipping, Amp)
