"""What all rules know of a running program: its steps, its gradients and their scales."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from apex.debug.check.finding import Finding, Place, here
from apex.debug.tensors import HALVES

SCALE = "apex_check_scale"  # in the metadata of the node that multiplies a loss
_COMBINES = ("Add", "Sub", "Mul", "Div", "Neg", "Mean", "Sum", "Stack", "Squeeze", "ToCopy")


class Passed(NamedTuple):
    """One backward that wrote a gradient.

    ``scale`` is ``None`` if its loss was not scaled, ``updates`` how many times a scale had been
    updated, ``is_late`` whether ``unscale_`` had divided the gradient already, and ``is_stale``
    whether a step had used it.
    """

    scale: float | None
    place: Place
    updates: int
    is_late: bool
    is_stale: bool


@dataclass
class Mark:
    """What is known of one gradient: which tensor and version it is, and the backwards in it.

    ``unscaled``: ``unscale_`` has divided it. ``touched``: the program has written it.
    ``stepped``: a step has used it, or was skipped.
    """

    key: tuple[int, int]
    passes: list[Passed] = field(default_factory=list)
    unscaled: bool = False
    touched: bool = False
    stepped: bool = False

    def scale(self) -> float | None:
        """What it is multiplied by, as far as that is known and not 1."""
        done = self.unscaled or self.touched or not self.passes
        return None if done or self.passes[-1].scale == 1.0 else self.passes[-1].scale


@dataclass
class Count:
    """Steps of one optimizer.

    Attributes:
        start: Of other optimizers before it.
        tried: That it was to make; amp counts one when it has ended.
        begun: ``tried`` when the last one began.
        real: That it has made.
        past: That amp had counted when the check began.
    """

    start: int = 0
    tried: int = 0
    begun: int = 0
    real: int = 0
    past: int = 0


class Facts:
    """What is known of one program.

    Attributes:
        measuring: Whether functions, gradients and weights are looked at still.
        steps: How many steps were tried.
        scalers: Those that have scaled a loss, with their first scale.
        updates: How many times a scaler's scale was updated.
        asked: Whether the program has read the scale since the last step.
        asked_late: Whether it has since the last backward began.
        is_off: Whether a loss went through a scaler that is not enabled.
        inside: The optimizer that a scaler is stepping.
        busy: Whether rules are looking, whose own calls are no part of the program.
        quiet: Whether functions are not looked at: in optimizers, backward and the like.
        network: Whether a module with parameters runs.
        regions: Autocast blocks that are open, the outermost first.
        low: Whether a float16 result needed a gradient since the last step.
        has_hooks: Whether the program has hooks on gradients: then no backward runs twice.
        is_blind: Whether functions are not looked at at all: in a program that compiles.
        reached: What else it has done: "checkpoint", "resume", "schedule".
        not_finite: That the training did not go on to the end, in numbers; empty if it did.
    """

    def __init__(self, limit: int, ignored: Iterable[str] = ()) -> None:
        self.limit, self._ignored = limit, frozenset(ignored)
        self.found: dict[tuple[str, str, int], Finding] = {}
        self.silenced: set[tuple[str, str, int]] = set()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.counts: weakref.WeakKeyDictionary[Any, Count] = weakref.WeakKeyDictionary()
        self.scalers: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self.schedules: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.marks: dict[int, Mark] = {}  # by the id of the parameter
        self.casts: list[tuple[weakref.ref[torch.nn.Module], Place]] = []
        self.steps = self.updates = self.busy = self.quiet = 0
        self.regions: list[Any] = []
        self.inside: Any = None
        self.measuring = True
        self.asked = self.asked_late = self.is_off = False
        self.network = self.low = self.has_hooks = self.is_blind = False
        self.reached: set[str] = set()
        self.not_finite = ""

    def tell(
        self, kind: str, text: str, at: Place | None = None, size: float = 0.0,
        step: int | None = None, sentence: str = "", fix: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Note a mistake.

        Args:
            kind: A key of ``KINDS``.
            text: What was measured.
            at: The line; by default that which runs.
            size: How bad it is, to keep the worst.
            step: When; by default now, 0 for a number of the whole run.
            sentence: What the line does, where that of the table does not fit.
            fix: The same of the fix.
        """
        at, step = at or here(), self.now() if step is None else step
        key = (kind, at.file, at.line)
        if kind in self._ignored or kind in at.ignored:
            self.silenced.add(key)
        elif key in self.found:
            self.found[key].again(step, text, size)
        else:
            self.found[key] = Finding.new(kind, at, step, text, size, sentence, fix)

    def has(self, *kinds: str) -> bool:
        """Whether one of these was found or silenced: others may be its symptoms."""
        return any(kind in kinds for kind, _, _ in (*self.found, *self.silenced))

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Look at no function inside."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet = max(0, self.quiet - 1)

    # -- steps -------------------------------------------------------------------------------------

    def now(self) -> int:
        """The number of the step that the program is in."""
        return self.steps + 1

    def count(self, optimizer: Any) -> Count:
        """The steps of an optimizer; of one of amp as amp counts them."""
        managed = getattr(optimizer, "_amp_stash", None)
        counted = 0 if managed is None else managed.ledger.steps
        if optimizer not in self.counts:  # amp counts those before a block as well
            self.counts[optimizer] = Count(self.steps - counted, *[counted] * 4)
        found = self.counts[optimizer]
        found.tried = max(found.tried, counted)
        self.steps = max(self.steps, found.start + found.tried)
        return found

    def params(self, optimizer: Any = None) -> list[torch.Tensor]:
        """What an optimizer steps, or all of them."""
        some = list(self.optimizers) if optimizer is None else [optimizer]
        return [p for one in some for group in one.param_groups for p in group["params"]]

    def cast_at(self, module: torch.nn.Module | None = None) -> Place | None:
        """The last line that cast a module, or ``module``, to 16 bits."""
        for ref, place in reversed(self.casts):
            cast = ref()
            if cast is not None and (module is None or module in set(cast.modules())):
                return place
        return None

    # -- gradients ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look which gradients the program has written or taken away."""
        for param in self.params():
            mark, key = self.marks.get(id(param)), key_of(param)
            if mark is not None and key is None:
                del self.marks[id(param)]
            elif mark is not None and mark.key != key:
                mark.touched = True

    def marks_of(self, params: Iterable[torch.Tensor]) -> list[Mark]:
        """The marks of the gradients of ``params``."""
        return [mark for param in params if (mark := self.marks.get(id(param))) is not None]

    def settle(self, params: Iterable[torch.Tensor], *, unscaled: bool = False) -> None:
        """Take the gradients as they are: torch has written them."""
        for param in params:
            mark, key = self.marks.get(id(param)), key_of(param)
            if mark is not None and key is not None:
                mark.key, mark.unscaled = key, mark.unscaled or unscaled

    def passed(self, before: dict[int, Any], scale: float | None, at: Place) -> list[torch.Tensor]:
        """Note a backward in each gradient that it wrote; return their parameters."""
        written = []
        for param in self.params():
            key = key_of(param)
            if key is not None and before.get(id(param)) != key:
                mark = self.marks.setdefault(id(param), Mark(key))
                late = mark.unscaled, mark.stepped
                mark.passes.append(Passed(scale, at, self.updates, *late))
                mark.key = key
                written.append(param)
        return written


