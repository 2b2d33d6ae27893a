"""From a fault to its cause: which replays are made, and what follows from them.

1. What was broken before the step is no fault of the step: a parameter, or an optimizer's update.
2. A replay under :class:`Trace` names the origin of the first bad gradient, output or loss. If it
   does not show the fault, others say what is missing: uninitialised memory, compiled code.
3. What came from outside is the cause (data, targets, another rank). An operation is run again at
   lower loss scales and in float32, which says whether scale, range or the model is the cause.

Ranks whose replay needs each other make the same replays in the same order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from apex.debug import sentences
from apex.debug.calls import Call, Outcome, Replay, StepError, unchanged
from apex.debug.ranks import Together
from apex.debug.report import Report
from apex.debug.tensors import describe, fronts, is_bad, module_paths
from apex.debug.tracing import Origin, Trace
from apex.debug.update import owner_of, update_again
from apex.debug.widening import Wide

__all__ = ["Fault", "explain"]

_HALVINGS = 24
_Loss = Callable[[], torch.Tensor]


@dataclass
class Fault:
    """A step that was not finite, with what is needed to replay it."""

    calls: list[Call]
    models: list[torch.nn.Module]
    optimizers: list[Any]
    step: int
    since: int
    scale: float
    together: Together
    bad_loss: bool


def explain(fault: Fault, step: _Loss | None) -> Report:
    """Say why a step was not finite; see the module's text."""
    everyone = fault.together.are_here()
    with _quiet():
        report = _Explanation(fault, step).report(everyone)
    report.rank = fault.together.rank
    if not everyone:
        report.notes.append(
            "not all ranks called explain() within 60 seconds, so only this one was looked at"
        )
    elif fault.together.is_parallel:
        _compare_ranks(report, fault)
    return report


