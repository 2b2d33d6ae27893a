"""What an optimizer keeps for its parameters: slots, masters, the storage's columns, checkpoints.

Slots such as ``exp_avg`` are per parameter, float32 unless an optimizer's contract says otherwise,
and stay so through ``load_state_dict``. The step count is per group, as in the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, methodcaller
from typing import Any, ClassVar

import torch

from apex.ops import _runtime
from apex.ops.lists.columns import local_parts
from apex.ops.lists.storage import PLAIN, STORAGES, Storage
from apex.optimizers import _checkpoint, _groups

MASTERED = methodcaller("__contains__", "master_param")
_SHAPE = attrgetter("shape")
_EXTRA = {"low_bits": "low_bits", "kahan": "error"}
# Attributes that a copy does not get: what amp puts on an optimizer, versions of tensors that are
# others in the copy, and a flag that a copy makes on the device where it is.
_NOT_COPIED = {"_amp_stash", "_scaled_step", "_written", "_dummy_overflow_buf"}


class StatefulOptimizer(torch.optim.Optimizer):
    """An optimizer that has slots, and its own way to save and load them.

    Args:
        params: Parameters or groups.
        defaults: Values of the group's numbers.
        storage: How weights are stored, see :mod:`apex.ops.lists.storage`.

    Raises:
        ValueError: There is no such storage.
    """

    #: Names of the state slots, in the order of the update.
    slots: tuple[str, ...] = ()
    #: Slots that are kept in the parameter's dtype, as the original does.
    narrow_slots: tuple[str, ...] = ()
    #: Shapes of slots that are not shaped like the weight, as functions of the parameter.
    slot_shapes: ClassVar[Mapping[str, Callable[[torch.Tensor], Sequence[int]]]] = {}
    #: Keys of the per-parameter state that are not slots.
    _more_state: tuple[str, ...] = ("master_param", "low_bits", "error")
    #: Numbers of a group that the optimizer of this name in torch.optim does not have.
    _not_in_torch: tuple[str, ...] = ()
    #: Whether loaded slots keep the dtype they were saved in, instead of getting a new slot's.
    _keeps_saved_dtypes = False
    #: Whether groups have a "step".
    _counts_steps = True
    #: dtypes of the parameters that get float32 masters.
    _mastered: frozenset[torch.dtype] = frozenset()

    def __init__(self, params: Any, defaults: dict[str, Any], storage: str) -> None:
        if storage not in STORAGES:
            raise ValueError(
                f"{type(self).__name__}: storage was {storage!r}; allowed are "
                f"{', '.join(map(repr, STORAGES))}."
            )
        self.storage = storage
        self._written: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch's copies hold only groups and state, and would lose a subclass's arguments. Hooks
        # and methods that amp or a scheduler has replaced stay with the original, as in torch.
        self._follow_written()
        arguments = {
            key: value
            for key, value in vars(self).items()
            if not (key in _NOT_COPIED or key.startswith("_optimizer_") or callable(value))
        }
        state: dict[str, Any] = super().__getstate__()
        return {**arguments, **state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_written", {})

    # -- the state of a parameter ------------------------------------------------------------------

    @property
    def _storage(self) -> Storage:
        return STORAGES[self.storage]

    def _states(self, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The state of each parameter: 0.03 us in their order, where hashing takes 0.1."""
        if len(self.state) == len(params) and all(map(is_, self.state, params)):
            return [*self.state.values()]
        return [*map(self.state.__getitem__, params)]

    def _stepped_slots(self) -> tuple[str, ...]:
        """The slots that a step needs now."""
        return self.slots

    def _state_of(
        self, param: torch.Tensor, slots: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        for slot in self._stepped_slots() if slots is None else slots:
            if slot not in state:
                state[slot] = self._new_slot(slot, param)
        storage = self._storage
        if storage.extra is not None and _EXTRA[storage.name] not in state:
            state[_EXTRA[storage.name]] = torch.zeros_like(param, dtype=storage.extra)
        return state

    def _master_or(self, param: torch.Tensor) -> torch.Tensor:
        """The parameter's master, made now if it is to have one; else the parameter."""
        state = self.state.get(param, {})
        if "master_param" not in state and param.dtype in self._mastered:
            state = self.state[param]
            master = state["master_param"] = param.detach().clone().float()
            self._written[param] = param._version, master
            return master
        found: torch.Tensor = state.get("master_param", param)
        return found

    def _follow_written(self) -> None:
        """Let what belongs to a weight follow if somebody else has written it since our last step.

        The storage's column becomes 0. A master becomes the weight where it would not be rounded to
        it. Right after loading nothing is done: model and optimizer are loaded in any order.
        """
        name = self._beside
        for param, (version, column) in self._written.items():
            if param._version == version or self.state.get(param, {}).get(name) is not column:
                continue
            if _runtime.capturing():
                raise RuntimeError(
                    f"{type(self).__name__}: a weight was written since the last step. A CUDA "
                    f'graph captured now would reset its "{name}" at each replay. Take a step '
                    "before capturing."
                )
            if name != "master_param":
                column.zero_()
            elif column.shape == param.shape:
                weight = param.detach()
                column.copy_(torch.where(column.to(weight.dtype) == weight, column, weight))
            self._written[param] = param._version, column

    def _note_versions(self) -> None:
        """Note the weights' versions, to see whether somebody else writes them."""
        name = self._beside
        if name is not None:
            self._written = {
                param: (param._version, state[name])
                for param, state in self.state.items()
                if isinstance(param, torch.Tensor) and name in state
            }

    @property
    def _beside(self) -> str | None:
        """The key of what belongs to the weight as it was stored last."""
        return _EXTRA.get(self.storage, "master_param" if self._mastered else None)

    def _new_slot(self, slot: str, param: torch.Tensor) -> torch.Tensor:
        dtype = self._slot_dtype(slot, param)
        if slot in self.slot_shapes:
            return param.new_zeros(*self.slot_shapes[slot](param), dtype=dtype)
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        narrow = slot in self.narrow_slots and self._storage is PLAIN
        return param.dtype if narrow else _wide(param.dtype)

    def _extras(
        self,
        params: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, Any]],
        copies: Mapping[torch.Tensor, torch.Tensor] | None,
        *,
        mastered: bool,
    ) -> Sequence[torch.Tensor | None] | None:
        """What is stored beside each weight; ``None`` if nothing is, for all of them."""
        name = _EXTRA.get(self.storage)
        if name is not None:
            if any(name not in state for state in states):
                states = [*map(self._state_of, params)]
            return local_parts([state[name] for state in states])
        if not mastered and not copies:
            return None
        copies = copies or {}
        return [
            weight if "master_param" in state else copies.get(param)
            for param, weight, state in zip(params, weights, states, strict=True)
        ]

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch saves it."""
        self._follow_written()
        found: dict[str, Any] = super().state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; of this class, or of the optimizer of its name in ``torch.optim``.

        Moments keep the dtype they were saved in: torch would round them to the parameter's.

        Raises:
            ValueError: The groups do not fit, or the state needs what this class does not do.
        """
        name = type(self).__name__
        _checkpoint.check_is_state_dict(name, state_dict)
        numbers = self.defaults.keys() - {*self._not_in_torch}
        loaded: dict[str, Any] = {}

        def convert(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._from_torch(given))
            for group in loaded["param_groups"]:
                self._check_numbers(group)
            _checkpoint.check_numbers_are_known(name, given, self.defaults)
            _checkpoint.check_states(
                name,
                loaded,
                self.param_groups,
                {slot: self.slot_shapes.get(slot, _SHAPE) for slot in self.slots},
                self._more_state,
                may_be_others=_checkpoint.has_slots_and_numbers(
                    given, self._stepped_slots(), numbers
                ),
            )
            return loaded

        def restore(_: torch.optim.Optimizer) -> None:
            self._restore(loaded)

        # After the user's hooks on the way in, before them on the way out.
        before = self.register_load_state_dict_pre_hook(convert)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a number out of range."""
        _groups.check_numbers(type(self).__name__, group)

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Put back what torch has cast."""
        for _, param, state in _checkpoint.saved_states(loaded, self.param_groups):
            for key, value in state.items():
                if key in (*self.slots, *self._more_state) and isinstance(value, torch.Tensor):
                    keeps = self._keeps_saved_dtypes or key not in self.slots
                    dtype = value.dtype if keeps else self._slot_dtype(key, param)
                    self.state[param][key] = value.detach().to(param.device, dtype, copy=True)
            for key in {*_EXTRA.values()} - {_EXTRA.get(self.storage)}:
                self.state.get(param, {}).pop(key, None)
        for group in self.param_groups:
            if isinstance(group.get("step"), torch.Tensor) and group["params"]:
                group["step"] = group["step"].to(group["params"][0].device)

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with the per-parameter step of ``torch.optim`` moved to the groups."""
        return _checkpoint.from_torch(
            type(self).__name__,
            state_dict,
            self.defaults,
            {key: value for key, value in self.defaults.items() if key != "lr"},
            counts_steps=self._counts_steps,
        )

    def torch_state_dict(self) -> dict[str, Any]:
        """The state for ``load_state_dict`` of the optimizer of this name in ``torch.optim``.

        Returns:
            A state dict with the step count at each parameter. Moments stay float32, but torch
            rounds them to a 16-bit parameter's dtype when it loads them.
        """
        return _checkpoint.to_torch(
            self.state_dict(),
            self._more_state,
            self._torch_state,
            self._torch_group,
            counts_steps=self._counts_steps,
        )

    def _torch_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state for ``torch.optim``."""
        return state

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group for ``torch.optim``."""
        raise NotImplementedError(f"torch.optim has no {type(self).__name__}.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
