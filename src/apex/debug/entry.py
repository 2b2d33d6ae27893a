"""``watch``: checks what it is given, and puts a :class:`Watch` on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from apex._compat import private
from apex.debug.report import Report
from apex.debug.tensors import params_of
from apex.debug.watch import Watch, watch_of


def watch(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    scaler: Any = None,
    step: Callable[[], torch.Tensor] | None = None,
    on_fault: str | Callable[[Report], None] = "explain",
    skip: bool = True,
    patience: int = 16,
    process_group: Any = None,
    every: int = 0,
) -> Watch:
    """Watch a training, and explain which operation made the first step that is not finite.

    Use it as a context manager, or call ``close()`` at the end. Finite steps compute the same
    numbers as without a watch, bit for bit.

    Args:
        model: The module that the program calls, or several (a GAN's two). It may be wrapped in
            DistributedDataParallel, sharded by FSDP2 or compiled.
        optimizer: The optimizer, or several.
        scaler: The ``GradScaler``, if you use one. Steps that amp or a scaler skips because the
            loss scale was too high are counted. They are reported only after more than ``patience``
            in a row.
        step: Function that computes the loss; see :meth:`Watch.explain`.
        on_fault: What to do at the first fault. ``"explain"`` explains it at once and issues a
            warning with the text. ``"raise"`` raises :class:`NonFiniteError`. ``"keep"`` does
            nothing: check ``watch.fault`` and call ``watch.explain()`` before the next step. A
            function is called with the :class:`Report`.
        skip: Skip updates that would write an inf or NaN, even if the program would not skip them.
        patience: Number of skipped steps in a row that are normal under a dynamic loss scale. 16
            halvings reduce the usual first scale, 65,536, to 1. A step with a NaN in the model's
            output, or with a watched loss that is not finite, is never normal.
        process_group: The ranks that hold parts of one model, if its parameters are not DTensors.
        every: Interval, in steps, of looking for modules whose gradients left their usual range
            (:attr:`Watch.drifts`); 0 for never. Each look waits for the device.

    Raises:
        TypeError: ``model`` or ``optimizer`` has the wrong type.
        ValueError: The models contain no parameter of an optimizer, or an option is out of range.
        RuntimeError: Another watch already watches the optimizer.
    """
    private.need("apex.debug")
    if scaler is not None:
        private.need("GradScaler")
    models, optimizers = _models(model), _optimizers(optimizer)
    if not (callable(on_fault) or on_fault in ("explain", "keep", "raise")):
        raise ValueError(
            f"apex.debug.watch: on_fault was {on_fault!r}; it must be 'explain', 'raise', 'keep' "
            "or a function that takes a report"
        )
    for name, number in (("patience", patience), ("every", every)):
        if type(number) is not int or number < 0:
            raise ValueError(f"apex.debug.watch: {name} was {number!r}; it must be 0 or more")
    if step is not None and not callable(step):
        raise TypeError(f"apex.debug.watch: step was {type(step).__name__}, not a function")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"apex.debug.watch: scaler was {type(scaler).__name__}, not a GradScaler")
    ours = {id(p) for one in models for p in one.parameters()}
    for one in optimizers:
        if ours.isdisjoint(map(id, params_of(one))):
            raise ValueError(
                f"apex.debug.watch: no parameter of the {type(one).__name__} is in the "
                f"{', '.join(type(one).__name__ for one in models)}: pass the model whose "
                "parameters it updates. (apex cannot watch an optimizer that updates float32 "
                "copies, as FP16_Optimizer does; it can watch one that amp.initialize returned.)"
            )
    return Watch(models, optimizers, scaler, step, on_fault, skip, patience, process_group, every)


def _models(given: Any) -> list[torch.nn.Module]:
    single = isinstance(given, torch.nn.Module) or not isinstance(given, Iterable)
    models = [given] if single else list(given)
    for one in models:
        if not isinstance(one, torch.nn.Module):
            raise TypeError(f"apex.debug.watch: model was {type(one).__name__}, not an nn.Module")
    if not models:
        raise ValueError(
            "apex.debug.watch: model was an empty list; pass the model that the program calls"
        )
    return models


def _optimizers(given: Any) -> list[Any]:
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    for one in optimizers:
        if not hasattr(one, "param_groups") or not hasattr(one, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"apex.debug.watch: optimizer was {type(one).__name__}; it must be a "
                "torch.optim.Optimizer. For a wrapper, pass the optimizer inside it "
                "(wrapper.optimizer)."
            )
        if watch_of(one) is not None:
            raise RuntimeError(
                "apex.debug.watch: another watch watches this optimizer already; close() it first"
            )
    if not optimizers:
        raise ValueError(
            "apex.debug.watch: optimizer was an empty list; pass the optimizer that updates the "
            "model"
        )
    return optimizers
