"""``what_if``, and what comes out: an answer, a table, the reasons; a policy for amp, a plot."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from apex._compat import private
from apex.amp.casting.kept_modules import MARK, VERSION
from apex.debug.sentences import SHOWN, listed
from apex.debug.tensors import plain
from apex.debug.undisturbed import unchanged, undisturbed
from apex.debug.what_if.formats import FORMATS
from apex.debug.what_if.judging import ENOUGH, LARGEST, OUTSIDE, Layer, Loss, Study
from apex.debug.what_if.updates import Updates
from apex.debug.what_if.whole import LEVELS, Level, Whole

# Okabe and Ito's, which colour-blind readers can tell apart; each cell has the word too.
COLOURS = {"safe": "#56B4E9", "look": "#F0E442", "not safe": "#D55E00", "not decided": "#CCCCCC"}


class WhatIf:
    """The result of :func:`apex.debug.what_if`; ``print`` shows all of it.

    Attributes:
        model: Name of the model's class.
        batches: Number of batches measured.
        formats: Names of the formats.
        layers: The measured modules. Each has ``name``, ``kind`` (its class) and ``verdicts``, a
            dict from format to verdict.
        ranges: Largest magnitudes of the float32 passes: ``product``, ``output``, ``loss`` and
            ``gradient``; and ``scale``, the largest loss scale for float16.
        optimizer: Name of the optimizer whose updates ``lost`` counts.
        lost: For each 16-bit type, the share of updates that weights in it would lose.
        large: Modules whose outputs exceed the range of float16, with their largest magnitude.
        unseen: Modules with a weight matrix whose products or gradients never occurred.
        others: Number of calls of each product that is not judged, such as ``cdist``.
        levels: Results of the first batch at O1 and O2 (float16) and at O4 and O5 (bfloat16), with
            the policy. Empty if no layer was decided.
    """

    def __init__(self, study: Study, layers: list[Layer], updates: Updates) -> None:
        self.model, self.batches = type(study.model).__name__, len(study.batches)
        self.formats = [form.name for form in study.forms]
        self.layers, self.unseen, self.others = layers, study.unseen(), study.trace.others
        self.ranges, self.optimizer, self.lost = study.ranges, updates.name, updates.lost()
        every = study.layers.values()
        self.large = {x.name or self.model: x.output for x in every if x.output > LARGEST}
        self.levels = list[Level]()
        if self.is_decided:
            self.levels = study.levels(self.policy())

    def states(self, form: str, state: str) -> list[Layer]:
        """Return the layers whose verdict on the format ``form`` is ``state``.

        A verdict is ``"safe"``, ``"look"``, ``"not safe"`` or ``"not decided"``.
        """
        return [one for one in self.layers if one.verdicts[form].state == state]

    @property
    def is_decided(self) -> bool:
        """Whether any layer was decided in any format."""
        return any(v.state != "not decided" for one in self.layers for v in one.verdicts.values())

    @property
    def answer(self) -> str:
        """Advice on levels, then a line for each format and each other result."""
        return "\n".join(filter(None, map(" ".join, [self._advice(), *self._topics()])))

    def _advice(self) -> Iterator[str]:
        """Which levels to use, of those that were run; bfloat16's first, which need no scale."""
        front = "Use"
        for form in ("bfloat16", "float16"):
            good = [x.name for x in self.levels if x.name in LEVELS[form] and x.state == "trains"]
            if good:
                policy = " with the policy" if self.policy()["formats"][form]["modules"] else ""
                other = f" (or {good[1]})" if good[1:] else ""
                yield f"{front} {good[0]}{other}{policy}."
                front = "If your device is fast in float16 only, use"
        if self.levels and all(one.state == "fails" for one in self.levels):
            yield "Stay in float32 (O0)."

    def _topics(self) -> Iterator[Iterable[str]]:
        scale = f"float16 needs a loss scale of at most {_power(self.ranges.scale)}"
        if not self.layers:
            yield ["Nothing was measured, because no layer with a product returned any numbers."]
        elif self.is_decided:
            failed = [one.name for one in self.levels if one.state == "fails"]
            if "bfloat16" in self.formats:
                yield self._bfloat16(failed)
            if "float16" in self.formats:
                yield self._float16(scale, failed)
            if skipped := [one for one in self.levels if one.state == "not run"]:
                names = listed([one.name for one in skipped])
                yield [f"apex did not run the whole model at {names}: {skipped[0].why}."]
            if "e4m3" in self.formats:
                yield [self._e4m3()]
            lost = {name: f"{share:.1%} in {name}" for name, share in self.lost.items()}
            yield [
                f"Without float32 masters, 16-bit weights would lose updates of {self.optimizer}:",
                f"{lost['float16']} (O3) and {lost['bfloat16']}; with masters (O2, O5), none.",
            ]
        else:
            seen = f"apex measured {self.batches} batches, and each layer needs results"
            yield [f"Not decided: {seen} in at least {ENOUGH}."]
            if "float16" in self.formats:
                yield [f"{scale}."]
        if self.unseen:
            yield [f"Not seen: `{'`, `'.join(self.unseen[:SHOWN])}`."]

    def _bfloat16(self, failed: list[str]) -> Iterator[str]:
        needs, safe = self._needs("bfloat16"), "everywhere is safe"
        if not needs and any(one in failed for one in LEVELS["bfloat16"]):
            safe = "computes each layer well by itself"
        elif self.unseen or self.others:
            safe = "is safe for the products that were measured"
        yield f"bfloat16 {needs or safe}."
        yield from self._failures("bfloat16")

    def _float16(self, scale: str, failed: list[str]) -> Iterator[str]:
        needs = self._needs("float16")
        safe = f"every layer {'that was seen ' if self.unseen or self.others else ''}is safe then"
        if any(one in failed for one in LEVELS["float16"]):
            safe = "it then computes each layer well by itself"
        rest = f" and {needs.removeprefix('needs ')}" if needs.startswith("needs ") else ""
        yield f"{scale}{rest or f'; it {needs}' if needs else f'; {safe}'}."
        yield from self._failures("float16")
        if self.large and ("O2" in failed or not self.levels):
            name, size = max(self.large.items(), key=lambda item: item[1])
            also = ", as are sums of float16 numbers at O1" if "O1" in failed else ""
            yield f"At O2 the tensors between modules are float16{also}, and `{name}` returns"
            yield f"{size:.2g}."

    def _failures(self, form: str) -> Iterator[str]:
        """At which levels of a format the whole model fails."""
        failed = [one for one in self.levels if one.name in LEVELS[form] and one.state == "fails"]
        policy = ", with that policy too" if self.states(form, "not safe") else ""
        for why in dict.fromkeys(one.why for one in failed):
            names = listed([one.name for one in failed if one.why == why])
            yield f"At {names} the whole model fails{policy}: {why}."

    def _needs(self, form: str) -> str:
        """What a 16-bit format needs, as the end of a sentence; empty if it needs nothing."""
        bad = self.states(form, "not safe")
        needed = [one for one in bad if one.verdicts[form].is_needed]
        parts = []
        if needed:
            parts.append(f"needs {_names(needed)} in float32: {_first_reason(needed, form)}")
            for one in [layer for layer in needed if layer.keep != layer.name]:
                keep = (
                    f"a policy must name `{one.keep}` for"
                    if one.keep
                    else ("a policy has no name for")
                )
                parts[0] += f" ({keep} {_names([one])})"
        if mild := [one for one in bad if one not in needed]:
            also = "also " if needed else ""
            parts.append(f"{also}computes {_names(mild)} inaccurately: {_first_reason(mild, form)}")
        if look := _names(self.states(form, "look")):
            parts.append(f"{'' if bad else 'is safe, but '}look at {look}")
        if few := _names(self.states(form, "not decided")):
            verb = "" if parts else "is "
            parts.append(f"{verb}not decided for {few} (fewer than {ENOUGH} batches)")
        return "; ".join(parts)

    def _e4m3(self) -> str:
        safe, look, bad, few = (self.states("e4m3", one) for one in COLOURS)
        noun = "linear layers" if {one.kind for one in self.layers} == {"Linear"} else "layers"
        verb = "is" if len(safe) == 1 else "are"
        text = f"e4m3: {len(safe)} of {len(self.layers)} {noun} {verb} safe"
        text += f", look at {len(look)}" if look else ""
        text += f", {len(few)} not decided" if few else ""
        verb = "is" if len(bad) == 1 else "are"
        return text + (f", {len(bad)} {verb} not: {_names(bad)}." if bad else ".")

    def table(self) -> str:
        """Return a table of layers and formats with verdicts and worst cosines (or ``inf``)."""
        rows = [["layer", "kind", *self.formats]]
        for one in self.layers:
            cells = [verdict.cell for verdict in one.verdicts.values()]
            rows.append([one.name or "(the model)", one.kind, *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def reasons(self) -> str:
        """Return the reason for each verdict other than safe, the ranges, and what is missing."""
        lines = [_reason(x, f) for f in self.formats for x in self.layers if x.verdicts[f].why]
        r = self.ranges
        sizes = f"product {r.product:.2g}, output {r.output:.2g}, gradient {r.gradient:.2g}"
        lines.append(f"Largest: {sizes}, loss {r.loss:.3g}.")
        if "float16" in self.formats:
            lost, total = r.small
            share = f"{lost / max(total, 1):.2%} of the gradients of products become zero"
            lines.append(f"In float16, at a loss scale of {_power(r.scale)}, {share}.")
        lines += [_level_line(one) for one in self.levels]
        if self.unseen:
            lines.append(f"Not seen: products or gradients of weights of {', '.join(self.unseen)}.")
        if self.others:
            counts = ", ".join(f"{name} ({count} calls)" for name, count in self.others.items())
            lines.append(f"Products that apex did not judge: {counts}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.answer}\n\n{self.table()}\n\n{self.reasons()}"

    def policy(self) -> dict[str, Any]:
        """Return a policy for ``amp.initialize(..., policy=...)`` that lists the unsafe layers.

        Raises:
            ValueError: No layer was decided.
        """
        if not self.is_decided:
            raise ValueError(
                f"apex.debug.what_if: a policy needs {ENOUGH} batches in which a layer with a "
                f"product returns numbers; {self.batches} batches decided no layer. Pass more "
                "batches"
            )
        formats: dict[str, dict[str, Any]] = {}
        for form in self.formats:
            bad = [one.keep for one in self.states(form, "not safe") if one.keep is not None]
            names = [one for one in bad if not any(one.startswith(f"{other}.") for other in bad)]
            scale = {"loss_scale": self.ranges.scale} if form == "float16" else {}
            formats[form] = {**scale, "modules": dict.fromkeys(names, FORMATS[form].others)}
        return {MARK: VERSION, "model": self.model, "batches": self.batches, "formats": formats}

    def save(self, path: str | Path) -> None:
        """Write :meth:`policy` to a JSON file."""
        Path(path).write_text(json.dumps(self.policy(), indent=2) + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw the table of layers and formats into a PNG, SVG or PDF file. Needs matplotlib."""
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("matplotlib is not installed: pip install matplotlib")
        from matplotlib.figure import Figure

        figure = Figure((4 + 1.5 * len(self.formats), 0.8 + 0.3 * len(self.layers)))
        axes = figure.subplots()
        axes.axis("off")
        axes.set_title(f"{self.model}: worst cosine to float32", fontsize=9)
        verdicts = [one.verdicts.values() for one in self.layers]
        cells = [[one.cell for one in row] for row in verdicts]
        colours = [[COLOURS[one.state] for one in row] for row in verdicts]
        names = [one.name or one.kind for one in self.layers]
        axes.table(cells, colours, rowLabels=names, colLabels=self.formats, loc="center")
        figure.savefig(path, dpi=150, bbox_inches="tight")


def _names(layers: Sequence[Layer]) -> str:
    own = {"": "the model's own products", OUTSIDE: "products outside of modules"}
    return listed([own.get(one.name, f"`{one.name}`") for one in layers])


def _first_reason(layers: Sequence[Layer], form: str) -> str:
    """Why the first of them is not safe; with its name if there are others."""
    where = f"in {_names(layers[:1])} " if len(layers) > 1 else ""
    return f"{where}{layers[0].verdicts[form].why}"


def _power(scale: float) -> str:
    return f"2**{math.log2(scale):.0f}"


def _reason(layer: Layer, form: str) -> str:
    v = layer.verdicts[form]
    text = f"{form}, {layer.name or layer.kind}: {v.state}, {v.why} (batch {v.batch})."
    if v.whole is not None:
        text += f" Alone in {form}: {_numbers(v.whole)}."
    return text


def _numbers(found: Whole) -> str:
    text = f"loss {found.exact:.4g} -> {found.loss:.4g}"
    gradients = f", median cosine of the weights' gradients {found.cosine:.3f}"
    return text + (gradients if math.isfinite(found.loss) else "")


def _level_line(level: Level) -> str:
    numbers = "" if level.whole is None else f", {_numbers(level.whole)}"
    why = f": {level.why}" if level.why else ""
    return f"At {level.name}, first batch, with the policy: {level.state}{numbers}{why}."


def what_if(
    model: torch.nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    formats: Sequence[str] = ("float16", "bfloat16", "e4m3"),
    optimizer: torch.optim.Optimizer | None = None,
    limit: int = 64,
    progress: Callable[[int, int], object] | None = None,
) -> WhatIf:
    """Measure for each layer of a model in which formats it can be trained, on any device.

    apex computes each layer's product and its gradients in float32 and in the formats, from the
    same inputs and output gradients, and compares them by cosine. A copy of the model then runs the
    first batch at O1, O2, O4 and O5 with the resulting policy. The model, its buffers and
    gradients, the optimizer and the random number generators stay unchanged, bit for bit.

    Args:
        model: A float32 model in training mode (or the mode that you want to measure), before
            ``amp.initialize``.
        loss: Function ``loss(model, batch)`` that returns a scalar, as for ``apex bench``.
        batches: Batches on the model's device. A verdict needs at least 8.
        formats: Any of ``"float16"``, ``"bfloat16"`` and ``"e4m3"``. The last one means e4m3
            operands, e5m2 gradients, bfloat16 results, and a scale for each tensor.
        optimizer: The optimizer whose updates are compared with the precision of 16-bit weights. A
            copy of it steps copies of the weights. ``None`` means AdamW at a learning rate of
            0.001.
        limit: Largest number of batches to measure.
        progress: Function that is called after each pass over a batch with the number of finished
            passes and the number of all passes.

    Returns:
        The result, which you can ``print`` and ``plot``. Its ``save`` writes a policy for
        ``amp.initialize(policy=...)``.

    Raises:
        TypeError: An argument has the wrong type, or ``loss`` does not return a scalar.
        ValueError: A format is unknown, the model is not in float32, there is no batch, or the loss
            or a gradient is not finite in float32.
    """
    private.need("apex.debug")
    given = {"model": model, "loss": loss, "batches": batches, "formats": formats}
    kinds: tuple[Any, ...] = (torch.nn.Module, Callable, Iterable, Iterable)
    if not all(map(isinstance, given.values(), kinds)):
        found = ", ".join(f"{name} was {type(one).__name__}" for name, one in given.items())
        raise TypeError(
            f"apex.debug.what_if: {found}; they must be an nn.Module, a function of it and a "
            "batch, an iterable of batches, and a list of formats"
        )
    names = [formats] if isinstance(formats, str) else [*formats]
    if not names or not all(one in [*FORMATS] for one in names):
        raise ValueError(f"apex.debug.what_if: formats was {names!r}; allowed: {[*FORMATS]}")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(
            f"apex.debug.what_if: limit was {limit!r}; allowed are integers of 1 or more, and a "
            "verdict needs 8"
        )
    taken, forms = list(islice(batches, limit)), [FORMATS[one] for one in dict.fromkeys(names)]
    named = [*model.named_parameters()]
    for found in [n for n, p in named if p.is_complex()]:
        raise ValueError(
            f"apex.debug.what_if: {found} is complex, and no 16-bit level has complex numbers. "
            "Keep such a model in float32 (O0); or store the weight as real and imaginary parts "
            "(torch.view_as_real), multiply these, and call what_if again"
        )
    wrong = [f"{n} is {p.dtype}" for n, p in named if p.dtype != torch.float32]
    wrong += [] if taken else ["batches was empty"]
    if wrong or not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"apex.debug.what_if: {[*wrong, 'no weight requires a gradient'][0]}; pass a model in "
            "float32 that trains (before amp.initialize), and 8 batches or more"
        )
    model = plain(model)
    stance = torch.compiler.set_stance("force_eager")
    with undisturbed(), unchanged(model, loss), torch.enable_grad(), stance:
        study = Study(model, loss, taken, forms, progress or (lambda *_: None))
        updates = Updates(study.parameters, optimizer)
        return WhatIf(study, study.run(updates.step), updates)
