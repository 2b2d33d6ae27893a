"""What a captured step depends on and no replay would notice: looked at before each replay.

| changed between replays | |
|---|---|
| a learning rate | written to the device, where the graph reads it |
| another number of a group, a static loss scale, numbers of a scaler, hooks, loaded state of an \
optimizer, groups | a new capture |
| ``model.train()``, ``model.eval()``, gradients that the program gives or clears | the call runs \
without the graph |
| memory of a weight, a buffer or a state, modules, ``requires_grad``, masters or 16-bit weights \
written past amp | an error, at every n-th replay: to look at 300 weights takes 0.3 ms |
| amp was reset, a watch of apex.debug was put on | an error |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from apex.amp.gradients import captures
from apex.amp.gradients.ledger import Pass
from apex.amp.gradients.left import Left
from apex.amp.gradients.parameters import addresses
from apex.amp.optimizer import OptimizerState, state_of
from apex.amp.training import Training

_MODE, _GRAD, _REQUIRES_GRAD = (
    itemgetter("training"),
    attrgetter("grad"),
    attrgetter("requires_grad"),
)
_OF_SCALER = {
    "_static": "loss_scale", "_scale_seq_len": "growth_interval", "_growth_factor": "growth_factor",
    "_backoff_factor": "backoff_factor", "_min_loss_scale": "min_loss_scale",
    "_max_loss_scale": "max_loss_scale",
}  # fmt: skip
# What groups have besides numbers, or count.
_COUNTED = ("params", "step", "initial_lr")
_OF_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAM = ("_backward_hooks", "_post_accumulate_grad_hooks")
_REPLACED = (
    "a module",
    "the memory of a weight, a buffer or a state of an optimizer (weight.data = ..., "
    "model.to(...), load_state_dict(assign=True))",
    "requires_grad of a weight",
)
_TENSORS_A_LOOK = 30  # so that looking takes 10 us a replay, whatever the model
_LOOKED_AT = 16  # weights whose gradients are looked at before each replay


class Numbers:
    """The numbers of optimizers' groups and of scalers; in ``on_device`` are groups without lr.

    With ``versions`` a tensor that was written has changed, too. State that an optimizer keeps in
    lists of a group is written in place, and not a number.
    """

    def __init__(
        self,
        optimizers: Iterable[Any],
        on_device: Sequence[Any] = (),
        scalers: Iterable[Any] = (),
        *,
        versions: bool = False,
    ) -> None:
        self._optimizers, self._versions = list(optimizers), versions
        self._read: list[tuple[dict[str, Any], Any]] = []
        for group in [group for one in self._optimizers for group in one.param_groups]:
            skipped = (*_COUNTED, "lr") if any(group is one for one in on_device) else _COUNTED
            keys = [k for k, x in group.items() if k not in skipped and not isinstance(x, list)]
            self._read.append((group, keys))
        self._read += [(vars(scaler), _OF_SCALER) for scaler in scalers]
        self._names = [_OF_SCALER.get(name, name) for _, keys in self._read for name in keys]
        self._seen = self._now()

    def _now(self) -> list[Any]:
        found: list[Any] = []
        for owner, keys in self._read:
            found += map(owner.get, keys)
        if self._versions:
            found = [x._version if isinstance(x, torch.Tensor) else x for x in found]
        for one in self._optimizers:  # loading replaces the state
            found += [getattr(one, "state", None), *[len(g["params"]) for g in one.param_groups]]
        return found

    def change(self) -> str:
        """Which has changed, if any."""
        now = self._now()
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return ""
        for place, (new, old) in enumerate(zip_longest(now, self._seen)):
            if new is not old and (type(new) is not type(old) or not _equal(new, old)):
                others = "an optimizer's state (load_state_dict) or groups"
                return self._names[place] if place < len(self._names) else others
        self._seen = now
        return ""


def _equal(new: Any, old: Any) -> bool:
    """Compare numbers; a tensor, or a state, equals itself only: the graph reads its memory."""
    return isinstance(new, (int, float, str, tuple)) and bool(new == old)


def is_gone(storage: StorageWeakRef) -> bool:
    """Whether nobody holds the memory any more."""
    gone: bool = storage.expired()  # type: ignore[no-untyped-call]
    return gone


def modules_of(trainings: Iterable[Training]) -> list[torch.nn.Module]:
    """All modules of the models that went through ``initialize``."""
    models = [model for one in trainings for ref, _ in one._models if (model := ref()) is not None]
    return [module for model in models for module in model.modules()]


def tensors_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of ``modules``."""
    kept = [one for module in modules for one in (module._parameters, module._buffers)]
    return [tensor for one in kept for tensor in one.values() if tensor is not None]


