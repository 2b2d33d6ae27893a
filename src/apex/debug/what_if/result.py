"""What comes out: an answer, a table, the reasons; a policy for amp, a plot."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from apex._precision_policy import MARK, VERSION, named_modules, write
from apex.debug.what_if import verdicts
from apex.debug.what_if.formats import FORMATS
from apex.debug.what_if.judging import LARGEST, Study
from apex.debug.what_if.updates import Updates
from apex.debug.what_if.verdicts import ENOUGH, LOOK, NOT_DECIDED, NOT_SAFE, SAFE, Layer

# Okabe and Ito's, which colour-blind readers can tell apart; each cell has the word too.
COLOURS = {SAFE: "#56B4E9", LOOK: "#F0E442", NOT_SAFE: "#D55E00", NOT_DECIDED: "#CCCCCC"}
SHOWN = 4  # names in a sentence


class WhatIf:
    """What :func:`apex.debug.what_if` returns; ``print`` shows all of it.

    Attributes:
        model: The class of the model.
        batches: How many were looked at.
        formats: The names of the formats.
        layers: Modules with products of their own, see :class:`Layer`.
        ranges: Largest magnitudes, see :class:`Ranges`.
        optimizer: Whose updates ``lost`` is about.
        lost: Of each 16-bit type the share of updates that weights in it would lose.
        large: Modules that give what float16 cannot hold, with the largest magnitude.
        unseen: Modules with a weight matrix of which no product, or no gradient, was seen.
        others: How often products were called that are not judged (``cdist``), by name.
    """

    def __init__(self, study: Study, updates: Updates) -> None:
        self.model, self.batches = type(study.model).__name__, len(study.batches)
        self.formats = [form.name for form in study.forms]
        self.layers, self.unseen = verdicts.layers_of(study), verdicts.unseen(study)
        self.others = study.trace.others
        self.ranges, self.optimizer, self.lost = study.ranges, updates.name, updates.lost()
        names = {id(one): name or self.model for name, one in named_modules(study.model)}
        sizes = study.ranges.outputs.items()
        self.large = {names[key]: size for key, size in sizes if size > LARGEST}

    def states(self, form: str, state: str) -> list[Layer]:
        """The layers with one verdict on a format."""
        return [one for one in self.layers if one.verdicts[form].state == state]

    @property
    def is_decided(self) -> bool:
        """Whether there is a verdict on any layer."""
        return any(v.state != NOT_DECIDED for one in self.layers for v in one.verdicts.values())

    @property
    def answer(self) -> str:
        """A few sentences: each format, then what else decides between levels."""
        scale = f"float16 needs a loss scale of at most {_power(self.ranges.scale)}"
        parts, is_part = [], bool(self.unseen or self.others)
        if not self.layers:
            parts.append("Nothing was measured: no layer with a product gave any numbers.")
        elif not self.is_decided:
            text = f"Not decided: {self.batches} batches were seen, and a layer needs"
            parts.append(f"{text} {ENOUGH} in which it gives numbers.")
            parts += [f"{scale}."] if "float16" in self.formats else []
        else:
            parts += self._formats(scale, is_part)
            shares = " and ".join(f"{share:.1%} in {name}" for name, share in self.lost.items())
            lost = f"If weights had 16 bits (O3), updates of {self.optimizer} would be lost: "
            parts.append(f"{lost}{shares}; with masters (O2, O5) none.")
        parts += [f"Not seen: `{'`, `'.join(self.unseen[:SHOWN])}`."] if self.unseen else []
        return " ".join(parts)

    def _formats(self, scale: str, is_part: bool) -> Iterator[str]:
        if "bfloat16" in self.formats:
            everywhere = "is safe where products were seen" if is_part else "everywhere is safe"
            yield f"bfloat16 {self._needs('bfloat16') or everywhere}."
        if "float16" in self.formats:
            needs = self._needs("float16").removeprefix("needs ")
            safe = f"every layer {'that was seen ' if is_part else ''}is safe then"
            yield f"{scale}{f' and {needs}' if needs else f'; {safe}'}."
        if "float16" in self.formats and self.large:
            name, size = max(self.large.items(), key=lambda item: item[1])
            between = f"At O2 what passes between modules is float16 as well, and `{name}` gives"
            yield f"{between} {size:.2g}: use O1, O4 or O5."
        if "e4m3" in self.formats:
            yield self._e4m3()

    def _needs(self, form: str) -> str:
        """What a 16-bit format needs, as the end of a sentence; empty if it needs nothing."""
        bad, look = self.states(form, NOT_SAFE), self.states(form, LOOK)
        text = f"needs {_names(bad)} in float32: {bad[0].verdicts[form].why}" if bad else ""
        for one in [layer for layer in bad if layer.keep != layer.name]:
            keep = f"names `{one.keep}`" if one.keep else "can name nothing"
            text += f" (a policy {keep} for {_names([one])})"
        if look:
            text += f"{'; ' if bad else 'is safe, but '}look at {_names(look)}"
        if few := self.states(form, NOT_DECIDED):
            text += (
                f"{'; ' if text else 'is '}not decided for {_names(few)} (below {ENOUGH} batches)"
            )
        return text

    def _e4m3(self) -> str:
        safe, look, bad, few = (self.states("e4m3", one) for one in COLOURS)
        noun = "linear layers" if {one.kind for one in self.layers} == {"Linear"} else "layers"
        text = f"e4m3: {len(safe)} of {len(self.layers)} {noun} are safe"
        text += f", look at {len(look)}" if look else ""
        text += f", {len(few)} not decided" if few else ""
        text += f", {len(bad)} {'is' if len(bad) == 1 else 'are'} not" if bad else ""
        return text + (f": {_names(bad)}." if bad else ".")

    def table(self) -> str:
        """Layer by format: the verdict and the worst cosine, or inf."""
        rows = [["layer", "kind", *self.formats]]
        for one in self.layers:
            cells = [f"{v.state} {v.number}" for v in map(one.verdicts.get, self.formats) if v]
            rows.append([one.name or "(the model)", one.kind, *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def reasons(self) -> str:
        """A line for each suspect, then ranges and what was not seen."""
        lines = [_reason(x, f) for f in self.formats for x in self.layers if x.verdicts[f].why]
        ranges = self.ranges
        product, output = (max(d.values(), default=0.0) for d in (ranges.products, ranges.outputs))
        sizes = f"product {product:.2g}, output {output:.2g}, gradient {ranges.gradient:.2g}"
        lines.append(f"Largest: {sizes}, loss {ranges.loss:.3g}.")
        if "float16" in self.formats:
            lost, total = ranges.small
            share = f"{lost / max(total, 1):.2%} of the gradients of products become zero"
            lines.append(f"In float16, at a loss scale of {_power(ranges.scale)}, {share}.")
        if self.unseen:
            lines.append(f"Not seen: products or gradients of weights of {', '.join(self.unseen)}.")
        if self.others:
            counts = ", ".join(f"{name} ({count} calls)" for name, count in self.others.items())
            lines.append(f"Products that are not judged: {counts}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.answer}\n\n{self.table()}\n\n{self.reasons()}"

    def policy(self) -> dict[str, Any]:
        """What ``amp.initialize(..., policy=...)`` takes: the layers that are not safe.

        Raises:
            ValueError: Nothing was decided.
        """
        if not self.is_decided:
            raise ValueError(
                f"apex.debug.what_if: a policy needs {ENOUGH} batches in which a layer with a "
                f"product gives numbers; of {self.batches} none is decided"
            )
        formats: dict[str, dict[str, Any]] = {}
        for form in self.formats:
            bad = [one.keep for one in self.states(form, NOT_SAFE) if one.keep is not None]
            names = [one for one in bad if not any(one.startswith(f"{other}.") for other in bad)]
            scale = {"loss_scale": self.ranges.scale} if form == "float16" else {}
            formats[form] = {**scale, "modules": dict.fromkeys(names, FORMATS[form].others)}
        return {MARK: VERSION, "model": self.model, "batches": self.batches, "formats": formats}

    def save(self, path: str | Path) -> None:
        """Write :meth:`policy` as JSON."""
        write(path, self.policy())

    def plot(self, path: str | Path) -> None:
        """Draw layers by formats into a PNG, SVG or PDF file; needs matplotlib."""
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("matplotlib is not installed: pip install matplotlib")
        from matplotlib.figure import Figure

        figure = Figure((4 + 1.5 * len(self.formats), 0.8 + 0.3 * len(self.layers)))
        axes = figure.subplots()
        axes.axis("off")
        axes.set_title(f"{self.model}: worst cosine to float32", fontsize=9)
        rows = [[one.verdicts[form] for form in self.formats] for one in self.layers]
        axes.table(
            [[f"{cell.state} {cell.number}" for cell in row] for row in rows],
            [[COLOURS[cell.state] for cell in row] for row in rows],
            rowLabels=[one.name or one.kind for one in self.layers],
            colLabels=self.formats,
            loc="center",
        )
        figure.savefig(path, dpi=150, bbox_inches="tight")


def _names(layers: Sequence[Layer]) -> str:
    shown = [f"`{one.name}`" if one.name else "the model's own products" for one in layers]
    if len(shown) > SHOWN:
        return f"{', '.join(shown[:SHOWN])} and {len(shown) - SHOWN} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _power(scale: float) -> str:
    return f"2**{math.log2(scale):.0f}"


def _reason(layer: Layer, form: str) -> str:
    v = layer.verdicts[form]
    text = f"{form}, {layer.name or layer.kind}: {v.state}, {v.why} (batch {v.score.batch})."
    if form in layer.whole:
        exact, loss, middle = layer.whole[form]
        text += f" Alone in {form}: loss {exact:.4g} -> {loss:.4g}"
        gradients = f", median cosine of the weights' gradients {middle:.3f}"
        text += f"{gradients if math.isfinite(loss) else ''}."
    return text
