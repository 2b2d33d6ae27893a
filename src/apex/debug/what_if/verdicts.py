"""From scores to verdicts, and which module a policy can name for a layer that is not safe."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from apex import _precision_policy as policies
from apex.debug.what_if.formats import Format, InFormat, Rounding
from apex.debug.what_if.judging import Score, Study, cosine
from apex.debug.what_if.tracing import ProductTrace

SAFE, LOOK, NOT_SAFE, NOT_DECIDED = "safe", "look", "not safe", "not decided"
ENOUGH, OUTSIDE = 8, "(outside of modules)"  # batches; the name of what has no module
SUSPECTS = 8  # of a format, the worst, that are tried in the whole model


class LayerVerdict(NamedTuple):
    """On one layer in one format.

    Attributes:
        state: One of "safe", "look", "not safe" and "not decided".
        score: The worst of all batches.
        why: The reason, where it is not safe or to be looked at.
    """

    state: str
    score: Score
    why: str

    @property
    def number(self) -> str:
        """The worst cosine, for a table."""
        return "inf" if self.score.inf else f"{self.score.cosine:.4f}"


class Layer(NamedTuple):
    """A module with products of its own, and the verdicts on it by format.

    Attributes:
        name: As in ``named_modules()``, without what compile and wrappers add.
        kind: The class of the module.
        keep: The module that a policy names to keep this one out of a format: itself, or the
            nearest around it that was called and whose weights nobody else has or reads; else None.
        whole: Of a suspect, alone in its format in the whole model and the first batch: the loss in
            float32, the loss, and the median cosine of the gradients of weight matrices.
        batches: In how many it was measured: it was called, and what it gave was not empty.
    """

    name: str
    kind: str
    keep: str | None
    verdicts: dict[str, LayerVerdict]
    whole: dict[str, tuple[float, float, float]]
    batches: int


def layers_of(study: Study) -> list[Layer]:
    """The layers in the order of the model, with their verdicts."""
    known = {key for scores in study.scores.values() for key in scores}
    keep = policies.keepers(study.model, study.called, study.trace.readers)
    found: list[Layer] = []
    for name, module in (*policies.named_modules(study.model), (OUTSIDE, None)):
        if id(module) in known:
            known.discard(id(module))
            verdicts = {form.name: _verdict(study, id(module), form) for form in study.forms}
            kind = "function" if module is None else type(module).__name__
            batches = len(study.measured[id(module)])
            found.append(Layer(name, kind, keep.get(name), verdicts, {}, batches))
    if any(verdict.why for layer in found for verdict in layer.verdicts.values()):
        _try_whole(study, found)
    return found


def _verdict(study: Study, key: int, form: Format) -> LayerVerdict:
    score = study.scores[form.name][key]
    state = SAFE if score.cosine >= form.safe else LOOK if score.cosine >= form.look else NOT_SAFE
    if len(study.batches) < ENOUGH or (state != NOT_SAFE and len(study.measured[key]) < ENOUGH):
        state = NOT_DECIDED
    why = _why(study, key, form, score) if state in (LOOK, NOT_SAFE) else ""
    return LayerVerdict(state, score, why)


def _why(study: Study, key: int, form: Format, score: Score) -> str:
    ranges = study.ranges
    result = "scores reach" if key in study.trace.attentions else "result reaches"
    for what, sizes in ((result, ranges.products), ("input or weight reaches", ranges.operands)):
        if score.inf and sizes[key] > (largest := torch.finfo(form.result).max):
            return f"its {what} {sizes[key]:.2g}, {form.name} ends at {largest:g}"
    if score.inf:
        return f"{score.inf:.1%} of its {score.result} is beyond {form.name}"
    text = f"the cosine of its {score.result} to float32's is {score.cosine:.3f}"
    return text + (f", {score.zero:.0%} of it became zero" if score.zero >= 0.01 else "")


def unseen(study: Study) -> list[str]:
    """Modules with a weight matrix of which no product, or no gradient, was seen."""
    missing = {id(p) for p in study.parameters} - study.reached
    named = [*policies.named_modules(study.model)]
    missing |= {id(p) for p in study.model.parameters() if not study.trace.readers[id(p)]}
    rows = [(n or type(m).__name__, p) for n, m in named for p in m.parameters(recurse=False)]
    return list(dict.fromkeys(name for name, p in rows if p.dim() > 1 and id(p) in missing))


def _try_whole(study: Study, layers: list[Layer]) -> None:
    """Run the first batch with one suspect in its format, and the rest in float32."""
    trace = ProductTrace()
    with trace.on(study.model):
        exact = study.passed(0, trace)
    ids = {name: id(module) for name, module in policies.named_modules(study.model)}
    for form in study.forms:
        suspects = [one for one in layers if one.verdicts[form.name].why]
        suspects.sort(key=lambda one: one.verdicts[form.name].score.cosine)
        rounding = Rounding(form, study.ranges.scale)
        for layer in suspects[:SUSPECTS]:
            alone = InFormat(rounding, trace.numbers[ids.get(layer.name, id(None))])
            both = zip(exact, study.passed(0, alone, rounding.scale), strict=True)
            pairs = [(a, b) for a, b in both if a is not None and b is not None and a.dim() > 1]
            middle = statistics.median([cosine(a, b) for a, b in pairs] or [1.0])
            layer.whole[form.name] = (trace.loss, alone.loss, middle)
