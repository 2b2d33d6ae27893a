"""The watch: what it keeps of a step, when it finds a fault, and how it skips the update.

It learns whether a step was finite from who knows: amp and a GradScaler check gradients anyway; in
other programs one pass over the gradients does, in a step hook of the optimizer. A step with a
fault is skipped by taking the gradients away for the time of the step: then weights stay those that
the gradients were computed with, and the replay is exact.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

import apex
from apex.debug import ranks
from apex.debug.calls import Call, is_transformed, stateful
from apex.debug.drift import Drift, Sampler
from apex.debug.explain import Fault, explain
from apex.debug.report import Report
from apex.debug.tensors import local, plain
from apex.ops.lists.unscale import unscale_

_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(apex.__file__))

_MOST_CALLS = 256  # of one step
_numbers = itertools.count()  # of watches; the same on ranks that run the same program
_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()


class FaultWarning(RuntimeWarning):
    """Issued with the text of a report, at the first step with a fault."""


class NonFiniteError(ArithmeticError):
    """Raised with ``on_fault="raise"``; ``report`` is the :class:`Report`."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report


class Watch:
    """Watches a training for steps that are not finite; see :func:`watch`.

    Attributes:
        report: Of the first fault that was explained; ``None`` as long as there is none.
        fault: The last step with a fault, until the next one that is finite; :meth:`explain` takes
            it.
        steps: How many steps were begun.
        skipped: How many of them were skipped: by the watch, amp or a GradScaler.
        drifts: Modules whose gradient norm left its band, see ``every`` of :func:`watch`.
    """

    def __init__(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        scaler: Any,
        step: Callable[[], torch.Tensor] | None,
        on_fault: str | Callable[[Report], None],
        skip: bool = True,
        patience: int = 16,
        process_group: Any = None,
        every: int = 0,
    ) -> None:
        self.report: Report | None = None
        self.fault: Fault | None = None
        self.drifts: list[Drift] = []
        self.steps = self.skipped = 0
        self._number = next(_numbers)
        self._step, self._on_fault, self._skip = step, on_fault, skip
        self._patience, self._group, self._every = patience, process_group, every
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._sampler = Sampler(self._models)
        self._open: dict[int, Call] = {}  # forwards that run, by model
        self._calls: deque[Call] = deque(maxlen=_MOST_CALLS)
        self._stateful: dict[int, list[torch.Tensor]] = {}  # buffers that a forward writes
        self._losses: list[torch.Tensor] = []
        self._since = 0
        self._in_a_row: dict[int, int] = {}  # steps with a fault, by optimizer
        self._stepped: set[int] = set()  # optimizers, since the last forward
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients of a skipped step
        self._busy = self._warned = False
        self._undo: list[Callable[[], None]] = []
        for model in models:
            self.attach(model)
        for optimizer in optimizers:
            self.attach_optimizer(optimizer)
        if scaler is not None:
            self.attach_scaler(scaler)

    # -- what a program calls ------------------------------------------------------------------

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss``, and let the next step look at it too: ``watch.loss(loss).backward()``.

        For losses that can be inf where all gradients are finite, such as a sum in float16, and
        for outputs of the model of which the loss masks a NaN. The loss of an empty batch may be
        anything. Under a dynamic loss scale gradients alone count.
        """
        self._losses.append(loss.detach())
        return loss

    def explain(self, step: Callable[[], torch.Tensor] | None = None) -> Report:
        """Replay the last step with a fault, and say what its cause is.

        Of the program nothing changes: parameters, gradients, buffers, random numbers, optimizer.
        In a distributed program all ranks have to call it.

        Args:
            step: Computes the loss of the current batch, without backward: ``lambda:
                loss_function(model(x), y)``. With it the line of the loss function can be named.

        Raises:
            RuntimeError: No step had a fault since the last finite one.
        """
        if self.fault is None:
            raise RuntimeError(
                "apex.debug: there is nothing to explain: since the last finite step no step had "
                "an inf or NaN in its gradients. Look at watch.fault first."
            )
        self._busy = True
        try:
            report = explain(self.fault, step or self._step)
        finally:
            self._busy = False
        self.report = self.report or report
        return report

    def sentence(self) -> str:
        """The sentence of the report, for the text of an error; explains first if need be."""
        if self.report is None and self.fault is not None:
            self.explain()
        return "" if self.report is None else self.report.sentence

    def kept_bytes(self) -> tuple[int, int]:
        """Bytes that are kept now: alive longer because of the watch, and copied by it."""
        held = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for call in self._calls
            for t in map(local, [*call.inputs, *call.gradients()])
        }
        copies = sum(value.nbytes for call in self._calls for _, value, _ in call.buffers)
        return sum(held.values()), copies + sum(s.nbytes for c in self._calls for s in c.random)

    def close(self) -> None:
        """Take all hooks off. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._calls.clear()
        self._losses.clear()
        self.fault = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- forwards ------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, first: Any = None) -> None:
        """Watch a model too; ``first`` are the inputs of a forward that has begun already."""
        model = _inner(model)
        self._models.append(plain(model))
        if first is not None:
            self._before(model, *first)
        compiled = getattr(model, "_compiled_call_impl", None)
        if compiled is not None:  # model.compile(): hooks would be compiled too

            def call(*args: Any, **kwargs: Any) -> Any:
                self._before(model, args, kwargs)
                output = compiled(*args, **kwargs)
                self._after(model, args, kwargs, output)
                return output

            model._compiled_call_impl = call
            self._undo.append(lambda: setattr(model, "_compiled_call_impl", compiled))
            return
        before = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        after = model.register_forward_hook(self._after, with_kwargs=True)
        self._undo += [before.remove, after.remove]

    def _before(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._busy or not torch.is_grad_enabled() or is_transformed():
            return
        if self._stepped:  # of several optimizers; the others needed the calls as well
            self._drop()
        if len(self._calls) == _MOST_CALLS and not self._warned:
            self._warned = True
            warnings.warn(
                f"apex.debug: {_MOST_CALLS} forwards and no step of the optimizer were seen. If a "
                "GradScaler steps it, pass watch(..., scaler=scaler).",
                stacklevel=_depth(),
            )
        buffers = self._stateful.get(id(model))
        if buffers is None:  # the first forward: each may be written
            buffers = stateful(model)
        self._open[id(model)] = Call(model, args, kwargs, buffers)

    def _after(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open.pop(id(model), None)
        if call is None or self._busy:
            return
        if id(model) not in self._stateful:
            self._stateful[id(model)] = call.keep_written_buffers()
        call.watch_outputs(output)
        self._calls.append(call)

    # -- steps ---------------------------------------------------------------------------------

    def attach_optimizer(self, optimizer: Any) -> None:
        """Watch the steps of an optimizer too."""
        self._optimizers.append(optimizer)
        _watches[id(optimizer)] = self
        managed = getattr(optimizer, "_amp_stash", None)
        if managed is not None:
            managed.observer = self
            self._undo.append(lambda: setattr(managed, "observer", None))
            if managed.can_skip():  # amp checks gradients itself
                return
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(lambda *_: self._give_back())
        self._undo += [before.remove, after.remove]

    def attach_scaler(self, scaler: Any) -> None:
        """Learn from a GradScaler which steps it skipped."""
        if not scaler.is_enabled():
            return  # it checks nothing: the hooks of the optimizer do
        inner = scaler.step

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._undo or not any(optimizer is one for one in self._optimizers):
                return inner(optimizer, *args, **kwargs)
            self._busy = True  # for the hooks of the optimizer
            try:
                result = inner(optimizer, *args, **kwargs)
            finally:
                self._busy = False
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if found:
                flags = [flag.to("cpu") for flag in found.values()]
                self.stepped(optimizer, torch.stack(flags).amax(), scaler.get_scale())
            return result

        scaler.step = types.MethodType(step, scaler)
        self._undo.append(lambda: vars(scaler).pop("step", None))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._busy:
            return None
        self._give_back()  # of a step that raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._check(optimizer)
            return None

        def evaluate() -> Any:
            self._give_back()
            loss = closure()
            self._check(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _check(self, optimizer: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        found, only_loss = self._look_at(params)
        managed = getattr(optimizer, "_amp_stash", None)
        scale = 1.0 if managed is None else managed.training.loss_scalers[0].loss_scale()
        if self.stepped(optimizer, found, scale, only_loss) and self._skip:
            self._hidden = [(p, p.grad) for p in params if p.grad is not None]
            for p, _ in self._hidden:
                p.grad = None

    def _look_at(self, params: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Whether a gradient or a watched loss is not finite on a rank; whether only a loss is."""
        found = _non_finite([p.grad for p in params if p.grad is not None])
        if self._losses and all(t.numel() for call in self._calls for t in call.inputs):
            bad = _non_finite(self._losses).to(found.device)
            return ranks.agree(torch.maximum(found, bad), params, self._group), bad > found
        return ranks.agree(found, params, self._group), False

    def _give_back(self) -> None:
        hidden, self._hidden = self._hidden, []
        for param, gradient in hidden:
            if param.grad is None:  # else the step raised, and another backward came since
                param.grad = gradient

    def stepped(self, optimizer: Any, found: Any, scale: float, only_loss: Any = None) -> bool:
        """End a step; return whether it had a fault.

        ``only_loss`` is ``None`` where amp or a scaler has decided whether to skip the step.
        """
        dynamic, is_bad = only_loss is None, bool(found)
        self.steps += 1
        self._stepped.add(id(optimizer))
        self._losses.clear()
        before = self._in_a_row.pop(id(optimizer), 0)
        if is_bad:
            self._in_a_row[id(optimizer)] = before + 1
            self.skipped += int(self._skip or dynamic)
            together = ranks.Together(self._models, self._group, f"{self._number}/{self.steps}")
            self.fault = Fault(
                list(self._calls),
                self._models,
                self._optimizers,
                self.steps,
                self._since,
                scale,
                together,
                bool(only_loss),
            )
            may_heal = dynamic and not any(call.had_nan() for call in self._calls)
            if self.report is None and before >= (self._patience if may_heal else 0):
                self._tell()
        else:
            self._since, self.fault = self.steps, None if before else self.fault
            if self._every and self.steps % self._every == 0:
                self.drifts += self._sampler.sample(self.steps)
        if len(self._stepped) == len(self._optimizers):
            self._drop()
        return is_bad

    def _tell(self) -> None:
        if self._on_fault == "keep":
            return
        report = self.explain()
        if callable(self._on_fault):
            self._on_fault(report)
        elif self._on_fault == "raise":
            raise NonFiniteError(report)
        else:
            warnings.warn(report.text(), FaultWarning, stacklevel=_depth())

    def _drop(self) -> None:
        """Forget calls whose backward has come, and those whose backward does not come."""
        self._stepped.clear()
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            call.age += 1
            if not call.passes and call.age < 3:
                self._calls.append(call)


def watch_of(optimizer: Any) -> Watch | None:
    """The watch on an optimizer: of ``amp.initialize(..., debug=True)`` for example."""
    found = _watches.get(id(optimizer))
    return found if found is not None and found._undo else None


def _depth() -> int:
    """How far above its caller the line of the program is, for ``warnings.warn``."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, depth = frame.f_back, depth + 1
    return depth


def _inner(model: Any) -> Any:
    """The module inside of a data-parallel wrapper, whose replay needs no other rank."""
    while "DataParallel" in type(model).__name__ and isinstance(
        getattr(model, "module", None), torch.nn.Module
    ):
        model = model.module
    return model


def _non_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """1.0 where an element on this rank is not finite, else 0.0: 0-dim, float32."""
    if not tensors:
        return torch.zeros((), device="cpu", dtype=torch.float32)
    if any([t.requires_grad or t.is_sparse for t in tensors]):  # noqa: C419  # faster
        tensors = [local(tensor).detach().clone() for tensor in tensors]
    one = torch.ones((), device=tensors[0].device, dtype=torch.float32)
    found = unscale_(tensors, one)
    assert found is not None  # asked for by a tensor
    return found
