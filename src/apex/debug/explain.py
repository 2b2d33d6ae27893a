"""From a fault to its cause: which replays are made, and what follows from them.

1. What was broken before the step is no fault of the step: a parameter, or an optimizer's update.
2. A replay under :class:`Trace` names the origin of the first bad gradient, output or loss. If it
   does not show the fault, others say what is missing: uninitialised memory, compiled code.
3. What came from outside is the cause (data, targets, another rank). An operation is run again at
   lower loss scales and in float32, which says whether scale, range or the model is the cause.

Ranks whose replay needs each other make the same replays in the same order: what one of them finds
is asked of all (``Together.any``) before it decides what is done next.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from apex.debug.calls import Call, Replay, ReplayResult, StepError, unchanged
from apex.debug.growth import Growth
from apex.debug.ranks import Together
from apex.debug.report import Report
from apex.debug.sentences import HINT, OUTSIDE, SHOWN, listed, rows_of
from apex.debug.tape import Tape
from apex.debug.tensors import describe, is_bad, named_in, names_of_stepped, params_of, plain
from apex.debug.tracing import Origin, Trace
from apex.debug.undisturbed import undisturbed
from apex.debug.update import update_again
from apex.debug.widening import Wide

_HALVES = ("float16", "bfloat16")
_OF_LARGE_WEIGHTS = ("loss", "model", "optimizer", "parameter", "range", "scale")
_HALVINGS = 24
_NOT_FINITE_EITHER = (
    "in float32 the step is not finite either: another operation makes an inf or NaN"
)
_Loss = Callable[[], torch.Tensor]


@dataclass
class Fault:
    """A step that was not finite, with what is needed to replay it.

    Attributes:
        bad_loss: Whether only a loss was not finite, and no gradient.
        is_skipped: Whether the update was skipped, so that weights are those of this step.
    """

    calls: list[Call]
    models: list[torch.nn.Module]
    optimizers: list[Any]
    step: int
    since: int
    scale: float
    together: Together
    bad_loss: bool
    is_skipped: bool
    growth: Growth | None = None
    tape: Tape | None = None


def explain(fault: Fault, step: _Loss | None) -> Report:
    """Say why a step was not finite; see the module's text."""
    everyone = fault.together.are_here()
    with undisturbed():
        report = _Explanation(fault, step).report(everyone)
    report.rank = fault.together.rank
    if fault.growth is not None and report.cause in _OF_LARGE_WEIGHTS:
        report.sentence += fault.growth.sentence(names_of_stepped(fault.models, fault.optimizers))
    if not everyone:
        report.notes.append(
            "not all ranks called explain() within 60 seconds, so apex looked at this rank only"
        )
    elif fault.together.is_parallel:
        _compare_ranks(report, fault)
    return report


def _compare_ranks(report: Report, fault: Fault) -> None:
    """On ranks where nothing went wrong: which rank sent the value?"""
    mine = None if report.cause in ("unrepeatable", "rank") else report.sentence
    others = fault.together.exchange(mine)
    guilty = [rank for rank, sentence in enumerate(others) if sentence is not None]
    if mine is None and guilty:
        report.cause = "rank"
        report.operation = report.operation or "all_reduce"
        report.sentence = (
            f"A collective brought the value from rank {guilty[0]}, where: {others[guilty[0]]}"
        )