def key_of(param: torch.Tensor) -> tuple[int, int] | None:
    """Which gradient a parameter has, and its version; ``None`` without one."""
    grad = param.grad
    return None if grad is None else (id(grad), 0 if grad.is_inference() else grad._version)


def scale_of(scaler: Any) -> float:
    """The scale of a GradScaler, without ``get_scale``, whose calls are the program's."""
    known = scaler._get_scale_async()
    return float(scaler.get_scale() if known is None else known)


def scales_of(roots: Iterable[torch.Tensor], known: Iterable[float]) -> set[float | None]:
    """The scales that losses were multiplied by; ``None`` for a part that was not.

    ``known``: a factor of this size is a scale, by which the program multiplies itself.
    """
    found: set[float | None] = set()
    nodes: list[Any] = [root.grad_fn for root in roots]
    for number, node in enumerate(nodes):
        if node is None:
            continue
        factor = node.metadata.get(SCALE, _factor(node))
        if SCALE in node.metadata or factor in known:
            found.add(factor)
        elif number < 64 and node.name().startswith(_COMBINES):
            nodes += [one for one, _ in node.next_functions if one not in nodes]
        else:
            found.add(None)
    return found


def _factor(node: Any) -> float | None:
    """The number that a node multiplies by."""
    try:
        other = node._saved_other if node.name().startswith("Mul") else None
    except RuntimeError:  # freed
        return None
    if isinstance(other, torch.Tensor):
        other = other.item() if other.numel() == 1 else None
    return float(other) if isinstance(other, int | float) else None  # or complex


