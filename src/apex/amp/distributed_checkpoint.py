"""``torch.distributed.checkpoint.state_dict`` for optimizers whose groups hold masters.

``get_state_dict`` and ``set_state_dict`` name an optimizer's state by the model's parameters, and
look those up among the tensors of its groups, where amp has put masters. While torch does that, the
model's parameters stand in the groups and in the state. torch has no hook at these places: four of
its private functions are wrapped when the first masters are made, and ``amp.reset()`` takes the
wrappers off. They pass through for optimizers without masters. Where torch lacks one of the four,
an error names it when a program calls the module's public functions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from apex._compat import private
from apex.amp.optimizer import OptimizerState, state_of

_MODULE = "torch.distributed.checkpoint.state_dict"
# Function, and at which position it is given the optimizer or the optimizers; None: it makes state.
_WRAPPED = {
    "_get_optim_state_dict": 1,
    "_split_optim_state_dict": 1,
    "_unflatten_optim_state_dict": 0,
    "_init_optim_state": None,
}
# What a program calls: it refuses masters where torch lacks one of these.
_PUBLIC = (
    *("get_optimizer_state_dict", "get_state_dict"),
    *("set_optimizer_state_dict", "set_state_dict"),
)
_originals: dict[str, Any] = {}


def install() -> None:
    """Wrap torch's functions, once; does nothing without ``torch.distributed``."""
    if _originals or not torch.distributed.is_available():
        return
    module = importlib.import_module(_MODULE)
    is_whole = all(hasattr(module, name) for name in _WRAPPED)
    for name in _WRAPPED if is_whole else _PUBLIC:
        _originals[name] = function = getattr(module, name)
        if not is_whole:
            wrapper = _refusing_masters(function)
        elif (position := _WRAPPED[name]) is None:
            wrapper = _unless_swapped(function)
        else:
            wrapper = _with_model_parameters(function, position)
        setattr(module, name, wrapper)


def uninstall() -> None:
    """Put torch's functions back."""
    if _originals:
        module = importlib.import_module(_MODULE)
    while _originals:
        name, function = _originals.popitem()
        setattr(module, name, function)


def _with_model_parameters(function: Any, position: int) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for optimizer, state in _with_masters(args[position]):
                _make_state(state, optimizer)
                stack.enter_context(state.params.swapped())
            return function(*args, **kwargs)

    return wrapper


def _refusing_masters(function: Any) -> Any:
    """A function of torch's that programs call, where torch lacks what has to be wrapped."""

    @functools.wraps(function)
    def wrapper(model: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_with_masters(optimizers)):
            private.need(_MODULE)
        return function(model, optimizers, *args, **kwargs)

    return wrapper


def _with_masters(given: Any) -> Iterator[tuple[Any, OptimizerState]]:
    for optimizer in given if isinstance(given, (list, tuple)) else [given]:
        state = state_of(optimizer)
        if state is not None and state.use_masters:
            yield optimizer, state


def _make_state(record: OptimizerState, optimizer: Any) -> None:
    """Let torch make the optimizer's state, by a step with gradients of zero, if it has none.

    Nothing is done while there are gradients, as in torch itself; and amp forgets that step.
    """
    ledger, make = record.ledger, _originals.get("_init_optim_state")
    has_grads = any(target.grad is not None for target in record.params.targets)
    if make is None or optimizer.state or has_grads:
        return
    before = [(part, dict(vars(part))) for part in (record, ledger, record.overflow)]
    numbers = record.overflow.counts.numbers
    counted = numbers.clone()
    make(optimizer)
    numbers.copy_(counted)  # in place: a CUDA graph may count in them
    for part, attributes in before:
        vars(part).update(attributes)


def _unless_swapped(initialise: Any) -> Any:
    @functools.wraps(initialise)
    def wrapper(optimizer: Any) -> Any:
        state = state_of(optimizer)
        if state is not None and state.params.is_swapped:
            return None
        return initialise(optimizer)

    return wrapper
