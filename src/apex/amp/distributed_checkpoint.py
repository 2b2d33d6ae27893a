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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from apex._compat import private
from apex.amp.optimizer import OptimizerState, state_of

_MODULE = "torch.distributed.checkpoint.state_dict"
_originals: dict[str, Any] = {}


def install() -> None:
    """Wrap torch's functions, once; does nothing without ``torch.distributed``."""
    if _originals or not torch.distributed.is_available():
        return
    module = importlib.import_module(_MODULE)
    is_whole = all(hasattr(module, name) for name in _WRAPPERS)
    for name, wrapper in (_WRAPPERS if is_whole else dict.fromkeys(_PUBLIC, _refuse)).items():
        _originals[name] = function = getattr(module, name)
        bound = functools.partial(wrapper, function)
        setattr(module, name, functools.update_wrapper(bound, function))


def uninstall() -> None:
    """Put torch's functions back."""
    while _originals:
        name, function = _originals.popitem()
        setattr(importlib.import_module(_MODULE), name, function)


def _with_weights(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch's with the model's parameters in groups and state."""
    with ExitStack() as stack:
        for optimizer, state in _with_masters(args):
            _make_state(state, optimizer)
            stack.enter_context(state.params.swapped())
        return function(*args, **kwargs)


def _refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that programs call, but for masters: torch lacks what has to be wrapped."""
    if any(_with_masters([*args, *kwargs.values()])):
        private.need(_MODULE)
    return function(*args, **kwargs)


def _unless_swapped(initialise: Any, optimizer: Any) -> Any:
    """Let torch make an optimizer's state, but not for weights whose masters have it."""
    state = state_of(optimizer)
    return None if state is not None and state.params.is_swapped else initialise(optimizer)


def _with_masters(args: Iterable[Any]) -> Iterator[tuple[Any, OptimizerState]]:
    """The optimizers with masters among arguments, and in lists and tuples among these."""
    for given in args:
        for one in given if isinstance(given, (list, tuple)) else [given]:
            state = state_of(one)
            if state is not None and state.use_masters:
                yield one, state


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


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "_get_optim_state_dict": _with_weights,
    "_split_optim_state_dict": _with_weights,
    "_unflatten_optim_state_dict": _with_weights,
    "_init_optim_state": _unless_swapped,
}
# What a program calls: it refuses masters where torch lacks one of these.
_PUBLIC = (
    *("get_optimizer_state_dict", "get_state_dict"),
    *("set_optimizer_state_dict", "set_state_dict"),
)
