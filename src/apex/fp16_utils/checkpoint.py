"""Checkpoints of ``FP16_Optimizer``: plain data now, pickled scaler objects in NVIDIA's Apex.

An old file holds the loss scaler as an object. Its classes are added to those that ``torch.load``
accepts by default (``weights_only=True``) when ``apex.fp16_utils`` is imported, so that old files
load as they are. Other classes are refused by ``torch.load``, without being executed. Of an object
that was loaded only its numbers are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from apex.amp.legacy.scaler import LossScaler as AmpLossScaler
from apex.amp.scale import check
from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, check_scale
from apex.fp16_utils.masters import Groups, flat

torch.serialization.add_safe_globals(
    [
        *(LossScaler, DynamicLossScaler, AmpLossScaler),
        (AmpLossScaler, "apex.amp.scaler.LossScaler"),  # as older files name it
    ]
)

_BOUNDS = ("min_loss_scale", "max_loss_scale")
_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", *_BOUNDS)


class Saved(NamedTuple):
    """What a checkpoint holds, checked; nothing is changed yet."""

    scaler: LossScaler
    optimizer: dict[str, Any]  # the state of the wrapped optimizer
    targets: Groups  # the masters that there are
    masters: Sequence[Sequence[torch.Tensor]]  # those that were saved, of the same shapes
    attributes: dict[str, Any]

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Copy the saved masters into those that there are."""
        for target, value in zip(flat(self.targets), flat(self.masters), strict=True):
            target.copy_(value)


def read(saved: Any, optimizer: Any) -> Saved:
    """Check a state of ``apex.fp16_utils.FP16_Optimizer``, of 2018 to 2025 or of ours."""
    flags = ("overflow", "first_closure_call_this_step")
    _check_keys(saved, ("loss_scaler", *flags, "optimizer_state_dict", "fp32_from_fp16"))
    scaler = _scaler_from(saved["loss_scaler"])
    targets, masters = optimizer.fp32_from_fp16_groups, saved["fp32_from_fp16"]
    _check_masters(masters, targets)
    inner = saved["optimizer_state_dict"]
    _check_keys(inner, ("state", "param_groups"))
    _refuse_order_of_2018(inner, optimizer)
    return Saved(scaler, inner, targets, masters, {name: bool(saved[name]) for name in flags})


def read_of_bert(saved: Any, optimizer: Any) -> Saved:
    """Check a state of ``apex.optimizers.FP16_Optimizer``, of 2019 to 2025 or of ours."""
    keys = ("dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups")
    _check_keys(saved, keys)
    _check_keys(saved["optimizer_state_dict"], ("state", "param_groups"))
    targets = optimizer.fp32_groups
    attributes = {"cur_iter": _integer("cur_iter", saved["cur_iter"]), "overflow": False}
    numbers = saved if saved["dynamic_loss_scale"] else {"cur_scale": saved["cur_scale"]}
    scaler = _scaler_from(numbers)
    _check_masters(saved["fp32_groups"], targets)
    inner = saved["optimizer_state_dict"]
    return Saved(scaler, inner, targets, saved["fp32_groups"], attributes)


def detached(groups: Groups) -> Groups:
    """Masters as they are saved."""
    return [[tensor.detach() for tensor in group] for group in groups]


def scaler_to_dict(scaler: LossScaler) -> dict[str, Any]:
    """The numbers of a scaler, of any era."""
    return {name: getattr(scaler, name) for name in _NUMBERS if hasattr(scaler, name)}


def _scaler_from(saved: Any) -> LossScaler:
    """Make a scaler of numbers by name, or of a scaler object of any era.

    Raises:
        TypeError: It is something else.
        ValueError: A number is missing, no number or out of range.
    """
    if isinstance(saved, LossScaler):
        values = scaler_to_dict(saved)
    elif isinstance(saved, Mapping | AmpLossScaler):
        values = dict(saved if isinstance(saved, Mapping) else vars(saved))
    else:
        raise TypeError(
            f"FP16_Optimizer: the saved loss_scaler is a {type(saved).__name__}; allowed are a "
            "dict of numbers, and the LossScaler classes of apex.fp16_utils and apex.amp."
        )
    try:
        if "_loss_scale" in values:  # apex.amp's of 2019 to 2025
            values = _from_amp(values)
        if "cur_iter" not in values:
            return LossScaler(values["cur_scale"])
        scaler = DynamicLossScaler(
            values["cur_scale"],
            values["scale_factor"],
            values["scale_window"],
            **{name: values[name] for name in _BOUNDS if name in values},
        )
        scaler.cur_scale = check_scale("cur_scale", values["cur_scale"])
        for name in ("cur_iter", "last_overflow_iter"):
            setattr(scaler, name, _integer(name, values[name]))
    except KeyError as error:
        raise ValueError(
            f"FP16_Optimizer: the saved loss_scaler has no {error}; it has "
            f"{', '.join(map(str, values))}."
        ) from None
    return scaler


def _from_amp(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values["dynamic"]:
        return {"cur_scale": values["_loss_scale"]}
    return {
        "cur_scale": values["_loss_scale"],
        "cur_iter": values["_unskipped"],  # clean iterations since the scale last changed
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": values["_scale_seq_len"],
        **{name: values.get(f"_{name}") for name in _BOUNDS},
    }


def _integer(name: str, value: Any) -> int:
    check(f"the saved {name}", value, lambda x: not x % 1, "an integer")
    return int(value)


def _check_keys(saved: Any, wanted: Sequence[str]) -> None:
    """Raise ``ValueError`` if ``saved`` is no state of an ``FP16_Optimizer``."""
    found = list(saved) if isinstance(saved, Mapping) else f"a {type(saved).__name__}"
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(
            f"FP16_Optimizer: state_dict has no {', '.join(missing)}; it has {found}. Pass what "
            "state_dict() of the same class returned."
        )


def _check_masters(saved: Sequence[Sequence[torch.Tensor]], groups: Groups) -> None:
    found, wanted = ([[tuple(x.shape) for x in group] for group in of] for of in (saved, groups))
    if found != wanted:
        raise ValueError(
            f"FP16_Optimizer: the saved masters have the shapes {found}, by group; the masters of "
            f"this optimizer have {wanted}. Make the same model and groups as when the state was "
            "saved."
        )


def _refuse_order_of_2018(saved: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse state in another order: before July 2018 the masters of a group came first.

    State is taken for such where its shapes fit that order and not the groups'.
    """
    halves, wide = optimizer.fp32_from_fp16_groups, optimizer.fp32_from_fp32_groups
    now = [group["params"] for group in optimizer.param_groups]
    for group, present, half, rest in zip(saved["param_groups"], now, halves, wide, strict=False):
        keys, state = group["params"], saved["state"]
        if _fits(keys, [*half, *rest], state) and not _fits(keys, present, state):
            raise ValueError(
                "FP16_Optimizer: the optimizer's state was saved before July 2018, when "
                "FP16_Optimizer stored the float32 parameters of a group last. Put float32 and "
                "16-bit parameters into separate groups before saving, or load only the model and "
                "the masters."
            )


def _fits(keys: Sequence[Any], params: Sequence[torch.Tensor], state: Mapping[Any, Any]) -> bool:
    return len(keys) == len(params) and all(
        value.shape == param.shape
        for key, param in zip(keys, params, strict=True)
        for value in state.get(key, {}).values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
