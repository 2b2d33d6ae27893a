"""Which state an optimizer has, and how it is saved, loaded and exchanged with ``torch.optim``.

torch casts a loaded state to the parameter's dtype, which would round float32 moments of 16-bit
weights; and it loads whatever it is given. So a state is checked before it is loaded, and what
torch has cast is put back from the saved tensors afterwards.

The optimizer of the same name in ``torch.optim`` counts steps per parameter and has keys in its
groups that ours do not know.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from apex.ops.lists.placements import described, fits
from apex.ops.lists.storage import storage_of
from apex.ops.lists.tensor_lists import local
from apex.optimizers import _eight_bit as eight_bit
from apex.optimizers._packed import unpack, warn_of_none

_SHAPE = attrgetter("shape")
# What all optimizers of torch.optim have in their groups, at its default.
TORCH_ONLY = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
# Keys that they keep in their groups and ours do not know, but for those that change what is
# computed: `_refused_keys`.
_FOREIGN = {*TORCH_ONLY, "decoupled_weight_decay", "capturable"} - {"maximize"}

# Attributes that a copy does not get: what amp puts on an optimizer, versions of tensors that are
# others in the copy, and a flag that a copy makes on the device where it is.
_NOT_COPIED = {
    "_amp_stash", "_scaled_step", "_written", "_dummy_overflow_buf", "_lost", "_begun", "_apart",
    "_shown",
}  # fmt: skip

StateDict = dict[str, Any]


def copied(optimizer: Any) -> dict[str, Any]:
    """What a copy gets besides groups and state, which are all that torch's copies hold.

    Hooks and methods that amp or a scheduler has replaced stay with the original, as in torch.
    """
    return {
        key: value
        for key, value in vars(optimizer).items()
        if not (key in _NOT_COPIED or key.startswith("_optimizer_") or callable(value))
    }


def _slots_in(state: Mapping[str, Any]) -> set[str]:
    """The keys of a state, and the slots of which it has codes."""
    return {*state, *filter(functools.partial(eight_bit.is_code, state), eight_bit.CODES)}


def _greatest(steps: Sequence[int | torch.Tensor]) -> int | torch.Tensor:
    """The greatest step, on a device if one is there; nothing waits for that."""
    device = next((step.device for step in steps if isinstance(step, torch.Tensor)), None)
    if device is None:
        return max(steps)
    each = [
        step.to(device, torch.int32, non_blocking=device.type != "cpu").reshape(1)
        if isinstance(step, torch.Tensor)
        else torch.full((1,), step, dtype=torch.int32, device=device)
        for step in steps
    ]
    return torch.cat(each).amax(0, keepdim=True)


def refuse_others(optimizer: Any, state_dict: StateDict) -> None:
    """Raise ``ValueError`` for a dict that no optimizer has saved."""
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"{optimizer._name}.load_state_dict: the dict has no {' and no '.join(missing)}"
            f" (it has {', '.join(map(str, state_dict)) or 'nothing'}). Pass what "
            "optimizer.state_dict() returned."
        )


def load(optimizer: Any, state_dict: StateDict, by_torch: Callable[[StateDict], None]) -> None:
    """Load a state: converted and checked, then by torch, then with what that has cast put back."""
    refuse_others(optimizer, state_dict)
    loaded: StateDict = {}

    def convert(_: torch.optim.Optimizer, given: StateDict) -> StateDict:
        loaded.update(optimizer._from_torch(given))
        low = unpack(optimizer, loaded, saved_states(optimizer, loaded))
        params = [(n, p) for n, p, _ in saved_states(optimizer, loaded)]
        brain = [n for n, param in params if param.dtype == torch.bfloat16]
        warn_of_none(optimizer, [low[n] for n in brain if n in low])
        for group in loaded["param_groups"]:
            optimizer._check_numbers(group)
        optimizer._check_loaded(loaded, given["param_groups"])
        return loaded

    def restored(_: torch.optim.Optimizer) -> None:
        optimizer._restore(loaded)

    # After the user's hooks on the way in, before them on the way out.
    before = optimizer.register_load_state_dict_pre_hook(convert)
    after = optimizer.register_load_state_dict_post_hook(restored, prepend=True)
    try:
        by_torch(state_dict)
    finally:
        before.remove()
        after.remove()


def with_steps(optimizer: Any, saved: StateDict) -> StateDict:
    """Give groups without parameters the greatest step of all, in a state dict.

    In memory they have none: parameters that are added begin at the first step. But a rank of
    this checkpoint may have parameters there, whose steps were counted by others.
    """
    numbers = {id(group): n for n, group in enumerate(optimizer.param_groups)}
    counted = (
        optimizer._counted_groups()
        if optimizer._counts_steps and optimizer._partition is None
        else ()
    )
    groups = [saved["param_groups"][numbers[id(group)]] for group in counted]
    steps = [group["step"] for group in groups if "step" in group]
    for group in groups if steps else ():
        if not group["params"]:
            group["step"] = _greatest(steps)
    return saved


def saved_states(optimizer: Any, loaded: StateDict) -> Iterator[tuple[Any, torch.Tensor, Any]]:
    """Yield the number of each saved parameter, the parameter here, and its saved state."""
    saved = [number for group in loaded["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(saved, params, strict=False):  # other lengths: torch says so
        yield number, param, loaded["state"].get(number, {})


def check_loaded(optimizer: Any, loaded: StateDict, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if a saved state is another optimizer's or of another shape.

    Args:
        optimizer: Whose.
        loaded: The state dict, converted.
        groups: As they were saved, with no numbers added.
    """
    # A program may keep tensors of its own beside the slots, such as an average of the weights.
    # Where slots or numbers are missing, what looks like that is a slot of another optimizer.
    kept = [optimizer._slots_of(group) for group in optimizer.param_groups for _ in group["params"]]
    saved = [*zip(saved_states(optimizer, loaded), kept, strict=False)]
    numbers = optimizer.defaults.keys() - {*optimizer._not_in_torch}
    is_ours = all(numbers <= group.keys() for group in groups) and any(
        isinstance(state, Mapping) and {*slots} <= _slots_in(state) for (*_, state), slots in saved
    )
    # Adam's state and groups contain all that Lion keeps; "eps" tells them apart. It is a key of
    # the program if a group has it here too and the state has no slot of another optimizer.
    strange = {"eps", "momentum"} & {key for group in groups for key in group}
    strange -= optimizer.defaults.keys()
    foreign_slots = eight_bit.CODES.keys() - {*optimizer.slots}
    entries = {key for (*_, state), _ in saved for key in _slots_in(state)}
    if is_ours and foreign_slots.isdisjoint(entries):
        strange -= {key for group in optimizer.param_groups for key in group}
    if strange and loaded["state"]:
        raise ValueError(
            f"{optimizer._name}: the saved groups have {strange.pop()}, and this optimizer keeps "
            f"{', '.join(optimizer.defaults)}. Load the state into the kind of optimizer that "
            "saved it."
        )
    shapes = {slot: optimizer.slot_shapes.get(slot, _SHAPE) for slot in optimizer.slots}
    of_codes = {eight_bit.absmax_of(slot): eight_bit.absmax_like for slot in shapes}
    known = {*shapes, *of_codes, *map(eight_bit.codes_of, shapes), *optimizer._more_state}
    for (number, param, state), slots in saved:
        own = {*(slots or optimizer.slots)}
        tensors = {key: x for key, x in state.items() if isinstance(x, torch.Tensor)}
        both = param, local(param)
        others = {tensors[key].shape for key in tensors.keys() - known}
        foreign = not is_ours and any(x.shape in others for x in both)
        if foreign or _slots_in(tensors) & shapes.keys() not in (set(), own):
            raise ValueError(
                f"{optimizer._name}: the saved state of parameter {number} has "
                f"{', '.join(tensors)}, and this optimizer keeps {', '.join(sorted(own))}. "
                "Load the state into the kind of optimizer that saved it."
            )
        for slot in filter(functools.partial(eight_bit.is_code, tensors), shapes):
            if slot in tensors or eight_bit.absmax_of(slot) not in tensors:
                missing = f'no "{eight_bit.absmax_of(slot)}"'
                raise ValueError(
                    f"{optimizer._name}: the saved {slot} of parameter {number} is in 8 bits, and "
                    f"the state has {'a float32 one too' if slot in tensors else missing}. Load "
                    "the state as it was saved; load a gathered state into an optimizer of the "
                    "same state=."
                )
        for key in tensors.keys() & known:
            shape = tuple(tensors[key].shape)
            if shape not in [tuple({**shapes, **of_codes}.get(key, _SHAPE)(x)) for x in both]:
                raise ValueError(
                    f"{optimizer._name}: the saved {key} of parameter {number} has shape {shape}, "
                    f"and the parameter {tuple(param.shape)}. Load the state into the model "
                    "that it was saved with."
                )
            if key not in {*optimizer.slot_shapes, *of_codes} and not fits(param, tensors[key]):
                raise ValueError(
                    f"{optimizer._name}: the saved {key} of parameter {number} is "
                    f"{described(tensors[key])}, and the parameter is {described(param)}. Save and "
                    "load with torch.distributed.checkpoint, which converts states to the "
                    "placements of this run."
                )


