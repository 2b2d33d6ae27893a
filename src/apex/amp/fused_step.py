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

from apex.ops import _runtime

if TYPE_CHECKING:
    from apex.amp.passes import Debt


# apex.ops is imported where it is used: `import apex` costs a fifth less so.


def fuses(device: torch.device) -> bool:
    """Whether kernels run for tensors on ``device``, or a path was asked for."""
    return _runtime.forced() is not None or _runtime.can_fuse(device)


def takes(grads: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel is to unscale ``grads``; see :func:`apex.ops.unscale.takes`."""
    if not grads or not fuses(grads[0].device):
        return False
    from apex.ops import unscale

    return unscale.takes(grads)


class Measured:
    """The norm of the gradients that a pass has made.

    Args:
        squares: Sum of the squares of all elements; float32, 0-dim.
        marks: Of the gradients; ``None`` for scaled ones, whose debt has them.
        found: Whether one was not finite, where that has yet to be told to the scaler.
    """

    def __init__(
        self,
        squares: torch.Tensor,
        marks: Marks | None = None,
        found: torch.Tensor | None = None,
    ) -> None:
        self.norm = squares.sqrt()
        self.found = found
        self.marks = marks


class Marks:
    """Who the gradients of some tensors are, to know them again.

    Args:
        params: The tensors.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._seen = [_mark(param.grad) for param in params]

    def hold(self, params: Sequence[torch.Tensor], *, or_gone: bool = False) -> bool:
        """Whether the gradients are still the same.

        Args:
            params: The tensors.
            or_gone: Whether some of the gradients may be ``None`` by now.
        """
        now = [_mark(param.grad) for param in params]
        if not or_gone or len(now) != len(self._seen):
            return self._seen == now
        return all(mark in (None, seen) for mark, seen in zip(now, self._seen, strict=True))

    def unchanged(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients that are still the same."""
        grads = [param.grad for param in params]
        pairs = zip(grads, self._seen, strict=False)
        return [grad for grad, seen in pairs if _mark(grad) == seen]


def _mark(grad: torch.Tensor | None) -> tuple[int, int, int] | None:
    return None if grad is None else (id(grad), grad.data_ptr(), grad._version)


class Owed:
    """A factor that gradients in memory have yet to be multiplied by.

    Either it waits for the step, or the step has applied it in registers alone.

    Args:
        factor: float32, 0-dim, or a number.
        marks: Of the gradients; ``None`` for scaled ones, whose debt has them.
    """

    def __init__(self, factor: torch.Tensor | float, marks: Marks | None) -> None:
        self.factor = factor
        self.marks = marks

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if somebody has changed the gradients since."""
        if self.marks is not None and not self.marks.hold(params, or_gone=True):
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
                factor = self.factor
                if isinstance(factor, torch.Tensor):
                    factor = factor.to(grad.device, non_blocking=True)
                grad.mul_(factor)


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
    from apex.ops.unscale import unscale_into

    squares = unscale_into(grads, outs, inverse(scale), found)
    return (found if isinstance(scale, torch.Tensor) else None), squares


def measured_scaled(debt: Debt, grads: dict[torch.Tensor, torch.Tensor]) -> Measured:
    """Measure gradients that are still scaled; nothing is written."""
    listed = list(grads.values())
    device = debt.scale.device if isinstance(debt.scale, torch.Tensor) else torch.device("cpu")
    found = torch.zeros((), dtype=torch.float32, device=listed[0].device if listed else device)
    from apex.ops.norms import square_sums

    squares = square_sums(listed, factor=inverse(debt.scale), flag=found).sum()
    return Measured(squares, found=found)
