"""Clipping the right gradients, and whether a step was taken.

At O2 and O5 the gradients that count are the float32 masters', not the 16-bit model's. These
functions take the optimizer, so that a loop is the same at every level.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.gradients.masters import master_params
from apex.amp.gradients.overflow import Outcome
from apex.amp.optimizer import state_of
from apex.amp.scale import SCALE
from apex.ops.lists.tensor_lists import OWN_MEMORY, local


def _collected(optimizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """The tensors that ``optimizer`` steps, with their gradients unscaled and in place.

    And the gradients, placed as their DTensors; ``None`` where torch's functions take them.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            "amp.clip_grad_norm_ and amp.clip_grad_value_ need an optimizer, and got "
            f"{type(optimizer).__name__}. Pass the optimizer, or use torch.nn.utils for tensors."
        )
    state = state_of(optimizer)
    if state is not None:
        state.collect()
    params = list(master_params(optimizer))
    both = [(param, param.grad) for param in params if param.grad is not None]
    grads = [grad for _, grad in both]
    # torch's functions refuse lists with a tensor that has the negative bit, and the norm that they
    # find of nothing follows torch's default device and dtype.
    is_usual = OWN_MEMORY.issuperset(map(type, params)) and not any(map(torch.Tensor.is_neg, grads))
    if grads and is_usual:
        return params, None
    from apex.ops.lists.placements import placed

    return params, [*placed("amp's clipping", [param for param, _ in both], grads)]


def clip_grad_norm_(
    optimizer: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of ``optimizer`` down to a total norm of ``max_norm``, in place.

    Call it after the ``scale_loss`` block and before ``step``, at any level. With ``fused_step``
    the step itself multiplies the gradients, and ``amp.master_params`` already shows them clipped.
    The norm includes the shards of DTensors on all ranks of their meshes, so call it on each rank.
    Of other tensors it includes only this rank's gradients, even with a ``process_group``.

    Args:
        optimizer: An optimizer, initialised by amp or not.
        max_norm: Largest total norm allowed.
        norm_type: Which p-norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: Raise if the norm is inf or NaN. By default amp skips the step.

    Returns:
        The total norm before clipping, a 0-dim tensor (never a DTensor).

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set, or a
            ``scale_loss`` block of the optimizer is open.
        TypeError: ``optimizer`` is not an optimizer.
    """
    state = state_of(optimizer)
    if state is not None and norm_type == 2.0:
        norm = state.clip_fused(max_norm, error_if_nonfinite=error_if_nonfinite)
        if norm is not None:
            return norm
    params, grads = _collected(optimizer)
    if grads is not None:
        from apex.ops.lists.clip import clip_

        return clip_(
            grads, max_norm, float(norm_type), error_if_nonfinite=error_if_nonfinite, over=params
        )
    return torch.nn.utils.clip_grad_norm_(
        params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )


def clip_grad_value_(optimizer: Any, clip_value: float) -> None:
    """Clamp every gradient element of ``optimizer`` to ``[-clip_value, clip_value]``, in place.

    Args:
        optimizer: An optimizer, initialised by amp or not.
        clip_value: Largest absolute value allowed.

    Raises:
        RuntimeError: A ``scale_loss`` block of the optimizer is open.
    """
    params, grads = _collected(optimizer)
    if grads is None:
        torch.nn.utils.clip_grad_value_(params, clip_value)
        return
    with torch.no_grad():
        for grad in map(local, grads):
            grad.clamp_(-clip_value, clip_value)


def stepped(optimizer: Any) -> bool:
    """Return whether amp took the last ``step()`` of ``optimizer``, instead of skipping it.

    Use it to step a scheduler or a moving average only after a taken step. It returns True for an
    optimizer that amp does not manage. With :class:`~apex.amp.GradScaler` use ``scaler.stepped``.
    """
    state = state_of(optimizer)
    if state is None:
        return True
    taken = state.overflow.counts.stepped
    return not taken.is_meta and bool(taken)


def outcome(optimizer: Any, loss_id: int = 0) -> Outcome:
    """Count the taken and skipped steps of ``optimizer``, without waiting for the device.

    Counting starts at ``initialize``, and checkpoints do not contain the counts. With
    :class:`~apex.amp.GradScaler` use ``scaler.outcome``.

    Args:
        optimizer: An optimizer that went through ``initialize``.
        loss_id: Which loss scaler's scale to return.

    Returns:
        A named tuple of the 0-dim tensors ``stepped`` (whether the last step was taken), ``taken``,
        ``skipped`` and ``scale``. Its method ``numbers()`` waits and returns Python numbers.

    Raises:
        RuntimeError: amp does not manage the optimizer.
        IndexError: ``loss_id`` is ``num_losses`` or more.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = model(torch.ones(1, 2)).float().mean() / 2
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> amp.outcome(optimizer).numbers()
        (True, 1, 0, 65536.0)
    """
    state = state_of(optimizer)
    if state is None:
        raise RuntimeError(
            f"amp.outcome was given {type(optimizer).__name__}, whose steps amp does not see. Pass "
            "an optimizer of amp.initialize (with enabled=True). With a GradScaler, call "
            "scaler.outcome(optimizer)."
        )
    scalers = state.training.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"amp.outcome: loss_id was {loss_id}, but initialize was called with "
            f"num_losses={len(scalers)}; allowed are 0 to {len(scalers) - 1}."
        )
    scaler = scalers[loss_id]
    return state.overflow.counts.outcome(
        scaler.numbers[SCALE] if scaler.dynamic else scaler.loss_scale()
    )