def restore(optimizer: Any, loaded: StateDict) -> None:
    """Put back what torch has cast."""
    for _, param, state in saved_states(optimizer, loaded):
        for key, value in state.items():
            if key in (*optimizer.slots, *optimizer._more_state) and isinstance(
                value, torch.Tensor
            ):
                keeps = optimizer._keeps_saved_dtypes and optimizer._state_form != "bfloat16"
                keeps = keeps or key not in optimizer.slots
                dtype = value.dtype if keeps else optimizer._kept_dtype(key, param)
                value = value.detach().to(param.device, dtype, copy=True)
                entries = optimizer._entries(key, value, param)
                if key not in entries:
                    del optimizer.state[param][key]
                optimizer.state[param].update(entries)
        _restore_codes(optimizer, param, state)
        for key in {"low_bits", "error"} - {storage_of(optimizer.storage, param.dtype).column}:
            optimizer.state.get(param, {}).pop(key, None)
    for group in optimizer.param_groups:
        if isinstance(group.get("step"), torch.Tensor) and group["params"]:
            group["step"] = group["step"].to(group["params"][0].device)
        if not group["params"] and optimizer._partition is None:
            group.pop("step", None)  # see _with_steps
        optimizer._prepare(group)


def _restore_codes(optimizer: Any, param: torch.Tensor, state: Mapping[str, Any]) -> None:
    for slot in filter(functools.partial(eight_bit.is_code, state), optimizer.slots):
        here, names = optimizer.state[param], eight_bit.names_of(slot)
        for name in names:
            here[name] = state[name].detach().to(param.device, copy=True)
        if not optimizer._is_quantized(slot, param):
            here[slot] = eight_bit.value_of(here, slot).to(optimizer._kept_dtype(slot, param))
            for name in names:
                del here[name]


