"""What a graph reads besides its arguments, and what it takes for given.

What it reads is written to the device before each replay: learning rates, and whether the step
before was skipped. What it takes for given is compared with what it was at the capture:

| changed since | looked at | what follows |
|---|---|---|
| another number of a group or an optimizer, a static loss scale, numbers of a scaler, hooks, \
loaded state of an optimizer, groups, gradients that the function adds to | before each call | \
a new capture |
| amp was reset, a watch of apex.debug was put on | before each call | an error |
| ``model.train()``, ``model.eval()`` | before each call | it runs without the graph |
| memory of a weight, a buffer or a state, modules, ``requires_grad``, masters or 16-bit weights \
written past amp | every n-th time: 300 weights take 0.3 ms | an error |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from apex._compat import private
from apex.amp.gradients import captures
from apex.amp.gradients.ledger import Pass
from apex.amp.gradients.left import Left
from apex.amp.gradients.parameters import addresses
from apex.amp.optimizer import OptimizerState, optimizers_inside, state_of
from apex.amp.training import Training

_MODE, _GRAD = itemgetter("training"), attrgetter("grad")
_OF_SCALER = {
    "static": "loss_scale", "_scale_seq_len": "growth_interval", "_growth_factor": "growth_factor",
    "_backoff_factor": "backoff_factor", "_min_loss_scale": "min_loss_scale",
    "_max_loss_scale": "max_loss_scale",
}  # fmt: skip
_NUMBERS = (float, int, bool)
# What groups have besides numbers, or count.
_COUNTED = ("params", "step", "initial_lr")
_STATE = "an optimizer's state (load_state_dict) or groups"
_HOOK = "a hook of a module, a parameter or an optimizer"
_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks",
    "_global_backward_hooks", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip
_OF_PARAM = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GRADIENTS = "gradients (call zero_grad in the function, before its backward)"
READ = "a tensor that it reads and that is not an argument (write to the tensor in place)"
_REPLACED = (
    "a module",
    "the memory of a weight, a buffer or a state of an optimizer (weight.data = ..., "
    "model.to(...), load_state_dict(assign=True))",
    "requires_grad of a weight",
)
_TENSORS_A_LOOK = 30  # so that looking takes 10 us a replay, whatever the model
_LOOKED_AT = 16  # weights whose gradients are looked at before each replay

# What reads a value, of each of these, and the values' names.
Row = tuple[Callable[[Any], Any], Sequence[Any], Sequence[str]]


class Values:
    """Values of the host: unchanged as long as they are the same objects, or equal numbers."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self._names = [name for _, _, names in self._rows for name in names]
        self.accept()

    def _now(self) -> list[Any]:
        found: list[Any] = []
        for read, owners, _ in self._rows:
            found += map(read, owners)
        return found

    def accept(self) -> None:
        """Take what is there now for unchanged."""
        self._seen = self._now()

    def change(self) -> str:
        """The first one that has changed, if any."""
        now = self._now()
        if all(map(is_, now, self._seen)):
            return ""
        for name, new, old in zip(self._names, now, self._seen, strict=True):
            if new is not old and (type(new) is not type(old) or not _equal(new, old)):
                return name
        self._seen = now
        return ""


def _equal(new: Any, old: Any) -> bool:
    """Compare numbers; a tensor, or a state, equals itself only: the graph reads its memory."""
    return isinstance(new, (int, float, str, tuple)) and bool(new == old)


def numbers_of(optimizers: Iterable[Any], on_device: Sequence[Any] = ()) -> Iterator[Row]:
    """The numbers of groups, and what loading replaces; in ``on_device`` are groups without lr.

    State that an optimizer keeps in lists of a group is written in place, and not a number.
    """
    for one in optimizers:
        for group in one.param_groups:
            skipped = (*_COUNTED, "lr") if any(group is other for other in on_device) else _COUNTED
            keys = [k for k, x in group.items() if k not in skipped and not isinstance(x, list)]
            yield group.get, keys, keys
            written = [k for k in keys if isinstance(group[k], torch.Tensor)]
            yield attrgetter("_version"), [group[k] for k in written], written
        lists = [one.param_groups, *(group["params"] for group in one.param_groups)]
        yield len, lists, [_STATE] * len(lists)
        yield _state, [one], [_STATE]


