"""Rules of steps: what an optimizer writes into 16-bit weights and state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from apex.debug.check.facts import Facts, Rule, short
from apex.debug.check.finding import Place, here
from apex.debug.tensors import HALVES
from apex.ops.lists.lost_updates import MOST, LostUpdates, keeps_what_is_lost


class NotFinite(Rule):
    """Steps of gradients that are not finite, and updates that are not.

    Sees the gradients before a step that no scaler checks, and 16-bit weights before and after.
    Prints how many elements. Silent without 16-bit numbers in the step: then ``apex debug`` is the
    tool; and after another finding that explains it.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._finite: list[torch.Tensor] = []
        self._halves = False

    def function(self, call: Any) -> None:
        """Note that 16-bit numbers take part."""
        self._halves |= call.low

    def enters(self, region: Any) -> None:
        """Note the same where functions are not seen."""
        self._halves |= region.enabled and self.facts.is_blind

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Look at the gradients."""
        facts = self.facts
        low = [p for p in params if p.dtype in HALVES]
        self._finite = [p for p in low if _finite(p)]
        plain = facts.inside is not optimizer and not hasattr(optimizer, "_amp_stash")
        if (
            not plain
            or not (self._halves or low)
            or facts.has("overflow-in-16-bits", "update-not-finite")
        ):
            return
        bad = sum(int((~torch.isfinite(p.grad)).sum()) for p in params if p.grad is not None)
        if bad:
            self._finite = []
            if all(map(_finite, params)):
                total = sum(p.numel() for p in params)
                facts.tell(
                    "not-finite-step", f"{bad} of {total} elements were not finite", size=bad
                )

    def step_ends(self, optimizer: Any) -> None:
        """Look at 16-bit weights that were finite, as their gradients were."""
        before, self._finite = self._finite, []
        if not before:
            return
        bad = sum(int((~torch.isfinite(p)).sum()) for p in before)
        if bad:
            dtype = before[0].dtype
            total = sum(p.numel() for p in self.facts.params(optimizer))
            text = f"the update made {bad} of {total} weights NaN or inf"
            eps = next((g["eps"] for g in optimizer.param_groups if "eps" in g), None)
            more = {}
            if eps and not torch.tensor(eps, dtype=dtype, device="cpu").item():
                sentence = f"divides by a root plus eps={eps:g}, which is 0 in {short(dtype)}"
                more["sentence"] = f"{sentence}, the type of these weights"
            self.facts.tell("update-not-finite", text, size=bad, **more)


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


@dataclass
class _Tally:
    """What was lost at one line, step by step: of weights and of averages."""

    place: Place
    dtype: torch.dtype
    weights: list[tuple[int, LostUpdates]] = field(default_factory=list)
    moments: list[tuple[int, LostUpdates]] = field(default_factory=list)
    name: str = ""  # of the averages
    kept: int = 0  # elements whose optimizer keeps what is lost
    elements: int = 0


class Lost(Rule):
    """Updates of 16-bit weights and of averages of squared gradients that round away.

    Sees weights and state before and after each step. Prints the share of elements with a gradient
    that did not move. Silent where that is below 20 % of all, at a learning rate of 0, and for
    optimizers that keep what is lost: in other bits, in a compensation, in masters, or on average,
    by random numbers. A state is an average of squared gradients if no element is negative and it
    moves towards the square of the gradient; the larger one of two is a maximum, which may stand.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._tallies: dict[tuple[str, int], _Tally] = {}
        self._before: list[Any] = []
        self._random: list[torch.Tensor] = []
        self._place = Place("", 0, "", "")

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Copy what has 16 bits, and the state beside it."""
        self._before = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None or not float(group.get("lr", 1.0)):
                    continue
                state, low = _state(optimizer, param), param.dtype in HALVES
                old = {n: s.clone() for n, s in state.items() if low or s.dtype in HALVES}
                if low or old or not state:
                    weight = param.detach().clone() if low else None
                    self._before.append((param, weight, param.grad.detach().clone(), old))
        if self._before:
            self._place, self._random = here(), _random_states()

    def step_ends(self, optimizer: Any) -> None:
        """Compare."""
        before, self._before = self._before, []
        states = zip(self._random, _random_states() if before else [], strict=False)
        drew = any(not torch.equal(old, new) for old, new in states)
        for param, weight, grad, old in before:
            state = _state(optimizer, param)
            if weight is not None:
                tally = self._tally(param.dtype)
                tally.elements += param.numel()
                after = param.detach()
                if drew or keeps_what_is_lost(weight, after, grad, old, state):
                    tally.kept += param.numel()
                self._count(tally.weights, weight, after, grad)
            for name in _averages_of_squares(old, state, grad):
                tally = self._tally(state[name].dtype)
                tally.name = name
                if name in old:
                    self._count(tally.moments, old[name], state[name], grad)

    def _tally(self, dtype: torch.dtype) -> _Tally:
        place = self._place
        return self._tallies.setdefault((place.file, place.line), _Tally(place, dtype))

    def _count(
        self, steps: list[tuple[int, LostUpdates]], old: torch.Tensor, new: torch.Tensor, grad: Any
    ) -> None:
        if not steps or steps[-1][0] != self.facts.now():
            steps.append((self.facts.now(), LostUpdates()))
        steps[-1][1].count(old, new, grad)

    def ends(self) -> None:
        """Tell where too much was lost."""
        for tally in self._tallies.values():
            lost, stood = _share(tally.weights), _share(tally.moments)
            if lost >= MOST and 2 * tally.kept > tally.elements:
                continue
            more = f"; in all steps {100 * stood:.0f} % of {tally.name!r}, the average of squared "
            more = f"{more}gradients, stood still as well" if stood >= MOST else ""
            what = f"of the {short(tally.dtype)} weights"
            if lost >= MOST:
                self._tell("update-lost", what, tally.weights, tally.place, more)
            elif stood >= MOST:
                what = f"of the elements of {tally.name!r}, in {short(tally.dtype)},"
                self._tell("moments-lost", what, tally.moments, tally.place, "")

    def _tell(
        self, kind: str, what: str, steps: list[tuple[int, LostUpdates]], place: Place, more: str
    ) -> None:
        for step, lost in steps:
            if (share := lost.share()) >= MOST:
                text = f"{100 * share:.3g} % {what} with a gradient did not move{more}"
                self.facts.tell(kind, text, place=place, size=share, step=step)
                more = ""


def _share(steps: list[tuple[int, LostUpdates]]) -> float:
    lost, there = (sum(one.numbers()[i] for _, one in steps) for i in (0, 1))
    return lost / max(1, there)


def _state(optimizer: Any, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state with an element for each of the parameter's."""
    state = optimizer.state.get(param, {})
    tensors = {n: s for n, s in state.items() if isinstance(s, torch.Tensor)}
    return {n: s for n, s in tensors.items() if s.shape == param.shape and s.dim()}


def _averages_of_squares(
    old: dict[str, torch.Tensor], state: dict[str, torch.Tensor], grad: torch.Tensor
) -> list[str]:
    """The 16-bit states that are an average, or a sum, of squared gradients."""
    found: list[str] = []
    for name, now in state.items():
        before = old[name] if name in old else torch.zeros_like(now)
        if now.dtype in HALVES and _averages_squares(before.double(), now.double(), grad.double()):
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


def _is_maximum(state: dict[str, torch.Tensor], name: str, other: str) -> bool:
    one, two = state[name], state[other]
    return name != other and bool((one >= two).all()) and not torch.equal(one, two)


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


RULES = (NotFinite, Lost)
