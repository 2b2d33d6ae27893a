"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scalers of a training.

The format is NVIDIA's: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``,
plain numbers that load under ``torch.load(weights_only=True)``. Everything is checked before
anything is changed.

An ``initialize`` with ``enabled=False`` makes no training: a program that only ever disables amp
gets an empty dict, so that checkpoint code needs no branches, and one that trains a second model
without amp still saves the scalers of its first.
"""

from __future__ import annotations

import gc
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from apex.amp._amp_state import _amp_state
from apex.amp.optimizer import state_of
from apex.amp.scaler import LossScaler
from apex.amp.training import Training, is_disabled, managed

_KEY = re.compile(r"loss_scaler(0|[1-9][0-9]*)")


def _scalers(optimizers: Any, called: str) -> list[LossScaler]:
    """The scalers of the training of ``optimizers``; of :func:`_newest` without them."""
    if optimizers is None:
        newest = _newest(called)
        return [] if newest is None else newest.loss_scalers
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    trainings = [None if (s := state_of(o)) is None else s.training for o in listed]
    first = trainings[0] if trainings else None
    if first is None:
        if listed and all(map(is_disabled, listed)):
            return []
        names = ", ".join(type(optimizer).__name__ for optimizer in listed) or "nothing"
        raise ValueError(
            f"amp.{called}: optimizers was or held {names}, "
            "which did not go through amp.initialize. Pass the optimizers of one initialize call."
        )
    if any(training is not first for training in trainings):
        raise ValueError(
            f"amp.{called}: optimizers were of several initialize calls. Call it once for the "
            "optimizers of each."
        )
    return first.loss_scalers


def _newest(called: str) -> Training | None:
    """The training of the newest ``initialize``; without one, the only training that is alive.

    Warns where several are alive. Those with a static scale do not count beside ``initialize``'s.
    """
    newest: Training | None = getattr(_amp_state, "training", None)
    allowed = 1 if newest is None else 0
    others = _others(newest)
    if len(others) > allowed:
        gc.collect()  # an optimizer that went through initialize is part of a cycle
        others = _others(newest)
    if len(others) > allowed:
        does = "leaves all of them out" if newest is None else "is about the newest initialize only"
        warnings.warn(
            f"amp.{called}: several trainings are alive, and this {does}. Call "
            f"amp.{called}(..., optimizers=...) for each of them.",
            stacklevel=4,
        )
    elif others:  # one, without initialize: of an amp.init handle
        return others[0]
    return newest


def _others(newest: Training | None) -> list[Training]:
    """The trainings that are alive beside ``newest``."""
    states = [optimizer._amp_stash for optimizer in list(managed)]
    found = {
        id(state.training): state.training
        for state in states
        if state.training is not newest
        and not state.superseded
        and (newest is None or state.can_skip())
    }
    return list(found.values())


def state_dict(destination: Any = None, *, optimizers: Any = None) -> Any:
    """Return the scale of every loss scaler of a training, and its steps without overflow.

    Args:
        destination: A mapping to fill; ``None`` makes a new ``OrderedDict``.
        optimizers: One or more optimizers of the training; ``None`` means the newest
            ``initialize`` call, or the handle of ``amp.init`` where that is the only training, with
            a warning while others are alive. If the newest ``initialize`` call is over and several
            are left, none of them is saved.

    Returns:
        ``destination``, with ``"loss_scalerN": {"loss_scale": float, "unskipped": int}`` for
        each scaler of the training; nothing is added when there is none.

    Raises:
        ValueError: ``optimizers`` did not go through one ``initialize`` call.
    """
    if destination is None:
        destination = OrderedDict()
    for index, scaler in enumerate(_scalers(optimizers, "state_dict")):
        entry = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
        destination[f"loss_scaler{index}"] = entry
    return destination


def load_state_dict(state_dict: Mapping[str, Any], *, optimizers: Any = None) -> None:
    """Load the scales and counts that :func:`state_dict` saved, by the number in each key.

    Call it after ``initialize``. A static scaler keeps its scale. Entries for scalers that do not
    exist are left out with a warning; before ``initialize`` that is all of them.

    Args:
        state_dict: What ``amp.state_dict`` returned, here or in NVIDIA's Apex.
        optimizers: As for :func:`state_dict`.

    Raises:
        TypeError: ``state_dict`` is not a mapping.
        ValueError: ``optimizers`` did not go through one ``initialize`` call.
        RuntimeError: A key is not of the form ``loss_scalerN``, or its entry is not a finite
            positive ``loss_scale`` and a non-negative ``unskipped``. Nothing was changed.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"amp.load_state_dict: state_dict was a {type(state_dict).__name__}; it must be the "
            "dict that amp.state_dict() returned."
        )
    unexpected = [key for key in state_dict if not _KEY.fullmatch(str(key))]
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. "
            "Allowed are the keys that amp.state_dict() writes: loss_scaler0, loss_scaler1, ..."
        )
    entries = {key: _checked(key, entry) for key, entry in state_dict.items()}
    scalers = _scalers(optimizers, "load_state_dict")
    if entries and not scalers:
        warnings.warn(
            "amp.load_state_dict: nothing was loaded, because there is no loss scale yet. Call "
            "amp.initialize (with enabled=True) first, and amp.load_state_dict afterwards.",
            stacklevel=2,
        )
    elif len(entries) != len(scalers):
        warnings.warn(
            f"amp.load_state_dict: state_dict contains {len(entries)} entries, while "
            f"{len(scalers)} loss_scalers are used. Entries are loaded by their number, and those "
            "without a scaler are left out. Pass the same num_losses to amp.initialize as in the "
            "run that was saved.",
            stacklevel=2,
        )
    for key, (scale, unskipped) in entries.items():
        number = int(str(key).removeprefix("loss_scaler"))
        if number >= len(scalers):
            continue
        scaler = scalers[number]
        if scaler.dynamic:
            scaler._loss_scale = scaler._bounded(scale)
            scaler._unskipped = unskipped


def _checked(key: str, entry: Any) -> tuple[float, int]:
    try:
        scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
        is_right = math.isfinite(scale) and scale > 0 and 0 <= unskipped == entry["unskipped"]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise RuntimeError(
            f'amp.load_state_dict: the entry "{key}" was {entry!r}; it must hold a number '
            "loss_scale and an integer unskipped."
        ) from e
    if not is_right:
        raise RuntimeError(
            f'amp.load_state_dict: the entry "{key}" was {entry!r}; loss_scale must be finite '
            "and above 0, unskipped a whole number of at least 0."
        )
    return scale, unskipped
