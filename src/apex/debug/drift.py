"""Divergence without NaN: whose gradients leave the band that they were in, and what became zero.

Sampled every so many steps, off by default: it reads all gradients once, and waits for a device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from apex.debug.tensors import HALVES, local

__all__ = ["Drift", "Sampler"]

_BAND = 8.0  # robust z-score; with the least spread, 0.05, a factor of 1.5
_FEWEST = 20  # samples before a band is known


@dataclass
class Drift:
    """A module whose gradient norm left its band.

    Attributes:
        step: Number of the step.
        module: Path of the module.
        norm: 2-norm of the gradients of its own parameters.
        median: Of its last samples.
        score: Robust z-score of the logarithm: (log norm - median) / (1.4826 * MAD).
        zeros: Share of the elements of its 16-bit gradients that are zero, or ``None``.
    """

    step: int
    module: str
    norm: float
    median: float
    score: float
    zeros: float | None

    def __str__(self) -> str:
        zeros = "" if self.zeros is None else f"; {self.zeros:.0%} of its 16-bit gradients are 0"
        return (
            f"step {self.step}: the gradient norm of {self.module or 'the model'} is "
            f"{self.norm:.3g}, its median was {self.median:.3g} (score {self.score:.1f}){zeros}"
        )


class Sampler:
    """Keeps the last ``length`` gradient norms of each module and compares the next with them."""

    def __init__(self, models: list[torch.nn.Module], length: int = 100) -> None:
        self._models = models
        self._norms: dict[str, deque[float]] = {}
        self._length = length
        self.zeros: dict[str, float] = {}

    @torch.no_grad()
    def sample(self, step: int) -> Drift | None:
        """Look at the gradients; return the first module (in forward order) outside of its band."""
        first = None
        for name, gradients in self._by_module():
            norm = float(torch.stack([g.float().norm() for g in gradients]).norm())
            halves = [g for g in gradients if g.dtype in HALVES]
            if halves:
                zeros = sum(float((g == 0).sum()) for g in halves)
                self.zeros[name] = zeros / sum(g.numel() for g in halves)
            if not 0.0 < norm < float("inf"):
                continue
            seen = self._norms.setdefault(name, deque(maxlen=self._length))
            value = torch.tensor(norm, dtype=torch.float64).log()
            if len(seen) >= _FEWEST:
                logs = torch.tensor(list(seen), dtype=torch.float64).log()
                median = logs.median()
                spread = 1.4826 * (logs - median).abs().median()
                score = float((value - median) / spread.clamp_min(0.05))
                if abs(score) > _BAND and first is None:
                    zero = self.zeros.get(name)
                    first = Drift(step, name, norm, float(median.exp()), score, zero)
            seen.append(norm)
        return first

    def _by_module(self) -> list[tuple[str, list[torch.Tensor]]]:
        found = []
        for model in self._models:
            for name, module in model.named_modules():
                own = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
                if own:
                    found.append((name, [local(gradient) for gradient in own]))
        return found
