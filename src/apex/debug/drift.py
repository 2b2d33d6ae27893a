"""Divergence without NaN: whose gradients leave the band that they were in, and what became zero.

Sampled every so many steps, off by default: it reads all gradients once, and waits for a device.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch

from apex.debug.tensors import HALVES, local, named_in

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
    """Keeps the last 100 gradient norms of each module and compares the next with them."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._models = models
        self._norms: dict[str, deque[float]] = {}

    @torch.no_grad()
    def sample(self, step: int) -> list[Drift]:
        """Look at the gradients; return the first module (in forward order) outside of its band."""
        found = []
        for name, module in named_in(self._models, "named_modules"):
            own = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
            if not own:
                continue
            norm = float(torch.stack([local(g).float().norm() for g in own]).norm())
            if not 0.0 < norm < math.inf:
                continue
            seen = self._norms.setdefault(name, deque(maxlen=100))
            if len(seen) >= _FEWEST:
                logs = torch.tensor([*seen, norm], dtype=torch.float64, device="cpu").log()
                median = logs[:-1].median()
                spread = 1.4826 * (logs[:-1] - median).abs().median()
                score = float((logs[-1] - median) / spread.clamp_min(0.05))
                if abs(score) > _BAND:
                    found.append(Drift(step, name, norm, float(median.exp()), score, _zeros(own)))
            seen.append(norm)
        return found[:1]


def _zeros(gradients: list[torch.Tensor]) -> float | None:
    halves = [local(g) for g in gradients if g.dtype in HALVES]
    zeros = sum(int((g == 0).sum()) for g in halves)
    return zeros / sum(g.numel() for g in halves) if halves else None
