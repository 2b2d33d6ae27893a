"""What a captured step depends on and no replay would notice: looked at before each replay.

| changed between replays | |
|---|---|
| a learning rate | written to the device, where the graph reads it |
| another number of a group, a static loss scale, numbers of a scaler, hooks, loaded state of an \
optimizer, groups | a new capture |
| ``model.train()``, ``model.eval()`` | the call runs without the graph |
| memory of a weight, ``requires_grad``, masters or 16-bit weights written past amp | an error, at \
every n-th replay: to look at 300 weights takes 0.2 ms |
| amp was reset, a watch of apex.debug was put on | an error |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from apex.amp.gradients import captures
from apex.amp.gradients.parameters import addresses
from apex.amp.optimizer import OptimizerState, state_of

_MODE, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
_OF_SCALER = attrgetter(
    "_static", "_scale_seq_len", "_growth_factor", "_backoff_factor", "_floor", "_ceiling"
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_WEIGHTS_A_LOOK = 10  # so that looking at 300 takes 10 us a replay, 0.2 to 0.3 ms each time


class Rate:
    """The learning rate of a group on the device, where the graph reads it.

    Without ``on`` the graph has the number itself: torch's optimizers without ``fused`` or
    ``capturable`` would wait to read it.
    """

    def __init__(self, group: dict[str, Any], on: torch.device | None) -> None:
        self.group: dict[str, Any] = group
        self.seen: Any = group.get("lr")
        is_number = not (isinstance(self.seen, torch.Tensor) and self.seen.device == on)
        self.tensor: torch.Tensor | None = None
        if on is not None and is_number and self.seen is not None:
            self.tensor = torch.full((), float(self.seen), dtype=torch.float32, device=on)

    def follow(self) -> bool:
        """Bring a changed one to the device; false if it cannot be."""
        now: Any = self.group.get("lr")
        is_tensor = isinstance(now, torch.Tensor)
        if now is self.seen and not (is_tensor and self.tensor is not None):
            return True  # a tensor on the device is read there
        if self.tensor is None or (is_tensor and now.device.type != "cpu"):
            return not is_tensor and not isinstance(self.seen, torch.Tensor) and now == self.seen
        self.tensor.fill_(float(now))
        self.seen = now
        return True


class Followed:
    """What the graph of a function depends on, of the ``optimizers`` that the function steps.

    Raises:
        RuntimeError: There is something that cannot be captured.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)
        self.states: list[OptimizerState] = []
        for optimizer in self.optimizers:
            self.states.append(_state_to_capture(optimizer))
        trainings = list(dict.fromkeys([state.training for state in self.states]))
        self.scalers = [scaler for one in trainings for scaler in one.loss_scalers]
        models = [model for one in trainings for ref, _ in one._models if (model := ref())]
        self._modules = [module for model in models for module in model.modules()]
        self._loaded = ""
        self._handles = [
            optimizer.register_load_state_dict_post_hook(self._note_loaded)
            for optimizer in self.optimizers
            if hasattr(optimizer, "register_load_state_dict_post_hook")
        ]
        self.device = next((p.device for s in self.states for p in s.params.stepped), None)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.rates = [Rate(group, _where_read(group, state)) for group, state in self._owned()]
        self._groups, self._keys = groups, [_keys(group) for group in groups]
        self._looks = 0
        self.look_again()

    def _owned(self) -> Iterator[tuple[dict[str, Any], OptimizerState]]:
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            for group in optimizer.param_groups:
                yield group, state

    def _note_loaded(self, optimizer: Any) -> None:
        self._loaded = f"{type(optimizer).__name__}.load_state_dict was called"

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    # -- the state as the graph knows it -----------------------------------------------------------

    def look_again(self, grads: Sequence[torch.Tensor] = ()) -> None:
        """Take the state now for that of the capture, whose graph writes to ``grads``."""
        params = [param for state in self.states for param in state.params.targets]
        masters = [tensor for state in self.states for tensor in state.params.tensors]
        self._params = [*params, *masters]
        self._every = 1 + len(params) // _WEIGHTS_A_LOOK
        self._memory = addresses(self._params)
        self._required = list(map(_REQUIRES_GRAD, params))
        self.modes = list(map(_MODE, self._modules))
        self._numbers = self._numbers_now()
        self._hooks, self._next_hook = self._hooks_now(), RemovableHandle.next_id
        self._exposes = [state.params.exposed for state in self.states]
        self._grads = grads  # held as long as the graph

    def _numbers_now(self) -> list[Any]:
        found: list[Any] = []
        for group, keys in zip(self._groups, self._keys, strict=True):
            found += map(group.get, keys)
            found.append(len(group["params"]))
        found += [len(optimizer.param_groups) for optimizer in self.optimizers]
        for values in map(_OF_SCALER, self.scalers):
            found += values
        return found

    def _hooks_now(self) -> list[int]:
        params = [len(getattr(p, "_backward_hooks", None) or ()) for p in self._params]
        later = [len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in self._params]
        modules = [len(getattr(one, name)) for one in self._modules for name in _HOOKS]
        return [*params, *later, *modules]

    # -- before a replay ---------------------------------------------------------------------------

    def is_in_another_mode(self) -> bool:
        """Whether a module is in ``train()`` or ``eval()`` other than in the capture."""
        return list(map(_MODE, self._modules)) != self.modes

    def change(self) -> str:
        """Follow what has changed; say what takes a new capture, or nothing.

        Raises:
            RuntimeError: Replays since the last look were wrong, or the step cannot be captured.
        """
        change = self._loaded or self._change_of_numbers() or self._change_of_hooks()
        if change:
            return change
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            if getattr(optimizer, "_amp_stash", None) is not state or state.observer is not None:
                _state_to_capture(optimizer)
                return f"{type(optimizer).__name__} went through amp.initialize again"
        for rate in self.rates:
            if not rate.follow():
                return "a learning rate changed that is not on the device"
        for state, exposes in zip(self.states, self._exposes, strict=True):
            if state.params.exposed and not exposes:  # what the forward would do
                state.params.reconcile()
        self._looks += 1
        if self._looks % self._every == 0:
            self._check_weights()
        return ""

    def _change_of_numbers(self) -> str:
        now = self._numbers_now()
        if all(map(is_, now, self._numbers)):
            return ""
        if not _equal(now, self._numbers):
            return f"{self._name_of_change(now)} changed"
        self._numbers = now
        return ""

    def _change_of_hooks(self) -> str:
        if RemovableHandle.next_id == self._next_hook:  # counts all hooks of the process
            return ""
        if self._hooks_now() != self._hooks:
            return "a hook was added to or removed from a module or a parameter"
        self._next_hook = RemovableHandle.next_id
        return ""

    def _name_of_change(self, now: list[Any]) -> str:
        names = [key for keys in self._keys for key in (*keys, "the number of parameters")]
        names += ["the number of groups"] * len(self.optimizers)
        of_scaler = ["loss_scale", "growth_interval", "growth_factor", "backoff_factor"]
        names += [*of_scaler, "min_loss_scale", "max_loss_scale"] * len(self.scalers)
        both = zip(names, now, self._numbers, strict=True)
        return next(name for name, new, old in both if not _equal([new], [old]))

    def _check_weights(self) -> None:
        """Raise where replays went on with other memory than the program's, or past its writes."""
        count = len(self._required)
        if addresses(self._params) != self._memory:
            what = "the memory of a weight was replaced (weight.data = ..., model.to(...))"
        elif list(map(_REQUIRES_GRAD, self._params[:count])) != self._required:
            what = "requires_grad of a weight was changed"
        elif any([state.params.weights and state.params.is_written() for state in self.states]):
            what = "a 16-bit weight or its master was written"
        else:
            return
        raise RuntimeError(
            f"amp.capture: {what} between replays, at most {self._every} replays ago, which a "
            "graph does not see: these replays went on from the state before. Do it before the "
            "first call, or make a new step after it, amp.capture(...). For weights use "
            "model.load_state_dict, which amp follows."
        )

    # -- the capture -------------------------------------------------------------------------------

    def is_settled(self) -> bool:
        """Whether the optimizers have all state, so that the host decides nothing any more."""
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            if state.training.is_dynamic():
                if not state._is_fused and captures.may_leave_uninitialized(optimizer):
                    return False
            elif state._step_check is not None:
                return False
            if state._model_check is not None and not state.params.records:
                return False
        return True

    @contextlib.contextmanager
    def numbers_on_the_device(self) -> Iterator[None]:
        """Inside of it, learning rates and counts of steps are tensors on the device.

        The counts stay there: a state of optimizers that count under a dynamic scale has them so.
        """
        for group, state in self._owned():
            if state._is_fused and type(group.get("step")) is int and group["params"]:
                on, step = group["params"][0].device, group["step"]
                group["step"] = torch.full((1,), step, dtype=torch.int32, device=on)
        before = [rate.group.get("lr") for rate in self.rates]
        for rate in self.rates:
            if rate.tensor is not None:
                rate.group["lr"] = rate.tensor
        try:
            yield
        finally:
            for rate, value in zip(self.rates, before, strict=True):
                if rate.tensor is not None:
                    rate.group["lr"] = value


