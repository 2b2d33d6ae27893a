"""What is known of a running program, for all rules: steps, gradients and their scales, findings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from apex.debug.check.finding import Finding, Place, here, new

SCALE = "apex_check_scale"  # in the metadata of the node that multiplies a loss
_COMBINES = ("Add", "Sub", "Mul", "Div", "Neg", "Mean", "Sum", "Stack", "Squeeze", "View", "Select")


@dataclass
class Passed:
    """One backward that wrote a gradient; ``scale`` is ``None`` if its loss was not scaled."""

    scale: float | None
    place: Place
    updates: int  # of scalers, until then


@dataclass
class Mark:
    """What is known of the gradient of one parameter.

    Attributes:
        key: Which tensor it is, and its version.
        passes: The backwards that it is the sum of.
        unscaled: Whether ``unscale_`` has divided it.
        touched: Whether the program has written it since.
        mixed: Whether a scaled backward has added to it after ``unscale_``.
    """

    key: tuple[int, int]
    passes: list[Passed] = field(default_factory=list)
    unscaled: bool = False
    touched: bool = False
    mixed: bool = False

    def scale(self) -> float | None:
        """What it is multiplied by, as far as it is still."""
        done = self.unscaled or self.touched or not self.passes
        return None if done else self.passes[-1].scale


@dataclass
class Count:
    """Steps of one optimizer: those before it was made, tried ones, and those that were made."""

    start: int = 0
    tried: int = 0
    real: int = 0


class Facts:
    """What is known of one program.

    Attributes:
        limit: How many steps are measured.
        optimizers: All that were made.
        marks: Of gradients, by the ``id`` of their parameter.
        updates: How many times a scaler's scale was updated.
        scalers: Those that have scaled a loss, with their first scale.
        asked: Whether the program has read the scale since the last step.
        inside: The optimizer that a scaler is stepping.
        busy: Whether rules are looking, whose own calls are no part of the program.
        quiet: Whether functions are not looked at now: in torch's optimizers and the like.
        network: Whether a module with parameters runs.
        regions: Autocast blocks that are open, the outermost first.
        low: Whether a float16 result needed a gradient since the last step.
        has_hooks: Whether the program has hooks on gradients: then no backward runs twice.
        is_blind: Whether values are not looked at: in a program that compiles.
    """

    def __init__(self, limit: int, ignored: Iterable[str] = ()) -> None:
        self.limit, self.ignored = limit, frozenset(ignored)
        self.found: dict[tuple[str, str, int], Finding] = {}
        self.silenced: set[tuple[str, str, int]] = set()
        self.optimizers: WeakSet[Any] = WeakSet()
        self.counts: WeakKeyDictionary[Any, Count] = WeakKeyDictionary()
        self.marks: dict[int, Mark] = {}
        self.updates = 0
        self.scalers: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self.asked = False
        self.inside: Any = None
        self.busy = self.quiet = self.network = 0
        self.regions: list[Any] = []
        self.low = self.has_hooks = self.is_blind = False
        self.reached: set[str] = set()
        self.measuring = True
        self.steps = 0

    # -- findings ----------------------------------------------------------------------------------

    def tell(
        self, kind: str, text: str, *, place: Place | None = None, size: float = 0.0,
        at_step: bool = True, step: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        """Note a mistake of ``kind`` at ``place`` (by default the line that runs).

        Args:
            kind: A key of ``KINDS``.
            text: What was measured.
            place: The line.
            size: How bad it is, to keep the worst.
            at_step: Whether ``text`` is about one step, ``step`` or else this one.
            more: ``sentence`` or ``fix``, where those of the table do not fit.
        """
        place, step = place or here(), step or self.now()
        key = (kind, place.file, place.line)
        if kind in self.ignored or kind in place.ignored:
            self.silenced.add(key)
        elif key in self.found:
            self.found[key].again(step, text, size)
        else:
            self.found[key] = new(kind, place, step if at_step else 0, text, size, **more)

    def has(self, *kinds: str) -> bool:
        """Whether one of these was found or silenced: others may be its symptoms."""
        return any(kind in kinds for kind, _, _ in (*self.found, *self.silenced))

    # -- steps -------------------------------------------------------------------------------------

    def now(self) -> int:
        """The number of the step that the program is in."""
        return self.steps + 1

    def count(self, optimizer: Any) -> Count:
        """The steps of an optimizer; of one of amp as amp counts them."""
        found = self.counts.setdefault(optimizer, Count(self.steps))
        managed = getattr(optimizer, "_amp_stash", None)
        if managed is not None:
            found.tried = max(found.tried, managed.ledger.steps)
        return found

    def count_steps(self) -> None:
        """Look how many steps were tried."""
        counts = [self.count(one) for one in list(self.counts)]
        self.steps = max([self.steps, *(one.start + one.tried for one in counts)])

    def params(self, optimizer: Any = None) -> list[torch.Tensor]:
        """What an optimizer steps, or all of them."""
        some = list(self.optimizers) if optimizer is None else [optimizer]
        return [p for one in some for group in one.param_groups for p in group["params"]]

    # -- gradients ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look which gradients the program has written or taken away."""
        for param in self.params():
            mark = self.marks.get(id(param))
            if mark is not None and mark.key != (key := key_of(param)):
                if key is None:
                    del self.marks[id(param)]
                else:
                    mark.touched = True

    def of(self, optimizer: Any) -> list[Mark]:
        """The marks of an optimizer's gradients, as they are now."""
        self.refresh()
        return self.marks_of(self.params(optimizer))

    def marks_of(self, params: Iterable[torch.Tensor]) -> list[Mark]:
        """The marks that there are."""
        return [mark for param in params if (mark := self.marks.get(id(param))) is not None]

    def settle(self, params: Iterable[torch.Tensor], *, unscaled: bool = False) -> None:
        """Take the gradients as they are: torch has written them."""
        for param in params:
            mark = self.marks.get(id(param))
            if mark is not None and (key := key_of(param)) is not None:
                mark.key, mark.unscaled = key, mark.unscaled or unscaled

    def passed(self, before: dict[int, Any], scale: float | None, place: Place) -> list[Any]:
        """Note a backward in each gradient that it wrote; return their parameters."""
        written = []
        for param in self.params():
            key = key_of(param)
            if key is None or before.get(id(param)) == key:
                continue
            mark = self.marks.setdefault(id(param), Mark(key))
            mark.mixed |= mark.unscaled and not mark.touched and scale is not None
            mark.passes.append(Passed(scale, place, self.updates))
            mark.key = key
            written.append(param)
        return written


