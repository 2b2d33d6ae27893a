"""What was recorded of a step by :class:`apex.debug.lines.Lines`, and how it runs again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch

from apex._compat.private import tree_map
from apex.debug.calls import (
    AutocastState,
    Call,
    Replay,
    ReplayResult,
    as_it_was,
    autocast_of,
    random_states,
    set_random_states,
    tensors_in,
    version_of,
)
from apex.debug.tensors import tensors_of
from apex.debug.tracing import Trace, show_line

Ref = weakref.ref  # to what was made, by which a replay finds what it makes in its place


class Recorded(NamedTuple):
    """A function that a program called, and where.

    Tensors that the tape has seen made are references, in ``args`` too: a tensor would keep its
    graph, with the activations of forwards without a backward. A loss that is computed inside of
    autocast in float32 overflows outside of it, and one under ``no_grad`` has no gradient.
    """

    function: Any
    args: Any
    kwargs: Any
    results: list[Ref[torch.Tensor]]
    code: CodeType | None
    instruction: int
    autocast: list[AutocastState]
    has_grad: bool


class Forward(NamedTuple):
    """A forward of a watched model, and its outputs."""

    call: Call
    results: list[Ref[torch.Tensor]]


@dataclass
class Tape:
    """What was recorded of one step.

    Attributes:
        items: In order.
        losses: What ``backward`` was called on.
        earlier: Of the step of another optimizer before. A GAN's generator has run in that one.
        made: By functions and forwards, by ``id``; it may be another tensor of the same ``id``.
        given: Other arguments, with their versions.
        before: Copies of those of them that are written to.
        aliases: Tensors of memory that the program has elsewhere, too, by ``id``; whether it was
            made.
    """

    items: list[Recorded | Forward] = field(default_factory=list)
    losses: list[Ref[torch.Tensor]] = field(default_factory=list)
    earlier: Tape | None = None
    is_whole: bool = True
    made: dict[int, Ref[torch.Tensor]] = field(default_factory=dict)
    given: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    aliases: dict[int, tuple[Ref[torch.Tensor], bool]] = field(default_factory=dict)
    size: int = 0
    random: list[torch.Tensor] = field(default_factory=random_states)
    trace: Trace | None = None

    def ref(self, tensor: torch.Tensor) -> Ref[torch.Tensor] | None:
        """The reference to a tensor that was made; ``None`` for others."""
        tape: Tape | None = self
        while tape is not None:
            found = tape.made.get(id(tensor))
            if found is not None and found() is tensor:
                return found
            tape = tape.earlier
        return None

    def has_begun(self) -> bool:
        """Whether a forward came."""
        return any(isinstance(item, Forward) for item in self.items)

    def forget(self, calls: list[Call]) -> None:
        """Forget the steps before, unless they have one of ``calls``, whose backward may come."""
        if self.earlier is not None:
            self.earlier.losses.clear()
            kept = [item.call for item in self.earlier.items if isinstance(item, Forward)]
            if not any(one is call for one in kept for call in calls):
                self.earlier = None

    def can_run(self, last: Call) -> bool:
        """Whether all was recorded up to a forward, and nothing that it reads was written since."""
        forwards = [i for tape in self._all() for i in tape.items if isinstance(i, Forward)]
        return any(last is item.call for item in forwards) and all(
            tape.is_whole
            and all(
                version_of(one) == version
                for key, (one, version) in tape.given.items()
                if key not in tape.before
            )
            for tape in self._all()
        )

    def _all(self) -> Iterator[Tape]:
        if self.earlier is not None:
            yield from self.earlier._all()
        yield self

    def run(self, replay: Replay, factor: float = 1.0) -> ReplayResult:
        """Run all again, forward and backward, at ``factor`` times the loss scale."""
        result = ReplayResult()
        made: dict[int, torch.Tensor] = {}  # by the id of a reference, or of a tensor that is kept
        for tape in self._all():
            made.update({key: one.clone() for key, one in tape.before.items()})
            set_random_states(tape.random)
            for item in tape.items:
                self._run(item, made, result)
        losses = [ref for tape in self._all() for ref in tape.losses]
        for number, ref in enumerate(losses, 1):
            now = result.loss = made[id(ref)]
            if now.requires_grad:
                pair = (now if factor == 1.0 else now * factor, torch.ones_like(now))
                replay.backward(result, [pair], [], keep=number < len(losses))
        return result

    def _run(
        self, item: Recorded | Forward, made: dict[int, torch.Tensor], result: ReplayResult
    ) -> None:
        if isinstance(item, Recorded):
            self._at(item)
            args, kwargs = tree_map(lambda one: made.get(id(one), one), (item.args, item.kwargs))
            with autocast_of(item.autocast), torch.set_grad_enabled(item.has_grad):
                now = tensors_of(item.function(*args, **kwargs))
            self._at(None)
        else:
            call = item.call
            with as_it_was(call):
                args, kwargs = tree_map(lambda one: self._now(one, made), (call.args, call.kwargs))
                result.given.append((call, tensors_in((args, kwargs) if kwargs else args)))
                now = tensors_in(call.model(*args, **kwargs))
            result.outputs.append(now)
        made.update({id(ref): one for ref, one in zip(item.results, now, strict=False)})

    def _now(self, leaf: Any, made: dict[int, torch.Tensor]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return made.get(id(self.ref(leaf)), made.get(id(leaf), leaf))

    def _at(self, item: Recorded | None) -> None:
        if self.trace is not None:
            self.trace.at = show_line(item.code, _line(item)) if item and item.code else ""


def _line(item: Recorded) -> int:
    """The line of an instruction; looked up in a replay, since it takes 1 us in a long function."""
    assert item.code is not None
    lines = item.code.co_lines()
    return next((n or 0 for first, end, n in lines if first <= item.instruction < end), 0)
