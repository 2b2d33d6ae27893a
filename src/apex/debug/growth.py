"""Weights that grew a hundredfold: their norms before each of the last steps, and some before.

Sampled are at most 8 matrices, spread over those that the optimizers step, the last one with them:
each takes two norms a step, of 2 us on a CPU (the largest magnitude takes 15). These stay on their
device; they are read only for a report.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from apex._compat import private
from apex.debug.tensors import local

_TENSORS = 8
_STEPS, _OLD = 8, 16  # the last steps, and of those before every eighth
_FACTOR = 100.0  # of the largest norm; healthy ones grow less, unless they begin at 0


@dataclass
class _Row:
    """2-norms of one step: of weights before it, of their gradients in it."""

    step: int
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


class Growth:
    """Remembers the last steps of the tensors that optimizers step."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque()
        self._old: deque[_Row] = deque(maxlen=_OLD)
        self._sampled: list[torch.Tensor] = []
        self._from = 0  # of how many optimizers

    @torch.no_grad()
    def begin(self, step: int, optimizers: list[Any]) -> None:
        """Note the weights that a step begins with; only the first call of a step does."""
        if self._rows and self._rows[-1].step == step:
            return
        if len(optimizers) != self._from:
            self._sample(optimizers)
        self._rows.append(_Row(step, _norms(self._sampled), []))
        if len(self._rows) > _STEPS and (first := self._rows.popleft()).step % _STEPS == 1:
            self._old.append(first)

    def _sample(self, optimizers: list[Any]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        stepped = [p for group in groups for p in group["params"] if _is_plain(p)]
        matrices = [one for one in stepped if one.dim() > 1] or stepped
        every = -(-len(matrices) // _TENSORS) or 1
        self._from, self._sampled = len(optimizers), matrices[::-1][::every]
        self._rows.clear()
        self._old.clear()

    @torch.no_grad()
    def end(self) -> None:
        """Note the gradients of the step, which are unscaled now."""
        if not self._rows or self._rows[-1].gradients:
            return
        gradients = [(i, one.grad) for i, one in enumerate(self._sampled)]
        found = [(i, one) for i, one in gradients if one is not None and _is_plain(local(one))]
        row: list[torch.Tensor | None] = [None] * len(self._sampled)
        norms = _norms([gradient for _, gradient in found])
        for (place, _), norm in zip(found, norms, strict=True):
            row[place] = norm
        self._rows[-1].gradients = row

    def sentence(self, names: dict[int, str]) -> str:
        """The growth, the step and what to do; empty if nothing grew. ``names``: by ``id``."""
        rows = [(row, [float(one) for one in row.weights]) for row in (*self._old, *self._rows)]
        rows = [(row, sizes) for row, sizes in rows if sizes and all(map(math.isfinite, sizes))]
        if len(rows) < 2:
            return ""
        last, sizes = rows[-1]
        before = [entry for entry in rows[:-1] if 0.0 < max(entry[1]) * _FACTOR <= max(sizes)]
        if not before:
            return ""
        first, smaller = before[-1]
        if first in self._old:  # it has lasted since: up to where it was large at first
            large = [entry for entry in rows if max(entry[1]) >= _FACTOR * max(smaller)]
            last, sizes = next(entry for entry in large if entry[0].step > first.step)
        place = sizes.index(max(sizes))
        since = [x for x, _ in rows if first.step <= x.step < last.step and x.gradients]
        norms = [row.gradients[place] for row in since]
        norm = max((float(one) for one in norms if one is not None), default=math.nan)
        gradient = "" if math.isnan(norm) else f" (norm of its gradient {norm:.3g})"
        which = f"updates of steps {first.step} to {last.step - 1}"
        if last.step == first.step + 1:
            which = f"update of step {first.step}"
        return (
            f" The {which} raised the norm of {names.get(id(self._sampled[place])) or 'a weight'} "
            f"from {smaller[place]:.3g} to {max(sizes):.3g}{gradient}: clip gradients "
            "(torch.nn.utils.clip_grad_norm_) or lower the learning rate."
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    filled = tensor.layout is torch.strided and not tensor.is_meta
    return tensor.is_floating_point() and filled


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    dense = [local(one) for one in tensors]
    filled = [one if one.numel() else one.new_zeros(1) for one in dense]
    wide = any(one.dtype is torch.float64 for one in filled)  # torch refuses to narrow them
    dtype = torch.float64 if wide else torch.float32
    return [*private.foreach_norm(filled, 2.0, dtype=dtype)] if filled else []
