"""The dynamic loss scale with hysteresis, on the device that holds it.

On an overflow the hysteresis counter goes down; the scale backs off once it has reached 0, and at
each overflow after that until a step is clean. ``growth_interval`` clean steps in a row raise the
scale, unless it would become infinite. There is no floor.

Source: Megatron-LM's dynamic gradient scaler; Micikevicius et al., arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def update_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> None:
    """Update the scale and both counters in place, without waiting.

    Args:
        scale: One element, floating.
        growth_tracker: One integer: clean steps since the scale last changed.
        hysteresis_tracker: One integer: overflows that may still pass before the scale backs off.
        found_inf: One element, above 0 where the last step overflowed.
        growth_factor: What the scale is multiplied by after ``growth_interval`` clean steps.
        backoff_factor: What it is multiplied by on an overflow.
        growth_interval: Clean steps in a row.
        hysteresis: What a clean step resets the counter to.
    """
    bad = found_inf.reshape(scale.shape) > 0
    left = hysteresis_tracker.reshape(scale.shape) - bad.to(hysteresis_tracker.dtype)
    clean_steps = growth_tracker.reshape(scale.shape) + 1
    grows = ~bad & (clean_steps == growth_interval)
    larger = scale * growth_factor
    larger = torch.where(grows & larger.isfinite(), larger, scale)
    scale.copy_(torch.where(bad & (left <= 0), scale * backoff_factor, larger))
    growth_tracker.copy_(clean_steps.masked_fill(bad | grows, 0).reshape(growth_tracker.shape))
    left = torch.where(bad, left, torch.full_like(left, hysteresis))
    hysteresis_tracker.copy_(left.reshape(hysteresis_tracker.shape))