def _state(optimizer: Any) -> Any:
    return getattr(optimizer, "state", None)


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
    step before the capture. So these are in a tensor of its own, and so are those of later steps.
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
        """Bring the flags of a step without the graph there, if one came last.

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
    """What the graph of a function reads and takes for given, as it is after a call of it.

    Args:
        optimizers: The function steps them.
        trainings: Theirs, and others whose models it reads.
        read: Memory that it reads, and that neither amp nor a module holds.
        named: Names by which it reaches such memory (:mod:`~apex.amp.graphs.names`).
        clears: Whether it does not add to gradients that it finds.
        toggled: ids of weights whose ``requires_grad`` it sets.

    Raises:
        RuntimeError: There is something that cannot be captured.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        trainings: Sequence[Training],
        read: Sequence[StorageWeakRef],
        *,
        named: Sequence[Row] = (),
        clears: bool,
        toggled: set[int],
    ) -> None:
        self.optimizers, self.states = list(optimizers), list(map(state_to_capture, optimizers))
        self._trainings, self._read, self._toggled = list(trainings), list(read), toggled
        self._named = named
        both = zip(self.optimizers, self.states, strict=True)
        self._groups = [(g, s) for one, s in both for g in one.param_groups if g["params"]]
        self._rates = [Rate(group) for group, state in self._groups if _reads_tensor(group, state)]
        self._skipped = [Skipped(state) for state in self.states if state.training.is_dynamic()]
        modules = modules_of(self._trainings)
        self._modules = modules  # held: no other can have an id of these
        self._settings = list(map(vars, modules))
        self._modes = list(map(_MODE, self._settings))
        parameters = [state.params for state in self.states]
        self._unexposed = [params for params in parameters if not params.exposed]
        self._params = [x for params in parameters for x in (*params.targets, *params.tensors)]
        inside = set(map(id, tensors_of(modules)))
        self._outside = [param for param in self._params if id(param) not in inside]
        self._memory, self._hooks = self._memory_now(), [*chain(*self._hooks_now())]
        self._every, self._looks = 1 + len(self._memory[1]) // _TENSORS_A_LOOK, 0
        self._clears = clears
        self._values = Values(self._looked_at())

    def _looked_at(self) -> Iterator[Row]:
        """What is looked at before each call; :meth:`_change` knows of the last two."""
        yield from numbers_of(self.optimizers, [rate.group for rate in self._rates])
        for one in map(vars, self._with_wrapped()):  # LARC's trust_coefficient
            names = [name for name, x in one.items() if name[0] != "_" and type(x) in _NUMBERS]
            yield one.get, names, names
        for training in self._trainings:
            for scaler in training.loss_scalers:
                yield vars(scaler).get, [*_OF_SCALER], [*_OF_SCALER.values()]
        names = [f"what amp knows of {type(one).__name__}" for one in self.optimizers]
        yield state_of, self.optimizers, names
        yield attrgetter("observer"), self.states, names
        expired, memory = private.expired, [storage.cdata for storage in self._read]
        if expired is None:
            expired, memory = StorageWeakRef.expired, [*self._read]
        yield expired, memory, [READ] * len(memory)
        yield from self._named
        hooks = self._hooks_now()
        yield len, hooks, [_HOOK] * len(hooks)  # of removed ones nobody counts
        some = [] if self._clears else self._params[:: 1 + len(self._params) // _LOOKED_AT]
        yield _GRAD, some, [_GRADIENTS] * len(some)
        yield vars(RemovableHandle).get, ["next_id"], [_HOOK]  # counts all of the process

    # -- before and after a call ------------------------------------------------------------------

    def is_in_its_mode(self) -> bool:
        """Whether all modules are in ``train()`` or ``eval()`` as they were then."""
        return list(map(_MODE, self._settings)) == self._modes

    def change(self) -> str:
        """Say what takes a new capture, if anything.

        Raises:
            RuntimeError: Replays since the last look were wrong, or the step cannot be captured.
        """
        change = self._change(_HOOK)
        if change:
            for optimizer in self.optimizers:
                state_to_capture(optimizer)
            return change
        for params in self._unexposed:
            if params.exposed:  # what the forward would do
                params.reconcile()
        self._looks += 1
        if self._looks % self._every == 0:
            self.check()
        return ""

    def _change(self, *passing: str) -> str:
        change = self._values.change()
        if change in passing and [*chain(*self._hooks_now())] == self._hooks:
            self._values.accept()
            return ""
        return change

    def check(self) -> None:
        """Raise ``RuntimeError`` where replays went on with other memory than the program's."""
        what = self._replaced()
        if what:
            raise RuntimeError(
                f"amp.capture: {what} changed between the last {self._every + 1} calls. A graph "
                "does not see this, so replays used the old state. Change it before the first "
                "call, or call amp.capture(...) again after the change. For weights use "
                "model.load_state_dict, which amp follows."
            )

    def change_by_call(self) -> str:
        """What a call without the graph has changed; gradients are those that it leaves."""
        return self._change(_HOOK, _GRADIENTS) or self._replaced()

    def _replaced(self) -> str:
        """What the graph reads where it is no more, or past amp's writes."""
        for name, now, before in zip(_REPLACED, self._memory_now(), self._memory, strict=True):
            if now != before:
                return name
        for params in [state.params for state in self.states if state.params.weights]:
            if params.exposed:
                params.reconcile()
            elif params.is_written():
                return "a 16-bit weight or its master"
        return ""

    def _memory_now(self) -> tuple[list[Any], ...]:
        """What :data:`_REPLACED` names."""
        modules = modules_of(self._trainings)
        states = [x for one in self.optimizers for x in (_state(one) or {}).values()]
        kept = [x for state in states if isinstance(state, dict) for x in state.values()]
        own = [x for x in kept if isinstance(x, torch.Tensor)]
        tensors = [*tensors_of(modules), *self._outside, *own]
        trained = [x.requires_grad for x in tensors if id(x) not in self._toggled]
        return list(map(id, modules)), [*addresses(tensors)], trained

    def _with_wrapped(self) -> list[Any]:
        """The optimizers, and those inside of wrappers."""
        return [one for outer in self.optimizers for one in (outer, *optimizers_inside(outer))]

    def _hooks_now(self) -> list[Any]:
        """The dicts of torch with hooks in them, by number."""
        modules = modules_of(self._trainings)
        owners = map(vars, (*modules, *self._with_wrapped(), torch_module, torch_optimizer))
        found = [owner.get(name) for owner in owners for name in _HOOKS]
        found += [getattr(param, name, None) for param in self._params for name in _OF_PARAM]
        return [hooks for hooks in found if hooks]

    # -- the capture -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Before a capture or a replay: bring to the device what the graph reads there."""
        for rate in self._rates:
            rate.follow()
        for skipped in self._skipped:
            skipped.follow()

    @contextlib.contextmanager
    def on_the_device(self) -> Iterator[None]:
        """Inside of it, learning rates and counts of steps are tensors on the device.

        The counts stay there: a state of optimizers that count under a dynamic scale has them so.
        """
        self.follow()
        for group, state in self._groups:
            if state.skipping.scales and type(group.get("step")) is int:
                step, device = group["step"], group["params"][0].device
                group["step"] = torch.full((1,), step, dtype=torch.int32, device=device)
        before = [rate.group["lr"] for rate in self._rates]
        try:
            for rate in self._rates:
                rate.group["lr"] = rate.tensor
            yield
        finally:
            for rate, value in zip(self._rates, before, strict=True):
                rate.group["lr"] = value

    def note_skipped(self) -> None:
        """At the end of a capture: have each replay tell the next one whether it was skipped."""
        for one in self._skipped:
            one.note()

    def end_capture(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """After a capture: which ``gradients`` from before it the graph reads or writes.

        Those that are there now are what it leaves.
        """
        self._change(_HOOK, _GRADIENTS)
        held = [] if self._clears else list(gradients)
        for state in self.states:  # go with the graph, not with the ledger
            held += state.ledger.in_graphs
            state.ledger.in_graphs = []
        return held


def _reads_tensor(group: dict[str, Any], state: OptimizerState) -> bool:
    """Whether a step reads a learning rate on the device; torch's others would wait for it."""
    reads = state.skipping.scales or group.get("fused") or group.get("capturable")
    return bool(reads) and group.get("lr") is not None


def is_settled(states: Iterable[OptimizerState]) -> bool:
    """Whether the optimizers have all state, so that the host decides nothing any more."""
    own = [one for one in states if one.training.is_dynamic() and not one.skipping.scales]
    return not any([captures.may_leave_uninitialized(one.optimizer()) for one in own])


def state_to_capture(optimizer: Any) -> OptimizerState:
    """Return amp's record of an optimizer whose steps can be captured.

    Raises:
        RuntimeError: They cannot, or amp does not manage the optimizer.
    """
    state, name = state_of(optimizer), type(optimizer).__name__
    if state is None:
        raise RuntimeError(
            f"amp.capture: the function stepped {name}, which amp does not manage. Pass it to "
            "amp.initialize (O0 changes nothing), or step it outside the function. After "
            "amp.reset() or another amp.initialize, call amp.capture(...) again."
        )
    if state.observer is not None:
        raise RuntimeError(
            f"amp.capture: apex.debug watches {name} and looks at each step on the host. Close the "
            "watch, or call initialize(debug=False)."
        )
    is_wrapped = any([record.synchronises is not None for record in state.params.records])
    has_group = state.training.process_group is not None
    if is_wrapped or has_group or any(map(_is_sharded, state.params.targets)):
        parts = "ranks hold parts of the model (FSDP, a DTensor, process_group=...)"
        what = "the model is inside a DistributedDataParallel" if is_wrapped else parts
        raise RuntimeError(
            f"amp.capture: {what}. apex cannot capture steps of several ranks yet. Call the "
            "function without amp.capture."
        )
    if state.training.is_dynamic() and not state.skipping.takes_flag:
        captures.refuse_read(optimizer, takes_flag=False, is_watched=False)
    if not state.skipping.scales and optimizer.defaults.get("capturable") is False:
        raise RuntimeError(
            f"amp.capture: {name} counts its steps on the host, and replays would not increase the "
            f"count. Make it with capturable=True ({name}(..., fused=True, capturable=True))."
        )
    return state


def _is_sharded(param: torch.Tensor) -> bool:
    """Whether it is a DTensor, or what torch's first FSDP makes of several parameters."""
    return hasattr(param, "placements") or type(param).__name__ == "FlatParameter"
