"""``state="8bit"``: which states are quantised to 8 bits, and how they are made, saved and loaded.

Instead of ``<slot>`` a state then has ``<slot>_codes``, uint8 of the parameter's shape, and
``<slot>_absmax``, see :mod:`apex.ops.lists.quantized`: 2 * (1 + 4/256) bytes a weight for Adam's
moments instead of 8. Both are placed as the parameter is, so that a checkpoint of shards can be
loaded on any number of ranks. The name of the slot is not used: torch's checkpoints, and other
optimizers, would read codes as moments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from apex.ops.lists.quantized import (
    SIGNED,
    UNSIGNED,
    Code,
    absmax_shape,
    dequantize,
    quantize,
    row_length,
)
from apex.ops.lists.tensor_lists import local

STATES = ("plain", "8bit", "bfloat16")
SMALLEST = 4096  # elements of a tensor whose state is quantised to 8 bits
CODES: Mapping[str, Code] = {
    "exp_avg": SIGNED,
    "momentum_buffer": SIGNED,
    "exp_avg_sq": UNSIGNED,
    "sum": UNSIGNED,
}


def codes_of(slot: str) -> str:
    """The key of the codes of a slot."""
    return f"{slot}_codes"


def absmax_of(slot: str) -> str:
    """The key of what belongs to the codes of a slot."""
    return f"{slot}_absmax"


def names_of(slot: str) -> tuple[str, str]:
    """The keys of a slot that is quantised to 8 bits."""
    return codes_of(slot), absmax_of(slot)


def absmax_like(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of what belongs to the codes of a slot."""
    return absmax_shape(param.shape) if param.dim() else ()


def is_held(param: torch.Tensor) -> bool:
    """Whether the state of a parameter is quantised to 8 bits; of a sharded one the whole counts.

    Not that of a small one, of a vector (rows of one element too), and of float64.
    """
    return (
        param.dim() > 1
        and param.numel() >= SMALLEST
        and row_length(param.shape) > 1
        and param.dtype != torch.float64
    )


def check_placement(user: str, param: Any) -> None:
    """Raise ``RuntimeError`` for a parameter whose rows are not whole on a rank."""
    for place in getattr(param, "placements", ()):
        if not place.is_replicate() and getattr(place, "dim", None) != 0 and is_held(param):
            raise RuntimeError(
                f'{user}: state="8bit" needs whole rows of dimension 0, and a parameter has the '
                f"placements {param.placements}. Shard it with Shard(0), or leave state out."
            )


def quantized(value: torch.Tensor, slot: str) -> dict[str, torch.Tensor]:
    """The entries of a slot from its value, which may be a DTensor."""
    codes, absmax = quantize(local(value).float(), CODES[slot])
    shape = absmax_shape(value.shape)
    return {
        codes_of(slot): placed(value, codes, value.shape),
        absmax_of(slot): placed(value, absmax, shape),
    }


def value_of(state: Mapping[str, Any], slot: str) -> torch.Tensor:
    """The float32 value of a slot that is quantised to 8 bits."""
    codes = state[codes_of(slot)]
    value = dequantize(local(codes), local(state[absmax_of(slot)]), CODES[slot])
    return placed(codes, value, codes.shape)


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with float32 instead of codes."""
    slots = [slot for slot in CODES if is_code(state, slot)]
    names = {name for slot in slots for name in names_of(slot)}
    found = {key: x for key, x in state.items() if key not in names}
    return found | {slot: value_of(state, slot) for slot in slots}


def is_code(state: Mapping[str, Any], slot: str) -> bool:
    """Whether a state has codes of a slot."""
    return codes_of(slot) in state


def stored(state: Mapping[str, Any], slot: str) -> torch.Tensor:
    """The codes of a slot, or its value; ``KeyError`` if there is neither."""
    codes = state.get(codes_of(slot))
    found: torch.Tensor = state[slot] if codes is None else codes
    return found


def stored_as(slot: str) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """What reads a slot from a state: :func:`stored`."""
    return functools.partial(stored, slot=slot)


def placed(like: Any, part: torch.Tensor, shape: Any) -> torch.Tensor:
    """A tensor of this shape that is placed as ``like``, from the local part."""
    if not hasattr(like, "placements"):
        return part
    shape = torch.Size(shape)
    whole: torch.Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=shape,
        stride=torch.empty(shape, device="meta", dtype=part.dtype).stride(),
    )  # fmt: skip
    return whole
