"""Casts of functions that a program asks for: annotations, registrations and blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from apex.amp.casting import cpu_float16, dispatcher, rules, switches
from apex.amp.casting.rules import _USER_CAST_REGISTRY, _USER_PROMOTE_REGISTRY
from apex.amp.casting.switches import Casts, Rule
from apex.amp.newest import newest

_F = TypeVar("_F", bound=Callable[..., Any])


def _decorate(function: _F, kind: str) -> _F:
    if isinstance(function, (classmethod, staticmethod)) or not callable(function):
        raise TypeError(
            f"amp.{kind}_function: fn was a {type(function).__name__}; it must be a function. "
            f"Write @classmethod or @staticmethod above @amp.{kind}_function, not below."
        )

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = switches.current()
        if casts is None:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", type(function).__name__)
        return rules.apply(Rule(kind), function, casts, args, kwargs, name=name, native=False)

    return wrapper  # type: ignore[return-value]


def half_function(fn: _F) -> _F:
    """Decorate ``fn`` so that its floating tensor arguments are cast to the 16-bit type.

    Arguments are cast only while function casts are on (O1, O4, ``init``, ``autocast``). Tensors in
    lists and tuples are cast too, float64 and integer tensors are not. Casts stay on inside ``fn``.
    """
    return _decorate(fn, "half")


def float_function(fn: _F) -> _F:
    """Decorate ``fn`` so that its 16-bit arguments are cast to float32, and casts are off inside.

    See :func:`half_function` for when arguments are cast, and which.
    """
    return _decorate(fn, "float")


def promote_function(fn: _F) -> _F:
    """Decorate ``fn`` so that its floating arguments are cast to the widest type among them.

    See :func:`half_function` for when arguments are cast, and which.
    """
    return _decorate(fn, "promote")


def _register(module: Any, name: str, kind: str) -> None:
    label = getattr(module, "__name__", repr(module))
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {label}.")
    found = getattr(module, name)
    if isinstance(found, type) and issubclass(found, torch.autograd.Function):
        module, name = found, "apply"
    elif isinstance(found, type):
        raise TypeError(
            f"amp.register_{kind}_function: {label}.{name} is a class, not a function. Register "
            f"the method that computes: amp.register_{kind}_function({label}.{name}, 'forward')."
        )
    rules.check_replaceable(module, name, kind)
    for registry in rules.REGISTRIES:
        registry.difference_update([e for e in registry if e[0] is module and e[1] == name])
    registry = _USER_PROMOTE_REGISTRY if kind == "promote" else _USER_CAST_REGISTRY
    registry.add(rules.Registration(module, name, kind))


def register_half_function(module: Any, name: str) -> None:
    """Cast the arguments of ``module.name`` to 16 bits from the next ``initialize`` on.

    Args:
        module: The module, class or other object that has the function as an attribute.
        name: The attribute's name. If it is a ``torch.autograd.Function``, its ``apply`` is cast.

    Raises:
        ValueError: ``module`` has no attribute of this name.
        TypeError: The attribute is not a function, or Python does not let apex replace it.

    Warns:
        UserWarning: Casts are on already. They cover this function only from the next
            ``initialize`` or ``init`` on.

    Example:
        >>> import types
        >>> backend = types.SimpleNamespace(fru=lambda x: x.dtype)
        >>> amp.register_half_function(backend, "fru")
        >>> handle = amp.init()
        >>> backend.fru(torch.ones(2))
        torch.float16
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Cast the arguments of ``module.name`` to float32; see :func:`register_half_function`."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Cast the arguments of ``module.name`` to the widest type among them.

    See :func:`register_half_function`.
    """
    _register(module, name, "promote")


@contextlib.contextmanager
def autocast(
    enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
) -> Iterator[None]:
    """Cast functions inside the block (or decorated function) as the thread's level does.

    The last ``initialize`` decides what the block does:

    * O1 or O4: these casts are on already; the block also caches the casts of weights.
    * O2, O3 or O5: O1's casts in the level's 16-bit type, outside of models only.
    * O0, or ``enabled=False``: nothing is cast.
    * No ``initialize`` yet: O1's casts, in float16.

    Args:
        enabled: ``False`` switches casts off inside the block.
        dtype: 16-bit type to use instead of the level's.
        cache_enabled: Whether to cast a weight only once per block; ``None`` means yes.

    Raises:
        ValueError: ``dtype`` is not a 16-bit floating type.
    """
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(
            f"amp.autocast: dtype was {dtype}; allowed are torch.float16, torch.bfloat16 and "
            "None (the type of the level)."
        )
    casts = _casts_of_block(dtype) if enabled else None
    if casts is None:
        with switches.off():
            yield
        return
    key = object()
    switches.begin_forward(key, casts, switches.device_types())
    torch.set_autocast_cache_enabled(cache_enabled is not False)
    try:
        yield
    finally:
        switches.end_forward(key)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Switch function casts off inside a block. Blocks can be nested.

    Models that went through ``initialize`` still compute at their own level inside the block.
    """
    with switches.off():
        yield


def _casts_of_block(dtype: torch.dtype | None) -> Casts | None:
    casts = switches.thread.casts
    if casts is None:
        options = getattr(newest, "opt_properties", None)
        if switches.thread.forwards or (options is not None and not options.casts_anything):
            return None  # inside a model of another level; or at O0, or disabled
        usual = torch.float16 if options is None else options.half_dtype
        casts = rules.casts_for(dtype or usual)
    if dtype is not None and dtype != casts.dtype:
        casts = Casts(dtype, casts.rules, casts.log)
    dispatcher.install(casts.dtype)
    cpu_float16.begin(casts.dtype, switches.device_types()[-1:])
    return casts