def key_of(param: torch.Tensor) -> tuple[int, int] | None:
    """Which gradient a parameter has, and its version; ``None`` without one."""
    grad = param.grad
    return None if grad is None else (id(grad), 0 if grad.is_inference() else grad._version)


def scales_of(roots: Iterable[torch.Tensor]) -> set[float | None]:
    """The scales that losses were multiplied by; ``None`` for a part that was not."""
    found: set[float | None] = set()
    nodes, seen = [root.grad_fn for root in roots], set()
    for node in nodes:
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [one for one, _ in node.next_functions if one is not None]
        if SCALE in node.metadata:
            found.add(float(node.metadata[SCALE]))
        elif len(seen) < 64 and below and node.name().startswith(_COMBINES):
            nodes += below
        else:
            found.add(None)
    return found


def short(dtype: torch.dtype) -> str:
    """A dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def distance(ours: Iterable[Any], exact: Iterable[Any]) -> float:
    """The norm of the difference of two lists of tensors, relative to that of the second."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, exact, strict=True)]
    over = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(over / max(1e-300, sum(float(b.square().sum()) for _, b in pairs)))


class Rule:
    """Looks for one family of mistakes: it overrides what a program does that it wants to see.

    Attributes:
        lasts: Whether it looks on after the measured steps.
    """

    lasts = False

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def scales(self, scaler: Any, losses: list[Any], scaled: list[Any], factor: float) -> None:
        """A GradScaler has multiplied losses."""

    def backward_begins(self, roots: list[Any], scales: set[float | None], place: Place) -> None:
        """Backward is about to run; ``roots`` is empty if gradients were passed to it."""

    def backward_ends(self, written: list[Any], place: Place) -> None:
        """Backward has written the gradients of these parameters."""

    def clips(self, params: list[Any], limit: float, was: torch.Tensor | None) -> None:
        """A function of torch has clipped gradients; ``was`` is their norm before, if it says."""

    def unscales(self, scaler: Any, optimizer: Any, marks: list[Mark]) -> None:
        """``unscale_`` has divided the gradients of an optimizer."""

    def refuses(self, error: ValueError) -> None:
        """``unscale_`` has raised."""

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """``scaler.step(optimizer)`` is about to run."""

    def step_begins(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """An optimizer is about to write ``params``, whose gradients it has; in a closure after
        its first call."""

    def step_ends(self, optimizer: Any) -> None:
        """An optimizer has made a step."""

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """A step was made or skipped."""

    def makes_schedule(self, schedule: Any) -> None:
        """A schedule was made."""

    def schedules(self, schedule: Any, place: Place) -> None:
        """The program is about to call ``schedule.step()``."""

    def saves(self, thing: Any, place: Place) -> None:
        """The program has called ``torch.save(thing)``."""

    def loads(self, thing: Any, place: Place) -> None:
        """``torch.load`` has returned ``thing``."""

    def takes_state(self, owner: Any, place: Place) -> None:
        """``load_state_dict`` of an optimizer, a scaler or a schedule has been called."""

    def casts(self, module: torch.nn.Module, place: Place) -> None:
        """The dtype of a module's parameters has been changed."""

    def enters(self, region: Any) -> None:
        """An autocast block begins."""

    def leaves(self, region: Any) -> None:
        """An autocast block ends."""

    def module_begins(self, module: torch.nn.Module, args: Any, depth: int) -> None:
        """A forward begins; ``depth`` is 0 for one that no other module calls."""

    def network_ends(self, module: torch.nn.Module, output: Any) -> None:
        """The forward of a network has ended: of the outermost module with parameters that
        returns no loss."""

    def writes(self, call: Any) -> None:
        """A function is about to write to its first argument."""

    def function(self, call: Any) -> None:
        """A function of torch was called."""

    def ends(self) -> None:
        """The program has ended: what only the whole run shows."""
