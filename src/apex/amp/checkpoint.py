"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scalers of a training.

The format is NVIDIA's: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``,
plain numbers that load under ``torch.load(weights_only=True)``. A training with a policy adds
``"policy"``, for each model the names of the modules that it keeps and their types. Everything is
checked before anything is changed.

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

from apex.amp.newest import newest
from apex.amp.optimizer import state_of
from apex.amp.scale import Scale
from apex.amp.training import Training, alive, in_use, is_disabled, moments, with_scale

_KEY = re.compile(r"loss_scaler(0|[1-9][0-9]*)")


def _trainings(optimizers: Any, called: str) -> list[Training]:
    """The training of ``optimizers``; without them, see :func:`_meant`."""
    if optimizers is None:
        return _meant(called)
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
            f"amp.{called}: the optimizers come from several initialize calls. Call amp.{called} "
            "once for the optimizers of each call."
        )
    return [first]


def _meant(called: str) -> list[Training]:
    """The trainings that a call without ``optimizers`` is about; newest last.

    What is saved is the state of those that had a ``scale_loss``, if there are any, or that a state
    was loaded into since: a model that is
    initialised and not trained, such as a momentum encoder or a teacher, has none. If their states
    differ, it is the newest's, with a warning. Trainings with a static scale count only where there
    are no others: nothing is loaded into them.

    A state is loaded into those that had no ``scale_loss`` yet; if there is none, into what would
    be saved.
    """
    if len(alive()) > 1:
        gc.collect()  # an optimizer that went through initialize is part of a cycle
    trainings = with_scale()
    if not trainings:
        last = getattr(newest, "training", None)
        return [] if last is None else [last]
    waiting = [one for one in trainings if not one.last_pass]
    if waiting and called == "load_state_dict":
        if len(waiting) < len(trainings) and waiting[-1].is_dynamic():
            warnings.warn(
                "amp.load_state_dict: apex loads the state into each training that has not entered "
                "scale_loss yet, and keeps the loss scales of the others. To choose, call "
                "amp.load_state_dict(..., optimizers=...).",
                stacklevel=4,
            )
        return waiting
    used = in_use(trainings)
    differ = any([_states(one) != _states(used[-1]) for one in used])
    if not differ or not used[-1].is_dynamic():
        return used
    warnings.warn(
        f"amp.{called}: several trainings exist, with different loss scales, and this call used "
        f"only the newest. Call amp.{called}(..., optimizers=...) for each of them.",
        stacklevel=4,
    )
    return used[-1:]


def _states(training: Training) -> list[dict[str, Any]]:
    """The entries of the scalers of ``training``."""
    return [scaler.entry() for scaler in training.loss_scalers]


def state_dict(destination: Any = None, *, optimizers: Any = None) -> Any:
    """Return each loss scaler's scale and its number of steps since the last overflow.

    Args:
        destination: A mapping to fill; ``None`` makes a new ``OrderedDict``.
        optimizers: One or more optimizers that went through the same ``initialize`` call. You need
            it only if a program calls ``initialize`` for several trainings. ``None`` means the
            training with a dynamic scale that has entered ``scale_loss`` or was loaded. If several
            have, and their states differ, it means the newest, with a warning.

    Returns:
        ``destination``, with ``"loss_scalerN": {"loss_scale": float, "unskipped": int}`` for each
        scaler, and ``"policy"`` if the training has one. Without a training nothing is added.

    Raises:
        ValueError: ``optimizers`` did not go through the same ``initialize`` call.
    """
    if destination is None:
        destination = OrderedDict()
    for training in _trainings(optimizers, "state_dict")[-1:]:
        for index, entry in enumerate(_states(training)):
            destination[f"loss_scaler{index}"] = entry
        if training.policy is not None:
            destination["policy"] = [dict(one) for one in training.policy]
    return destination


