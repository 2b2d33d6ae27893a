"""Rules of learning rate schedules, and of what is saved and loaded."""

from __future__ import annotations

import dataclasses
import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from apex.debug.check.facts import Facts, Rule
from apex.debug.check.finding import Place

_DEEP = 5  # levels of a checkpoint that are looked at


@dataclass
class _Known:
    """One schedule: its calls, and the steps of its optimizer at the last one."""

    early: Place | None = None  # a single call before the first step
    tried: int = 0
    real: int = 0
    ahead: int = 0
    rates: list[float] = field(default_factory=list)  # that were used before each call


def _rate(schedule: Any) -> float:
    return float(schedule.optimizer.param_groups[0]["lr"])


class Schedules(Rule):
    """Calls of ``scheduler.step()`` that count steps which were not made, or come too early.

    Sees steps that a GradScaler or amp skipped, and single calls before the first step. Prints
    learning rates. Silent where the rate is the same, for ``ReduceLROnPlateau`` and for calls with
    an epoch, which do not count, and for two or more calls before the first step: a run that resumes
    winds its schedule forward.
    """

    lasts = True

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()

    def makes_schedule(self, schedule: Any) -> None:
        """Note where it starts."""
        if not isinstance(getattr(schedule, "optimizer", None), torch.optim.Optimizer):
            return
        count = self.facts.count(schedule.optimizer)
        self._known[schedule] = _Known(tried=count.tried, real=count.real)

    def schedules(self, schedule: Any, place: Place) -> None:
        """Compare the steps since the last call."""
        if schedule not in self._known:
            self.makes_schedule(schedule)
        known = self._known[schedule]
        count, rate = self.facts.count(schedule.optimizer), _rate(schedule)
        known.rates.append(rate)
        if not count.tried:
            known.early = None if known.rates[:-1] else place
        elif known.early is not None:
            self._look_early(known)
        if known.ahead:
            meant = known.rates[max(0, len(known.rates) - 1 - known.ahead)]
            if not math.isclose(rate, meant, rel_tol=1e-6):
                text = f"{known.ahead} of {count.tried} steps had been skipped: the learning rate "
                text += f"was {rate:.4g} and not {meant:.4g}"
                size = float(known.ahead)
                self.facts.tell("scheduler-counts-skipped", text, place=place, size=size)
        if count.tried > known.tried and count.real == known.real:
            known.ahead += 1
        known.tried, known.real = count.tried, count.real

    def _look_early(self, known: _Known) -> None:
        """Tell of a call before the first step, once the rate has changed."""
        old, new = known.rates[-2:]
        if old == new:
            return
        text = f"the first learning rate, {old:.4g}, was never used: the first step had {new:.4g}"
        if len(known.rates) > 2:
            text = f"the learning rate became {new:.4g} one call early"
        place, known.early = known.early, None
        self.facts.tell("scheduler-before-optimizer", text, place=place, at_step=False)


