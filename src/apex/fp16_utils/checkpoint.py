"""Checkpoints of ``FP16_Optimizer``: plain data now, pickled scaler objects in NVIDIA's Apex.

An old file holds the loss scaler as an object. Its classes are added to those that ``torch.load``
accepts by default (``weights_only=True``) when ``apex.fp16_utils`` is imported, so that old files
load as they are. Other classes are refused by ``torch.load``, without being executed. Of an object
that was loaded only its numbers are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from apex.amp import scaler as amp_scaler
from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, check_scale

torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, amp_scaler.LossScaler])

_NUMBERS = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
    "min_loss_scale",
    "max_loss_scale",
)


def scaler_to_dict(scaler: LossScaler) -> dict[str, Any]:
    """The numbers of a scaler."""
    names = _NUMBERS if isinstance(scaler, DynamicLossScaler) else _NUMBERS[:1]
    return {name: getattr(scaler, name) for name in names}


def scaler_from(saved: Any) -> LossScaler:
    """Make a scaler of what a checkpoint holds.

    Args:
        saved: Numbers by name, or a scaler object of any era.

    Raises:
        TypeError: It is something else.
        ValueError: A number is missing, no number or out of range.
    """
    if isinstance(saved, LossScaler | amp_scaler.LossScaler):
        values = vars(saved)
    elif isinstance(saved, Mapping):
        values = dict(saved)
    else:
        raise TypeError(
            f"FP16_Optimizer: the saved loss_scaler is a {type(saved).__name__}; allowed are a "
            "dict of numbers, and the LossScaler classes of apex.fp16_utils and apex.amp."
        )
    if isinstance(saved, DynamicLossScaler):
        values = {**{name: getattr(saved, name) for name in _NUMBERS[-2:]}, **values}
    try:
        if "_loss_scale" in values:  # apex.amp's of 2019 to 2025
            values = _from_amp(values)
        if "cur_iter" not in values:
            return LossScaler(values["cur_scale"])
        scaler = DynamicLossScaler(**{"init_scale": values["cur_scale"], **_options(values)})
        scaler.cur_scale = check_scale("cur_scale", values["cur_scale"])
        scaler.cur_iter = whole("cur_iter", values["cur_iter"])
        scaler.last_overflow_iter = whole("last_overflow_iter", values["last_overflow_iter"])
    except KeyError as error:
        raise ValueError(
            f"FP16_Optimizer: the saved loss_scaler has no {error}; it has "
            f"{', '.join(map(str, values))}."
        ) from None
    return scaler


def whole(name: str, value: Any) -> int:
    """Return a saved count as an integer.

    Raises:
        ValueError: It is not an integer.
    """
    try:
        number = int(value)
        if number == float(value):
            return number
    except (OverflowError, TypeError, ValueError):
        pass
    raise ValueError(f"FP16_Optimizer: the saved {name} was {value!r}; it must be an integer.")


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "scale_factor": values["scale_factor"],
        "scale_window": values["scale_window"],
        **{name: values[name] for name in _NUMBERS[-2:] if name in values},
    }


def _from_amp(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values["dynamic"]:
        return {"cur_scale": values["_loss_scale"]}
    return {
        "cur_scale": values["_loss_scale"],
        "cur_iter": values["_unskipped"],  # clean iterations since the scale last changed
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": values["_scale_seq_len"],
        "min_loss_scale": values.get("_min_loss_scale"),
        "max_loss_scale": values.get("_max_loss_scale"),
    }


def check_keys(saved: Any, wanted: Sequence[str]) -> None:
    """Raise ``ValueError`` if ``saved`` is no state of an ``FP16_Optimizer``."""
    found = list(saved) if isinstance(saved, Mapping) else f"a {type(saved).__name__}"
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(
            f"FP16_Optimizer: state_dict has no {', '.join(missing)}; it has {found}. Pass what "
            "state_dict() of the same class returned."
        )


def check_masters(
    saved: Sequence[Sequence[torch.Tensor]], groups: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Raise ``ValueError`` if saved masters do not fit.

    Args:
        saved: A sequence of masters for each group.
        groups: The masters that there are.
    """
    found = [[tuple(tensor.shape) for tensor in group] for group in saved]
    wanted = [[tuple(tensor.shape) for tensor in group] for group in groups]
    if found != wanted:
        raise ValueError(
            f"FP16_Optimizer: the saved masters have the shapes {found}, by group; this "
            f"optimizer's have {wanted}. Make model and groups as they were when it was saved."
        )


