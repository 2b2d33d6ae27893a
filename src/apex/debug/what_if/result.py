"""What comes out: an answer, a table, the reasons; a policy for amp, a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex._precision_policy import MARK, VERSION
from apex.debug.what_if.formats import FORMATS
from apex.debug.what_if.judging import Ranges
from apex.debug.what_if.verdicts import ENOUGH, LOOK, NOT_DECIDED, NOT_SAFE, OUTSIDE, SAFE, Layer

SHOWN = 4  # names in a sentence


@dataclass
class WhatIf:
    """What :func:`apex.debug.what_if` returns; ``print`` shows all of it.

    Attributes:
        model: The class of the model.
        batches: How many were looked at.
        formats: The names of the formats.
        layers: Modules with products of their own, see :class:`Layer`.
        ranges: Largest magnitudes, see :class:`Ranges`.
        lost: Of each 16-bit type the share of updates that weights in it would lose.
        optimizer: Whose updates these are.
        large: Modules that give what float16 cannot hold, with the largest magnitude.
        unseen: Modules with a weight matrix that no product has multiplied which was seen.
    """

    model: str
    batches: int
    formats: list[str]
    layers: list[Layer]
    ranges: Ranges
    lost: dict[str, float]
    optimizer: str
    large: dict[str, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    @property
    def loss_scale(self) -> float:
        """The largest power of two under which no gradient of the batches overflows float16."""
        return self.ranges.scale

    def states(self, form: str, state: str) -> list[Layer]:
        """The layers with one verdict on a format."""
        return [one for one in self.layers if one.verdicts[form].state == state]

    # -- the text ----------------------------------------------------------------------------------

    @property
    def answer(self) -> str:
        """A few sentences: each format, then what else decides between levels."""
        if self.batches < ENOUGH:
            ranges = f"float16 would need a loss scale of at most {_power(self.loss_scale)}."
            ranges = ranges if "float16" in self.formats else ""
            text = f"Not decided: {self.batches} batches were seen, and {ENOUGH} are needed."
            return f"{text} {ranges}".strip()
        by_name = {"float16": self._float16, "bfloat16": self._bfloat16, "e4m3": self._e4m3}
        order = [one for one in ("bfloat16", "float16", "e4m3") if one in self.formats]
        sentences = [by_name[one]() for one in order]
        if "float16" in self.formats and self.large:
            name, size = max(self.large.items(), key=lambda item: item[1])
            sentences.append(
                f"At O2 what passes between modules is float16 as well, and `{name}` gives "
                f"{size:.2g}: use O1, O4 or O5."
            )
        return " ".join([*sentences, self._updates()])

    def _bfloat16(self) -> str:
        suspects = self._suspects("bfloat16")
        return f"bfloat16 {suspects}." if suspects else "bfloat16 everywhere is safe."

    def _float16(self) -> str:
        scale = f"float16 needs a loss scale of at most {_power(self.loss_scale)}"
        suspects = self._suspects("float16").removeprefix("needs ")
        if not suspects:
            return f"{scale}; every layer is safe then."
        return f"{scale} and {suspects}."

    def _suspects(self, form: str) -> str:
        """What a 16-bit format needs, as the end of a sentence; empty if it needs nothing."""
        bad, look = self.states(form, NOT_SAFE), self.states(form, LOOK)
        text = ""
        if bad:
            text = f"needs {_names(bad)} in float32: {bad[0].verdicts[form].why}"
            kept = {one.name: one.keep for one in bad}
            others = [one.shown for one in bad if one.keep is None]
            around = [
                f"`{keep}` for `{name}`" for name, keep in kept.items() if keep not in (None, name)
            ]
            text += f" (a policy names {', '.join(around)})" if around else ""
            text += f" (no policy can name {', '.join(others)})" if others else ""
        if look:
            text += f"{'; ' if bad else 'everywhere is safe, but '}look at {_names(look)}"
        return text

    def _e4m3(self) -> str:
        noun = "linear layers" if {one.kind for one in self.layers} == {"Linear"} else "layers"
        safe, look, bad = (len(self.states("e4m3", one)) for one in (SAFE, LOOK, NOT_SAFE))
        if safe == len(self.layers):
            return f"e4m3: all {safe} {noun} are safe."
        text = f"e4m3: {safe} of {len(self.layers)} {noun} are safe"
        text += f", look at {look}" if look else ""
        if bad:
            names = _names(self.states("e4m3", NOT_SAFE))
            text += f", {bad} {'is' if bad == 1 else 'are'} not: {names}"
        return f"{text}."

    def _updates(self) -> str:
        shares = " and ".join(f"{share:.1%} in {name}" for name, share in self.lost.items())
        return (
            f"If the weights themselves had 16 bits (O3), updates of {self.optimizer} would be "
            f"lost: {shares}; masters (O2, O5) lose none."
        )

    def table(self) -> str:
        """Layer by format: the verdict and the worst cosine, or inf."""
        rows = [["layer", "kind", *self.formats]]
        rows += [
            [one.name or "(the model)", one.kind, *(_cell(one, form) for form in self.formats)]
            for one in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def reasons(self) -> str:
        """A line for each suspect, then ranges and what was not seen."""
        lines = [
            line for form in self.formats for one in self.layers if (line := _reason(one, form))
        ]
        lines.append(
            f"Largest: weight {self.ranges.weight:.2g}, product "
            f"{max(self.ranges.products.values(), default=0.0):.2g}, output of a module "
            f"{max(self.ranges.outputs.values(), default=0.0):.2g}, gradient "
            f"{self.ranges.gradient:.2g}, loss {self.ranges.loss:.3g}."
        )
        if "float16" in self.formats:
            lost, total = (sum(column) for column in zip(*self.ranges.small, strict=True))
            share = f"{lost / max(total, 1):.2%} of the gradients of products zero"
            lines.append(f"At a loss scale of {_power(self.loss_scale)} float16 makes {share}.")
        if self.unseen:
            lines.append(f"Not seen: the weights of {', '.join(self.unseen)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.answer}\n\n{self.table()}\n\n{self.reasons()}"

    # -- files -------------------------------------------------------------------------------------

    def policy(self) -> dict[str, Any]:
        """What ``amp.initialize(..., policy=...)`` takes: the layers that are not safe.

        Raises:
            ValueError: There were too few batches to decide.
        """
        if self.batches < ENOUGH:
            raise ValueError(
                f"apex.debug.what_if: {self.batches} batches decide nothing, so there is no "
                f"policy. Pass {ENOUGH} or more."
            )
        formats: dict[str, dict[str, Any]] = {}
        for form in self.formats:
            names = [one.keep for one in self.states(form, NOT_SAFE) if one.keep is not None]
            scale = {"loss_scale": self.loss_scale} if FORMATS[form].needs_scale else {}
            formats[form] = {**scale, "modules": dict.fromkeys(names, FORMATS[form].others)}
        return {MARK: VERSION, "model": self.model, "batches": self.batches, "formats": formats}

    def save(self, path: str | Path) -> None:
        """Write :meth:`policy` as JSON."""
        Path(path).write_text(json.dumps(self.policy(), indent=2) + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw layers by formats into a PNG, SVG or PDF file; needs matplotlib."""
        from apex.debug.what_if.plot import draw

        draw(self, Path(path))


def _power(scale: float) -> str:
    return f"2**{round(math.log2(scale))}"


def _names(layers: Sequence[Layer]) -> str:
    shown = [one.shown for one in layers[:SHOWN]]
    more = len(layers) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _cell(layer: Layer, form: str) -> str:
    verdict = layer.verdicts[form]
    return f"{verdict.state} {'inf' if verdict.score.inf else f'{verdict.score.cosine:.4f}'}"


def _reason(layer: Layer, form: str) -> str:
    verdict = layer.verdicts[form]
    if verdict.state in (SAFE, NOT_DECIDED):
        return ""
    text = f"{form}, {layer.name or layer.kind}: {verdict.state}, {verdict.why}."
    if verdict.score.subnormal >= 0.01:
        text += f" {verdict.score.subnormal:.0%} of it is subnormal."
    if layer.keep is None and layer.name != OUTSIDE:
        text += " Its weight is shared, or it is the model itself: no policy can name it."
    if form in layer.whole:
        exact, loss, middle = layer.whole[form]
        text += f" Alone in {form} in the first batch: loss {exact:.4g} -> {loss:.4g}"
        if math.isfinite(loss):
            text += f", median cosine of the weights' gradients {middle:.3f}"
        text += "."
    return text
