"""What is kept of each forward of a step, and how it is run again.

A call keeps, by reference, its inputs and the gradients that reached its outputs; and, copied, the
states of random numbers and autocast, and those buffers that a forward writes and a result depends
on (not BatchNorm's statistics while training). A replay runs the forward and then backward from the
kept gradients. It uses ``torch.autograd.grad``, so that no ``.grad`` is written and no hook of a
parameter runs; where that cannot work (FSDP2, reentrant checkpoints) it uses ``backward`` and gives
the gradients back afterwards.
"""

from __future__ import annotations

import copy
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from apex._compat import private
from apex._compat.private import tree_flatten, tree_map
from apex.debug.tensors import is_bad, local, plain

_ON_DEVICES = ("cpu", "cuda")
AutocastState = tuple[str, torch.dtype, bool, bool]
_MAPPINGS = (dict, UserDict)  # of classes that torch.utils._pytree does not know


def _parts_of(leaf: Any) -> dict[Any, Any]:
    """What is in an object that torch's pytrees do not know, by key or name of the attribute."""
    if isinstance(leaf, _MAPPINGS):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {one.name: getattr(leaf, one.name, None) for one in fields(leaf)}
    if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.nn.Module | type):
        return {name: one for name, one in vars(leaf).items() if isinstance(one, torch.Tensor)}
    return {}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of nested containers, and of the attributes of objects in them."""
    if isinstance(tree, torch.Tensor):  # usual, and ten times faster
        return [tree]
    if isinstance(tree, tuple) and all(isinstance(one, torch.Tensor) for one in tree):
        return list(tree)
    found: list[torch.Tensor] = []
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif parts := _parts_of(leaf):
            found += tensors_in(list(parts.values()))
    return found


def _sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Of a floating tensor its sum, not finite if an element is not (or if it overflows)."""
    floating = tensor.is_floating_point()
    return [local(tensor.detach()).sum(dtype=torch.float32)] if floating else []


def _uses_gpus() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_states() -> list[torch.Tensor]:
    """Of the CPU and of all GPUs, if any is in use: a model may draw on each that it is on."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if _uses_gpus() else [])]


def autocast_states() -> list[AutocastState]:
    """The arguments of ``torch.autocast`` that give back what is set now."""
    cache = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache)
        for kind in _ON_DEVICES[: 1 + _uses_gpus()]
    ]


@contextmanager
def autocast_of(states: list[AutocastState]) -> Iterator[None]:
    """Run what is inside under the autocast that :func:`autocast_states` returned."""
    with ExitStack() as stack:
        for entry in states:
            stack.enter_context(torch.autocast(*entry))
        yield


def stateful(model: torch.nn.Module) -> list[torch.Tensor]:
    """Buffers that a forward may read after it has written them; BatchNorm's it does not read."""
    return [
        buffer
        for module in plain(model).modules()
        if not (isinstance(module, private.BatchNorm) and module.training)
        for buffer in module.buffers(recurse=False)
    ]


