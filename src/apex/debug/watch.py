"""The watch: what it keeps of a step, when it finds a fault, and how it skips the update.

It learns whether a step was finite from who knows: amp and a GradScaler check gradients anyway; in
other programs one pass over the gradients does, in a step hook of the optimizer. A step with a
fault is skipped by taking the gradients away for the time of the step: then weights stay those that
the gradients were computed with, and the replay is exact.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from apex._compat.program import stacklevel
from apex.debug import ranks
from apex.debug.attaching import put_on_model, put_on_scaler, unwrapped
from apex.debug.calls import Call, is_transformed, stateful
from apex.debug.drift import Drift, Sampler
from apex.debug.explain import Fault, explain
from apex.debug.growth import Growth
from apex.debug.lines import Lines
from apex.debug.report import Report
from apex.debug.tensors import local, non_finite, params_of, plain

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
    """Watch a training for steps that are not finite. :func:`watch` returns this object.

    Attributes:
        report: Report on the first fault that was explained, or ``None``.
        fault: The last step with a fault, which :meth:`explain` replays. ``None`` again after the
            next finite step.
        steps: Number of steps begun.
        skipped: Number of steps that the watch, amp or a GradScaler skipped.
        drifts: Modules whose gradient norm left its usual range; see ``every`` of :func:`watch`.
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
        warn: Callable[[str], None] | None = None,
        growth: Growth | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.report: Report | None = None
        self.fault: Fault | None = None
        self.drifts: list[Drift] = []
        self.steps = self.skipped = 0
        self._number = next(_numbers)
        self._step, self._on_fault, self._skip = step, on_fault, skip
        self._patience, self._group, self._every = patience, process_group, every
        self._warn = warn or (lambda text: warnings.warn(text, stacklevel=stacklevel()))
        self._growth, self._lines = growth, lines
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._sampler = Sampler(self._models)
        self._calls: deque[Call] = deque()
        self._stateful: dict[int, list[torch.Tensor]] = {}  # buffers that a forward writes
        self._losses: list[torch.Tensor] = []
        self._since = 0
        self._in_a_row: dict[int, int] = {}  # steps with a fault, by optimizer
        self._stepped: set[int] = set()  # optimizers, since the last forward
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients of a skipped step
        self._busy = self._warned = self._stopped = False
        self._lock = threading.RLock()  # for programs that train in several threads
        self._undo: list[Callable[[], None]] = []
        for model in models:
            self.attach(model)
        for optimizer in optimizers:
            self.attach_optimizer(optimizer)
        if scaler is not None:
            self.attach_scaler(scaler)

    # -- what a program calls ------------------------------------------------------------------

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss``, and check it too at the next step: ``watch.loss(loss).backward()``.

        Use it for a loss that can be inf or NaN although all gradients are finite. Examples are a
        sum in float16, a mean over no labels, and a loss that masks a NaN in the model's output.
        The loss of an empty batch may have any value. ``apex debug`` does this for you.
        """
        if not self._stopped:
            if len(self._losses) == _MOST_CALLS:  # of a program without steps
                del self._losses[0]
            self._losses.append(loss.detach().clone())
        return loss

    def explain(self, step: Callable[[], torch.Tensor] | None = None) -> Report:
        """Replay the last step with a fault, and report its cause.

        The replay leaves parameters, gradients, buffers, the optimizer and random number generators
        unchanged. In a distributed program all ranks must call it.

        Args:
            step: Function that computes the loss of the current batch, without backward:
                ``lambda: loss_function(model(x), y)``. With it the report can name the line of the
                loss function.

        Raises:
            RuntimeError: No step since the last finite one had a fault.
        """
        if self.fault is None:
            raise RuntimeError(
                "apex.debug: there is nothing to explain, because no step since the last finite "
                "one had an inf or NaN in its gradients. Check watch.fault first."
            )
        self._busy = True
        if self._lines is not None:
            self._lines.off()
        try:
            report = explain(self.fault, step or self._step)
        finally:
            self._busy = self._stopped
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

    def tell_at_end(self) -> None:
        """Report the last fault of a program that has ended, where its weights are still there.

        That is a step if all were skipped, or a loss that is not finite and had no step.
        """
        was_parallel = self.fault is not None and self.fault.together.is_parallel
        if self.report is not None or ranks.is_parallel() or was_parallel:
            return  # ranks would explain it together
        if self._calls and self._has_losses() and bool(non_finite(self._losses)):
            params = [p for one in self._optimizers for p in params_of(one)]
            found = non_finite([p.grad for p in params if p.grad is not None])
            self.steps += 1
            self.fault = self._fault(1.0, only_loss=not found, is_skipped=True)
            self._tell()
        elif self.fault is not None and self.skipped == self.steps:
            self._tell()

    def stop(self) -> None:
        """Look at no further step; hooks stay until :meth:`close`, which a hook cannot call."""
        self._stopped, self._busy, self.fault = True, True, None
        if self._lines is not None:
            self._lines.stop()
        while self._calls:
            self._calls.pop().release()

    def close(self) -> None:
        """Remove all hooks. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        while self._calls:
            self._calls.pop().release()
        self._losses.clear()
        self.fault = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- forwards ------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module) -> None:
        """Watch the forwards of a model too."""
        model = unwrapped(model)
        self._models.append(plain(model))
        self._undo.append(put_on_model(model, self.begin_call, self.end_call))

    def begin_call(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Call | None:
        """Keep what a forward is given; ``None`` where it is not to be watched."""
        if self._busy:
            return None
        if self._lines is not None:
            self._lines.begin_call()
        if not torch.is_grad_enabled() or is_transformed():
            return None
        with self._lock:
            if self._stepped:  # of several optimizers; the others needed the calls as well
                self._drop()
                if self._lines is not None:
                    self._lines.tape.forget(list(self._calls))
            if len(self._calls) == _MOST_CALLS and not self._warned:
                self._warned = True
                self._warn(
                    f"apex.debug saw {_MOST_CALLS} forwards but no step of the optimizer. If a "
                    "GradScaler calls its step(), pass watch(..., scaler=scaler)."
                )
            if self._growth is not None:
                self._growth.begin(self.steps + 1, self._optimizers)
            buffers = self._stateful.get(id(model))
            if buffers is None:  # the first forward: each may be written
                buffers = stateful(model)
            return Call(model, args, kwargs, buffers)

    def end_call(self, call: Call | None, output: Any) -> None:
        """Keep what a replay needs of the outputs."""
        if self._busy:
            return
        if call is not None:
            self._keep(call, output)
        if self._lines is not None:
            self._lines.end_call(call, output)

    def _keep(self, call: Call, output: Any) -> None:
        with self._lock:
            if id(call.model) not in self._stateful:
                self._stateful[id(call.model)] = call.keep_written_buffers()
            call.watch_outputs(output)
            if len(self._calls) == _MOST_CALLS:
                self._calls.popleft().release()
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
            if managed.training.is_dynamic():  # amp checks gradients itself
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
                self._busy = self._stopped
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if found:
                flags = [flag.to("cpu") for flag in found.values()]
                self.stepped(optimizer, torch.stack(flags).amax(), scaler.get_scale())
            return result

        self._undo.append(put_on_scaler(scaler, step))

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
        found = non_finite([p.grad for p in params if p.grad is not None])
        if self._has_losses():
            bad = non_finite(self._losses).to(found.device)
            return ranks.agree(torch.maximum(found, bad), params, self._group), bad > found
        return ranks.agree(found, params, self._group), False

    def _has_losses(self) -> bool:
        inputs = [one for call in self._calls for one in call.inputs]
        return bool(self._losses) and all(one.numel() for one in inputs)

    def _is_bad_at_any_scale(self) -> bool:
        """Whether an output is NaN, or a loss is not finite.

        A loss is watched with its scale, which only in float16 makes it infinite. Ranks would not
        agree: each has a loss of its own.
        """
        if any(call.had_nan() for call in self._calls):
            return True
        if ranks.is_parallel() or not self._has_losses():
            return False
        wide = [one for one in self._losses if one.dtype is not torch.float16]
        return bool(non_finite(wide)) or any(bool(one.isnan()) for one in self._losses)

    def _give_back(self) -> None:
        hidden, self._hidden = self._hidden, []
        for param, gradient in hidden:
            if param.grad is None:  # else the step raised, and another backward came since
                param.grad = gradient

    def stepped(self, optimizer: Any, found: Any, scale: float, only_loss: Any = None) -> bool:
        """End a step; return whether it had a fault.

        ``only_loss`` is ``None`` where amp or a scaler has decided whether to skip the step.
        """
        if self._stopped:
            return bool(found)
        with self._lock:
            is_bad, dynamic = bool(found), only_loss is None
            if dynamic and not is_bad and self._has_losses():
                only_loss = bool(non_finite(self._losses))
            self._end_step(optimizer, is_bad or bool(only_loss), scale, only_loss, dynamic=dynamic)
            return is_bad

    def _end_step(
        self, optimizer: Any, is_bad: bool, scale: float, only_loss: Any, *, dynamic: bool
    ) -> None:
        is_taken = dynamic and bool(only_loss)  # amp or a scaler looks at gradients alone
        self.steps += 1
        if self._growth is not None:
            self._growth.end()
        self._stepped.add(id(optimizer))
        may_heal = is_bad and dynamic and not is_taken and not self._is_bad_at_any_scale()
        self._losses.clear()
        before = self._in_a_row.pop(id(optimizer), 0)
        if is_bad:
            self._in_a_row[id(optimizer)] = before + 1
            is_skipped = (self._skip or dynamic) and not is_taken
            self.skipped += int(is_skipped)
            self.fault = self._fault(scale, only_loss=bool(only_loss), is_skipped=is_skipped)
            if self.report is None and before >= (self._patience if may_heal else 0):
                self._tell()
        else:
            self._since, self.fault = self.steps, None if before else self.fault
            if self._every and self.steps % self._every == 0:
                self.drifts += self._sampler.sample(self.steps)
        is_last = len(self._stepped) == len(self._optimizers)
        if is_last:
            self._drop()
        if self._lines is not None:
            self._lines.end_step(is_last=is_last)

    def _fault(self, scale: float, *, only_loss: bool, is_skipped: bool) -> Fault:
        return Fault(
            list(self._calls),
            self._models,
            self._optimizers,
            self.steps,
            self._since,
            scale,
            ranks.Together(self._models, self._group, f"{self._number}/{self.steps}"),
            only_loss,
            is_skipped,
            self._growth,
            None if self._lines is None else self._lines.tape,
        )

    def _tell(self) -> None:
        if self._on_fault == "keep":
            return
        report = self.explain()
        if callable(self._on_fault):
            self._on_fault(report)
        elif self._on_fault == "raise":
            raise NonFiniteError(report)
        else:
            warnings.warn(report.text(), FaultWarning, stacklevel=stacklevel())

    def _drop(self) -> None:
        """Forget calls whose backward has come, and those whose backward does not come."""
        self._stepped.clear()
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            call.age += 1
            if not call.passes and call.age < 3:
                self._calls.append(call)
            else:
                call.release()


def watch_of(optimizer: Any) -> Watch | None:
    """Return the watch on an optimizer, for example that of ``amp.initialize(..., debug=True)``.

    Returns ``None`` if nothing watches the optimizer.
    """
    found = _watches.get(id(optimizer))
    return found if found is not None and found._undo else None
