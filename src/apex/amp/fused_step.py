"""What saves passes over the gradients: norms that are known already, factors that can wait.

Unscaling reads and writes every gradient once, and measures the norm on the way
(:mod:`apex.ops.unscale`). ``amp.clip_grad_norm_`` uses that norm, and where the optimizer is one of
:mod:`apex.optimizers` it leaves the multiplication to the update kernel. Both only as long as the
gradients are what that one pass made them: the same tensors at the same addresses, of the same
``_version``. A write through ``.data`` changes none of these and cannot be seen.

With ``initialize(fused_step=True)`` gradients are not even unscaled before the step: they are read
once for finiteness and norm, and once by the update, which multiplies by ``clip / scale`` in
registers and writes the 16-bit weights too.

| bytes per weight (Adam) | float32 gradients | 16-bit gradients, float32 masters |
|---|---|---|
| GradScaler, clip, fused step | 48 | |
| default, clipped | 36 | 36 |
| ``fused_step``, clipped or not | 32 | 30 |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from apex.ops.norms import square_sums
from apex.ops.unscale import unscale_into

if TYPE_CHECKING:
    from apex.amp.passes import Debt


class Measured:
    """The norm of the gradients that a pass has made.

    Args:
        squares: Sum of the squares of all elements; float32, 0-dim.
        params: Whose gradients these are, to know them again. Empty for scaled ones, which are
            known by the debt they belong to.
        found: Whether one was not finite, where that has yet to be told to the scaler.
    """

    def __init__(
        self,
        squares: torch.Tensor,
        params: Sequence[torch.Tensor] = (),
        found: torch.Tensor | None = None,
    ) -> None:
        self.norm = squares.sqrt()
        self.found = found
        self._seen = [_mark(param.grad) for param in params]

    def holds(self, params: Sequence[torch.Tensor], *, or_gone: bool = False) -> bool:
        """Whether the gradients are still those that were measured.

        Args:
            params: Whose gradients to look at.
            or_gone: Whether some of them may be ``None`` by now.
        """
        now = [_mark(param.grad) for param in params]
        if not or_gone or len(now) != len(self._seen):
            return self._seen == now
        return all(mark in (None, seen) for mark, seen in zip(now, self._seen, strict=True))


def _mark(grad: torch.Tensor | None) -> tuple[int, int, int] | None:
    return None if grad is None else (id(grad), grad.data_ptr(), grad._version)


class Clip:
    """A factor for gradients that waits for the step.

    Args:
        coefficient: float32, 0-dim, at most 1.
        measured: Of the gradients.
    """

    def __init__(self, coefficient: torch.Tensor, measured: Measured) -> None:
        self.coefficient = coefficient
        self.measured = measured

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if somebody has changed the gradients since."""
        if not self.measured.holds(params, or_gone=True):
            raise RuntimeError(
                "amp: gradients were changed after amp.clip_grad_norm_, whose factor was to be "
                "applied by the step. Change them before clipping, or call "
                "list(amp.master_params(optimizer)) after it, which applies the factor at once."
            )

    @torch.no_grad()
    def apply(self, grads: Iterable[torch.Tensor | None]) -> None:
        """Multiply the gradients now."""
        for grad in grads:
            if grad is not None:
                grad.mul_(self.coefficient.to(grad.device, non_blocking=True))


def inverse(scale: torch.Tensor | float) -> torch.Tensor | float:
    """``1 / scale``, a float32 tensor where the scale is one."""
    return scale.reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale


def unscale_and_measure(
    grads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], scale: torch.Tensor | float
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Write ``grads / scale`` into ``outs``.

    Returns:
        Whether an element of ``grads`` was not finite (``None`` for a scale that is a number,
        where nothing is checked), and the sum of the squares of ``outs``.
    """
    device = scale.device if isinstance(scale, torch.Tensor) else grads[0].device
    found = torch.zeros((), dtype=torch.float32, device=device)
    squares = unscale_into(grads, outs, inverse(scale), found)
    return (found if isinstance(scale, torch.Tensor) else None), squares


def measured_scaled(debt: Debt, grads: dict[torch.Tensor, torch.Tensor]) -> Measured:
    """Measure gradients that are still scaled; nothing is written."""
    listed = list(grads.values())
    found = torch.zeros((), dtype=torch.float32, device=listed[0].device)
    squares = square_sums(listed, factor=inverse(debt.scale), flag=found).sum()
    return Measured(squares, found=found)