def is_transformed() -> bool:
    """Whether torch.func or a tracer runs the model: on tensors without memory of their own."""
    transformed = private.maybe_current_level() is not None
    return transformed or private.get_tracing_state() is not None


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written."""
    return -1 if tensor.is_inference() else tensor._version


class Call:
    """One forward of a watched model, see the module's text.

    Attributes:
        passes: For each backward that reached the outputs: place of the output -> its gradient.
        sums: Of each floating output, which say later whether it was finite.
        gave: The memory of the outputs, by place. Where a later call takes one of them (a GAN's
            discriminator what the generator made), its replay takes that of the replay.
        age: How many steps passed since without a gradient.
    """

    def __init__(
        self, model: torch.nn.Module, args: Any, kwargs: Any, buffers: list[torch.Tensor]
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.inputs = tensors_in((args, kwargs) if kwargs else args)
        self._versions = [version_of(tensor) for tensor in self.inputs]
        self.random = random_states()
        self.autocast = autocast_states()
        self.training = model.training
        self.buffers = [(one, one.detach().clone(), version_of(one)) for one in buffers]
        self.passes: dict[int, dict[int, torch.Tensor]] = {}
        self.sums: list[torch.Tensor] = []
        self.gave: list[StorageWeakRef | None] = []
        self.age = 0
        self._on_leaves: list[RemovableHandle] = []

    def keep_written_buffers(self) -> list[torch.Tensor]:
        """Forget the copies of buffers that this forward did not write; return the others."""
        self.buffers = [entry for entry in self.buffers if version_of(entry[0]) != entry[2]]
        return [buffer for buffer, _, _ in self.buffers]

    def watch_outputs(self, output: Any) -> None:
        """Keep the gradients that will reach the outputs, and whether these are finite."""
        me = weakref.ref(self)
        for place, tensor in enumerate(tensors_in(output)):
            self.sums += _sums(tensor)
            self.gave.append(_memory(tensor))
            if tensor.requires_grad:
                hook = partial(_keep_gradient, me, place)
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning
                handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                if tensor.is_leaf:  # a parameter, which lives longer than the step
                    self._on_leaves.append(handle)

    def release(self) -> None:
        """Take the hooks off that would outlive the call."""
        while self._on_leaves:
            self._on_leaves.pop().remove()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that have reached the outputs."""
        return [one for passed in self.passes.values() for one in passed.values()]

    def with_gradient(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the outputs of a replay that a gradient reached."""
        places = {place for passed in self.passes.values() for place in passed}
        return [output for place, output in enumerate(outputs) if place in places]

    def had_bad_output(self) -> bool:
        """Whether an output was not finite when the program ran."""
        return any(is_bad(one) for one in self.sums)

    def had_nan(self) -> bool:
        """Whether an output was NaN, which no other loss scale can change."""
        return any(bool(one.isnan()) for one in self.sums)

    def why_not(self) -> str:
        """Why the call cannot be run again; empty if it can."""
        for place, (tensor, before) in enumerate(zip(self.inputs, self._versions, strict=True)):
            if version_of(tensor) != before:
                return f"not replayable: input {place} was written to after the forward"
        return ""


def _keep_gradient(call: weakref.ref[Call], place: int, gradient: torch.Tensor) -> None:
    if (kept := call()) is not None:
        kept.passes.setdefault(private.current_graph_task_id(), {})[place] = gradient


def _memory(tensor: torch.Tensor) -> StorageWeakRef | None:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class StepError(TypeError):
    """``step()`` did not give a loss."""


@dataclass
class ReplayResult:
    """What a replay gave.

    Attributes:
        gradients: Name of a parameter -> its gradient, summed over the calls.
        outputs: The outputs of each call that matters.
        inputs: The gradients of inputs, which another call may have given.
        given: What a tape gave to each call, in the order of its inputs.
        loss: Of ``step()``.
    """

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    given: list[tuple[Call, list[torch.Tensor]]] = field(default_factory=list)
    loss: torch.Tensor | None = None

    def bad_outputs(self) -> list[torch.Tensor]:
        """The outputs with an element that is not finite."""
        return [one for outputs in self.outputs for one in outputs if is_bad(one)]

    def bad_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients with an element that is not finite."""
        return {name: one for name, one in self.gradients.items() if is_bad(one)}

    def had_bad_output(self) -> bool:
        """What :meth:`Call.had_bad_output` would have said of the replay."""
        return any(is_bad(s) for outputs in self.outputs for one in outputs for s in _sums(one))

    def is_bad(self) -> bool:
        """Whether the fault shows."""
        bad_loss = self.loss is not None and is_bad(self.loss)
        return bad_loss or bool(self.bad_gradients() or self.bad_outputs())


class Replay:
    """Runs calls again.

    Args:
        calls: In the order in which they were made.
        named: The parameters, by name.
        scale: The loss scale that the gradients were computed with.
        step: Computes the loss of the current batch, where the program gave such a function.
    """

    def __init__(
        self,
        calls: list[Call],
        named: dict[str, torch.Tensor],
        scale: float,
        step: Callable[[], torch.Tensor] | None,
    ) -> None:
        self.calls, self.scale, self.step = calls, scale, step
        self._named = {name: one for name, one in named.items() if one.requires_grad}
        # Those whose outputs matter: not a validation, or what a discriminator was given.
        self.judged = [call for call in calls if call.passes] or calls

    def run(self, factor: float = 1.0) -> ReplayResult:
        """Run all calls forward and backward, at ``factor`` times the loss scale."""
        result = ReplayResult()
        made: dict[int, torch.Tensor] = {}  # by the memory of what the call gave at first
        for call in self.calls:
            with as_it_was(call):
                args, kwargs = tree_map(lambda one: _leaf(one, made), (call.args, call.kwargs))
                outputs = tensors_in(call.model(*args, **kwargs))
            if call in self.judged:
                result.outputs.append(outputs)
            for gave, now in zip(call.gave, outputs, strict=False):
                if gave is not None and not gave.expired():  # type: ignore[no-untyped-call]
                    made[gave.cdata] = now
            given = [one for one in tensors_in((args, kwargs)) if one.requires_grad and one.is_leaf]
            passes = list(call.passes.values())
            for passed in passes:
                pairs = [
                    (outputs[place], gradient if factor == 1.0 else gradient * factor)
                    for place, gradient in passed.items()
                    if place < len(outputs) and outputs[place].requires_grad
                ]
                self.backward(result, pairs, given, keep=passed is not passes[-1])
        return result

    def run_step(self, factor: float = 1.0) -> ReplayResult:
        """Run the program's own function, with the loss."""
        assert self.step is not None
        with as_it_was(self.calls[0], autocast=False) if self.calls else nullcontext():
            loss = self.step()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise StepError(
                    f"apex.debug: step() returned {type(loss).__name__}; it must compute the loss "
                    "of the current batch, without backward, and return it: a tensor of one element"
                )
            result = ReplayResult(loss=loss)
            if loss.requires_grad:
                pair = (loss * self.scale * factor, torch.ones_like(loss))
                self.backward(result, [pair], [], keep=False)
        return result

    def backward(
        self,
        result: ReplayResult,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        given: list[torch.Tensor],
        *,
        keep: bool,
    ) -> None:
        """Add the gradients of pairs of an output and its gradient to the result."""
        if not pairs or not self._named:
            return
        outputs, seeds = zip(*pairs, strict=True)
        leaves = [*self._named.values(), *given]
        is_sharded = any(hasattr(call.model, "unshard") for call in self.calls)
        if is_sharded or is_reentrant(outputs):
            found = by_backward(outputs, seeds, leaves, keep)
        else:
            found = [*torch.autograd.grad(outputs, leaves, seeds, keep, allow_unused=True)]
        for name, gradient in zip(self._named, found, strict=False):
            if gradient is not None:
                before = result.gradients.get(name)
                result.gradients[name] = gradient if before is None else before + gradient
        result.inputs += [one for one in found[len(self._named) :] if one is not None]


@contextmanager
def as_it_was(call: Call, *, autocast: bool = True) -> Iterator[None]:
    """Random numbers, buffers, mode and autocast of the call; the modes afterwards as before."""
    modes = [(module, module.training) for module in call.model.modules()]
    set_random_states(call.random)
    if call.training != call.model.training:
        call.model.train(call.training)
    for buffer, value, _ in call.buffers:
        buffer.data.copy_(value)
    with autocast_of(call.autocast if autocast else []), torch.enable_grad():
        yield
    for module, mode in modes:  # the next call may need train() with a frozen part in eval
        module.training = mode


def _leaf(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """An input as a leaf of its own, so that backward ends there; what a replay made of it."""
    if not isinstance(value, torch.Tensor):
        again = copy.copy(value) if (parts := _parts_of(value)) else value
        for name, part in parts.items():
            part = tree_map(lambda one: _leaf(one, made), part)
            if isinstance(again, _MAPPINGS):
                again[name] = part
            else:
                object.__setattr__(again, name, part)
        return again
    if type(value) is torch.Tensor and value.layout is torch.strided:
        now = made.get(value.untyped_storage()._cdata)
        if now is not None and now.dtype == value.dtype:
            again = now.detach().as_strided(value.size(), value.stride(), value.storage_offset())
            return again.requires_grad_(value.requires_grad)
    return value.detach().requires_grad_() if value.requires_grad else value


def is_reentrant(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a part of the graph is a reentrant checkpoint: refuses ``torch.autograd.grad``."""
    nodes: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = {None}
    for node in nodes:  # which grows
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return any("Checkpoint" in node.name() for node in seen - {None})


def by_backward(
    outputs: Sequence[torch.Tensor], seeds: Any, leaves: Sequence[torch.Tensor], keep: bool
) -> list[torch.Tensor | None]:
    """The gradients of ``leaves``, whose ``.grad`` is afterwards what it was."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        torch.autograd.backward(outputs, seeds, retain_graph=keep)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def set_random_states(states: list[torch.Tensor]) -> None:
    """Give back what :func:`random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def unchanged(models: list[torch.nn.Module], optimizers: list[Any]) -> Iterator[None]:
    """Give random states, buffers, attributes of modules and autocast's cache back at the end.

    amp notes no forward in between.
    """
    managed = [one._amp_stash for one in optimizers if hasattr(one, "_amp_stash")]
    records = [record for one in managed for record in one.ledger.params.records]
    for record in records:
        record.is_replayed = True
    random = random_states()
    kept = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
    modules = [(module, dict(vars(module))) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for record in records:
            record.is_replayed = False
        torch.clear_autocast_cache()
        for module, attributes in modules:  # such as a hidden state that a forward leaves
            vars(module).clear()
            vars(module).update(attributes)
        for buffer, value in kept:
            buffer.data.copy_(value)
        set_random_states(random)
