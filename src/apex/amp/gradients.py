"""Clipping the right gradients, and asking whether a step landed.

At O2 and O5 the gradients that count are the float32 masters', not the 16-bit model's. These
functions take the optimizer, so that a loop says the same at every level.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.amp._amp_state import master_params
from apex.amp.training import state_of


def _collected(optimizer: Any) -> list[torch.Tensor]:
    """The tensors that ``optimizer`` steps, with their gradients unscaled and in place."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp's clipping was given {type(optimizer).__name__}; it takes the optimizer, whose "
            "float32 gradients it finds at every level. For tensors there is torch.nn.utils."
        )
    state = state_of(optimizer)
    if state is not None:
        if state.is_open:
            raise RuntimeError(
                "amp: gradients are still scaled inside the scale_loss block. Clip after it."
            )
        state.collect()
    return list(master_params(optimizer))


def clip_grad_norm_(
    optimizer: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of ``optimizer`` down to a total norm of ``max_norm``, in place.

    Call it after the ``scale_loss`` block and before ``step``, at any level.

    Args:
        optimizer: An optimizer, initialised or not.
        max_norm: Largest total norm allowed.
        norm_type: Which p-norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: Raise when the norm is inf or nan. By default it is returned as it is,
            and amp skips the step.

    Returns:
        The total norm before clipping, a 0-dim tensor.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set, or a
            ``scale_loss`` block of the optimizer is open.
        TypeError: ``optimizer`` is none.
    """
    state = state_of(optimizer)
    known = None if state is None or state.is_open or norm_type != 2.0 else state.measure()
    if state is None or known is None:
        return torch.nn.utils.clip_grad_norm_(
            _collected(optimizer), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
    if error_if_nonfinite and not bool(known.isfinite()):
        raise RuntimeError(
            f"amp.clip_grad_norm_: the total norm of the gradients is {known.item()}. Pass "
            "error_if_nonfinite=False to let amp skip the step."
        )
    if not state.clip((max_norm / (known + 1e-6)).clamp(max=1.0)):
        torch.nn.utils.clip_grads_with_norm_(_collected(optimizer), max_norm, known)
    return known


def clip_grad_value_(optimizer: Any, clip_value: float) -> None:
    """Clamp every gradient element of ``optimizer`` to ``[-clip_value, clip_value]``, in place.

    Args:
        optimizer: An optimizer, initialised or not.
        clip_value: Largest absolute value allowed.

    Raises:
        RuntimeError: A ``scale_loss`` block of the optimizer is open.
    """
    torch.nn.utils.clip_grad_value_(_collected(optimizer), clip_value)


def stepped(optimizer: Any) -> bool:
    """Say whether the last ``step()`` of ``optimizer`` was taken, not skipped.

    So that a scheduler or a moving average can follow it. For an optimizer that amp does not
    manage, whose steps are never skipped, the answer is yes.
    """
    state = state_of(optimizer)
    return True if state is None else state.landed
