"""``FusedSGD``: SGD with momentum in one launch, with the attributes that amp drives it by."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import required

from apex.multi_tensor_apply import list_functions
from apex.ops import _runtime
from apex.ops.lists.quantized import NEGATIVE_ZERO
from apex.ops.lists.storage import StepOptions
from apex.ops.lists.tensor_lists import Scalar
from apex.ops.updates.sgd import SGD, sgd_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._checkpoint import TORCH_ONLY
from apex.optimizers._lost import PLAIN_BY_DEFAULT
from apex.optimizers._step import Launch


class FusedSGD(FusedOptimizer):
    """SGD, with momentum, dampening and Nesterov's variant, in one launch for all parameters.

    Drop-in for ``torch.optim.SGD``. The docstring of :mod:`apex.ops.updates.sgd` has the formula.
    Momentum buffers have the parameter's dtype, as in the original, or float32 with a ``storage``
    other than ``"plain"``.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups.
        lr: Learning rate, required here or in each group. A tensor is read on its device.
        momentum: Decay of the momentum buffer.
        dampening: Share of each gradient that is not added to the buffer.
        weight_decay: L2 penalty. A tensor is read on its device.
        nesterov: Whether to use Nesterov's momentum.
        wd_after_momentum: Add the penalty after the momentum.
        materialize_master_grads: For amp at O2: whether masters have gradients of their own, or the
            step reads the model's gradients, which are still scaled.

    Attributes:
        most_recent_scale: Factor that gradients are still multiplied by. The next step divides by
            it and sets it to 1.
        scale_set_by_backward: Whether ``most_recent_scale`` was set since the last step.

    Raises:
        ValueError: There is no ``lr``; or you asked for Nesterov's momentum without momentum, or
            with dampening.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    slots = ("momentum_buffer",)
    _numbers = SGD
    narrow_slots = ("momentum_buffer",)
    _counts_steps = False
    set_grad_none = False
    wd_after_momentum, materialize_master_grads = False, True
    most_recent_scale: float | torch.Tensor = 1.0
    scale_set_by_backward = False
    # Subclasses with a step of their own call these, as in the original.
    multi_tensor_sgd = staticmethod(list_functions.multi_tensor_sgd)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        storage: str = PLAIN_BY_DEFAULT,
        state: str = "plain",
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov,
        }  # fmt: skip
        self.wd_after_momentum = bool(wd_after_momentum)
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, state=state
        )
        if state != "plain" and not self._stepped_slots():
            raise ValueError(
                f'FusedSGD: state="{state}" stores momentum buffers, but no group has momentum. '
                "Pass a momentum, or leave state out."
            )

    @functools.cached_property
    def _begun(self) -> dict[int, Sequence[torch.Tensor]]:
        """Buffers that are known to have a history, by the id of the first of some parameters."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).pop("_begun", None)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        super()._check_numbers(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                "Nesterov momentum requires a momentum and zero dampening; momentum was "
                f"{group['momentum']}, dampening {group['dampening']}."
            )

    def get_momentums(
        self, params: Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], bool]:
        """Return the momentum buffers, and make those that are missing.

        Returns:
            The buffers, and whether all of them are new.

        Raises:
            RuntimeError: Buffers are stored in 8 bits.
        """
        if self._state_form == "8bit":
            raise RuntimeError(
                'FusedSGD: with state="8bit" a momentum buffer may be stored as 8-bit codes. Leave '
                "state out if your program updates weights itself."
            )
        params = list(params)
        fresh = all(self._is_fresh(param) for param in params)
        return [self._state_of(param, self.slots)["momentum_buffer"] for param in params], fresh

    def _stepped_slots(self) -> tuple[str, ...]:
        # As in torch: no buffers where no group has momentum.
        for group in self.param_groups:
            if group["momentum"]:
                return self.slots
        return ()

    def _new_slot(self, slot: str, param: torch.Tensor) -> torch.Tensor:
        return super()._new_slot(slot, param).fill_(-0.0)

    def _is_fresh(self, param: torch.Tensor) -> bool:
        return "momentum_buffer" not in self.state.get(param, {})

    def _take_step(self, factor: Scalar, *options: Any) -> None:
        scale = self.most_recent_scale
        if type(scale) is not float and isinstance(scale, torch.Tensor):
            factor = scale.reciprocal().float() * factor
        elif scale != 1.0:
            factor = factor / scale
        super()._take_step(factor, *options)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False

    def _update(self, group: dict[str, Any], launch: Launch, options: StepOptions) -> None:
        numbers = self._numbers_of(group, launch.device)
        columns = launch.columns if numbers.momentum else launch.columns[:2]
        if not (numbers.momentum and numbers.dampening):
            sgd_(columns, numbers, options)
            return
        buffers, begun = columns[2], self._begun.get(id(launch.params[0]), ())
        first = None
        if len(begun) != len(buffers) or not all(map(is_, begun, buffers)):
            # The first gradient enters whole, in spite of dampening. Looked at is the buffer, on
            # its device, because a step that is skipped there does not begin a history.
            first = torch.stack([*map(_is_new, buffers)]).float()
            if not _runtime.waits(launch.device) and not first.any():
                first = None
        sgd_(columns, numbers, options, first)
        if first is None or options.noop is None:
            self._begun[id(launch.params[0])] = buffers

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        theirs = any("foreach" in group for group in state_dict["param_groups"])
        states = {}
        for number, state in state_dict["state"].items():
            if isinstance(state, Mapping):  # else a user's own
                state = {key: value for key, value in state.items() if value is not None}
                if theirs and "momentum_buffer" in state:  # -0.0 would be taken for a new one
                    state["momentum_buffer"] = state["momentum_buffer"] + 0.0
            states[number] = state
        return super()._from_torch({**state_dict, "state": states})

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if self.wd_after_momentum and group["weight_decay"] and group["momentum"]:
            raise ValueError(
                "FusedSGD: torch.optim.SGD adds the weight decay before the momentum; with "
                "wd_after_momentum=True it would compute something else. Save state_dict()."
            )
        return {**group, **TORCH_ONLY}


def _is_new(buffer: torch.Tensor) -> torch.Tensor:
    """Whether a buffer has elements and no history: all are -0.0."""
    if buffer.dtype == torch.uint8:  # quantised to 8 bits
        return buffer.eq(NEGATIVE_ZERO).all() & bool(buffer.numel())
    return (buffer.eq(0) & buffer.signbit()).all() & bool(buffer.numel())