def load_state_dict(state_dict: Mapping[str, Any], *, optimizers: Any = None) -> None:
    """Load the scales and counts that :func:`state_dict` saved, by the number in each key.

    Call it after ``initialize`` and before the first ``scale_loss``. A static scaler keeps its
    scale. Entries without a matching scaler are ignored, with a warning; before ``initialize`` no
    entry has one.

    Args:
        state_dict: What ``amp.state_dict`` returned, in apex or in NVIDIA's Apex.
        optimizers: As for :func:`state_dict`. ``None`` means every training that has not entered
            ``scale_loss`` yet. If all have, it means the training that :func:`state_dict` saves.

    Raises:
        TypeError: ``state_dict`` is not a mapping.
        ValueError: ``optimizers`` did not go through the same ``initialize`` call.
        RuntimeError: A key is not of the form ``loss_scalerN``, an entry is not a finite positive
            ``loss_scale`` with a non-negative ``unskipped``, or the saved run had another policy.
            Nothing changes in these cases.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"amp.load_state_dict: state_dict was a {type(state_dict).__name__}; it must be the "
            "dict that amp.state_dict() returned."
        )
    policy = state_dict.get("policy")
    state_dict = {key: entry for key, entry in state_dict.items() if key != "policy"}
    unexpected = [key for key in state_dict if not _KEY.fullmatch(str(key))]
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        advice = ""
        if "_growth_tracker" in unexpected:
            advice = (
                " This is the state of a GradScaler. To continue with its scale, pass "
                "{'loss_scaler0': {'loss_scale': saved['scale'], 'unskipped': "
                "saved['_growth_tracker']}}."
            )
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. Allowed "
            f"are the keys that amp.state_dict() writes: loss_scaler0, loss_scaler1, ...{advice}"
        )
    entries = {key: _checked(key, entry) for key, entry in state_dict.items()}
    trainings = _trainings(optimizers, "load_state_dict")
    for training in trainings if state_dict or policy else ():
        _refuse_other_policy(policy, training.policy)
    numbers = [len(training.loss_scalers) for training in trainings]
    if entries and not any(numbers):
        warnings.warn(
            "amp.load_state_dict: apex loaded nothing, because there is no loss scale yet. Call "
            "amp.initialize (with enabled=True) before amp.load_state_dict.",
            stacklevel=2,
        )
    elif numbers and len(entries) not in numbers:
        warnings.warn(
            f"amp.load_state_dict: state_dict contains {len(entries)} entries, while {numbers[-1]} "
            "loss_scalers are used. apex loads entries by their number and ignores entries without "
            "a scaler. Pass amp.initialize the same num_losses as in the saved run.",
            stacklevel=2,
        )
    for training in trainings if entries else ():
        _load(entries, training.loss_scalers)
        training.loaded = next(moments)


def _refuse_other_policy(saved: Any, now: Any) -> None:
    if saved != now:
        raise RuntimeError(
            f"amp.load_state_dict: the saved run had the policy {saved!r}, and this training has "
            f"{now!r}. Pass amp.initialize the policy of the saved run. To change it on purpose, "
            "first replace 'policy' in the saved dict by the one in amp.state_dict() (or delete it "
            "if that dict has none)."
        )


def _load(entries: Mapping[str, tuple[float, int]], scalers: list[Scale]) -> None:
    for key, (scale, unskipped) in entries.items():
        number = int(str(key).removeprefix("loss_scaler"))
        if number < len(scalers):
            scalers[number].load(scale, unskipped)


def _checked(key: str, entry: Any) -> tuple[float, int]:
    try:
        scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
        is_right = math.isfinite(scale) and scale > 0 and 0 <= unskipped == entry["unskipped"]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise RuntimeError(
            f'amp.load_state_dict: the entry "{key}" was {entry!r}; it must hold loss_scale, a '
            "finite number above 0, and unskipped, a whole number of at least 0."
        )
    return scale, unskipped