class Rate:
    """The learning rate of a group, in a tensor on the device: there the graph reads it."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, rate = group, group["lr"]
        dtype = rate.dtype if isinstance(rate, torch.Tensor) else torch.float32
        self.tensor = torch.empty((), dtype=dtype, device=group["params"][0].device)
        self._seen: Any = None
        self.follow()

    def follow(self) -> None:
        """Bring one that has changed to the device."""
        rate: Any = self.group["lr"]
        if not isinstance(rate, torch.Tensor):
            if rate != self._seen:
                self.tensor.fill_(float(rate))
                self._seen = rate
        elif self._seen != (id(rate), rate._version):
            self.tensor.copy_(rate.view(()), non_blocking=True)
            self._seen = id(rate), rate._version


class Skipped:
    """Whether the step before was skipped, in a tensor on the device: there the graph reads it.

    A graph drops what a skipped step has left (:mod:`apex.amp.gradients.left`) by the flags of the
    step before the capture. Those of the step before a replay are brought there.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._ledger = state.ledger
        self._flag = flag = torch.zeros(
            (), dtype=torch.float32, device=state.params.targets[0].device
        )
        scaler, ledgers = state.training.loss_scalers[0], [self._ledger]
        before = Pass(scaler, 0, ledgers, flag, found_inf=flag, counted=flag - 1)
        self._left = Left([before])

    def follow(self) -> None:
        """Before a replay: bring the flags of a step without the graph there, if one came between.

        Afterwards the ledger has the flags that the graph writes.
        """
        if self._ledger.left is not self._left:
            self._write(self._ledger.left)
            self._ledger.left = self._left

    def note(self) -> None:
        """At the end of a capture: bring the flags of the captured step there, in each replay."""
        self._left = self._ledger.left
        self._write(self._left)

    def _write(self, left: Left) -> None:
        flags = [one.found_inf.to(self._flag.device, non_blocking=True) for one in left.passes]
        self._flag.copy_(torch.stack(flags).amax()) if flags else self._flag.zero_()


