"""Checks of a parameter group, made before anything of it is taken."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch.optim.optimizer import required

from apex.ops.lists.placements import is_sharded

HALF = (torch.float16, torch.bfloat16)
_AT_LEAST_0 = ("lr", "eps", "weight_decay", "momentum", "max_grad_norm", "step")
_NAMES = {"lr": "learning rate", "eps": "epsilon value"}
_SPELLED = {"learning_rate": "lr"}  # as other libraries spell it


def check_keys(
    optimizer: str,
    group: Mapping[str, Any],
    numbers: Collection[str],
    arguments: Mapping[str, Any],
    refused: Collection[str],
) -> None:
    """Raise ``ValueError`` for a key that would be expected to change what is computed.

    Programs keep what they like in groups (timm's ``lr_scale``, Megatron's ``wd_mult``, a name).
    torch's ``ZeroRedundancyOptimizer`` puts the constructor's arguments there.

    Args:
        optimizer: Name of the class, for messages.
        group: What the user has passed.
        numbers: Keys that have an effect.
        arguments: The constructor's arguments that hold for all groups, with their values.
        refused: Keys of other optimizers that change what they compute, where they are set.
    """
    for key, value in group.items():
        if key in numbers or key in ("params", "param_names"):
            continue
        if key in arguments:
            if value != arguments[key]:
                raise ValueError(
                    f"{optimizer}: a group has {key}={value!r}, and the optimizer "
                    f"{key}={arguments[key]!r}, which holds for all groups. Pass it to the "
                    "constructor; for different values make several optimizers."
                )
        elif key in refused:
            if value:
                raise ValueError(
                    f"{optimizer}: a group has {key}={value!r}, which this optimizer does not "
                    "support. Leave it out."
                )
        elif meant := _meant(key, {*numbers, *arguments}):
            raise ValueError(
                f"{optimizer}: a group has the unknown key {key!r}. Write {meant!r}, or give a key "
                "of your own another name."
            )


def _meant(key: str, known: Collection[str]) -> str | None:
    """What is probably meant by a misspelt key; not what ``no_weight_decay`` contains."""
    written = key.lower()
    near = [name for name in known if abs(len(name) - len(key)) <= 1]
    close = difflib.get_close_matches(_SPELLED.get(written, written), near, n=1, cutoff=0.85)
    return close[0] if close else _SPELLED.get(written)


def check_complete(
    optimizer: str, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> None:
    """Raise ``KeyError`` if a group lacks one of its numbers."""
    for number, group in enumerate(groups):
        for key in defaults.keys() - group.keys():
            raise KeyError(
                f"{optimizer}: group {number} has no {key!r} any more. Put it back; its default is "
                f"{defaults[key]!r}."
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
            if value.is_meta:
                continue
            value = value.item()
        if value is not required and not (isinstance(value, Real) and float(value) >= 0):
            raise ValueError(
                f"Invalid {_NAMES.get(key, key + ' value')}: {value}. "
                f"{optimizer} needs a number of at least 0."
            )
    betas = tuple(group.get("betas", (0.0, 0.0)))
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas}. {optimizer} needs two, 0 <= beta < 1.")
    for number, beta in enumerate(betas):
        if not (isinstance(beta, Real | torch.Tensor) and 0.0 <= float(beta) < 1.0):
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
        if tensor.is_neg():
            raise RuntimeError(
                f"{optimizer}: the sign of a parameter is a bit of the tensor (is_neg()) and not "
                "in its memory. Make the parameter of `data.resolve_neg()`."
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


def keep_on_device(group: dict[str, Any]) -> None:
    """Make ``lr`` and ``step`` tensors where the group's parameters are."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    step = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=device)
    group["lr"], group["step"] = lr.detach().clone(), step.detach().clone().reshape(1)
