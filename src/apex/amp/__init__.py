"""Automatic mixed precision: ``initialize``, ``scale_loss`` and what goes with them.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

The one idea: a training's state belongs to the objects passed to ``initialize``. Casting rests
on ``torch.autocast`` (:mod:`~apex.amp.casts`), with a thin layer for what torch's lists lack
(:mod:`~apex.amp.overlay`, :mod:`~apex.amp.rules`). A model carries two hooks
(:mod:`~apex.amp.modules`). An optimizer carries its masters and its skip
(:mod:`~apex.amp.optimizer`). A loss scaler is a few numbers on the device
(:mod:`~apex.amp.scaler`). ``_amp_state`` is a view for old readers.
"""

from torch.amp import GradScaler

from apex.amp import lists
from apex.amp.amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from apex.amp.casts import autocast
from apex.amp.clipping import clip_grad_norm_, clip_grad_value_, stepped
from apex.amp.frontend import initialize, load_state_dict, reset, state_dict
from apex.amp.handle import disable_casts, scale_loss

from apex.amp import _initialize, handle, opt, scaler  # isort: skip  # reached as attributes
from apex.amp._amp_state import _amp_state, master_params  # last: replaces the module's name

__all__ = [
    "GradScaler",
    "_amp_state",
    "_initialize",
    "autocast",
    "clip_grad_norm_",
    "clip_grad_value_",
    "disable_casts",
    "float_function",
    "half_function",
    "handle",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "opt",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "scale_loss",
    "scaler",
    "state_dict",
    "stepped",
]