class Followed:
    """What the graph of a function depends on, of the ``optimizers`` that the function steps.

    ``clears`` says whether the function does not add to gradients of these weights that it finds.
    ``read`` is the memory that it reads and that neither amp nor a module holds.

    Raises:
        RuntimeError: There is something that cannot be captured.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        clears: Callable[[Any], bool],
        read: Sequence[StorageWeakRef],
    ) -> None:
        self._read = list(read)
        self.optimizers = list(optimizers)
        self.states = [state_to_capture(optimizer) for optimizer in self.optimizers]
        self._trainings = list(dict.fromkeys([state.training for state in self.states]))
        both = zip(self.optimizers, self.states, strict=True)
        self._groups = [(g, s) for one, s in both for g in one.param_groups if g["params"]]
        self.rates = [Rate(group) for group, state in self._groups if _reads_tensor(group, state)]
        self._skipped = [Skipped(state) for state in self.states if state.training.is_dynamic()]
        scalers = [scaler for one in self._trainings for scaler in one.loss_scalers]
        self._numbers = Numbers(self.optimizers, [rate.group for rate in self.rates], scalers)
        self._modes = list(map(vars, modules_of(self._trainings)))
        params = [param for state in self.states for param in state.params.targets]
        self._params = [*params, *(x for state in self.states for x in state.params.tensors)]
        inside = set(map(id, tensors_of(modules_of(self._trainings))))
        self._outside = [param for param in self._params if id(param) not in inside]
        self._some = self._params[:: 1 + len(self._params) // _LOOKED_AT]
        # As the graph knows them.
        self._trained, self._left = self._modes_now(), self._gradients()
        self._memory, self._hooks = self._memory_now(), self._hooks_now()
        self._next_hook = RemovableHandle.next_id
        self._exposes = [state.params.exposed for state in self.states]
        self._every, self._looks = 1 + len(self._memory[1]) // _TENSORS_A_LOOK, 0
        self._clears, self._held = clears(self._params), list[torch.Tensor]()

    def _gradients(self) -> list[torch.Tensor | None]:
        return list(map(_GRAD, self._some))

    # -- what decides whether a call replays -------------------------------------------------------

    def _modes_now(self) -> list[bool]:
        return list(map(_MODE, self._modes))

    def is_in_another_mode(self) -> bool:
        """Whether a module is in ``train()`` or ``eval()`` other than in the capture."""
        return self._modes_now() != self._trained

    def refuse_others(self, optimizers: Sequence[Any]) -> None:
        """Raise ``RuntimeError`` if the capture has stepped others than the call before."""
        if set(map(id, optimizers)) != set(map(id, self.optimizers)):
            raise RuntimeError(
                "amp.capture: it steps other optimizers in other calls. A replay repeats one call: "
                "capture a function that steps the same ones each time"
            )

    def captured(self, held: list[torch.Tensor]) -> None:
        """Note the gradients that were there before and to which the graph writes."""
        self._held, self._left = held, self._gradients()
        for state in self.states:  # goes with the graph, not with the ledger
            self._held += state.ledger.in_graphs
            state.ledger.in_graphs = []

    # -- before a call -----------------------------------------------------------------------------

    def change(self) -> str:
        """Follow what has changed; say what takes a new capture, or nothing.

        Raises:
            RuntimeError: Replays since the last look were wrong, or the step cannot be captured.
        """
        change = self._numbers.change() or self._change_of_hooks()
        if change:
            return change
        both = zip(self.optimizers, self.states, self._exposes, strict=True)
        for optimizer, state, exposes in both:
            if state_of(optimizer) is not state or state.observer is not None:
                state_to_capture(optimizer)
                return f"what amp knows of {type(optimizer).__name__}"
            if state.params.exposed and not exposes:  # what the forward would do
                state.params.reconcile()
        if any(map(is_gone, self._read)):
            return "a tensor that it reads and does not get as an argument (write to it in place)"
        if not self._clears and not all(map(is_, self._gradients(), self._left)):
            return "gradients (call zero_grad in the function, before its backward)"
        for rate in self.rates:
            rate.follow()
        self._looks += 1
        if self._looks % self._every == 0:
            self.check()
        return ""

    def _hooks_now(self) -> list[int]:
        owners: list[tuple[Any, Sequence[str]]] = [(param, _OF_PARAM) for param in self._params]
        owners += [(module, _OF_MODULE) for module in modules_of(self._trainings)]
        return [len(getattr(one, name, None) or ()) for one, names in owners for name in names]

    def _change_of_hooks(self) -> str:
        if RemovableHandle.next_id == self._next_hook:  # counts all hooks of the process
            return ""
        if self._hooks_now() != self._hooks:
            return "a hook of a module or a parameter"
        self._next_hook = RemovableHandle.next_id
        return ""

    # -- memory ------------------------------------------------------------------------------------

    def _memory_now(self) -> tuple[list[Any], ...]:
        """What :data:`_REPLACED` names."""
        modules = modules_of(self._trainings)
        states = [x for one in self.optimizers for x in getattr(one, "state", {}).values()]
        kept = [x for state in states if isinstance(state, dict) for x in state.values()]
        own = [x for x in kept if isinstance(x, torch.Tensor)]
        tensors = [*tensors_of(modules), *self._outside, *own]
        return list(map(id, modules)), [*addresses(tensors)], list(map(_REQUIRES_GRAD, tensors))

    def _replaced(self) -> str:
        """What the graph reads where it is no more, or past amp's writes."""
        for name, now, before in zip(_REPLACED, self._memory_now(), self._memory, strict=True):
            if now != before:
                return name
        written = [state.params.weights and state.params.is_written() for state in self.states]
        return "a 16-bit weight or its master" if any(written) else ""

    def check(self) -> str:
        """Raise ``RuntimeError`` where replays went on with other memory than the program's."""
        what = self._replaced()
        if what:
            raise RuntimeError(
                f"amp.capture: {what} changed between calls, at most {self._every} ago, which a "
                "graph does not see: its replays went on from the state before. Do it before the "
                "first call, or make a new step after it, amp.capture(...). For weights use "
                "model.load_state_dict, which amp follows."
            )
        return ""

    def change_by_call(self) -> str:
        """What a call without the graph has replaced, if anything."""
        self._left = self._gradients()
        return self._replaced()

    def follow_skipped(self) -> None:
        """Before a capture or a replay: bring to the graph whether the last step was skipped."""
        for one in self._skipped:
            one.follow()

    def note_skipped(self) -> None:
        """At the end of a capture: have each replay bring its own to the next one."""
        for one in self._skipped:
            one.note()

    # -- the capture -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def numbers_on_the_device(self) -> Iterator[None]:
        """Inside of it, learning rates and counts of steps are tensors on the device.

        The counts stay there: a state of optimizers that count under a dynamic scale has them so.
        """
        for group, state in self._groups:
            if state._is_fused and type(group.get("step")) is int:
                step, device = group["step"], group["params"][0].device
                group["step"] = torch.full((1,), step, dtype=torch.int32, device=device)
        before = [rate.group["lr"] for rate in self.rates]
        try:
            for rate in self.rates:
                rate.group["lr"] = rate.tensor
            yield
        finally:
            for rate, value in zip(self.rates, before, strict=True):
                rate.group["lr"] = value


def _reads_tensor(group: dict[str, Any], state: OptimizerState) -> bool:
    """Whether a step reads a learning rate on the device; torch's others would wait for it."""
    reads = state._is_fused or group.get("fused") or group.get("capturable")
    return bool(reads) and group.get("lr") is not None


def is_settled(states: Iterable[OptimizerState]) -> bool:
    """Whether the optimizers have all state, so that the host decides nothing any more."""
    own = [one for one in states if one.training.is_dynamic() and not one._is_fused]
    return not any([captures.may_leave_uninitialized(one._optimizer()) for one in own])


def state_to_capture(optimizer: Any) -> OptimizerState:
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
