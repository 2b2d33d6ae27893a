"""Checkpoints of ``storage="auto"``: low bits are saved within a slot, without a key of their own.

:mod:`torch.distributed.checkpoint` loads the keys that the optimizer has now. With the key
``low_bits`` it would raise "Missing key" for a checkpoint of ``storage="plain"`` or of 1.0; without
it the low bits of a newer one would be dropped. So both have the same keys, and the dtype of the
first slot of a bfloat16 weight says more:

* ``exp_avg``, or another slot, is float64. Of its 52 bits a float32 needs 23: the lowest 16 are the
  low bits, and the 13 between them are 0. Rounded to float32 it is the moment, so that 1.0 and
  ``"plain"`` load it as it is; and a float32 moment that is copied into it has low bits of 0.
* ``exp_avg_codes`` is int32, ``low bits << 8 | code``; copied into uint8 it is the code.

Slots are placed as their weights are, so that low bits go to any number of ranks. They are saved in
8 bytes a weight instead of 6, and unlike int16 both dtypes can be sent by NCCL and gloo.

A weight without a slot (SGD without momentum) keeps the key ``low_bits``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from apex.ops.lists.storage import AUTO
from apex.ops.lists.tensor_lists import local
from apex.optimizers._eight_bit import codes_of, placed

_LOW, _BETWEEN = 0xFFFF, 0x1FFF0000  # bits of a float64 that hold a float32


def packed(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose low bits are within slots; states that have some are copied."""
    for number, state in saved["state"].items():
        if not isinstance(state, Mapping) or "low_bits" not in state:
            continue
        key = _holder(optimizer, state)
        if key is not None:
            rest = {name: x for name, x in state.items() if name != "low_bits"}
            saved["state"][number] = rest | {key: _with_bits(state[key], state["low_bits"])}
    return saved


def unpack(
    optimizer: Any, loaded: dict[str, Any], states: Iterable[tuple[Any, torch.Tensor, Any]]
) -> dict[Any, torch.Tensor]:
    """Take low bits out of the slots of a state dict, in place; returns those by parameter.

    ``states``: the number, parameter and state of each. Slots of float64 parameters stay: such a
    number may have zeros where one with low bits has them, and be outside the range of float32.
    """
    found: dict[Any, torch.Tensor] = {}
    for number, param, state in states:
        if param.dtype == torch.float64 or not isinstance(state, Mapping):
            continue
        key = _holder(optimizer, state)
        bits = None if key is None else _bits_of(state[key])
        if key is not None and bits is not None:
            slot, low = bits
            loaded["state"][number] = {"low_bits": low, **state, key: slot}
            found[number] = local(low)
    return found


def warn_of_none(optimizer: Any, found: Iterable[torch.Tensor]) -> None:
    """Warn if slots that can hold the low bits of bfloat16 weights were loaded and hold none."""
    found = [low for low in found if low.numel()]
    if optimizer.storage == AUTO and found and not any(low.any() for low in found):
        warnings.warn(
            f'{optimizer._name}: an optimizer with storage="auto" loaded a state without low bits, '
            "so it continues from the bfloat16 weights. This is right for a state of "
            'storage="plain". A state of storage="low_bits" has them in separate entries, which '
            "torch.distributed.checkpoint does not read into this optimizer. Load such a state "
            'into an optimizer with storage="low_bits", and pass its state_dict() to '
            "load_state_dict of this one.",
            stacklevel=2,
        )


def _holder(optimizer: Any, state: Mapping[str, Any]) -> str | None:
    """The key of the first slot that has the shape of the weight."""
    for slot in optimizer.slots:
        for key in (slot, codes_of(slot)) if slot not in optimizer.slot_shapes else ():
            if isinstance(state.get(key), torch.Tensor):
                return key
    return None


def _with_bits(slot: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """A slot of a weight, with its low bits in it."""
    value, bits = local(slot), local(low)
    if value.dtype == torch.uint8:
        return placed(slot, value.int() | (bits.int() << 8), slot.shape)
    value = value.to(torch.float64, copy=True)
    value.view(torch.int64).bitwise_or_(bits.long().bitwise_and_(_LOW))
    return placed(slot, value, slot.shape)


def _bits_of(slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A slot as it was, and the low bits in it; ``None`` if it is none that can hold some."""
    value = local(slot)
    if value.dtype == torch.int32:
        both = value.bitwise_and(0xFF).to(torch.uint8), (value >> 8).to(torch.int16)
    elif value.dtype == torch.float64 and not value.view(torch.int64).bitwise_and(_BETWEEN).any():
        bits = value.view(torch.int64)
        both = bits.bitwise_and(~_LOW).view(torch.float64).float(), bits.to(torch.int16)
    else:
        return None
    one, two = (placed(slot, part, slot.shape) for part in both)
    return one, two