def from_torch(optimizer: Any, state_dict: StateDict) -> StateDict:
    """Convert a state dict of ``torch.optim``, whose steps are per parameter; ours stays.

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
        for key in {*optimizer._refused_keys} & group.keys() - optimizer.defaults.keys():
            if group.pop(key):
                raise ValueError(
                    f"{optimizer._name}: the state was saved with {key}=True, which this optimizer "
                    "does not support."
                )
        for key in _FOREIGN & group.keys() - optimizer.defaults.keys():
            group.pop(key)
        steps = {
            float(states[number].pop("step"))
            for number in group["params"]
            if "step" in states.get(number, {})
        }
        steps = steps if optimizer._counts_steps else set()
        if len(steps) > 1:
            raise ValueError(
                f"{optimizer._name}: the saved parameters of one group are at different steps "
                f"({sorted(steps)}), but this optimizer counts steps per group. Put them into "
                "different groups."
            )
        if steps and "step" not in group:
            group["step"] = int(steps.pop())
        defaults = {key: value for key, value in optimizer.defaults.items() if key != "lr"}
        groups.append({**defaults, **group})
    return {**state_dict, "state": states, "param_groups": groups}


def to_torch(optimizer: Any) -> StateDict:
    """The state for ``load_state_dict`` of the optimizer of this name in ``torch.optim``.

    Returns:
        A state dict with the step count at each parameter. Moments stay float32, but torch
        rounds them to a 16-bit parameter's dtype when it loads them.
    """
    saved, groups = optimizer.state_dict(), []
    unpack(optimizer, saved, saved_states(optimizer, saved))
    states = saved["state"]
    for group in saved["param_groups"]:
        group = dict(group)
        step = group.pop("step", 0)
        for number in {*group["params"]} & states.keys():
            # tensors would be shared
            state = eight_bit.widened(copy.deepcopy(states[number]))
            state = {key: state[key] for key in state if key not in optimizer._more_state}
            if type(optimizer)._counts_steps:
                state["step"] = torch.tensor(float(step), device="cpu", dtype=torch.float32)
            states[number] = optimizer._torch_state(state)
        groups.append(optimizer._torch_group(group))
    return {"state": states, "param_groups": groups}
