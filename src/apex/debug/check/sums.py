"""Rules of values in 16 bits: averages and sums, whole numbers, statistics, overflows."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apex._compat import private
from apex.debug.check.facts import CheckRule, Facts, is_low, short
from apex.debug.check.finding import Place
from apex.debug.check.values import CASTS, MOVES, FunctionCall

_LEAST, _UPDATES = 0.25, 3
_OFF = 0.01  # an error of one element below it does not matter
_SUMS = CASTS | {"add", "__radd__", "__iadd__", "add_", "sub", "__isub__", "sub_"}
_WHOLE = {torch.bfloat16: 256, torch.float16: 2048}
_MOST = 1_000_000  # elements of whole numbers that are looked at
_INF = 0x7C00  # the bits of inf in float16; NaN is above, and what is negative below 0
_Base = tuple[torch.Tensor, torch.Tensor]  # a value, and what float64 gives for it


@dataclass
class _Kept:
    """A tensor that outlives a step, or may do so.

    Attributes:
        exact: What float64 gives for it.
        last: A copy of what it is, to know it again: another tensor may get its memory.
        step: When the line ``place`` wrote it.
        base: What it was computed from: its value at the end of an earlier step.
        is_sum: Whether it is that and something else, added; an average also decays.
    """

    memory: Any
    exact: torch.Tensor
    last: torch.Tensor
    step: int
    place: Place
    base: _Base | None
    is_sum: bool


@dataclass
class _Line:
    """A line that updates 16-bit tensors from step to step.

    Attributes:
        lost: Elements that stood still, of ``there`` that should have moved.
        grows: Of single elements, by how much each update has changed them.
        is_sum: Whether each update has only added to them.
        last: Of such an element the value, and what float64 gives.
    """

    dtype: torch.dtype
    lost: int = 0
    there: int = 0
    steps: set[int] = field(default_factory=set)
    grows: list[float] = field(default_factory=list)
    is_sum: bool = True
    last: tuple[float, float] = (0.0, 0.0)


class SumsInHalf(CheckRule):
    """Averages and sums in 16 bits whose steps round away.

    Sees 16-bit tensors that are computed, in place or anew, from what they were a step before, and
    computes them in float64 as well. Prints the share of elements that stood still though float64
    moved, and for one element both values and where a sum stops. Silent below 25 % and under three
    updates; for one element below 1 % of error; for what needs a gradient; and in optimizers, which
    have a rule of their own.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._lines: dict[Place, _Line] = {}

    def writes(self, call: FunctionCall) -> None:
        """Note what float64 has for the tensors that a function is about to write."""
        for one in call.each():
            target = one.args[0] if one.args else None
            if not isinstance(target, torch.Tensor) or not is_low(target):
                continue
            if not (target.requires_grad and torch.is_grad_enabled()):
                found = self._find(target)
                exact = target.detach().double() if found is None else found.exact.clone()
                call.old[id(target)] = exact, found

    def function(self, call: FunctionCall) -> None:
        """Follow the result."""
        if call.writes:
            for one in call.each():
                if one.args and id(one.args[0]) in call.old:
                    self._follow(one, one.args[0], *call.old[id(one.args[0])])
        elif not call.is_random() and not any(one.requires_grad for one in call.got):
            is_new = call.low and call.name not in MOVES and not self.facts.network
            if is_new or any(map(self._find, call.given)):
                self._follow(call, call.got[0])

    def _follow(
        self, call: FunctionCall, result: Any, start: Any = None, old: _Kept | None = None
    ) -> None:
        """Compute a result in float64; ``start``: what the tensor was that it is written to."""
        target = call.args[0] if start is not None else None
        known = [found for one in call.given if one is not target and (found := self._find(one))]
        if call.name == "copy_" and not any(map(self._base, known)):
            old = None  # something else
        found_with = [(one, self._base(one)) for one in (old, *known) if one is not None]
        pairs = [(one, base) for one, base in found_with if base]
        is_sum = call.name in _SUMS | {"copy_"} and len(pairs) == 1
        is_sum &= all(one.is_sum or one.step != self.facts.steps for one, _ in pairs)
        bases = [base for _, base in pairs]
        with torch.no_grad():
            wide = call.again(lambda t: start if t is target else self._exact(t), torch.float64)
        if not wide or wide[0].shape != result.shape or not result.is_floating_point():
            return
        base = bases[0] if bases and bases[0][0].shape == result.shape else None
        place = known[0].place if call.name == "copy_" and known else call.place
        memory: Any = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        values = wide[0].double(), result.detach().clone()
        self._kept[_memory(result)] = _Kept(memory, *values, self.facts.steps, place, base, is_sum)

    def _find(self, tensor: torch.Tensor) -> _Kept | None:
        found = self._kept.get(_memory(tensor)) if tensor.is_floating_point() else None
        if found is None or found.memory.expired() or found.last.shape != tensor.shape:
            return None
        is_same = found.last.dtype == tensor.dtype and torch.equal(found.last, tensor.detach())
        return found if is_same else None  # else somebody else wrote it

    def _base(self, found: _Kept) -> _Base | None:
        """What ``found`` was at the end of an earlier step. That it is used is what counts it."""
        if found.step == self.facts.steps:
            return found.base
        if found.base is not None:
            self._count(found, *found.base)
            found.base = None
        return found.last, found.exact

    def _exact(self, leaf: torch.Tensor) -> torch.Tensor:
        found = self._find(leaf)
        wide = leaf.detach().double() if leaf.is_floating_point() else leaf
        return wide if found is None else found.exact

    def _count(self, kept: _Kept, old: torch.Tensor, exact: torch.Tensor) -> None:
        """Count an update of a tensor that was used again in a later step."""
        if old.dtype != kept.last.dtype or not is_low(old):
            return
        line = self._lines.setdefault(kept.place, _Line(old.dtype))
        moves = kept.exact != exact
        line.lost += int(((kept.last == old) & moves).sum())
        line.there += int(moves.sum())
        if bool(moves.any()):
            line.steps.add(kept.step)
        if old.numel() == 1:
            line.last = float(kept.last), float(kept.exact)
            line.grows.append(float(kept.exact) - float(exact))
            line.is_sum &= kept.is_sum

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Forget what is gone."""
        self._kept = {key: one for key, one in self._kept.items() if not one.memory.expired()}

    def ends(self) -> None:
        """Tell of updates that were lost, and of sums that will be."""
        for at, line in self._lines.items():
            if len(line.steps) < _UPDATES:
                continue
            value, exact = line.last
            both = f"; at the end it was {value:.5g}, in float64 {exact:.5g}"
            is_single = 0 < line.there <= len(line.grows)
            is_right = is_single and abs(value - exact) < _OFF * abs(exact)
            if line.lost >= _LEAST * line.there and not is_right:
                text = (
                    f"{100 * line.lost / line.there:.3g} % of its elements did not move although "
                )
                text += f"the update was not 0, in {len(line.steps)} steps"
                self.facts.tell("sum-in-16-bits", text + both * is_single, at, step=0)
            elif is_single and line.is_sum and _is_sum(line.grows):
                step = abs(line.grows[-1])
                text = (
                    f"after {len(line.grows)} updates it was {value:.5g}, in float64 {exact:.5g}; "
                )
                text += f"it grows by {step:.3g} at each update and "
                most, stop = torch.finfo(line.dtype).max, step * _WHOLE[line.dtype]
                text += f"stops at about {stop:.4g}" if stop < most else f"is inf above {most:g}"
                self.facts.tell("sum-in-16-bits", text, at, step=0)


def _is_sum(grows: list[float]) -> bool:
    """Whether one element only grows, by steps of the same order."""
    least, most = min(map(abs, grows)), max(map(abs, grows))
    is_one_way = all(one > 0 for one in grows) or all(one < 0 for one in grows)
    return len(grows) > _UPDATES and is_one_way and least > 0.25 * most


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class WholeNumbers(CheckRule):
    """Whole numbers that become one in 16 bits: positions, steps, ids.

    Sees ``arange`` in 16 bits; and functions with 16-bit results of integers, or of float32 tensors
    of consecutive whole numbers. Prints how many different numbers there were and are. Silent where
    none is lost, as of bytes and one-hot labels.
    """

    def function(self, call: FunctionCall) -> None:
        """Compare the numbers before and after."""
        if not call.low or call.got[0].numel() < 2:
            return
        dtype = call.got[0].dtype
        pairs = [(one.numel(), one) for one in call.got if call.name == "arange"]
        pairs += [(_different(one), one) for one in call.given if _is_whole(one, dtype)]
        for there, one in pairs:
            left = _different(one.to(dtype))
            if left < there:
                text = f"{there} different numbers became {left} in {short(dtype)}"
                self.facts.tell("whole-numbers-in-16-bits", text, size=there - left)


def _different(tensor: torch.Tensor) -> int:
    values: torch.Tensor = tensor.unique()  # type: ignore[no-untyped-call]
    return values.numel()


def _is_whole(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether these are integers, or consecutive whole numbers in wide floats."""
    if not tensor.dim() or tensor.numel() > _MOST or tensor.is_complex():
        return False
    if not tensor.is_floating_point():
        return tensor.dtype != torch.bool
    if is_low(tensor) or tensor.requires_grad or tensor.numel() <= _WHOLE[dtype]:
        return False
    values: torch.Tensor = tensor.unique()  # type: ignore[no-untyped-call]
    return bool((values.diff() == 1).all()) and bool((values == values.round()).all())