class _Explanation:
    def __init__(self, fault: Fault, step: _Loss | None) -> None:
        self._fault, self._has_step = fault, step is not None
        self._models = fault.models
        self._named: dict[str, torch.Tensor] = dict(named_in(self._models, "named_parameters"))
        self._replay = Replay(fault.calls, self._named, fault.scale, step)
        self._any = fault.together.any
        self._notes: list[str] = []
        self._inputs: dict[str, torch.Tensor] = {}
        self._is_between = False  # whether it came about between two forwards
        self._hint = "" if step else HINT
        usable = fault.tape is not None and fault.calls and not fault.together.needs_others
        self._tape = fault.tape if usable else None
        if self._tape is not None and not self._tape.can_run(fault.calls[-1]):
            self._tape = None

    # -- the report ----------------------------------------------------------------------------

    def report(self, everyone: bool) -> Report:
        broken = next((name for name, param in self._named.items() if is_bad(param)), None)
        if self._any(broken is not None):
            return self._parameter(broken)
        reason = self._why_not(everyone)
        try:
            if not reason:
                with unchanged(self._models, self._fault.optimizers):
                    return self._replayed()
        except StepError:
            raise
        except Exception as error:  # noqa: BLE001  # the program's own code: training goes on
            reason = f"it raised {type(error).__name__}: {str(error).partition('. ')[0]}"
        return self._make("unrepeatable", f"The step cannot be replayed: {reason}.")

    def _why_not(self, everyone: bool) -> str:
        if not self._fault.calls and not self._has_step:
            names = ", ".join(type(model).__name__ for model in self._models)
            return (
                f"apex saw no forward of {names} since the last step; watch the module that the "
                "program calls, as model(x) and not as model.forward(x)"
            )
        if self._fault.together.needs_others and not everyone:
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
            elif origin.kind in ("parameter", "buffer"):
                report.module = origin.name.rpartition(".")[0]
        return report

    # -- replays -------------------------------------------------------------------------------

    def _trace(
        self,
        run: Callable[[], ReplayResult],
        fill: float | None = None,
        find: Callable[[Trace, ReplayResult], Origin | None] | None = None,
    ) -> tuple[ReplayResult, Origin | None]:
        known: list[tuple[torch.Tensor, tuple[str, str]]] = []
        known += [(param, ("parameter", name)) for name, param in self._named.items()]
        known += [(one, ("buffer", name)) for name, one in named_in(self._models, "named_buffers")]
        modules = reversed(named_in(self._models, "named_modules"))  # the first name of each counts
        paths = {id(module): name for name, module in modules}
        calls = self._fault.calls
        for number, call in enumerate(calls, 1):
            of = paths[id(plain(call.model))] or "the model"
            of += f" (forward {number} of {len(calls)} of this step)" if len(calls) > 1 else ""
            inputs = {f"Input {i} of {of}": one for i, one in enumerate(call.inputs)}
            self._inputs.update(inputs)
            known += [(one, ("input", name)) for name, one in inputs.items()]
            for passed in call.passes.values():
                known += [(g, ("gradient", f"output {i} of {of}")) for i, g in passed.items()]
        trace = Trace(paths, known, fill)
        if self._tape is not None:
            self._tape.trace = trace
        with torch.compiler.set_stance("force_eager"), trace.running():
            result = run()
        return result, (find or self._origin)(trace, result)

    def _origin(self, trace: Trace, result: ReplayResult) -> Origin | None:
        """The origin of what is not finite in the end: loss first, then gradients, outputs."""

        def origins(tensors: Iterable[torch.Tensor]) -> list[Origin]:
            return [origin for one in tensors if (origin := trace.origin_of(one)) is not None]

        losses = origins([] if result.loss is None else [result.loss])
        for origin in losses:
            if origin.kind != "mask":
                return origin
        outputs = [one for one in origins(result.bad_outputs()) if one.kind != "mask"]
        gradients = origins(result.bad_gradients().values())
        inside = [one for one in gradients if one.kind != "gradient"]
        if gradients and not inside:  # the output of a call: by another one that took it?
            inside = [one for one in origins(result.inputs) if one.kind == "operation"]
        if inside:  # backward computes with what the forward broke, and may break it once more
            used = zip(self._replay.judged, result.outputs, strict=False)
            reached = [one for call, all_ in used for one in call.with_gradient(all_)]
            inside += [one for one in origins(reached) if one.kind == "operation"]
            return min(inside, key=_order)
        if gradients and not outputs:
            return gradients[0]
        masks = losses if self._fault.bad_loss else []  # one that is in the loss itself
        return min(outputs or masks, key=_order, default=None)

    def _replayed(self) -> Report:
        run = self._replay.run if self._fault.calls else self._replay.run_step
        result, origin = self._trace(run)
        was_bad = any(call.had_bad_output() for call in self._replay.judged)
        differs = was_bad and not result.had_bad_output()
        is_shown = self._any(origin is not None) and not self._any(differs)
        after = origin is not None and origin.kind == "gradient"
        if self._has_step and (not is_shown or self._any(after)):
            again, inside = self._trace(self._replay.run_step)
            if self._any(inside is not None):
                run, result, origin, is_shown = self._replay.run_step, again, inside, True
            elif is_shown:
                self._notes.append(
                    "step() did not show the fault. Does it use the batch of this step?"
                )
        prepared = None
        if self._tape is not None and (not is_shown or after or _is_input(origin)):
            self._is_between = _is_input(origin) and any(map(_came_from_a_model, self._fault.calls))
            if origin is not None and _is_input(origin) and not self._is_between:
                _, prepared = self._try_tape(partial(self._origin_of_input, origin.name))
            else:
                again, inside = self._try_tape()
                if inside is not None:
                    run, result, origin, is_shown = self._run_tape, again, inside, True
        if not is_shown:
            return self._not_shown(run, was_bad)
        report = self._classify(run, result, origin)
        if prepared is not None and prepared.index and prepared.module is None:
            self._name_line_of_input(report, prepared)
        report.parameters = list(result.bad_gradients())
        if origin is None or origin.kind != "buffer":
            self._note_buffers()
        return report

    def _note_buffers(self) -> None:
        buffers = named_in(self._models, "named_buffers")
        bad = [name for name, one in buffers if is_bad(one) and bool(one.isnan().any())]
        if bad:
            self._notes.append(
                f"the forward also wrote NaN into the buffer {bad[0]}, where it stays"
            )

    def _run_tape(self, factor: float = 1.0) -> ReplayResult:
        """Run again what the program computed before, between and after the forwards."""
        assert self._tape is not None
        return self._tape.run(self._replay, factor)

    def _try_tape(
        self, find: Callable[[Trace, ReplayResult], Origin | None] | None = None
    ) -> tuple[ReplayResult, Origin | None]:
        try:
            return self._trace(self._run_tape, find=find)
        except Exception:  # noqa: BLE001  # the program's own code; the report says what is known
            return ReplayResult(), None

    def _origin_of_input(self, name: str, trace: Trace, result: ReplayResult) -> Origin | None:
        """The origin of what the tape gave to a forward as the input ``name``."""
        for call, now in result.given:
            for one, again in zip(call.inputs, now, strict=False):
                if one is self._inputs.get(name):
                    return trace.origin_of(again)
        return None

    def _name_line_of_input(self, report: Report, origin: Origin) -> None:
        """Say which line before the forward made an input not finite."""
        report.sentence += f" The operation {origin.place()} made it so{_because(origin)}."
        report.line, report.operation, report.call = origin.line, origin.name, origin.call

    def _not_shown(self, run: Callable[[], ReplayResult], in_forward: bool) -> Report:
        if self._any(self._fault.bad_loss):
            return self._make(
                "loss",
                "The loss was not finite, although outputs and gradients are: the fault lies in "
                f"the loss function or its targets{self._hint}.",
            )
        _, origin = self._trace(run, fill=math.nan)  # before replays that read memory as it is
        if origin is not None and origin.kind == "memory":
            return self._classify(run, ReplayResult(), origin)
        shows = []
        for stance in ("default", "force_eager") * 2:  # it may have random numbers of its own
            with torch.compiler.set_stance(stance):
                result = run()
            bad = result.had_bad_output() if in_forward else result.is_bad()
            shows.append(self._any(bad))
        if shows == [True, False] * 2:
            return self._make(
                "compiled",
                "The compiled model returns values that are not finite, and the same model "
                "uncompiled (torch.compiler.set_stance('force_eager')) does not.",
            )
        self._note_unwatched()
        report = self._make(
            "unrepeatable",
            "When apex ran the step again, all gradients were finite. Either the program changed "
            "them (a hook, or code between backward and step), or the model depends on something "
            "that a replay does not repeat (NumPy's random numbers, files, time).",
        )
        gradients = {name: one.grad for name, one in self._named.items()}
        report.parameters = [k for k, one in gradients.items() if one is not None and is_bad(one)]
        return report

    def _note_unwatched(self) -> None:
        ours = set(map(id, self._named.values()))
        for optimizer in self._fault.optimizers:
            params = params_of(optimizer)
            others = sum(id(param) not in ours for param in params)
            if others:
                self._notes.append(
                    f"{others} of the {len(params)} parameters of {type(optimizer).__name__} are "
                    "in no watched module; watch it too: apex.debug.watch(module, optimizer)"
                )

    # -- causes --------------------------------------------------------------------------------

    def _classify(
        self, run: Callable[..., ReplayResult], result: ReplayResult, origin: Origin | None
    ) -> Report:
        inside = origin is not None and origin.kind in ("operation", "mask")
        healed, finite, wide = None, False, Wide(0)
        if inside or self._fault.together.needs_others:  # on all ranks that replay together
            healed = self._scale(run, result)
            wide, finite = self._widen(run, result, origin or Origin("", ""))
        if origin is None:
            return self._make("rank", "A collective brought the value from another rank.")
        if origin.kind == "gradient":
            return self._after_output(origin)
        if not inside:
            return self._outside(origin)
        dtype = origin.values["dtype"]
        gave = f"{origin.place()} gave {origin.counts()}{self._samples(origin)}"
        if healed is not None:
            return self._make(
                "scale",
                f"The loss scale of {self._fault.scale:g} is too high: {gave} in {dtype}, and is "
                f"finite at {healed:g}.",
                origin,
            )
        if finite or (wide.is_finite and dtype in _HALVES):
            limit = torch.finfo(getattr(torch, dtype)).max
            beyond = f": {wide.largest:.4g} is beyond {dtype}'s largest number, {limit:.5g}"
            end = beyond if wide.largest > limit else _because(origin)
            if not finite:
                self._notes.append(_NOT_FINITE_EITHER)
            sentence = f"{gave} in {dtype}, and finite values in float32{end}."
            return self._make("range", sentence, origin)
        in_loss = origin.module is None and run in (self._replay.run_step, self._run_tape)
        in_loss = in_loss and not self._is_between
        where, cause = ("In the loss, ", "loss") if in_loss else ("", "model")
        what = "NaN" if origin.has_nan() else "inf"
        also = f" (also {what} when recomputed in float32)"
        same = also if wide.is_finite is False and dtype in _HALVES else ""
        return self._make(cause, f"{where}{gave}{same}{_because(origin)}.", origin)

    def _samples(self, origin: Origin) -> str:
        """The samples of the batch that have the values, if not all of them do."""
        first = next((one for call in self._fault.calls for one in call.inputs), None)
        values = origin.values
        size = first.shape[0] if first is not None and first.dim() else 0
        rows, bad = values.get("rows", []), values.get("bad_rows", 0)
        if not 0 < bad < size or values["shape"][0] != size:
            return ""
        names = listed([str(row) for row in rows][:SHOWN] + ["more"] * (bad > SHOWN))
        return f" (in sample{'s' if bad > 1 else ''} {names} of the batch, of {size})"

    def _outside(self, origin: Origin) -> Report:
        """What came from outside of the replayed operations."""
        cause, sentence = OUTSIDE[origin.kind]
        words = {"name": origin.name, "counts": origin.counts(), "place": origin.place()}
        words["rows"] = rows_of(origin.values)
        return self._make(cause, sentence.format(**words), origin)

    def _after_output(self, origin: Origin) -> Report:
        """The output was finite and its gradient was not."""
        values, scale = origin.values, self._fault.scale
        if scale > 1.0 and not values["nan"] and values["dtype"] == "float16":
            sentence = (
                f"The loss scale of {scale:g} is too high: the gradient of {origin.name} "
                "is beyond float16's largest number, 65504."
            )
            return self._make("scale", sentence, origin)
        name = origin.name[0].upper() + origin.name[1:]
        sentence = (
            f"{name} is finite but its gradient has {origin.counts()}, so the fault lies in the "
            f"loss function or its targets{self._hint}."
        )
        return self._make("loss", sentence, origin)

    def _scale(self, run: Callable[..., ReplayResult], result: ReplayResult) -> float | None:
        """The highest scale, in halvings, at which gradients are finite; ``None`` for none."""
        scale = self._fault.scale
        if scale <= 1.0 or self._any(bool(result.bad_outputs())):
            return None
        if self._any(run(0.5**_HALVINGS).is_bad()):
            return None
        # Whether gradients are finite goes from False to True once as the scale is halved, and it
        # is True after _HALVINGS: bisection runs the step log2 as often. `fewer` is the place in
        # `halvings`, which begins with 1.
        halvings = range(1, _HALVINGS)
        fewer = bisect_left(halvings, True, key=lambda n: not self._any(run(0.5**n).is_bad()))
        return float(scale * 0.5 ** (fewer + 1))

    def _widen(
        self, run: Callable[..., ReplayResult], result: ReplayResult, origin: Origin
    ) -> tuple[Wide, bool]:
        """What the operation gives in float32, and whether all of the step is finite there."""
        wide = Wide(origin.index)
        with torch.compiler.set_stance("force_eager"), wide:
            again = run()
        if origin.direction == "forward" and result.bad_outputs():
            results = [one for outputs in again.outputs for one in outputs]
        else:
            results = [*again.gradients.values(), *again.inputs]
        if again.loss is not None:
            results.append(again.loss)
        involved = wide.is_used or origin.values.get("dtype") in _HALVES
        finite = involved and not any(is_bad(wide.widened(one)) for one in results)
        return wide, finite

    def _parameter(self, name: str | None) -> Report:
        since, fault = self._fault.since, self._fault
        if name is None:
            return self._make("rank", "A parameter on another rank is not finite.")
        param = self._named[name]
        origin = Origin("parameter", name, values=describe(param))
        when = f"since the update of step {since}" if since else "before the first watched step"
        update = update_again(fault.optimizers, param) if since else None
        if update is None:
            sentence = f"The parameter {name} was not finite {when}: it has {origin.counts()}."
            return self._make("parameter", sentence, origin)
        optimizer, group, origin = update
        report = self._make(
            "optimizer",
            f"{type(optimizer).__name__} made the parameter {name} not finite at step {since}, "
            f"from finite gradients: {origin.name} gave {origin.counts()} in "
            f"{origin.values['dtype']}.",
            origin,
        )
        report.module, report.direction = name.rpartition(".")[0], None
        eps = group.get("eps")
        if (
            isinstance(eps, float)
            and float(torch.tensor(eps, dtype=param.dtype, device="cpu")) == 0.0
        ):
            self._notes.append(f"eps={eps:g} is 0 in {str(param.dtype).removeprefix('torch.')}")
        return report


def _because(origin: Origin) -> str:
    """One step further, where the inputs of the operation are known."""
    if origin.kind == "mask":
        return ", which the loss reads: a mask covers a target"
    return f": {origin.reason}" if origin.reason else ""


def _came_from_a_model(call: Call) -> bool:
    """Whether an input that is not finite was computed from what another forward gave."""
    return any(one.requires_grad and is_bad(one) for one in call.inputs)


def _is_input(origin: Origin | None) -> bool:
    return origin is not None and origin.kind == "input"


def _order(origin: Origin) -> tuple[bool, int]:
    return origin.index == 0, origin.index
