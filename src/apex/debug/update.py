"""Whether an optimizer's own update makes a parameter inf or NaN: it is made again, on a copy."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from apex.debug.tensors import is_bad, params_of
from apex.debug.tracing import Origin, Trace


def _owner_of(optimizers: list[Any], param: torch.Tensor) -> tuple[Any, dict[str, Any], Any] | None:
    """The optimizer that steps ``param``, its group, and what it steps: a master perhaps."""
    for optimizer in optimizers:
        stepped = [(group, one) for group in optimizer.param_groups for one in group["params"]]
        for target, (group, one) in zip(params_of(optimizer), stepped, strict=False):
            if target is param:
                return optimizer, group, one
    return None


def update_again(
    optimizers: list[Any], param: torch.Tensor
) -> tuple[Any, dict[str, Any], Origin] | None:
    """Let a copy of the optimizer repeat its update from its state on a finite parameter.

    Returns the optimizer, the group of ``param`` and the origin of what is not finite; ``None`` if
    the update is finite or cannot be made.
    """
    owner = _owner_of(optimizers, param)
    if owner is None:
        return None
    optimizer, group, stepped = owner
    state = optimizer.state.get(stepped, {})
    like = torch.zeros_like(stepped.detach()).requires_grad_()
    moments = [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == like.shape]
    blocks = [v for key, v in state.items() if str(key).endswith("_absmax")]  # of moments in 8 bits
    if any(map(is_bad, [*moments, *blocks])):
        # Gradients were finite, so an update broke them (Adadelta's: 0 / 0). As if it were the
        # first, with gradients of zero, where such an update breaks.
        state, like.grad = {}, torch.zeros_like(like)
    else:
        like.grad = torch.ones_like(like) if not moments else moments[0].to(like.dtype)
    try:
        other = copy.copy(optimizer)  # without hooks
        for name, value in vars(optimizer).items():
            if name not in ("step", "zero_grad", "_amp_stash"):
                vars(other).setdefault(name, value)
        other.param_groups = [{**group, "params": [like]}]
        other.state = defaultdict(dict)
        other.state[like] = copy.deepcopy(dict(state))
        trace = Trace({}, [(like.grad, ("gradient", "gradient"))])
        with torch.no_grad(), trace.running():
            type(optimizer).step(other)
        found = trace.origin_of(like.detach())
    except Exception:  # noqa: BLE001  # an optimizer of any kind: then nothing is claimed of it
        return None
    if found is None or found.kind not in ("operation", "mask"):
        return None
    return optimizer, group, found