class Overflows(CheckRule):
    """Functions whose result is inf in 16 bits and finite in float32.

    Sees all functions of the program with float16 results, and repeats those with an inf in
    float32, eight times at each line (bfloat16 ends where float32 does). Prints how many values,
    and the largest in float32. Silent for casts, for minus infinity (a mask), for functions in
    place, and in backward.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._seen: Counter[Place] = Counter()

    def function(self, call: FunctionCall) -> None:
        """Look for infinities."""
        result = call.got[0].detach()
        if result.dtype != torch.float16 or not result.numel() or call.name in CASTS | MOVES:
            return
        if int(result.view(torch.int16).amax()) < _INF:  # as whole numbers: 30 times as fast
            return
        self._seen[call.place] += 1
        if self._seen[call.place] > 8 or call.writes or call.is_random():
            return
        with torch.no_grad():
            wide = call.again(lambda t: t.float() if is_low(t) else t, torch.float32)
        if not wide or wide[0].shape != result.shape:
            return
        inf = int(((result == torch.inf) & torch.isfinite(wide[0])).sum())
        if inf:
            text = f"{inf} of {result.numel()} values of {call.name} were inf; in float32 the "
            text += f"largest is {float(wide[0].abs().max()):.3g}, and {short(result.dtype)} ends "
            text += f"at {torch.finfo(result.dtype).max:g}"
            self.facts.tell("overflow-in-16-bits", text, size=inf)


class Statistics(CheckRule):
    """Running statistics of BatchNorm in 16 bits.

    Sees each forward in training mode of a BatchNorm whose statistics have 16 bits, and keeps them
    in float64 as well. Prints how many are inf, or the largest error, at the line that cast the
    module. Silent below 1 %.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._exact: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()

    def module_begins(self, module: torch.nn.Module, args: Any, depth: int) -> None:
        """Compare with what the last forward has left, and compute what this one will leave."""
        is_norm = isinstance(module, private.BatchNorm) and module.training
        var = getattr(module, "running_var", None) if is_norm and args else None
        if var is None or not is_low(var):
            return
        now = var.double()
        exact = self._exact.get(module, now)
        inf = int((~torch.isfinite(now) & torch.isfinite(exact)).sum())
        off = float(((now - exact).abs() / exact.abs().clamp_min(1e-12)).max())
        if inf or off >= 0.01:
            text = f"running variances were off by up to {100 * off:.3g} %"
            if inf:
                text = f"{inf} of {now.numel()} running variances were inf; in float64 the largest "
                text += f"is {float(exact.max()):.3g}"
            at = self.facts.cast_at(module)
            self.facts.tell("batchnorm-in-16-bits", text, at, size=inf or min(off, 1.0))
        x = args[0].detach().double()
        rate: Any = 0.1 if module.momentum is None else module.momentum
        new = x.var([axis for axis in range(x.dim()) if axis != 1])
        self._exact[module] = (1 - rate) * exact + rate * new


RULES = (SumsInHalf, WholeNumbers, Overflows, Statistics)
