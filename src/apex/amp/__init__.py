"""Automatic mixed precision: ``initialize``, ``scale_loss`` and the functions around them.

In a training loop::

    model, optimizer = amp.initialize(model, optimizer, opt_level="O4")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

``initialize`` puts hooks on models and replaces ``step``, ``zero_grad`` and ``add_param_group`` on
each optimizer. At O1 and O4 it also switches ``torch.autocast`` on in the thread, and adds kernels
to torch's autocast in the process. ``amp.reset()`` undoes all of this. It leaves only torch's own
mark of a skipped step, ``_opt_called``, and the three methods that ``amp.float16_weights`` replaces
in torch's scaler.
"""

# The state of a training belongs to the objects passed to ``initialize``. Casting uses
# ``torch.autocast``, with a thin layer for functions that torch's lists lack (``casting``). A model
# carries two hooks. An optimizer carries its gradients' state and its masters (``gradients``,
# ``optimizer``). A loss scaler is a few numbers on the device (``scale``). What programs of 2017 to
# 2019 call is in ``legacy``. tests/amp/initialize/test_footprint.py counts what is added.

from apex._upstream.missing import explain_attributes
from apex.amp import lists
from apex.amp.clipping import clip_grad_norm_, clip_grad_value_, outcome, stepped
from apex.amp.frontend import initialize, load_state_dict, reset, state_dict
from apex.amp.functions import (
    autocast,
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from apex.amp.grad_scaler import GradScaler
from apex.amp.gradients.masters import master_params
from apex.amp.graphs.captured import capture
from apex.amp.half_weights import float16_weights
from apex.amp.legacy.amp import init
from apex.amp.scaling import scale_loss

from apex.amp import amp as amp  # isort: skip  # these are reached as attributes
from apex.amp import _initialize, handle, opt, scaler  # isort: skip
from apex.amp._amp_state import _amp_state  # isort: skip  # last: replaces the module's name

__all__ = [
    "GradScaler",
    "_amp_state",
    "_initialize",
    "autocast",
    "capture",
    "clip_grad_norm_",
    "clip_grad_value_",
    "disable_casts",
    "float16_weights",
    "float_function",
    "half_function",
    "handle",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "opt",
    "outcome",
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

explain_attributes(__name__)
