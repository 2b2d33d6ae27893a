"""Checkpoints: what torch's ``load_state_dict`` lacks, and conversion to and from torch.optim.

torch casts a loaded state to the parameter's dtype, which would round float32 moments of 16-bit
weights; and it loads whatever it is given. So a state is checked before it is loaded, and what
torch has cast is put back from the saved tensors afterwards.

The optimizer of the same name in ``torch.optim`` counts steps per parameter and has keys in its
groups that ours do not know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from apex.ops.lists.columns import local

# Keys that the optimizers of torch.optim keep in their groups and ours do not know. Those that
# change what is computed are refused when set.
_FOREIGN = {"foreach", "fused", "differentiable", "decoupled_weight_decay", "capturable"}
_REFUSED = {"amsgrad", "maximize"}
# What all optimizers of torch.optim have in their groups, at its default.
TORCH_ONLY = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}


def check_is_state_dict(optimizer: str, state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if this is not what ``state_dict()`` returns."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"{optimizer}.load_state_dict: the dict has no {' and no '.join(missing)}"
            f" (it has {', '.join(map(str, state_dict)) or 'nothing'}). Pass what "
            "optimizer.state_dict() returned."
        )


def saved_states(
    loaded: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, torch.Tensor, dict[str, Any]]]:
    """Yield the number of each saved parameter, the parameter here, and its saved state."""
    saved = [number for group in loaded["param_groups"] for number in group["params"]]
    params = [param for group in groups for param in group["params"]]
    for number, param in zip(saved, params, strict=False):  # other lengths: torch says so
        yield number, param, loaded["state"].get(number, {})


def has_slots_and_numbers(
    saved: Mapping[str, Any], slots: Collection[str], numbers: Collection[str]
) -> bool:
    """Whether a state dict can be an optimizer's: a parameter has its slots, groups its numbers.

    A program may keep tensors of its own beside the slots, such as an average of the weights. In
    other state dicts what looks like that is a slot of another optimizer.

    Args:
        saved: A state dict, ours or of ``torch.optim``.
        slots: Names of the optimizer's slots.
        numbers: Keys of its groups that the optimizer of its name in ``torch.optim`` has too.
    """
    states = [state for state in saved["state"].values() if isinstance(state, Mapping)]
    return all({*numbers} <= group.keys() for group in saved["param_groups"]) and any(
        {*slots} <= state.keys() for state in states
    )


def check_numbers_are_known(
    optimizer: str, saved: Mapping[str, Any], numbers: Collection[str]
) -> None:
    """Raise ``ValueError`` if saved groups have a number that only other algorithms have.

    Adam's state and groups contain all that Lion keeps; ``eps`` tells them apart.
    """
    others = {key for group in saved["param_groups"] for key in group}
    others &= {"eps", "momentum"} - {*numbers}
    if others and saved["state"]:
        raise ValueError(
            f"{optimizer}: the saved groups have {others.pop()}, and this optimizer keeps "
            f"{', '.join(numbers)}. Load the state into the kind of optimizer that saved it."
        )


def check_states(
    optimizer: str,
    loaded: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    slots: Mapping[str, Callable[[torch.Tensor], Sequence[int]]],
    more: Sequence[str],
    *,
    may_be_others: bool,
) -> None:
    """Raise ``ValueError`` if a saved tensor is another optimizer's or of another shape.

    Args:
        optimizer: Name of the class, for messages.
        loaded: The state dict.
        groups: The optimizer's.
        slots: The slots that it keeps, and what tells the shape of one from the parameter.
        more: Other keys of a state that it knows.
        may_be_others: Whether further tensors of a parameter's shape may be the program's, see
            :func:`has_slots_and_numbers`; else they are another optimizer's.
    """
    for number, param, state in saved_states(loaded, groups):
        tensors = {key: x for key, x in state.items() if isinstance(x, torch.Tensor)}
        both = param, local(param)
        others = [tensors[key].shape for key in tensors.keys() - {*slots, *more}]
        foreign = not may_be_others and any(x.shape in others for x in both)
        if foreign or 0 < len(tensors.keys() & slots.keys()) < len(slots):
            raise ValueError(
                f"{optimizer}: the saved state of parameter {number} has {', '.join(tensors)}, and "
                f"this optimizer keeps {', '.join(slots)}. Load the state into the kind of "
                "optimizer that saved it."
            )
        for key in tensors.keys() & {*slots, *more} - {"first"}:
            shape = tuple(tensors[key].shape)
            if shape not in [tuple(slots[key](x) if key in slots else x.shape) for x in both]:
                raise ValueError(
                    f"{optimizer}: the saved {key} of parameter {number} has shape {shape}, and "
                    f"the parameter {tuple(param.shape)}. Load the state into the model that it "
                    "was saved with."
                )


def from_torch(
    optimizer: str,
    state_dict: Mapping[str, Any],
    defaults: Mapping[str, Any],
    missing: Mapping[str, Any],
    *,
    counts_steps: bool,
) -> dict[str, Any]:
    """Convert a state dict of ``torch.optim``, whose steps are per parameter; ours stays as it is.

    Args:
        optimizer: Name of the class, for messages.
        state_dict: Of ``torch.optim``, or ours.
        defaults: Keys that groups have here.
        missing: What groups get that do not have it.
        counts_steps: Whether groups have a ``"step"``.

    Raises:
        ValueError: It was saved with what this class does not do, or at different steps.
    """
    groups = []
    states = {
        number: dict(state) if isinstance(state, Mapping) else state  # or a user's own
        for number, state in state_dict["state"].items()
    }
    for saved in state_dict["param_groups"]:
        group = dict(saved)
        for key in _REFUSED & group.keys() - defaults.keys():
            if group.pop(key):
                raise ValueError(
                    f"{optimizer}: the state was saved with {key}=True, which this optimizer does "
                    "not support."
                )
        for key in _FOREIGN & group.keys() - defaults.keys():
            group.pop(key)
        steps = {
            float(states[number].pop("step"))
            for number in group["params"]
            if "step" in states.get(number, {})
        }
        steps = steps if counts_steps else set()
        if len(steps) > 1:
            raise ValueError(
                f"{optimizer}: the saved parameters of one group are at different steps "
                f"({sorted(steps)}), and this optimizer counts per group. Put them into different "
                "groups."
            )
        if steps and "step" not in group:
            group["step"] = int(steps.pop())
        for key, value in missing.items():
            group.setdefault(key, value)
        groups.append(group)
    return {**state_dict, "state": states, "param_groups": groups}


def to_torch(
    saved: dict[str, Any],
    ours: Sequence[str],
    convert_state: Callable[[dict[str, Any]], dict[str, Any]],
    convert_group: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    counts_steps: bool,
) -> dict[str, Any]:
    """Convert one of our state dicts to one of ``torch.optim``.

    Args:
        saved: From ``state_dict()``; its states are replaced.
        ours: Keys of a parameter's state that torch does not know.
        convert_state: Converts what is left of a parameter's state.
        convert_group: Converts a group, whose step is gone.
        counts_steps: Whether groups have a ``"step"``.
    """
    groups = []
    for group in saved["param_groups"]:
        group = dict(group)
        step = group.pop("step", 0)
        for number in group["params"]:
            if number in saved["state"]:
                state = copy.deepcopy(saved["state"][number])  # tensors would be shared
                state = {key: state[key] for key in state if key not in ours}
                if counts_steps:
                    state["step"] = torch.tensor(float(step))
                saved["state"][number] = convert_state(state)
        groups.append(convert_group(group))
    return {"state": saved["state"], "param_groups": groups}
