"""Moments in float16 with a scale each, for ``DistributedFusedAdam(with_scaled_states=True)``.

Second moments are squares of gradients: float16 has nothing below 6e-8, and few digits below 6e-5.
So each moment of a fragment is divided by a power of two which brings its largest magnitude to
between 2**14 and 2**15. Powers of two round nothing, so what is widened and narrowed without a step
in between keeps its bits. A step widens some fragments at a time to float32, at most `ELEMENTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.optimizers._step import Launch

ELEMENTS = 2**24  # 128 MiB of two moments
LARGEST = 15  # float16 has magnitudes up to 2**16


def scale_of(slot: str) -> str:
    """The key of the scale of a slot."""
    return f"{slot}_scale"


def narrow(state: dict[str, Any], slot: str, value: torch.Tensor) -> None:
    """Store a float32 value in float16, and its scale."""
    exponent = (torch.frexp(value.abs().amax()).exponent - LARGEST).clamp(min=-126)
    scale = ((exponent + 127) << 23).view(torch.float32)  # its bits: a power is rounded on a GPU
    state.setdefault(scale_of(slot), torch.empty_like(scale)).copy_(scale)  # as a CUDA graph needs
    state[slot].copy_(value / scale)


def widen(state: dict[str, Any], slot: str) -> torch.Tensor:
    """The float32 value of a slot."""
    value: torch.Tensor = state[slot].float()
    return value.mul_(state[scale_of(slot)]) if scale_of(slot) in state else value


def portions(launch: Launch) -> Iterator[Launch]:
    """A launch as launches of at most `ELEMENTS` elements each, or of one parameter."""
    start, size = 0, 0
    for number, param in enumerate(launch.params):
        if size and size + param.numel() > ELEMENTS:
            yield _part(launch, slice(start, number))
            start, size = number, 0
        size += param.numel()
    yield _part(launch, slice(start, len(launch.params)))


def _part(launch: Launch, chosen: slice) -> Launch:
    return Launch(launch.params[chosen], [column[chosen] for column in launch.columns])


def widened(launch: Launch, states: Sequence[dict[str, Any]], slots: Sequence[str]) -> Launch:
    """A launch with moments in float32; they are the last columns."""
    moments = [[widen(state, slot) for state in states] for slot in slots]
    return launch._replace(columns=[*launch.columns[: -len(slots)], *moments])