def _compare_ranks(report: Report, fault: Fault) -> None:
    """On ranks where nothing went wrong: which rank sent the value?"""
    mine = None if report.cause in ("unrepeatable", "rank") else (report.cause, report.sentence)
    others = fault.together.exchange(mine)
    guilty = [rank for rank, entry in enumerate(others) if entry is not None]
    if mine is None and guilty:
        report.cause = "rank"
        report.operation = report.operation or "all_reduce"
        report.sentence = (
            f"The value came by a collective from rank {guilty[0]}, where: {others[guilty[0]][1]}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Explanation:
    def __init__(self, fault: Fault, step: _Loss | None) -> None:
        self._fault, self._loss = fault, step
        models = [_plain(model) for model in fault.models]
        self._fronts = dict(zip(map(id, fault.models), fronts(models), strict=True))
        self._paths = module_paths(models)
        self._named: dict[str, torch.Tensor] = {
            (f"{front}.{name}" if front else name): param
            for model, front in zip(models, fronts(models), strict=True)
            for name, param in model.named_parameters()
        }
        self._replay = Replay(fault.calls, self._named, fault.scale, step)
        self._together = fault.together
        self._notes: list[str] = []

    # -- the report ----------------------------------------------------------------------------

    def report(self, everyone: bool) -> Report:
        broken = next((name for name, param in self._named.items() if is_bad(param)), None)
        if self._together.any(broken is not None):
            return self._parameter(broken)
        reason = self._why_not(everyone)
        if reason:
            return self._make("unrepeatable", f"The step cannot be replayed: {reason}.")
        on_gpu = any(param.is_cuda for param in self._named.values())
        models = [_plain(model) for model in self._fault.models]
        try:
            with unchanged(models, self._fault.optimizers, on_gpu):
                return self._replayed()
        except StepError:
            raise
        except Exception as error:  # noqa: BLE001  # the program's own code: training goes on
            what = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
            return self._make("unrepeatable", f"The step cannot be replayed: it raised {what}.")

    def _why_not(self, everyone: bool) -> str:
        if not self._fault.calls and self._loss is None:
            names = ", ".join(type(_plain(model)).__name__ for model in self._fault.models)
            return (
                f"no forward of {names} was seen since the last step; watch the module that the "
                "program calls, as model(x) and not as model.forward(x)"
            )
        if self._together.needs_others and not everyone:
            return "the model is shared by ranks that did not call explain()"
        return next((why for call in self._fault.calls if (why := call.why_not())), "")

    def _make(self, cause: str, sentence: str, origin: Origin | None = None) -> Report:
        fault = self._fault
        report = Report(cause, sentence, fault.step, since=fault.since, scale=fault.scale)
        report.notes = self._notes
        if origin is not None:
            report.values, report.line = origin.values, origin.line
            if origin.kind in ("operation", "mask", "memory"):
                report.operation, report.module = origin.name, origin.module
                report.direction, report.call = origin.direction, origin.call
        return report

    # -- replays -------------------------------------------------------------------------------

    def _trace(
        self, run: Callable[[], Outcome], fill: float | None = None
    ) -> tuple[Outcome, Origin | None]:
        known: list[tuple[torch.Tensor, tuple[str, str]]] = []
        known += [(param, ("parameter", name)) for name, param in self._named.items()]
        for model in self._fault.models:
            buffers = _plain(model).named_buffers()
            known += [(buffer, ("buffer", name)) for name, buffer in buffers]
        count = len(self._fault.calls)
        for number, call in enumerate(self._fault.calls, 1):
            of = self._fronts.get(id(call.model)) or "the model"
            of += f" (forward {number} of {count} of this step)" if count > 1 else ""
            known += [(t, ("input", f"input {i} of {of}")) for i, t in enumerate(call.inputs)]
            for passed in call.passes.values():
                known += [(g, ("gradient", f"output {i} of {of}")) for i, g in passed.items()]
        trace = Trace(self._paths, known, fill)
        with torch.compiler.set_stance("force_eager"), trace.running():
            outcome = run()
        return outcome, self._origin(trace, outcome)

    def _origin(self, trace: Trace, outcome: Outcome) -> Origin | None:
        """The origin of what is not finite in the end: loss first, then gradients, outputs."""
        loss = None if outcome.loss is None else trace.origin_of(outcome.loss)
        if loss is not None and loss.kind != "mask":
            return loss
        outputs = [origin for one in outcome.bad_outputs() if (origin := trace.origin_of(one))]
        outputs = [origin for origin in outputs if origin.kind != "mask"]
        found = [trace.origin_of(one) for one in outcome.bad_gradients().values()]
        gradients = [one for one in found if one is not None]
        inside = [one for one in gradients if one.kind != "gradient"]
        if gradients and not inside:  # the output of a call: by another one that took it?
            found = [trace.origin_of(one) for one in outcome.inputs]
            inside = [one for one in found if one is not None and one.kind == "operation"]
        if inside:  # backward computes with what the forward broke, and may break it once more
            used = zip(self._fault.calls, outcome.outputs, strict=False)
            bad = [o for call, all_ in used for o in call.with_gradient(all_) if is_bad(o)]
            origins = [one for o in bad if (one := trace.origin_of(o)) and one.kind == "operation"]
            return min(inside + origins, key=_order)
        if gradients and not outputs:
            return gradients[0]
        return min(outputs, key=_order, default=None)

    def _replayed(self) -> Report:
        run = self._replay.run if self._fault.calls else self._replay.run_step
        outcome, origin = self._trace(run)
        before = any(call.had_bad_output() for call in self._replay.judged)
        differs = before and not outcome.had_bad_output()
        if not self._together.any(origin is not None) or self._together.any(differs):
            return self._not_shown(run)
        after = origin is not None and origin.kind == "gradient"
        if self._loss is not None and self._together.any(after):
            run = self._replay.run_step
            again, inside = self._trace(run)
            if not self._together.any(inside is not None):
                self._notes.append("step() did not show the fault: is it the batch of this step?")
                run = self._replay.run
            elif after:
                outcome, origin = again, inside
        report = self._classify(run, outcome, origin)
        report.parameters = list(outcome.bad_gradients())
        self._note_buffers()
        return report

    def _not_shown(self, run: Callable[[], Outcome]) -> Report:
        if self._loss is not None:  # more than the models may have been differentiated
            outcome, origin = self._trace(self._replay.run_step)
            if self._together.any(origin is not None):
                return self._classify(self._replay.run_step, outcome, origin)
        if self._together.any(self._fault.bad_loss):
            hint = (
                "" if self._loss else " (apex.debug.watch(..., step=lambda: loss) names the line)"
            )
            return self._make(
                "loss",
                "The loss was not finite, although outputs and gradients are: the fault lies in "
                f"the loss function or its targets{hint}.",
            )
        _, origin = self._trace(run, fill=math.nan)  # before replays that read memory as it is
        if origin is not None and origin.kind == "memory":
            return self._classify(run, Outcome(), origin)
        in_forward = any(call.had_bad_output() for call in self._replay.judged)
        as_it_is: list[bool] = []
        eager: list[bool] = []
        for bad, stance in ((as_it_is, "default"), (eager, "force_eager")) * 2:
            with torch.compiler.set_stance(stance):
                outcome = run()
            shows = outcome.had_bad_output() if in_forward else outcome.is_bad()
            bad.append(self._together.any(shows))  # twice: it may have random numbers of its own
        if all(as_it_is) and not any(eager):
            return self._make(
                "compiled",
                "The compiled model gives values that are not finite, and the same model "
                "uncompiled (torch.compiler.set_stance('force_eager')) does not.",
            )
        self._note_unwatched()
        return self._make(
            "unrepeatable",
            "The replay of the step does not show the fault: something between backward and step "
            "changed the gradients, or the model depends on what is not kept (random numbers of "
            "NumPy, files, time).",
        )

    def _note_unwatched(self) -> None:
        ours = set(map(id, self._named.values()))
        for optimizer in self._fault.optimizers:
            managed = getattr(optimizer, "_amp_stash", None)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            params = params if managed is None else [*managed.params.targets]
            others = sum(id(param) not in ours for param in params)
            if others:
                self._notes.append(
                    f"of the {len(params)} parameters of {type(optimizer).__name__}, {others} are "
                    "in no module that is watched; name it: apex.debug.watch(module, optimizer)"
                )

    def _note_buffers(self) -> None:
        bad = [
            name
            for model in self._fault.models
            for name, buffer in _plain(model).named_buffers()
            if is_bad(buffer) and not bool(torch.isinf(buffer).any())
        ]
        if bad:
            self._notes.append(
                f"the forward has also written NaN into the buffer {bad[0]}, which stays there"
            )

    # -- causes --------------------------------------------------------------------------------

    def _classify(self, run: Callable[..., Outcome], outcome: Outcome, origin: Any) -> Report:
        inside = origin is not None and origin.kind in ("operation", "mask")
        if not inside and not self._together.needs_others:
            return self._outside(origin)
        healed = self._scale(run, outcome)  # on all ranks that replay together
        largest, finite = self._widen(run, outcome, origin or Origin("", ""))
        if not inside:
            return self._outside(origin)
        what = sentences.what(origin)
        if healed is not None:
            return self._make(
                "scale",
                f"The loss scale of {self._fault.scale:g} is too high: {what} gave "
                f"{sentences.bad(origin)} in {sentences.dtype_of(origin)}, and is finite at "
                f"{healed:g}.",
                origin,
            )
        if finite:
            return self._make(
                "range", f"{what} gave {sentences.range_of(origin, largest)}.", origin
            )
        in_loss = origin.module is None and run == self._replay.run_step
        where, cause = ("The loss: ", "loss") if in_loss else ("", "model")
        same = " in float32 as well" if origin.values["dtype"] in ("float16", "bfloat16") else ""
        return self._make(cause, f"{where}{what} gave {sentences.bad(origin)}{same}.", origin)

    def _outside(self, origin: Origin | None) -> Report:
        """What came from outside of the replayed operations."""
        if origin is None:
            return self._make("rank", "The value came by a collective from another rank.")
        if origin.kind == "gradient":
            return self._after_output(origin)
        cause, name = _OUTSIDE[origin.kind]
        return self._make(cause, sentences.outside(origin, name), origin)

    def _after_output(self, origin: Origin) -> Report:
        """The output was finite and its gradient was not."""
        values, scale = origin.values, self._fault.scale
        if scale > 1.0 and not values["nan"] and values["dtype"] == "float16":
            sentence = (
                f"The loss scale of {scale:g} is too high: the gradient of {origin.name} "
                "is beyond float16's largest number, 65504."
            )
            return self._make("scale", sentence, origin)
        hint = "" if self._loss else " (apex.debug.watch(..., step=lambda: loss) names the line)"
        sentence = (
            f"The loss: {origin.name} is finite and its gradient has {sentences.bad(origin)}, "
            f"so the fault lies in the loss function or its targets{hint}."
        )
        return self._make("loss", sentence, origin)

    def _scale(self, run: Callable[..., Outcome], outcome: Outcome) -> float | None:
        """The highest scale, in halvings, at which gradients are finite; ``None`` for none."""
        scale = self._fault.scale
        if scale <= 1.0 or self._together.any(bool(outcome.bad_outputs())):
            return None
        if self._together.any(run(0.5**_HALVINGS).is_bad()):
            return None
        low, high = 0, _HALVINGS  # bad after `low` halvings, finite after `high`
        while high - low > 1:
            middle = (low + high) // 2
            bad = self._together.any(run(0.5**middle).is_bad())
            low, high = (middle, high) if bad else (low, middle)
        return float(scale * 0.5**high)

    def _widen(
        self, run: Callable[..., Outcome], outcome: Outcome, origin: Origin
    ) -> tuple[float | None, bool]:
        """Largest result of the operation in float32, and whether all is finite there."""
        wide = Wide(origin.index)
        with torch.compiler.set_stance("force_eager"), wide:
            again = run()
        if origin.direction == "forward" and outcome.bad_outputs():
            results = [one for outputs in again.outputs for one in outputs]
        else:
            results = [*again.gradients.values(), *again.inputs]
        if again.loss is not None:
            results.append(again.loss)
        involved = wide.is_used or origin.values.get("dtype") in ("float16", "bfloat16")
        finite = involved and not any(is_bad(wide.widened(one)) for one in results)
        return wide.largest, finite

    def _parameter(self, name: str | None) -> Report:
        since, fault = self._fault.since, self._fault
        if name is None:
            return self._make("rank", "A parameter on another rank is not finite.")
        param = self._named[name]
        origin = Origin("parameter", name, values=describe(param))
        when = f"since the update of step {since}" if since else "before the first watched step"
        update = update_again(fault.optimizers, param) if since else None
        if update is None:
            sentence = (
                f"The parameter {name} was not finite {when}: it has {sentences.bad(origin)}."
            )
            return self._make("parameter", sentence, origin)
        update.module, update.direction = None, "optimizer"
        optimizer, update_origin = type(owner_of(fault.optimizers, param)[0]).__name__, update
        report = self._make(
            "optimizer",
            f"{optimizer} made the parameter {name} not finite at step {since}, from finite "
            f"gradients: {update_origin.name} gave {sentences.bad(update_origin)} in "
            f"{sentences.dtype_of(update_origin)}.",
            update_origin,
        )
        report.module, report.direction = None, None
        group = owner_of(fault.optimizers, param)[1]
        eps = group.get("eps")
        if isinstance(eps, float) and float(torch.tensor(eps, dtype=param.dtype)) == 0.0:
            self._notes.append(f"eps={eps:g} is 0 in {str(param.dtype).removeprefix('torch.')}")
        return report


_OUTSIDE = {
    "input": ("data", ""),
    "parameter": ("parameter", "the parameter"),
    "buffer": ("parameter", "the buffer"),
    "memory": ("uninitialised", "memory"),
    "collective": ("rank", "another rank"),
    "tensor": ("loss", "a tensor that existed before the step (targets?)"),
}


def _order(origin: Origin) -> tuple[bool, int]:
    return origin.index == 0, origin.index


def _plain(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model, "_orig_mod", model)  # torch.compile(model)
