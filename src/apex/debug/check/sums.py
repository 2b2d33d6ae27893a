"""Rules of values in 16 bits: averages and sums, whole numbers, statistics, overflows."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from apex.debug.check.facts import Facts, Rule, short
from apex.debug.check.finding import Place
from apex.debug.check.values import CASTS, MOVES, Call, is_in_place
from apex.debug.tensors import HALVES, tensors_of

_LEAST, _UPDATES = 0.25, 3
_WHOLE = {torch.bfloat16: 256, torch.float16: 2048}
_MOST = 1_000_000  # elements of whole numbers that are looked at


@dataclass
class _Update:
    """What a line did to a tensor in one step."""

    step: int
    lost: int
    there: int
    value: float | None  # of one element
    exact: float | None
    grows: float = 0.0


@dataclass
class _Line:
    """A line that updates 16-bit tensors which go from step to step."""

    place: Place
    dtype: torch.dtype
    updates: list[_Update] = field(default_factory=list)


@dataclass
class _Kept:
    """A tensor that outlives a step, or may do so.

    Attributes:
        value: What float64 gives for it.
        last: A copy of what it is, to know it again: another tensor may get its memory.
        base: Value and exact value at the end of an earlier step that it was computed from.
        place: The line that wrote it.
    """

    memory: Any
    value: torch.Tensor
    last: torch.Tensor
    step: int
    place: Place
    base: tuple[torch.Tensor, torch.Tensor] | None = None


class Sums(Rule):
    """Averages and sums in 16 bits whose steps round away.

    Sees 16-bit tensors that are computed, in place or anew, from what they were a step before, and
    computes them in float64 as well. Prints the share of elements that stood still though float64
    moved, and for one element both values and where it stops. Silent below 25 % and under three
    updates; for what needs a gradient; in networks, but for tensors without gradients; and in
    optimizers, which have a rule of their own.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._lines: dict[tuple[str, int], _Line] = {}

    def writes(self, call: Call) -> None:
        """Compute an in-place function of 16-bit tensors in float64, before it runs."""
        target = call.args[0] if call.args else None
        if isinstance(target, list | tuple):
            call.exact = [self._exact_of(call, i) for i in range(len(target))]  # type: ignore[attr-defined]
        elif isinstance(target, torch.Tensor):
            call.exact = [self._exact_of(call, None)]  # type: ignore[attr-defined]

    def _exact_of(self, call: Call, index: int | None) -> Any:
        """Target, exact result, and what it was a step before; ``None`` if it is not followed."""
        args = tuple(_at(arg, index) for arg in call.args)
        target = args[0]
        if not isinstance(target, torch.Tensor) or target.dtype not in HALVES:
            return None
        if target.requires_grad and torch.is_grad_enabled():
            return None
        found = self._find(target)
        start = target.detach().double() if found is None else found.value.clone()
        name = call.name.removeprefix("_foreach_")
        func = call.func if index is None else getattr(torch.Tensor, name, None)
        kwargs = {key: _at(one, index) for key, one in call.kwargs.items()}
        others = Call(func, args[1:], kwargs)
        source = next((f for one in others.given if (f := self._find(one)) and f.base), None)
        base = self._base(found)
        if name == "copy_":
            base = base if source is not None else None
        with torch.no_grad():
            new = others.again(self._exact, torch.float64, first=start)
        place = source.place if name == "copy_" and source is not None else None
        return None if new is None else (target, new, base, place)

    def function(self, call: Call) -> None:
        """Follow results."""
        if is_in_place(call.name):
            for one in getattr(call, "exact", ()):
                if one is not None:
                    target, new, base, place = one
                    self._keep(target, new, base, place or call.place)
            return
        known = [found for one in call.given if (found := self._find(one))]
        if not known and not (call.low and self._is_followed(call)):
            return
        if call.is_random() or any(one.requires_grad for one in call.got):
            return
        base = next((b for found in known if (b := self._base(found))), None)
        if not known and call.name in MOVES:
            return
        with torch.no_grad():
            wide = tensors_of(call.again(self._exact, torch.float64))
        for one, new in zip(call.got, wide, strict=False):
            if one.is_floating_point() and new.shape == one.shape:
                fits = base is not None and base[0].shape == one.shape
                self._keep(one, new.double(), base if fits else None, call.place)

    def _is_followed(self, call: Call) -> bool:
        return not self.facts.network and call.got[0].numel() > 0

    def _find(self, tensor: torch.Tensor) -> _Kept | None:
        found = self._kept.get(_memory(tensor)) if tensor.is_floating_point() else None
        if found is None or found.memory.expired() or found.last.shape != tensor.shape:
            return None
        is_same = found.last.dtype == tensor.dtype and torch.equal(found.last, tensor.detach())
        return found if is_same else None  # else somebody else wrote it

    def _base(self, found: _Kept | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What ``found`` was at the end of an earlier step."""
        if found is None:
            return None
        if found.step == self.facts.steps:
            return found.base
        if found.base is not None:
            self._count(found, found.base)
            found.base = None  # counted once
        return found.last, found.value

    def _exact(self, leaf: torch.Tensor) -> torch.Tensor:
        found = self._find(leaf)
        if found is not None:
            return found.value
        return leaf.detach().double() if leaf.is_floating_point() else leaf

    def _keep(self, tensor: torch.Tensor, new: torch.Tensor, base: Any, place: Place) -> None:
        memory: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        last = tensor.detach().clone()
        kept = _Kept(memory, new, last, self.facts.steps, place, base)
        self._kept[_memory(tensor)] = kept

    def _count(self, kept: _Kept, base: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count an update: its result has been used in a later step."""
        old, exact = base
        if old.dtype != kept.last.dtype or old.dtype not in HALVES:
            return
        moves = kept.value != exact
        lost = int(((kept.last == old) & moves).sum())
        update = _Update(kept.step, lost, int(moves.sum()), None, None)
        if old.numel() == 1:
            update.value, update.exact = float(kept.last), float(kept.value)
            update.grows = float(kept.value) - float(exact)
        place = kept.place
        line = self._lines.setdefault((place.file, place.line), _Line(place, old.dtype))
        line.updates.append(update)

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Forget what is gone."""
        self._kept = {key: one for key, one in self._kept.items() if not one.memory.expired()}

    def ends(self) -> None:
        """Tell of updates that were lost, and of sums that will be."""
        for line in self._lines.values():
            updates = line.updates
            lost, there = sum(one.lost for one in updates), sum(one.there for one in updates)
            steps = {one.step for one in updates if one.there}
            last = updates[-1]
            if len(steps) < _UPDATES or not there:
                continue
            both = ""
            if last.value is not None and last.exact is not None:
                both = f"it was {last.value:.5g}, and {last.exact:.5g} in float64"
            if lost / there >= _LEAST:
                text = f"{100 * lost / there:.3g} % of its elements did not move at an update that "
                text += f"is not 0, in {len(steps)} steps" + (
                    f"; in the end {both}" if both else ""
                )
                self._tell(line, text)
            elif both and _is_sum(updates):
                stop = abs(last.grows) * _WHOLE[line.dtype]
                text = (
                    f"after {len(updates)} updates {both}; it grows by {last.grows:.3g}, and from "
                )
                text += f"about {stop:.4g} on it stands still"
                self._tell(line, text)

    def _tell(self, line: _Line, text: str) -> None:
        self.facts.tell("sum-in-16-bits", text, place=line.place, at_step=False)


def _is_sum(updates: list[_Update]) -> bool:
    """Whether one element only grows, by steps of the same order."""
    steps = [one.grows for one in updates]
    least, most = min(map(abs, steps)), max(map(abs, steps))
    same_sign = all(one > 0 for one in steps) or all(one < 0 for one in steps)
    return len(steps) > _UPDATES and same_sign and least > 0.25 * most


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _at(value: Any, index: int | None) -> Any:
    """An element of an argument of a function of lists."""
    return value[index] if index is not None and isinstance(value, list | tuple) else value


class WholeNumbers(Rule):
    """Whole numbers that become one in 16 bits: positions, steps, ids.

    Sees ``arange`` and casts of integers, products and sums with them, and float32 tensors of
    consecutive whole numbers. Prints how many different numbers there were and are. Silent where
    none is lost, as of bytes and one-hot labels.
    """

    def function(self, call: Call) -> None:
        """Compare the numbers before and after."""
        if not call.low or not call.got[0].numel() > 1:
            return
        dtype = call.got[0].dtype
        if call.name == "arange":
            self._tell(call, call.got[0].numel(), call.got[0])
            return
        for one in call.given:
            if one.dim() and one.numel() <= _MOST and _is_whole(one, dtype):
                self._tell(call, int(one.unique().numel()), one.to(dtype))

    def _tell(self, call: Call, there: int, result: torch.Tensor) -> None:
        left = int(result.unique().numel())
        if left < there:
            text = f"{there} different numbers became {left} in {short(result.dtype)}"
            self.facts.tell("whole-numbers-in-16-bits", text, size=there - left)


def _is_whole(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether these are integers, or consecutive whole numbers in wide floats."""
    if not tensor.is_floating_point():
        return not tensor.is_complex() and tensor.dtype != torch.bool
    if tensor.dtype in HALVES or tensor.requires_grad or tensor.numel() <= _WHOLE[dtype]:
        return False
    values = tensor.unique()
    few = values.numel() <= _WHOLE[dtype] or values.numel() < tensor.numel() / 64
    return not few and bool((values.diff() == 1).all()) and bool((values == values.round()).all())


class Overflows(Rule):
    """Functions whose result is inf in 16 bits and finite in float32.

    Sees all functions of the program with 16-bit results, the first eight times at each line, and
    repeats those with an inf in float32. Prints how many values, and the largest in float32. Silent
    for casts, for minus infinity (a mask), and in backward.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._seen: dict[tuple[Any, int], int] = {}

    def function(self, call: Call) -> None:
        """Look for infinities."""
        if not call.low or call.name in CASTS | MOVES or not call.got[0].is_floating_point():
            return
        result = call.got[0].detach()
        if result.numel() and bool(result.max() == torch.inf):
            self._compare(call, result)

    def _compare(self, call: Call, result: torch.Tensor) -> None:
        key = (call.place.file, call.place.line)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] > 8 or is_in_place(call.name) or call.is_random():
            return
        with torch.no_grad():
            wide = call.again(lambda t: t.float() if t.dtype in HALVES else t, torch.float32)
        exact = next(iter(tensors_of(wide)), None)
        if exact is None or exact.shape != result.shape:
            return
        inf = int(((result == torch.inf) & torch.isfinite(exact)).sum())
        if inf:
            limit = torch.finfo(result.dtype).max
            text = f"{call.name} gave {inf} of {result.numel()} values as inf; in float32 the "
            text += f"largest is {float(exact.abs().max()):.3g} ({short(result.dtype)} ends at "
            self.facts.tell("overflow-in-16-bits", f"{text}{limit:g})", size=inf)


class Statistics(Rule):
    """Running statistics of BatchNorm in 16 bits.

    Sees each forward in training mode of a BatchNorm whose statistics have 16 bits, and keeps them
    in float64 as well. Prints how many are inf, or the largest error, at the line that cast the
    module. Silent below 1 %.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._cast: list[tuple[weakref.ref[torch.nn.Module], Place]] = []
        self._exact: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()
        self._texts: dict[Place, tuple[int, str, float]] = {}

    def casts(self, module: torch.nn.Module, place: Place) -> None:
        """Remember the line."""
        self._cast.append((weakref.ref(module), place))

    def module_begins(self, module: torch.nn.Module, args: Any, depth: int) -> None:
        """Compare with what the last forward has left, and compute what this one will leave."""
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if not is_norm or not module.training or not args or module.running_var is None:
            return
        if module.running_var.dtype not in HALVES:
            return
        now = module.running_var.double()
        exact = self._exact.get(module, now)
        self._tell(module, now, exact)
        with torch.no_grad():
            x = args[0].detach().double()
            var = x.var([d for d in range(x.dim()) if d != 1])
        rate = module.momentum if module.momentum is not None else 0.1
        self._exact[module] = (1 - rate) * exact + rate * var

    def _tell(self, module: torch.nn.Module, now: torch.Tensor, exact: torch.Tensor) -> None:
        inf = int((~torch.isfinite(now)).sum())
        off = float(((now - exact).abs() / exact.abs().clamp_min(1e-12)).max())
        if not inf and off < 0.01:
            return
        text = f"running variances were off by up to {100 * off:.3g} %"
        if inf:
            text = (
                f"{inf} of {now.numel()} running variances were inf, and {float(exact.max()):.3g} "
            )
            text += "in float64"
        places = [p for ref, p in self._cast if (m := ref()) and module in set(m.modules())]
        size = inf or min(off, 1.0)
        self.facts.tell(
            "batchnorm-in-16-bits", text, place=places[-1] if places else None, size=size
        )


RULES = (Sums, WholeNumbers, Overflows, Statistics)
