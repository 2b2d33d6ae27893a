"""Rules of learning rate schedules, and of what is saved and loaded."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from apex.debug.check.facts import CheckRule, Facts, scale_of
from apex.debug.check.finding import Place, here

_DEEP, _LONG = 5, 1000  # what is looked at of a checkpoint: levels, and elements of a list
_CLASSES = {
    "optimizer": torch.optim.Optimizer,
    "scaler": torch.amp.GradScaler,
    "scheduler": LRScheduler,
}
_KEYS = {  # of their states
    "optimizer": {"param_groups", "state"},
    "scaler": {"growth_factor", "scale"},
    "scheduler": {"last_epoch", "_last_lr"},
    "amp": {"loss_scaler0"},
}
_OF_AMP: dict[str, tuple[str, str, tuple[str, ...]]] = {  # kind, sentence, fix
    "amp-not-saved": (
        "scaler-not-saved",
        "saves the optimizer's state but not amp's, which has the loss scale",
        ('"amp": amp.state_dict()', 'amp.load_state_dict(checkpoint["amp"]) at resume'),
    ),
    "amp-not-loaded": (
        "scaler-not-loaded",
        "loads the optimizer's state but not amp's, which the checkpoint contains",
        ('amp.load_state_dict(checkpoint["amp"])', "after amp.initialize"),
    ),
}


@dataclass
class _Known:
    """What is known of one schedule.

    Attributes:
        tried, real: Steps of its optimizer at the last call.
        rates: What was used before each call.
        early: A single call before the first step.
        ahead: How many skipped steps it has counted.
    """

    tried: int
    real: int
    rates: list[float] = field(default_factory=list)
    early: Place | None = None
    ahead: int = 0


def _rate(schedule: Any) -> float:
    return float(schedule.optimizer.param_groups[0]["lr"])


class Schedules(CheckRule):
    """Calls of ``scheduler.step()`` that count steps which were not made, or come too early.

    Sees steps that a GradScaler or amp skipped, and single calls before the first step. Prints
    learning rates. Silent where the rate is the same; for ``ReduceLROnPlateau`` and calls with an
    epoch, which do not count; and for two or more calls before the first step: a run that resumes
    winds its schedule forward.
    """

    lasts = True

    def makes_schedule(self, schedule: Any) -> None:
        """Note where it starts."""
        if isinstance(getattr(schedule, "optimizer", None), torch.optim.Optimizer):
            count = self.facts.count(schedule.optimizer)
            self.facts.schedules[schedule] = _Known(count.tried, count.real)

    def schedules(self, schedule: Any) -> None:
        """Compare the steps since the last call."""
        if schedule not in self.facts.schedules:
            self.makes_schedule(schedule)
        known, count = self.facts.schedules[schedule], self.facts.count(schedule.optimizer)
        rates, rate = known.rates, _rate(schedule)
        rates.append(rate)
        if not count.tried:
            known.early = here() if len(rates) == 1 else None
        elif known.early is not None and rates[-2] != rate:
            text = f"the first learning rate, {rates[0]:.4g}, was never used; the first step used "
            text = f"{text}{rate:.4g}" if len(rates) == 2 else f"it became {rate:.4g} a call early"
            self.facts.tell("scheduler-before-optimizer", text, known.early, step=0)
            known.early = None
        meant = rates[max(0, len(rates) - 1 - known.ahead)]
        if not math.isclose(rate, meant, rel_tol=1e-6):
            text = (
                f"{known.ahead} of {count.tried} steps had been skipped, so the learning rate was "
            )
            text += f"{rate:.4g} instead of {meant:.4g}"
            # The rate is that of the step before this call.
            self.facts.tell(
                "scheduler-counts-skipped", text, size=known.ahead, step=self.facts.steps
            )
        known.ahead += count.tried > known.tried and count.real == known.real
        known.tried, known.real = count.tried, count.real


class Checkpoints(CheckRule):
    """States that a checkpoint lacks, or that a resumed run does not load.

    Sees what ``torch.save``, ``pickle.dump`` and ``torch.load`` are given, five levels deep, and
    ``load_state_dict`` of optimizers, scalers and schedules. Prints the scale or the learning rate,
    now and in a run that resumes. Silent where no optimizer was saved, where both numbers are the
    same, where the scale itself was saved or the program has called ``state_dict``, and for
    schedules whose rates follow from the last one, which the optimizer has (``ExponentialLR``).
    """

    lasts = True

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._saved: set[str] = set()
        self._loaded: dict[str, Any] = {}
        self._taken: dict[str, Place] = {}
        self._texts: dict[str, tuple[str, Place]] = {}  # by kind of mistake
        self._amp: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def saves(self, thing: Any) -> None:
        """Look what is in it, and what is not."""
        self.facts.reached.add("checkpoint")
        kinds = {name: part for part in _inside(thing) for name in _names(part)}
        self._saved |= kinds.keys()
        if "optimizer" not in kinds:
            return
        scales = [("scaler", scale_of(one), at) for one, at in self.facts.scalers.items()]
        scales += [("amp", one.loss_scale(), at) for one, at in self._amp.items()]
        for name, scale, start in scales:
            if scale in [part for part in _inside(thing) if isinstance(part, float)]:
                self._saved.add(name)
            if scale != start:
                off, what = abs(math.log2(start / scale)), "doublings are lost"
                what = "steps are skipped again" if start > scale else what
                text = f"the scale is {scale:g} now; a resumed run starts at {start:g}, so "
                self._texts[f"{name}-not-saved"] = f"{text}{off:.0f} {what}", here()
        for schedule, known in self.facts.schedules.items():
            rate = _rate(schedule)
            is_other = known.rates and not math.isclose(rate, known.rates[0], rel_tol=1e-6)
            if is_other and _counts(schedule, len(known.rates)):
                text = f"after {len(known.rates)} calls the learning rate is {rate:.4g}; a "
                text += f"resumed run begins the schedule at {known.rates[0]:.4g}"
                self._texts["scheduler-not-saved"] = text, here()

    def gives_state(self, owner: Any) -> None:
        """Note that the program saves it, in whatever way."""
        self._saved.update(_names(owner))

    def loads(self, thing: Any) -> None:
        """Look what is in it."""
        self.facts.reached.add("resume")
        self._loaded.update({name: part for part in _inside(thing) for name in _names(part)})
        if "amp" in self._loaded:
            self._loaded["amp"] = self._loaded["amp"].get("loss_scaler0", self._loaded["amp"])

    def takes_state(self, owner: Any) -> None:
        """Note who has loaded a state."""
        self._taken.update(dict.fromkeys(_names(owner), here()))

    def scales(self, losses: list[Any], scaled: list[Any], factor: float) -> None:
        """Compare the scale of a resumed run with that of the checkpoint."""
        self._compare("scaler", "scale", "the scale", factor)

    def losses(self, roots: list[Any]) -> None:
        """The same of amp, whose scale is there when its first block is."""
        states = [getattr(one, "_amp_stash", None) for one in list(self.facts.optimizers)]
        for training in (one.training for one in states if one is not None):
            for one in training.loss_scalers if training.last_pass else ():
                if one.dynamic and one not in self._amp:
                    self._amp[one] = one.loss_scale()
                    self._compare("amp", "loss_scale", "the scale", self._amp[one])

    def schedules(self, schedule: Any) -> None:
        """Compare the calls of a resumed run with those of the checkpoint."""
        calls = len(self.facts.schedules[schedule].rates) - 1
        self._compare("scheduler", "last_epoch", "a schedule with the count", calls)

    def _compare(self, name: str, key: str, what: str, now: float) -> None:
        """Compare with a state that was loaded from a file and not taken."""
        state, at = self._loaded.get(name), self._taken.get("optimizer")
        if isinstance(state, dict) and at and name not in self._taken and state[key] != now:
            text = f"the checkpoint has {what} {state[key]:g}, and this run continued at {now:g}"
            self._texts.setdefault(f"{name}-not-loaded", (text, at))

    def ends(self) -> None:
        """Tell what no save had, and what no load has taken."""
        for kind, (text, at) in self._texts.items():
            if not (kind.endswith("saved") and kind.partition("-")[0] in self._saved):
                name, sentence, fix = _OF_AMP.get(kind, (kind, "", ()))
                self.facts.tell(name, text, at, step=0, sentence=sentence, fix=fix)


def _counts(schedule: Any, calls: int) -> bool:
    """Whether a schedule that begins to count again gives other rates, from the same last one."""
    if not type(schedule).__module__.startswith("torch."):
        return True
    on, again = copy.copy(schedule), copy.copy(schedule)
    groups = schedule.optimizer.param_groups
    kept = [dict(group) for group in groups]  # get_lr of OneCycleLR writes momentums
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for again.last_epoch in range(1, min(calls, _LONG) + 100):
                on.last_epoch = schedule.last_epoch + again.last_epoch
                if not all(map(math.isclose, on.get_lr(), again.get_lr())):
                    return True
        except Exception:  # noqa: BLE001  # of a schedule that has an end, or no such method
            return True
        finally:
            for group, numbers in zip(groups, kept, strict=True):
                group.update(numbers)
    return False


def _names(part: Any) -> list[str]:
    """Whether an object is an optimizer, a scaler or a schedule, or the state of one."""
    keys = part.keys() if isinstance(part, dict) else ()
    return [
        n for n in _KEYS if isinstance(part, _CLASSES.get(n, ())) or (keys and keys >= _KEYS[n])
    ]


def _inside(thing: Any, deep: int = _DEEP) -> Iterator[Any]:
    """An object and what is in it."""
    yield thing
    parts: Any = ()
    if isinstance(thing, dict):
        parts = () if "param_groups" in thing else list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = thing[:_LONG]
    elif not isinstance(thing, (torch.Tensor, torch.nn.Module, type, *_CLASSES.values())):
        parts = list(getattr(thing, "__dict__", {}).values())
    for part in parts if deep else ():
        yield from _inside(part, deep - 1)


RULES = (Schedules, Checkpoints)
