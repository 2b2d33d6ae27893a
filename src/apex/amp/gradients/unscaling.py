"""Unscaling gradients: in place, and from 16-bit weights into their float32 masters' gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.amp.gradients.masters import Pairs, Sharers
from apex.amp.scaler import unscale_
from apex.ops import _runtime

# apex.ops.unscale is imported where it is used: `import apex` costs a fifth less so.


def inverse(scale: torch.Tensor | float) -> torch.Tensor | float:
    """``1 / scale``, a float32 tensor where the scale is one."""
    return scale.reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale


def unscale_into(
    grads: Sequence[torch.Tensor], pairs: Pairs, sharers: Sharers, scale: torch.Tensor | float
) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Unscale ``grads`` in place, and the gradients of 16-bit weights into float32 copies.

    Where a kernel can run it writes the copies in the same pass over memory: 6 bytes for each
    16-bit gradient instead of 14.

    Args:
        grads: Gradients of weights that the optimizer steps themselves; sparse ones coalesced.
        pairs: Weights with masters.
        sharers: See :class:`apex.amp.training.Training`.
        scale: What the loss was multiplied by.

    Returns:
        The non-finite flag, see :func:`apex.amp.scaler.unscale_`, and the copies that are still to
        be added to a master's gradient, with its tensor.
    """
    if pairs and _runtime.can_fuse(pairs.weights[0].device):
        from apex.ops import unscale

        halves = [weight.grad for weight in pairs.weights if weight.grad is not None]
        if unscale.takes([*grads, *halves]):
            wide, more = pairs.widen(sharers, empty=True)
            device = scale.device if isinstance(scale, torch.Tensor) else halves[0].device
            found_inf = torch.zeros((), dtype=torch.float32, device=device)
            unscale.unscale_into([*grads, *halves], [*grads, *wide], inverse(scale), found_inf)
            return (found_inf if isinstance(scale, torch.Tensor) else None), more
    wide, more = pairs.widen(sharers, empty=False)
    return unscale_([*grads, *wide], scale), more