def _keys(group: dict[str, Any]) -> list[str]:
    """What is compared of a group: its numbers, but for what optimizers and schedules count.

    State that an optimizer keeps in lists of a group is written in place.
    """
    counted = ("params", "lr", "step", "initial_lr")
    return [k for k, value in group.items() if k not in counted and not isinstance(value, list)]


def _equal(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Compare numbers; a tensor equals itself only: the graph reads its memory."""
    tensors = [isinstance(x, torch.Tensor) for x in (*now, *before)]
    if True not in tensors:
        return list(now) == list(before)
    both = zip(now, before, strict=True)
    return all(x is y or not isinstance(x, torch.Tensor) and _equal([x], [y]) for x, y in both)


def _where_read(group: dict[str, Any], state: OptimizerState) -> torch.device | None:
    """The device on which a step reads a learning rate in a tensor, if it does."""
    if not group["params"] or not (
        state._is_fused or group.get("fused") or group.get("capturable")
    ):
        return None
    device: torch.device = group["params"][0].device
    return device


def _state_to_capture(optimizer: Any) -> OptimizerState:
    """Return amp's record of an optimizer whose steps can be captured.

    Raises:
        RuntimeError: They cannot, or amp does not manage the optimizer.
    """
    state, name = state_of(optimizer), type(optimizer).__name__
    if state is None:
        raise RuntimeError(
            f"amp.capture: {name} was stepped in the function, and amp does not manage it. Pass it "
            "to amp.initialize (O0 changes nothing), or step it outside. After amp.reset() or "
            "another amp.initialize make a new step: amp.capture(...)."
        )
    if state.observer is not None:
        raise RuntimeError(
            f"amp.capture: apex.debug watches {name}, and looks at each step on the host. Take the "
            "watch off (close it, or initialize(debug=False))."
        )
    if any([record.synchronises is not None for record in state.params.records]):
        raise RuntimeError(
            "amp.capture: the model is inside of a DistributedDataParallel. Steps of several "
            "ranks are not captured yet. Call the function without amp.capture."
        )
    params = state.params.targets
    if state.training.process_group is not None or any(map(_is_sharded, params)):
        raise RuntimeError(
            "amp.capture: ranks hold parts of the model (FSDP, a DTensor, process_group=...). "
            "Steps of several ranks are not captured yet. Call the function without amp.capture."
        )
    if state.training.is_dynamic() and not state._takes_flag:
        captures.refuse_read(optimizer, takes_flag=False, is_watched=False)
    if not state._is_fused and optimizer.defaults.get("capturable") is False:
        raise RuntimeError(
            f"amp.capture: {name} counts its steps on the host, where replays would not count. "
            f"Make it with capturable=True ({name}(..., fused=True, capturable=True))."
        )
    return state


def _is_sharded(param: torch.Tensor) -> bool:
    """Whether it is a DTensor, or what torch's first FSDP makes of several parameters."""
    return hasattr(param, "placements") or type(param).__name__ == "FlatParameter"
