"""Whether a training went on to its end: what no line is to blame for, and no finding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from apex.debug.check.facts import CheckRule, Count, Facts
from apex.debug.check.values import has_values

_RECENT = 16  # losses and steps that decide: most of the later half of these
_AT_ONCE = 64  # losses that are counted together: that costs 7 us, for one and for 64


class Ends(CheckRule):
    """A training whose losses are not finite, or whose steps are skipped, when the program ends.

    Sees what each backward begins with and the steps of each optimizer, in the whole run;
    afterwards the weights of optimizers that still exist. Prints how many of them. Silent for what
    a training got over: a scale that falls at first, batches with a NaN whose steps were skipped,
    and an optimizer whose last step was before the first of another. Waits for no device after the
    measured steps.
    """

    lasts = True

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._losses = self._first = 0
        self._bad: dict[torch.device, torch.Tensor] = {}  # how many; one number for each device
        self._uncounted: list[torch.Tensor] = []
        self._recent: deque[torch.Tensor] = deque(maxlen=_RECENT)
        self._counts: dict[int, tuple[Count, deque[bool], list[int]]] = {}

    def losses(self, roots: list[torch.Tensor]) -> None:
        """Count a loss, and the steps since the last one."""
        self._count_steps()
        for one in (root.detach() for root in roots if root.numel() and has_values(root)):
            if one.is_cuda and torch.cuda.is_current_stream_capturing():
                continue
            # Without isfinite, which takes 5 us. Infinities in a vector may be a mask's.
            rest = one - one if one.numel() == 1 else one
            bad = (rest != rest).any() if rest.dim() else rest != rest
            self._losses += 1
            self._recent.append(bad)
            self._uncounted.append(bad)
            if len(self._uncounted) == _AT_ONCE:
                self._count_losses()
            if self.facts.measuring and not self._first and bad:
                self._first = self.facts.now()

    def _count_losses(self) -> None:
        for device in {one.device for one in self._uncounted}:
            bad = torch.stack([one for one in self._uncounted if one.device == device]).sum()
            self._bad[device] = self._bad.get(device, 0) + bad
        self._uncounted.clear()

    def _count_steps(self) -> None:
        for one in list(self.facts.optimizers):
            count = self.facts.counts.get(one) or self.facts.count(one)
            if id(count) not in self._counts:
                self._counts[id(count)] = count, deque(maxlen=_RECENT), [count.past, 0]
        for count, recent, seen in self._counts.values():
            skipped = count.tried - count.real
            if seen != [count.real, skipped]:
                recent += [True] * (skipped - seen[1]) + [False] * (count.real - seen[0])
                seen[:] = count.real, skipped

    def ends(self) -> None:
        """Judge."""
        self._count_steps()
        self._count_losses()
        texts, bad = [], sum(map(int, self._bad.values()))
        if bad and _is_most([*map(bool, self._recent)]):
            first = f" (the first in step {self._first})" if self._first else ""
            texts.append(f"{bad} of {self._losses} losses were not finite{first}")
        begins = [one.start + one.past for one, *_ in self._counts.values() if one.tried > one.past]
        for count, recent, _ in self._counts.values():
            is_replaced = max(begins, default=0) >= count.start + count.tried
            if _is_most(recent) and not is_replaced:
                skipped = count.tried - count.real
                texts.append(f"{skipped} of {count.tried - count.past} steps were skipped")
        trained = [one for one in self.facts.params() if one.requires_grad and has_values(one)]
        if any(bool(torch.isnan(one.detach()).any()) for one in trained):
            texts.append("weights are NaN")
        self.facts.not_finite = ", ".join(texts)


def _is_most(recent: Sequence[bool]) -> bool:
    """Whether most of the later half, of an even number, are true."""
    half = [*recent][-max(1, (len(recent) // 2 + 1) // 2 * 2) :]
    return sum(half) > len(half) / 2


RULES = (Ends,)
