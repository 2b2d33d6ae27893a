"""Automatic mixed precision: ``initialize``, ``scale_loss`` and what goes with them.

In a training loop::

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

The main idea: the state of a training belongs to the objects passed to ``initialize``. Casting
uses ``torch.autocast``, with a thin layer for functions that torch's lists lack
(:mod:`~apex.amp.casting`). A model carries two hooks. An optimizer carries its gradients' state and
its masters (:mod:`~apex.amp.gradients`, :mod:`~apex.amp.optimizer`). A loss scaler is a few numbers
on the device (:mod:`~apex.amp.scaler`). ``_amp_state`` is a view for old programs.

What ``initialize`` puts where, counted for a model of ten linear layers with its optimizer on a CPU
(``tests/amp/test_footprint.py`` compares). ``amp.reset()`` takes all of it off. The last column
says what else does: another ``initialize`` of the same objects (again), or of any objects in the
same thread (next), also with ``enabled=False``.

    ==================================================  ===  ===  ===  =====
    what                                                 O0   O1   O2  ends
    ==================================================  ===  ===  ===  =====
    model: forward hooks, on the model itself             2    2    2  again
    model: guards on layers, until its first forward      0    0   10  again
    model: state-dict and loading hooks, on each layer    0    0   30  again
    model: weights cast to 16 bits                        0    0   20  again
    optimizer: methods replaced on the instance           3    3    3  again
    optimizer: attributes added                           3    3    4  again
    optimizer: group entries replaced by masters          0    0   20  again
    thread: device types with autocast switched on        0    1    0  next
    process: kernels under torch's AutocastCPU key        0  107    0  reset
    process: functions wrapped                            0   11    7  reset
    process: attributes set on _amp_state                 5    6    5  reset
    ==================================================  ===  ===  ===  =====

The functions are six of torch's that autocast cannot cast and two of ``torch.utils.checkpoint``
(O1), or four of ``torch.distributed.checkpoint`` (O2), and torch's three ``matrix_exp``. An
optimizer inside of a wrapper gets a step pre-hook where there are masters. An accelerator's
autocast key gets kernels too. ``amp.init`` puts on thread and process what O1 does; its handle's
``_deactivate`` switches the thread's autocast off again. ``verbosity=2`` adds a
``TorchFunctionMode`` to the thread. A registration holds for each later O1, O4 or ``init``. A
skipped step sets ``_opt_called`` on the optimizer, torch's own mark for its schedulers, which
stays.
"""

from torch.amp import GradScaler

from apex._missing import explain_attributes
from apex.amp import lists
from apex.amp.amp import (
    autocast,
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
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

explain_attributes(__name__)
