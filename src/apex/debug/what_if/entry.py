"""``what_if``: checks what it is given, and studies it without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from apex import _precision_policy as policies
from apex.debug.tensors import plain
from apex.debug.undisturbed import undisturbed
from apex.debug.what_if.formats import FORMATS, Format
from apex.debug.what_if.judging import Loss, Study
from apex.debug.what_if.result import WhatIf
from apex.debug.what_if.unchanged import unchanged
from apex.debug.what_if.updates import Updates
from apex.debug.what_if.verdicts import ENOUGH, layers_of, try_whole, unseen


def what_if(
    model: torch.nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    formats: Sequence[str] = ("float16", "bfloat16", "e4m3"),
    optimizer: torch.optim.Optimizer | None = None,
    limit: int = 64,
) -> WhatIf:
    """Measure, layer by layer, in which formats a model can be trained; on any device.

    Each layer's own results (product, gradients of inputs and weight matrices) are computed in
    float32 and in the formats, from the same inputs and output gradients, and compared by cosine.
    The model, its buffers and gradients, the optimizer and the states of random numbers are
    afterwards what they were, bit for bit.

    Args:
        model: In float32, in the mode (``train()``) in which it is to be looked at; not after
            ``amp.initialize``.
        loss: ``loss(model, batch)`` gives a scalar, as for ``apex bench``.
        batches: At least 8, on the model's device; fewer decide nothing.
        formats: Among ``"float16"``, ``"bfloat16"`` and ``"e4m3"`` (results in bfloat16, gradients
            in e5m2, a scale for each tensor).
        optimizer: Whose updates are compared with the precision of 16-bit weights; a copy of it
            steps copies of the weights. ``None`` for AdamW at a learning rate of 0.001.
        limit: The most batches that are looked at.

    Returns:
        The answer: ``print`` it, ``save`` its policy for ``amp.initialize(policy=...)``, ``plot``.

    Raises:
        TypeError: An argument is of another type, or ``loss`` gives no scalar.
        ValueError: A format is unknown, the model is not in float32, there is no batch, or the loss
            or a gradient is not finite in float32.
    """
    forms = _checked(model, loss, formats)
    listed = list(islice(batches, limit))
    if not listed:
        raise ValueError("apex.debug.what_if: batches was empty; pass 8 or more")
    model = plain(model)
    modules = [model, *([loss] if isinstance(loss, torch.nn.Module) else [])]
    with (
        undisturbed(),
        unchanged(modules),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        study = Study(model, loss, listed, forms)
        updates = Updates(study.parameters, optimizer)
        study.run(updates.step)
        layers = layers_of(study)
        if len(listed) >= ENOUGH:
            try_whole(study, layers)
        names = {id(module): name for name, module in policies.named_modules(model)}
        ends = FORMATS["float16"].largest
        large = {
            names[i] or type(model).__name__: size
            for i, size in study.ranges.outputs.items()
            if size > ends
        }
        return WhatIf(
            type(model).__name__, len(listed), [form.name for form in forms], layers, study.ranges,
            updates.lost, updates.name, large, unseen(study),
        )  # fmt: skip


def _checked(model: Any, loss: Any, formats: Sequence[str]) -> list[Format]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"apex.debug.what_if: model was {type(model).__name__}, not an nn.Module")
    if not callable(loss):
        raise TypeError(
            f"apex.debug.what_if: loss was {type(loss).__name__}; it must be a function that takes "
            "the model and a batch, and returns a scalar"
        )
    formats = [formats] if isinstance(formats, str) else list(formats)
    unknown = [one for one in formats if one not in FORMATS]
    if unknown or not formats:
        raise ValueError(
            f"apex.debug.what_if: formats was {formats!r}; allowed are {', '.join(FORMATS)}"
        )
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"apex.debug.what_if: {name} has no shape yet (a lazy module). Run one forward "
                "first."
            )
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"apex.debug.what_if: {name} is {parameter.dtype}, and formats are compared with "
                "float32. Call it before amp.initialize, on a model in float32."
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("apex.debug.what_if: no parameter of the model requires a gradient")
    return [FORMATS[one] for one in dict.fromkeys(formats)]
