"""``what_if``: checks what it is given, and studies it without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from apex._precision_policy import named_modules
from apex.debug.tensors import plain
from apex.debug.undisturbed import unchanged, undisturbed
from apex.debug.what_if.formats import FORMATS
from apex.debug.what_if.judging import LARGEST, Loss, Study
from apex.debug.what_if.result import WhatIf
from apex.debug.what_if.updates import Updates
from apex.debug.what_if.verdicts import layers_of, unseen


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
    unknown = [one for one in formats if one not in FORMATS]
    if unknown or not formats:
        raise ValueError(
            f"apex.debug.what_if: formats was {formats!r}; a list of {', '.join(FORMATS)} is needed"
        )
    if not isinstance(model, torch.nn.Module) or not callable(loss):
        raise TypeError(
            f"apex.debug.what_if: model was {type(model).__name__} and loss {type(loss).__name__}; "
            "they must be an nn.Module and a function of it and a batch"
        )
    listed, forms = list(islice(batches, limit)), [FORMATS[one] for one in dict.fromkeys(formats)]
    wrong = [f"{n} is {p.dtype}" for n, p in model.named_parameters() if p.dtype != torch.float32]
    trained = [p for p in model.parameters() if p.requires_grad]
    if wrong or not trained or not listed:
        no = "batches was empty" if trained else "no weight of the model requires a gradient"
        raise ValueError(
            f"apex.debug.what_if: {wrong[0] if wrong else no}; pass a model in float32 that trains "
            "(before amp.initialize), and 8 batches or more"
        )
    model = plain(model)
    modules = [one for one in (model, loss) if isinstance(one, torch.nn.Module)]
    stance = torch.compiler.set_stance("force_eager")
    with undisturbed(), unchanged(modules), torch.enable_grad(), stance:
        study = Study(model, loss, listed, forms)
        updates = Updates(study.parameters, optimizer)
        study.run(updates.step)
        layers, sizes = layers_of(study), study.ranges.outputs
        named = {id(one): name or type(model).__name__ for name, one in named_modules(model)}
        large = {named[i]: size for i, size in sizes.items() if size > LARGEST}
        names, missed = [form.name for form in forms], unseen(study)
    found = (layers, study.ranges, updates.name, updates.lost, large, missed)
    return WhatIf(type(model).__name__, len(listed), names, *found)