class Checkpoints(Rule):
    """States that a checkpoint lacks, or that a resumed run does not load.

    Sees what ``torch.save`` and ``torch.load`` are given, five levels deep, and ``load_state_dict``
    of optimizers, scalers and schedules. Prints the scale or the learning rate, now and in a run
    that resumes. Silent where no optimizer was saved, where both numbers are the same, and where
    the number itself was saved.
    """

    lasts = True

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._saved: set[str] = set()
        self._missing: dict[str, tuple[str, Place]] = {}
        self._loaded: dict[str, Any] = {}
        self._taken: dict[str, Place] = {}
        self._schedules: weakref.WeakKeyDictionary[Any, tuple[float, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._used: dict[str, str] = {}

    def schedules(self, schedule: Any, place: Place) -> None:
        """Note which schedules are used, their first rate, and how many calls they had."""
        start, calls = self._schedules.get(schedule, (_rate(schedule), 0))
        self._schedules[schedule] = start, calls + 1

    def saves(self, thing: Any, place: Place) -> None:
        """Look what is in it, and what is not."""
        kinds = _kinds(thing)
        self._saved |= kinds.keys()
        self.facts.reached.add("checkpoint")
        if "optimizer" not in kinds:
            return
        for scaler, start in self.facts.scalers.items():
            scale = float(scaler._scale)
            if scale in _numbers(thing):
                self._saved.add("scaler")
            if scale != start:
                off = abs(math.log2(start / scale))
                lost = (
                    f"{off:.0f} steps are skipped again"
                    if start > scale
                    else f"{off:.0f} doublings"
                )
                lost = lost if start > scale else f"{lost} are lost"
                text = f"the scale is {scale:g} now; a run that resumes starts at {start:g}: {lost}"
                self._missing["scaler"] = text, place
        for schedule, (start, calls) in self._schedules.items():
            rate = _rate(schedule)
            if calls and not math.isclose(rate, start, rel_tol=1e-6):
                text = f"after {calls} calls the learning rate is {rate:.4g}; a run that resumes "
                text += f"begins the schedule at {start:.4g}"
                self._missing["scheduler"] = text, place

    def loads(self, thing: Any, place: Place) -> None:
        """Look what is in it."""
        self.facts.reached.add("resume")
        self._loaded.update(_kinds(thing))

    def takes_state(self, owner: Any, place: Place) -> None:
        """Note who has loaded a state."""
        self._taken[_kind_of(owner)] = place

    def scales(self, scaler: Any, losses: list[Any], scaled: list[Any], factor: float) -> None:
        """Compare the scale of a resumed run with that of the checkpoint."""
        state = self._loaded.get("scaler")
        if not state or "optimizer" not in self._taken or "scaler" in self._taken:
            return
        saved = float(state.get("scale", factor))
        if "scaler" not in self._used and saved != factor:
            text = f"the checkpoint has the scale {saved:g}, this run went on at {factor:g}"
            self._used["scaler"] = text

    def ends(self) -> None:
        """Tell what no save had, and what no load has taken."""
        for kind, (text, place) in self._missing.items():
            if kind not in self._saved:
                self.facts.tell(f"{kind}-not-saved", text, place=place, at_step=False)
        state = self._loaded.get("scheduler")
        calls = max((calls for _, calls in self._schedules.values()), default=0)
        if state and calls and "scheduler" not in self._taken:
            text = f"the checkpoint's schedule has counted {state.get('last_epoch', 0)} calls, "
            self._used["scheduler"] = f"{text}this run's {calls}"
        for kind, text in self._used.items():
            if "optimizer" in self._taken:
                place = self._taken["optimizer"]
                self.facts.tell(f"{kind}-not-loaded", text, place=place, at_step=False)


def _kind_of(owner: Any) -> str:
    if isinstance(owner, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(owner, torch.amp.GradScaler):
        return "scaler"
    return "scheduler" if isinstance(owner, LRScheduler) else ""


def _kinds(thing: Any, depth: int = 0) -> dict[str, Any]:
    """What is in a checkpoint, with the states of optimizer, scaler and schedule."""
    if kind := _kind_of(thing):
        return {kind: {}}
    if isinstance(thing, dict):
        if "param_groups" in thing and "state" in thing:
            return {"optimizer": thing}
        if "growth_factor" in thing and "scale" in thing:
            return {"scaler": thing}
        if "last_epoch" in thing and ("_step_count" in thing or "base_lrs" in thing):
            return {"scheduler": thing}
    found: dict[str, Any] = {}
    for part in _parts(thing) if depth < _DEEP else ():
        found.update(_kinds(part, depth + 1))
    return found


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, list | tuple):
        return list(thing[:1000])
    if isinstance(thing, torch.Tensor | torch.nn.Module | type):
        return []
    is_plain = dataclasses.is_dataclass(thing) or hasattr(thing, "__dict__")
    return list(vars(thing).values()) if is_plain else []


def _numbers(thing: Any, depth: int = 0) -> set[float]:
    if isinstance(thing, float):
        return {thing}
    if isinstance(thing, dict) and "param_groups" in thing:
        return set()
    some = (_numbers(part, depth + 1) for part in _parts(thing)) if depth < _DEEP else ()
    return set().union(*some)


RULES = (Schedules, Checkpoints)