def in_group_order(saved: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Bring the wrapped optimizer's state into the order of its groups.

    NVIDIA's Apex of 2018 put the masters of a group before its float32 parameters and left out
    frozen ones. State is taken for such where its shapes fit that order and not the groups'.

    Args:
        saved: ``state_dict`` of the wrapped optimizer.
        optimizer: The ``FP16_Optimizer``.

    Raises:
        ValueError: ``saved`` has not the keys of an optimizer's state.
    """
    check_keys(saved, ("state", "param_groups"))
    groups, state, spare = list(saved["param_groups"]), saved["state"], 0
    for number, group in enumerate(groups):
        keys = list(group["params"])
        if number >= len(optimizer.param_groups):
            continue
        params = optimizer.param_groups[number]["params"]
        first = [
            *optimizer.fp32_from_fp16_groups[number],
            *optimizer.fp32_from_fp32_groups[number],
        ]
        if _fits(keys, params, state) or not _fits(keys, first, state):
            continue
        key_of = {id(param): key for param, key in zip(first, keys, strict=True)}
        spare -= len(params)  # keys without state
        ordered = [key_of.get(id(param), spare + i) for i, param in enumerate(params)]
        groups[number] = {**group, "params": ordered}
    return {**saved, "param_groups": groups}


def _fits(keys: Sequence[Any], params: Sequence[torch.Tensor], state: Mapping[Any, Any]) -> bool:
    return len(keys) == len(params) and all(
        value.shape == param.shape
        for key, param in zip(keys, params, strict=True)
        for value in state.get(key, {}).values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )


def from_flat(saved: Mapping[str, Any], groups: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Split what BERT's programs saved before spring 2019: each group as one flat parameter.

    Args:
        saved: The state of an ``FP16_Optimizer`` with ``fp32_groups_flat``.
        groups: The parameters by group.

    Raises:
        ValueError: There is another number of groups, or a flat tensor has not as many elements as
            the parameters of its group.
    """
    state: dict[int, Any] = {}
    made: dict[str, Any] = {"state": state, "param_groups": []}
    inner = saved["optimizer_state_dict"]
    numbers = [len(inner["param_groups"]), len(saved["fp32_groups_flat"])]
    if numbers != [len(groups)] * 2:
        raise ValueError(
            f"FP16_Optimizer: the saved optimizer has {numbers[0]} groups, and fp32_groups_flat "
            f"{numbers[1]}; this optimizer has {len(groups)}. Make the groups as they were when it "
            "was saved."
        )
    for group, params in zip(inner["param_groups"], groups, strict=True):
        keys = range(len(state), len(state) + len(params))
        values = inner["state"].get(group["params"][0], {})
        split = {name: _split(value, params) for name, value in values.items()}
        state.update(
            (key, {n: parts[i] for n, parts in split.items()}) for i, key in enumerate(keys)
        )
        made["param_groups"].append({**group, "params": [*keys]})
    flat = zip(saved["fp32_groups_flat"], groups, strict=True)
    masters = [_split(tensor, params) for tensor, params in flat]
    return {**saved, "fp32_groups": masters, "optimizer_state_dict": made}


def _split(value: Any, params: Sequence[torch.Tensor]) -> list[Any]:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return [value for _ in params]
    sizes = [param.numel() for param in params]
    if value.numel() != sum(sizes):
        raise ValueError(
            f"FP16_Optimizer: a saved group has {value.numel()} elements, and the parameters of "
            f"this group {sum(sizes)}. Make model and groups as they were when it was saved."
        )
    pieces = zip(torch.split(value.reshape(-1), sizes), params, strict=True)
    return [piece.view(param.shape) for piece, param in pieces]
