"""``amp.init``: casts for the thread without a model, as programs of 2018 ask for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from apex._compat import private
from apex.amp.casting import cpu_float16, rules, switches
from apex.amp.casting.rules import _USER_CAST_REGISTRY, _USER_PROMOTE_REGISTRY
from apex.amp.frontend import (
    Properties,
    initialize,
    load_state_dict,
    lock,
    opt_levels,
    reset,
    state_dict,
)
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
from apex.amp.legacy.handle import AmpHandle, NoOpHandle
from apex.amp.scaling import scale_loss

_F = TypeVar("_F", bound=Callable[..., Any])

_DECORATOR_HANDLE: AmpHandle | NoOpHandle | None = None

_ORDER_OF_2018 = ("enabled", "enable_caching", "verbose", "allow_banned")


def _in_either_order(function: _F) -> _F:
    """Have ``init`` take its positional arguments in the order of 2018 too.

    The second one was a flag in 2018; now it is ``loss_scale``, which is a string or a number. A
    tutorial of 2018 calls the first one ``enable``.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "enable" in kwargs and "enabled" not in kwargs:
            kwargs["enabled"] = kwargs.pop("enable")
        if len(args) < 2 or not isinstance(args[1], bool):
            return function(*args, **kwargs)
        # Python refuses a fifth argument, and a name that is in both.
        named = dict(zip(_ORDER_OF_2018, args, strict=False))
        return function(*args[len(_ORDER_OF_2018) :], **named, **kwargs)

    return wrapper  # type: ignore[return-value]


@_in_either_order
def init(
    enabled: bool = True,
    loss_scale: str | float = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Switch on O1's function casts for everything that this thread runs, without a model.

    Functions registered since an ``initialize`` at O1 or O4 are then cast in its models too. A
    second call replaces the casts and registrations of the first, but handles of earlier calls
    still scale losses. The positional arguments of 2018, ``init(enabled, enable_caching, verbose,
    allow_banned)``, work too: ``init`` assumes them if the second argument is ``True`` or
    ``False``.

    Args:
        enabled: ``False`` returns a handle that does nothing, and switches casts off.
        loss_scale: Scale of the handle's scalers: ``"dynamic"`` or a number.
        enable_caching: Has no effect except on ``handle.has_cache``. Each use casts a weight
            again; a block of ``amp.autocast()`` casts it only once.
        verbose: Log each cast, to the ``apex.amp`` logger or as a line on standard output.
        allow_banned: Cast ``binary_cross_entropy`` to float32 instead of raising an error.

    Returns:
        The handle. Its ``_deactivate()`` switches the casts off again.

    Raises:
        TypeError: An argument has the wrong type, or was passed twice.
        ValueError: ``loss_scale`` is neither ``"dynamic"`` nor a finite number above 0.
        RuntimeError: You called it inside a ``torch.autocast`` block, whose end would undo it.

    Example:
        >>> handle = amp.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = model(torch.ones(1, 4)).float().mean()
        >>> with handle.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    global _DECORATOR_HANDLE  # noqa: PLW0603  # programs read this name
    private.need("amp.initialize")
    flags = enabled, enable_caching, verbose, allow_banned
    for name, flag in zip(_ORDER_OF_2018, flags, strict=True):
        if not isinstance(flag, int):  # 0 and 1 may come from a command line
            raise TypeError(f"amp.init: {name} was {flag!r}; it must be True or False.")
    if isinstance(loss_scale, bool):
        raise TypeError(f"amp.init: loss_scale was {loss_scale}; it must be 'dynamic' or a number.")
    switches.refuse_users_block("amp.init", switches_on=bool(enabled))
    if not enabled:
        switches.disable_for_thread()
        _DECORATOR_HANDLE = NoOpHandle()
        return _DECORATOR_HANDLE
    handle = AmpHandle(loss_scale, bool(enable_caching), bool(verbose))
    devices = switches.device_types()[-1:]
    with lock:
        known = rules.registered()
        casts = rules.casts_for(
            torch.float16, known, verbose=bool(verbose), allow_banned=bool(allow_banned)
        )
        rules.add_registrations(switches.alive(), known)
    handle.activate(casts, devices)
    cpu_float16.begin(torch.float16, devices)
    _DECORATOR_HANDLE = handle
    return handle
