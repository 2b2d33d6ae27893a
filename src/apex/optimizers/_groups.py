"""Checks of a parameter group, made before anything of it is taken."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import required

from apex.ops.placements import is_sharded

HALF = (torch.float16, torch.bfloat16)
# What torch's schedulers write into groups.
SCHEDULED = {"initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_AT_LEAST_0 = ("lr", "eps", "weight_decay", "momentum", "max_grad_norm")
_NAMES = {"lr": "learning rate", "eps": "epsilon value"}


def check_keys(optimizer: str, group: Mapping[str, Any], known: set[str]) -> None:
    """Raise ``ValueError`` for a key that is not known.

    Args:
        optimizer: Name of the class, for messages.
        group: What the user has passed.
        known: Keys that a group may have.
    """
    unknown = sorted(set(group) - known)
    if unknown:
        raise ValueError(
            f"{optimizer}: a group has the unknown key(s) {', '.join(unknown)}; "
            f"known are {', '.join(sorted(known - {'param_names', 'step'}))}."
        )


def check_numbers(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a number out of range."""
    for key in _AT_LEAST_0:
        value = group.get(key, 0.0)
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"{optimizer}: {key} was a tensor of shape {tuple(value.shape)}; it must have "
                    "one element."
                )
        elif value is not required and not (isinstance(value, numbers.Real) and float(value) >= 0):
            raise ValueError(
                f"Invalid {_NAMES.get(key, key + ' value')}: {value}. "
                f"{optimizer} needs a number of at least 0."
            )
    for number, beta in enumerate(group.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {number}: {beta}. {optimizer} "
                "needs 0 <= beta < 1."
            )


def check_params(optimizer: str, params: Any, storage: str, needs_whole: str) -> None:
    """Raise ``RuntimeError`` for a parameter that cannot be stepped.

    Args:
        optimizer: Name of the class, for messages.
        params: A tensor, tensors, or pairs of name and tensor.
        storage: How weights are stored.
        needs_whole: What is computed from tensors as a whole; "" for nothing.
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    for entry in listed:
        tensor = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(tensor, torch.Tensor):
            continue  # torch's own error says what it is
        if tensor.dtype not in (*HALF, torch.float32, torch.float64):
            raise RuntimeError(
                f"{optimizer} only support fp16 and fp32 (and bf16, fp64); a parameter has "
                f"{tensor.dtype}."
            )
        check_stored(optimizer, [tensor], storage)
        if needs_whole and is_sharded(tensor):
            raise RuntimeError(
                f"{optimizer} needs {needs_whole}, and a parameter is sharded over processes. Use "
                "FusedAdam for it."
            )


def check_stored(optimizer: str, params: Sequence[torch.Tensor], storage: str) -> None:
    """Raise ``RuntimeError`` for a parameter that ``storage`` does not keep.

    Args:
        optimizer: Name of the class, for messages.
        params: Parameters.
        storage: How weights are stored.
    """
    if storage == "plain":
        return
    others = {param.dtype for param in params} - {torch.bfloat16}
    if others:
        raise RuntimeError(
            f"{optimizer}: storage={storage!r} keeps bfloat16 weights; a parameter has "
            f"{others.pop()}. Convert the model with .bfloat16() first; for a model that was "
            "converted since, make a new optimizer, whose load_state_dict takes this one's state."
        )
