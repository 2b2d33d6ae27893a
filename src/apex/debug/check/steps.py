"""Rules of steps: what an optimizer writes into 16-bit weights and state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from apex.debug.check.facts import CheckRule, Facts, is_low, short
from apex.debug.check.finding import Place, here
from apex.ops.lists.lost_updates import MOST, LostUpdates, keeps_what_is_lost

_Steps = list[tuple[int, LostUpdates]]  # with the number of the step
_States = dict[str, torch.Tensor]


class NotFinite(CheckRule):
    """Steps of gradients that are not finite, and updates that are not.

    Sees the gradients before a step that no scaler checks, and 16-bit weights before and after.
    Prints how many elements. Silent in programs without float16, whose tool is
    ``apex debug``, and after another finding that explains it.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._finite: list[torch.Tensor] = []
        self._sees_float16 = False

    def function(self, call: Any) -> None:
        """Note that float16 takes part."""
        self._sees_float16 |= any(one.dtype == torch.float16 for one in call.got)

    def enters(self, region: Any) -> None:
        """Note the same where functions are not seen."""
        self._sees_float16 |= region.enabled and region.dtype == torch.float16

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Look at the gradients."""
        params = [one for one in params if _has_numbers(one.grad)]
        facts, low = self.facts, [one for one in params if is_low(one)]
        self._finite = [one for one in low if _finite(one) and _finite(one.grad)]
        checked = facts.inside is optimizer or hasattr(optimizer, "_amp_stash")
        explained = facts.has("overflow-in-16-bits", "update-not-finite", "scaled-step")
        if checked or explained or not self._sees_float16:
            return
        bad = sum(int((~torch.isfinite(p.grad)).sum()) for p in params if p.grad is not None)
        if bad and all(map(_finite, params)):
            total = sum(one.numel() for one in params)
            facts.tell("not-finite-step", f"{bad} of {total} elements were not finite", size=bad)
        self._finite = [] if bad else self._finite

    def step_ends(self, optimizer: Any) -> None:
        """Look at 16-bit weights that were finite, as their gradients were."""
        before, self._finite = self._finite, []
        bad = sum(int((~torch.isfinite(one)).sum()) for one in before)
        if not bad:
            return
        dtype, sentence = before[0].dtype, ""
        total = sum(one.numel() for one in self.facts.params(optimizer))
        eps = next((group["eps"] for group in optimizer.param_groups if "eps" in group), None)
        if eps and not torch.tensor(eps, dtype=dtype, device="cpu").item():
            sentence = f"divides by a root plus eps={eps:g}, which is 0 in {short(dtype)}, the "
            sentence += "type of these weights"
        text = f"the update made {bad} of {total} weights NaN or inf"
        self.facts.tell("update-not-finite", text, size=bad, sentence=sentence)


def _has_numbers(grad: torch.Tensor | None) -> bool:
    """Whether it is there and not sparse or of a meta tensor."""
    return grad is not None and grad.layout == torch.strided and not grad.is_meta


def _finite(tensor: Any) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


@dataclass
class _Tally:
    """What was lost at one line, step by step: of weights and of averages."""

    place: Place
    dtype: torch.dtype
    weights: _Steps = field(default_factory=list)
    moments: _Steps = field(default_factory=list)
    name: str = ""  # of the averages
    kept: int = 0  # elements whose optimizer keeps what is lost
    elements: int = 0


class Lost(CheckRule):
    """Updates of 16-bit weights and of averages of squared gradients that round away.

    Sees weights and state before and after each step. Prints the share of elements with a gradient
    that did not move. Silent where that is below 20 % of all, at a learning rate of 0, for sparse
    gradients, and for optimizers that keep what is lost: in other bits, in a compensation, in
    masters, or on average, by random numbers. A state is an average of squared gradients if no
    element is negative and it moves towards the square of the gradient; the larger one of two is a
    maximum, which may stand.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._tallies: dict[tuple[Place, torch.dtype], _Tally] = {}
        self._before: list[Any] = []
        self._random: list[torch.Tensor] = []

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Copy what has 16 bits, and the state beside it."""
        self._before, self._random = [], _random_states()
        moving = [g["params"] for g in optimizer.param_groups if float(g.get("lr", 1.0))]
        for param in [one for group in moving for one in group if _has_numbers(one.grad)]:
            state, low = _state(optimizer, param), is_low(param)
            old = {name: one.clone() for name, one in state.items() if low or is_low(one)}
            if (low or old or not state) and _finite(param.grad):
                weight = param.detach().clone() if low else None
                self._before.append((param, weight, param.grad.detach().clone(), old))

    def step_ends(self, optimizer: Any) -> None:
        """Compare."""
        before, self._before = self._before, []
        states = zip(self._random, _random_states() if before else [], strict=False)
        drew = any(not torch.equal(old, new) for old, new in states)
        for param, weight, grad, old in before:
            state = _state(optimizer, param)
            if weight is not None:
                tally, after = self._tally(param.dtype), param.detach()
                tally.elements += param.numel()
                if drew or keeps_what_is_lost(weight, after, grad, old, state):
                    tally.kept += param.numel()
                self._count(tally.weights, weight, after, grad)
            for name in _averages_of_squares(old, state, grad):
                tally = self._tally(state[name].dtype)
                tally.name = name
                if name in old:
                    self._count(tally.moments, old[name], state[name], grad)

    def _tally(self, dtype: torch.dtype) -> _Tally:
        key = here(), dtype
        return self._tallies.setdefault(key, _Tally(*key))

    def _count(self, steps: _Steps, old: torch.Tensor, new: torch.Tensor, grad: Any) -> None:
        if not steps or steps[-1][0] != self.facts.now():
            steps.append((self.facts.now(), LostUpdates()))
        steps[-1][1].count(old, new, grad)

    def ends(self) -> None:
        """Tell where too much was lost."""
        for tally in self._tallies.values():
            lost, stood = _share(tally.weights), _share(tally.moments)
            is_kept = 2 * tally.kept > tally.elements
            if lost >= MOST and not is_kept:
                more = f"; over all steps {100 * stood:.0f} % of {tally.name!r}, the average of "
                more = f"{more}squared gradients, did not change either" if stood >= MOST else ""
                what = f"of the {short(tally.dtype)} weights"
                self._tell("update-lost", what, tally.weights, tally.place, more)
            elif stood >= MOST:
                what = f"of the {short(tally.dtype)} elements of {tally.name!r}"
                self._tell("moments-lost", what, tally.moments, tally.place, "")

    def _tell(self, kind: str, what: str, steps: _Steps, at: Place, more: str) -> None:
        for step, lost in steps:
            if (share := lost.share()) >= MOST:
                text = f"{100 * share:.3g} % {what} with a gradient did not move{more}"
                self.facts.tell(kind, text, at, size=share, step=step)
                more = ""


def _share(steps: _Steps) -> float:
    numbers = [lost.numbers() for _, lost in steps]
    return sum(lost for lost, _ in numbers) / max(1, sum(there for _, there in numbers))


def _state(optimizer: Any, param: torch.Tensor) -> _States:
    """The tensors of an optimizer's state with an element for each of the parameter's."""
    state = optimizer.state.get(param, {})
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    return {name: one for name, one in tensors.items() if one.shape == param.shape and one.dim()}


def _averages_of_squares(old: _States, state: _States, grad: torch.Tensor) -> list[str]:
    """The 16-bit states that are an average, or a sum, of squared gradients."""
    found: list[str] = []
    for name, now in state.items():
        before = old[name] if name in old else torch.zeros_like(now)
        if is_low(now) and _averages_squares(before.double(), now.double(), grad.double()):
            found.append(name)
    return [name for name in found if not any(_is_maximum(state, name, one) for one in found)]


def _averages_squares(old: torch.Tensor, now: torch.Tensor, grad: torch.Tensor) -> bool:
    changed = (grad != 0) & (old != now)
    if bool((now < 0).any()) or not bool((now > 0).any()):
        return False
    if not bool(changed.any()):
        return bool((now <= 4 * grad.square().max()).all())
    step = (now - old)[changed]
    is_towards = step * (grad.square() - old)[changed] > 0
    return float(is_towards.double().mean()) > 0.8 or bool((step > 0).all())


def _is_maximum(state: _States, name: str, other: str) -> bool:
    one, two = state[name], state[other]
    return name != other and bool((one >= two).all()) and not torch.equal(one, two)


def _random_states() -> list[torch.Tensor]:
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_on_gpu else [])]


RULES = (NotFinite, Lost)
