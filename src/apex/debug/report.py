"""A report: what was found, in one sentence, as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex.debug import reproduce
from apex.debug.sentences import listed

CAUSES = {
    "scale": "the loss scale is too high for a gradient of 16 bits",
    "range": "a value beyond the range of 16 bits, finite in float32",
    "model": "the model's own arithmetic, not finite in float32 either",
    "loss": "the loss function or its targets",
    "data": "an input that was not finite",
    "parameter": "a parameter that was not finite before the step",
    "optimizer": "an update of the optimizer that was not finite, from finite gradients",
    "rank": "a value that another rank sent",
    "compiled": "compiled code only; the same operations give finite values uncompiled",
    "uninitialised": "uninitialized memory",
    "unrepeatable": "the replay did not show the fault",
}


@dataclass
class Report:
    """Why a step was not finite.

    Attributes:
        cause: A key of :data:`CAUSES`.
        sentence: What happened, in one sentence.
        operation: The torch operation that made the first inf or NaN, or ``None``.
        module: Path of the module that ran the operation or owns the bad parameter; ``None``
            outside of the model.
        direction: ``"forward"``, ``"backward"`` or ``None``.
        line: The source line, in the forward pass, that the operation belongs to.
        step: Number of the step, counted from 1.
        since: Number of the last finite step; 0 if no step was finite.
        scale: The loss scale of the step; 1.0 without loss scaling.
        values: Facts about the first bad tensor: its shape and dtype, the counts ``"nan"`` and
            ``"inf"``, the index ``"first"``, and more.
        parameters: Names of the parameters whose gradients were not finite.
        notes: Further remarks, one sentence each.
        rank: Rank of the process, in a distributed program.
    """

    cause: str
    sentence: str
    step: int
    operation: str | None = None
    module: str | None = None
    direction: str | None = None
    line: str = ""
    since: int = 0
    scale: float = 1.0
    values: dict[str, Any] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank: int | None = None
    call: Any = field(default=None, repr=False, compare=False)

    def to_json(self) -> str:
        """Return the attributes above as JSON. A scale of inf or NaN becomes a string."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["call"]
        if not math.isfinite(self.scale):
            fields["scale"] = str(self.scale)
        return json.dumps(fields, indent=2, allow_nan=False, default=str)

    def text(self) -> str:
        """Return the report as text of several lines."""
        values = self.values
        rows = [
            ("cause", f"{self.cause}: {CAUSES[self.cause]}"),
            ("operation", ", ".join(part for part in (self.operation, self.direction) if part)),
            ("module", self.module if self.module != "" else "(the model itself)"),
            ("line", self.line),
            ("values", _values(values) if values else ""),
            ("step", f"{self.step}; the last one that was finite: {self.since or 'none'}"),
            ("loss scale", f"{self.scale:g}" if self.scale != 1.0 else ""),
            ("gradients", _some(self.parameters)),
            ("rank", "" if self.rank is None else str(self.rank)),
        ]
        lines = [f"apex.debug: {self.sentence}"]
        lines += [f"  {name:<10} {value}" for name, value in rows if value]
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the operation with its inputs to a file that ``apex debug repro`` runs again.

        Raises:
            ValueError: The report names no operation, because the cause is in the data, a parameter
                or the optimizer; or the inputs cannot be cropped to 10 MB.
        """
        if self.call is None:
            raise ValueError(
                f"apex.debug: a report with the cause {self.cause!r} has no operation to save"
            )
        return reproduce.save(Path(path), self.call, json.loads(self.to_json()))


def _values(values: dict[str, Any]) -> str:
    shape = " x ".join(map(str, values["shape"])) or "one element"
    text = f"{values['dtype']}, {shape}: {values['nan']} NaN and {values['inf']} inf"
    if values.get("first"):
        text += f", the first at {values['first']}"
    if values.get("largest") is not None:
        text += f"; largest finite magnitude {values['largest']:.4g}"
    return text


def _some(names: list[str]) -> str:
    return f"not finite: {listed(names)}" if names else ""
