"""``what_if``: checks what it is given, and studies it without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from apex.debug.tensors import plain
from apex.debug.undisturbed import unchanged, undisturbed
from apex.debug.what_if.formats import FORMATS
from apex.debug.what_if.judging import Loss, Study
from apex.debug.what_if.result import WhatIf
from apex.debug.what_if.updates import Updates


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
    given = {"model": model, "loss": loss, "batches": batches, "formats": formats}
    allowed = (isinstance(model, torch.nn.Module), callable(loss), isinstance(batches, Iterable))
    if not all((*allowed, isinstance(formats, Iterable))):
        found = ", ".join(f"{name} was {type(one).__name__}" for name, one in given.items())
        raise TypeError(
            f"apex.debug.what_if: {found}; they must be an nn.Module, a function of it and a "
            "batch, an iterable of batches, and a list of formats"
        )
    names = [formats] if isinstance(formats, str) else [*formats]
    if not names or not all(one in [*FORMATS] for one in names):
        raise ValueError(f"apex.debug.what_if: formats was {names!r}; allowed: {[*FORMATS]}")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"apex.debug.what_if: limit was {limit!r}; allowed: 1 or more, 8 decide")
    listed, forms = list(islice(batches, limit)), [FORMATS[one] for one in dict.fromkeys(names)]
    wrong = [f"{n} is {p.dtype}" for n, p in model.named_parameters() if p.dtype != torch.float32]
    wrong += [] if listed else ["batches was empty"]
    if wrong or not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"apex.debug.what_if: {[*wrong, 'no weight requires a gradient'][0]}; pass a model in "
            "float32 that trains (before amp.initialize), and 8 batches or more"
        )
    model = plain(model)
    stance = torch.compiler.set_stance("force_eager")
    with undisturbed(), unchanged(model, loss), torch.enable_grad(), stance:
        study = Study(model, loss, listed, forms)
        updates = Updates(study.parameters, optimizer)
        study.run(updates.step)
        return WhatIf(study, updates)