def walk(root: torch.Tensor) -> Iterator[Any]:
    """All nodes of a graph."""
    nodes, seen = [root.grad_fn], set()
    for node in nodes:
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [one for one, _ in node.next_functions]


def is_low(tensor: torch.Tensor) -> bool:
    """Whether a tensor has 16 bits."""
    return tensor.dtype in HALVES


def short(dtype: torch.dtype) -> str:
    """A dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def distance(pairs: Iterable[tuple[Any, Any]]) -> float:
    """The norm of the difference of gradients and exact ones, relative to that of the latter.

    0 where one is not finite.
    """
    over = under = 0.0
    for ours, exact in pairs:
        if ours is not None and exact is not None:
            over += float((ours.double() - exact.double()).square().sum())
            under += float(exact.double().square().sum())
    return math.sqrt(over / under) if under and math.isfinite(over) else 0.0


class CheckRule:
    """Looks for one family of mistakes.

    It has a method for each event that it wants to see:

    ========================== ===================================================================
    ``scales(losses, scaled)`` a GradScaler has multiplied losses
    ``losses(roots)``          backward begins, in each step until the end
    ``backward_begins(...)``   with roots (none if gradients were passed), their scales, the line
    ``backward_ends(written)`` parameters whose gradients were written
    ``hooked(call)``           a function in a hook of a parameter's gradient, in backward
    ``clips(params, ...)``     torch has clipped: with the limit, and what the function returned
    ``unscales(scaler, o)``    ``unscale_`` has divided; the marks are those from before
    ``refuses(error)``         it has raised ``ValueError``
    ``scaler_steps(scaler, o)`` ``scaler.step(optimizer)`` is about to run
    ``step_begins(o, params)`` an optimizer is about to write parameters, whose gradients it has
    ``step_ends(o)``           it has made that step
    ``attempt_ends(o, skipped)`` a step was made or skipped
    ``makes_schedule(s)``      a schedule was made; ``schedules(s)``: its ``step()`` is called
    ``saves(thing)``           ``torch.save`` was called; ``loads(thing)``: of ``torch.load``
    ``takes_state(owner)``     ``load_state_dict`` of an optimizer, a scaler or a schedule
    ``gives_state(owner)``     the program called ``state_dict`` of a scaler or a schedule
    ``enters``, ``leaves``     an autocast block
    ``module_begins(...)``     a forward: module, arguments, and how deep it is
    ``network_ends(output)``   of the outermost module with parameters that returns no loss
    ``writes(call)``           a function is about to write to its first argument
    ``function(call)``         a function of torch was called
    ``ends()``                 the program has ended
    ========================== ===================================================================

    Attributes:
        lasts: Whether it looks on after the measured steps.
    """

    lasts = False

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
