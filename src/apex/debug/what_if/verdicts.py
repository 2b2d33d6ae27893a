"""From scores to verdicts, and which module a policy can name for a layer that is not safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apex import _precision_policy as policies
from apex.debug.what_if.formats import Format, InFormat
from apex.debug.what_if.judging import Score, Study, cosine

SAFE, LOOK, NOT_SAFE, NOT_DECIDED = "safe", "look", "not safe", "not decided"
ENOUGH = 8  # batches
OUTSIDE = "(outside of modules)"
SUSPECTS = 8  # of a format that are tried in the whole model


@dataclass(frozen=True)
class Verdict:
    """On one layer in one format.

    Attributes:
        state: One of "safe", "look", "not safe" and "not decided".
        score: The worst of all batches.
        batch: The number of that batch.
        why: The reason, where it is not safe or to be looked at.
    """

    state: str
    score: Score
    batch: int
    why: str = ""


@dataclass
class Layer:
    """A module with products of its own, and the verdicts on it by format.

    Attributes:
        name: As in ``named_modules()``, without what compile and wrappers add.
        kind: The class of the module.
        keep: The module that a policy names to keep this one out of a format, or why none can be:
            itself, or the nearest around it that was called and shares no weight with the rest.
        whole: Of a suspect in a format, alone in it, in the whole model: the loss in float32 and
            then, and the median cosine of the gradients of the parameters.
    """

    name: str
    kind: str
    keep: str | None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    whole: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The name for a sentence."""
        return f"`{self.name}`" if self.name else f"the {self.kind} itself"


def layers_of(study: Study) -> list[Layer]:
    """The layers in the order of the model, with their verdicts."""
    known = {key for scores in study.scores.values() for one in scores for key in one}
    found: list[Layer] = []
    for name, module in policies.named_modules(study.model):
        if id(module) in known:
            known.discard(id(module))
            layer = Layer(name, type(module).__name__, _keeper(study, name))
            layer.verdicts = _verdicts(study, id(module))
            found.append(layer)
    if None in known:
        found.append(Layer(OUTSIDE, "function", None, _verdicts(study, None)))
    return found


def _verdicts(study: Study, key: int | None) -> dict[str, Verdict]:
    return {form.name: _verdict(study, key, form) for form in study.forms}


def _verdict(study: Study, key: int | None, form: Format) -> Verdict:
    scores = [(one[key], b) for b, one in enumerate(study.scores[form.name]) if key in one]
    score, batch = min(scores, key=lambda pair: pair[0].cosine)
    if len(study.batches) < ENOUGH:
        return Verdict(NOT_DECIDED, score, batch)
    state = SAFE if score.cosine >= form.safe else LOOK if score.cosine >= form.look else NOT_SAFE
    why = "" if state == SAFE else _why(study, key, form, score, batch)
    return Verdict(state, score, batch, why)


def _why(study: Study, key: int | None, form: Format, score: Score, batch: int) -> str:
    ends = f"{form.name} ends at {form.largest:g}"
    result, operand = study.ranges.products.get(key, 0.0), study.ranges.operands.get(key, 0.0)
    if score.inf and result > form.largest:
        what = "scores reach" if study.is_attention(key) else "result reaches"
        return f"its {what} {result:.2g}, {ends}"
    if score.inf and operand > form.largest:
        return f"its input or weight reaches {operand:.2g}, {ends}"
    text = f"the cosine of its {score.result} to float32's is {score.cosine:.3f} (batch {batch})"
    if score.inf:
        text = f"{score.inf:.1%} of its {score.result} is beyond {form.name} (batch {batch})"
    return text + (f", {score.zero:.0%} of it became zero" if score.zero >= 0.01 else "")


def _keeper(study: Study, name: str) -> str | None:
    """The innermost module at or around ``name`` that a policy can name."""
    modules: dict[str, torch.nn.Module] = {}
    for one, module in policies.named_modules(study.model):
        modules.setdefault(one, module)
    while name:
        if _can_be_named(study, modules[name]):
            return name
        name = name.rpartition(".")[0]
    return None


def _can_be_named(study: Study, module: torch.nn.Module) -> bool:
    """Whether it was called, and its weights are nobody else's and read by nobody else."""
    inside = {id(one) for one in module.modules()}
    readers = [study.trace.readers.get(id(p), set()) for p in module.parameters()]
    was_called = id(module) in study.trace.called
    return (
        was_called
        and all(one <= inside for one in readers)
        and policies.shared_weight(study.model, module) is None
    )


def unseen(study: Study) -> list[str]:
    """Modules that hold a weight matrix which no product that was seen has multiplied."""
    found = []
    for name, module in policies.named_modules(study.model):
        matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        if any(id(p) not in study.trace.readers for p in matrices):
            found.append(name or type(module).__name__)
    return list(dict.fromkeys(found))


def try_whole(study: Study, layers: Sequence[Layer]) -> None:
    """Run the first batch with one suspect in its format, and the rest in float32."""
    ids = {name: id(module) for name, module in policies.named_modules(study.model)}
    exact: Any = None
    for form in study.forms:
        suspects = [one for one in layers if one.verdicts[form.name].state in (LOOK, NOT_SAFE)]
        suspects.sort(key=lambda one: one.verdicts[form.name].score.cosine)
        for layer in suspects[:SUSPECTS]:
            exact = exact or study.passed(0)
            numbers = study.trace.numbers.get(ids.get(layer.name), set())
            chosen = InFormat(form, study.ranges.scale, numbers)
            trace, gradients = study.passed(0, chosen)
            cosines = [
                cosine(a, b)
                for a, b in zip(exact[1], gradients, strict=True)
                if a is not None and b is not None and a.dim() > 1
            ]
            middle = sorted(cosines)[len(cosines) // 2] if cosines else 1.0
            layer.whole[form.name] = (exact[0].loss, trace.loss, middle)
