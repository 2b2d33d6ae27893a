"""Casts of functions by name: those that a user asked for, and a few that autocast cannot do.

A rule names a function by where it is found (``torch.sigmoid``) and says what to do with its
arguments. User registrations, edits of ``apex.amp.lists`` and the banned function are rules; what
the lists have as shipped holds for float16 only, as in :mod:`apex.amp.casting.dispatcher`.
No other module of amp replaces attributes of other modules. Each named function is wrapped once;
the wrapper asks at call time whether the thread's casts have a rule for it; :func:`restore` puts
every original back. A rule wins over the built-in lists, because autocast is off inside the call.

For a function of torch the call runs without further casts. For a function of the user's own,
half and promote leave casts on inside, so that layers it uses still meet their float32 weights.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import pkgutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from apex._compat import private
from apex.amp.casting import cpu_float16, dispatcher, switches
from apex.amp.casting.log import CastLog
from apex.amp.casting.switches import Casts, Rule
from apex.amp.levels import HALF_TYPES
from apex.amp.lists import LISTS, functional_overrides, listed, tensor_overrides, torch_overrides

# On the float list, where no autocast kernel can cast them: composites written in Python that
# multiply or pool first, a function that CUDA's autocast registers as promote, a copy to the CPU.
_FLOAT_BY_WRAPPER = {
    functional_overrides: "multilabel_soft_margin_loss local_response_norm interpolate grid_sample",
    tensor_overrides: "cpu",
}


_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Registration(NamedTuple):
    """A function to wrap, and how: half, float or promote."""

    owner: Any
    name: str
    kind: str

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))  # a SimpleNamespace has no hash


_USER_CAST_REGISTRY: set[Registration] = set()  # hold until reset
_USER_PROMOTE_REGISTRY: set[Registration] = set()
REGISTRIES = _USER_CAST_REGISTRY, _USER_PROMOTE_REGISTRY
_patches: dict[str, tuple[Any, Callable[[], None]]] = {}  # by key: an owner, what restores it
_lock = threading.RLock()


_SHIPPED_BANS = {name for name, _ in functional_overrides.BANNED_FUNCS}
_SHIPPED = {module.__name__: listed(module) for module in LISTS}


def registered() -> list[Registration]:
    """The user's registrations; they hold until ``amp.reset()``."""
    return [*_USER_CAST_REGISTRY, *_USER_PROMOTE_REGISTRY]


def casts_for(
    dtype: torch.dtype,
    registrations: Sequence[Registration] = (),
    *,
    verbose: bool = False,
    allow_banned: bool = False,
) -> Casts:
    """Build the casts of a training from the lists as they are now and the registrations.

    Their kernels are registered; they are not switched on yet. ``verbose``: log each cast.
    ``allow_banned``: cast the banned functions' arguments to float32 instead of refusing them. A
    registered function that cannot be replaced raises ``TypeError``; then nothing was changed.
    """
    for registration in registrations:
        check_replaceable(*registration)
    rules: dict[str, Rule] = {}
    _patch_checkpoint()
    patch_matrix_exp()
    for module, names in _FLOAT_BY_WRAPPER.items():
        for name in [name for name in names.split() if listed(module).get(name) == "float"]:
            wrap = _unless_saved if name == "cpu" else None
            rules[_patch(module.MODULE, name, wrap)] = Rule("float", shipped=True)
    for module in LISTS:
        for name, kind in _edits(module):
            rules[_patch(module.MODULE, name)] = Rule(kind)
        for name, message in getattr(module, "BANNED_FUNCS", ()):
            rules[_patch(module.MODULE, name)] = Rule(
                "float" if allow_banned else "banned", message, name in _SHIPPED_BANS
            )
    for name in (*torch_overrides.FP32_FUNCS, *tensor_overrides.FP32_FUNCS):
        rules[f"{name}_"] = Rule("in place")
    casts = Casts(dtype, rules)
    add_registrations([casts], registrations)
    dispatcher.install(dtype)
    casts.log = CastLog() if verbose else None
    return casts


def add_registrations(all_casts: Sequence[Casts], registrations: Sequence[Registration]) -> None:
    """Add rules for ``registrations`` to casts."""
    for owner, name, kind in registrations:
        key = _patch(owner, name)
        for casts in all_casts:
            casts.rules[key] = Rule(kind)


def warn_of_late_registrations(casts: Casts | None, outside: Casts | None) -> None:
    """Say which registrations came after the ``initialize`` that made ``casts``.

    One that a later ``initialize`` has taken up, and that is among the casts ``outside`` of models,
    may be for another model. So it is named once the function was called under ``casts``.
    """
    for owner, name, kind in registered():
        keys, rule = _keys(owner, name), Rule(kind)
        if casts is None or rule in map(casts.rules.get, keys):
            continue
        is_taken_up = outside is not None and rule in map(outside.rules.get, keys)
        if not is_taken_up or not casts.missed.isdisjoint(keys):
            label = getattr(owner, "__name__", repr(owner))
            warnings.warn(
                f"amp.register_{kind}_function: {label}.{name} was registered after "
                "amp.initialize, so it is not cast in this training. Register functions before "
                "initialize, or call initialize again.",
                stacklevel=3,  # the `with` statement of scale_loss
            )


def _edits(module: Any) -> Iterator[tuple[str, str]]:
    """What differs from the list as shipped: ``(name, kind)``, kind native for a name removed."""
    shipped, now = _SHIPPED[module.__name__], listed(module)
    for name in shipped.keys() | now.keys():
        if shipped.get(name) != now.get(name) and hasattr(module.MODULE, name):
            yield name, now.get(name, "native")


def _unpickle(dtype: torch.dtype, rules: dict[str, Rule]) -> Casts:
    """Make the casts of an unpickled model work in this process, as far as names can be found."""
    dispatcher.install(dtype)
    cpu_float16.begin(dtype, switches.device_types()[-1:])
    _patch_checkpoint()
    for key in rules:
        owner, _, name = key.lstrip(".").rpartition(".")
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            _patch(pkgutil.resolve_name(owner), name)
    return Casts(dtype, rules)


copyreg.pickle(Casts, lambda casts: (_unpickle, (casts.dtype, casts.rules)))


def wraps() -> bool:
    """Whether a function is wrapped now."""
    return bool(_patches)


def restore() -> None:
    """Put every wrapped function back."""
    with _lock:
        while _patches:
            _, put_back = _patches.popitem()[1]
            put_back()


def check_replaceable(owner: Any, name: str, kind: str) -> None:
    """Raise ``TypeError`` if ``owner.name``, registered as ``kind``, cannot be replaced."""
    label = getattr(owner, "__name__", repr(owner))
    try:
        with _lock:
            raw, own = _attribute(owner, name), name in getattr(owner, "__dict__", ())
            if inspect.isdatadescriptor(raw) or not callable(getattr(owner, name)):
                raise TypeError(f"it is a {type(raw).__name__}, not a function")
            setattr(owner, name, raw)
            if not own:
                delattr(owner, name)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"amp.register_{kind}_function: {label}.{name} cannot be replaced: {error}. Write a "
            f"function that calls it, decorate that one with amp.{kind}_function, and call it "
            "instead."
        ) from None


def _attribute(owner: Any, name: str) -> Any:
    """The attribute as it is stored; a module may make it on demand."""
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        return getattr(owner, name)


def _key(owner: Any, name: str) -> str:
    label = getattr(owner, "__qualname__", getattr(owner, "__name__", None))
    module = getattr(owner, "__module__", "")
    return f"{module}.{label}.{name}" if label else f"{id(owner):x}.{name}"


def _keys(owner: Any, name: str) -> tuple[str, str]:
    """The key of a rule, and what it is where another owner has the same name."""
    key = _key(owner, name)
    return key, f"{key}@{id(owner):x}"


def _patch(owner: Any, name: str, wrap: _Wrap | None = None) -> str:
    """Wrap ``owner.name``, once, and return the key its rules are stored under."""
    with _lock:
        key, longer = _keys(owner, name)
        if key in _patches and _patches[key][0] is not owner:
            key = longer
        if key in _patches:
            return key
        raw = _attribute(owner, name)
        is_method = isinstance(raw, (staticmethod, classmethod))
        function = raw.__func__ if is_method else getattr(owner, name)
        wrapper: Any = wrap(function) if wrap else _wrap(key, function, native=_is_torchs(owner))
        if is_method:
            wrapper = type(raw)(wrapper)
        put_back = functools.partial(setattr, owner, name, raw)
        if name not in vars(owner):  # but inherited
            put_back = functools.partial(delattr, owner, name)
        setattr(owner, name, wrapper)
        _patches[key] = owner, put_back
        return key


def _patch_checkpoint() -> None:
    """Have ``torch.utils.checkpoint`` recompute with the casts that its forward had.

    It restores the state of autocast, which does not say whose casts those were. Where torch has
    renamed these functions, the newest casts to the restored type are used.
    """
    module = torch.utils.checkpoint
    reentrant = getattr(module, "CheckpointFunction", None)
    for owner, name, position in (
        (module, "_checkpoint_without_reentrant_generator", 0),
        (reentrant, "forward", 1),  # after ``ctx``
    ):
        if hasattr(owner, name):
            _patch(owner, name, functools.partial(_with_casts_of_forward, position))


def patch_matrix_exp() -> None:
    """Have ``matrix_exp`` of 16-bit tensors computed in float32.

    torch 2.13 on a CPU returns memory that nothing has written, or fails. Orthogonal
    parametrizations use it, and at O2, O3 and O5 their weights are in 16 bits.
    """
    for owner in (torch, torch.linalg, torch.Tensor):
        _patch(owner, "matrix_exp", functools.partial(_widened, _key(owner, "matrix_exp")))


def _unless_saved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave ``Tensor.cpu`` alone where a pack hook calls it, as ``save_on_cpu`` does.

    A backward needs the tensor in the type in which its forward has saved it. torch calls pack
    hooks with gradients off. Those of a checkpoint call no ``cpu``: there the program does.
    """
    cast = _wrap(_key(torch.Tensor, "cpu"), function, native=True)
    hooks = private.top_saved_tensors_default_hooks

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = None if torch.is_grad_enabled() else hooks(True)
        is_saved = found and getattr(found[0], "__module__", "") != "torch.utils.checkpoint"
        return (function if is_saved else cast)(*args, **kwargs)

    return wrapper


def _widened(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(x, "dtype", None) not in HALF_TYPES:
            return function(x, *args, **kwargs)
        return function(x.float(), *args, **kwargs).to(x.dtype)

    return _wrap(key, wrapper, native=True)  # a registration still applies


def _with_casts_of_forward(position: int, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch's that is given, at ``position``, what is to be recomputed."""

    @functools.wraps(checkpoint)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        function, casts = args[position], switches.current()

        def recomputed(*inner: Any, **named: Any) -> Any:
            return switches.recompute(casts, function, inner, named)

        return checkpoint(*args[:position], recomputed, *args[position + 1 :], **kwargs)

    return wrapper


def _is_torchs(owner: Any) -> bool:
    if issubclass(owner if isinstance(owner, type) else type(owner), torch.nn.Module):
        return False  # its methods use weights too, which no rule has cast
    module = owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", "")
    return str(module).split(".")[0] == "torch"


def _wrap(key: str, function: Callable[..., Any], *, native: bool) -> Callable[..., Any]:
    name = key.partition("@")[0].rpartition(".")[2]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = switches.current()
        rule = None if casts is None else casts.rules.get(key)
        if casts is not None and rule is None and not torch.compiler.is_compiling():
            casts.missed.add(key)
        if casts is None or rule is None or (rule.shipped and casts.dtype == torch.bfloat16):
            return function(*args, **kwargs)
        return apply(rule, function, casts, args, kwargs, name=name, native=native)

    return wrapper


def apply(
    rule: Rule,
    function: Callable[..., Any],
    casts: Casts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    native: bool,
) -> Any:
    """Call ``function`` with its arguments cast as ``rule`` says; the log has ``name``.

    Only floating tensors on a device whose casts are on take part; float64 is left alone. Lists and
    tuples are entered, other containers are not. A ``native`` function, of torch, is run without
    further casts. A banned one raises ``NotImplementedError`` if an argument is 16-bit.
    """
    devices = [name for name in switches.device_types() if torch.is_autocast_enabled(name)]
    found = dispatcher.tensors_in((args, tuple(kwargs.values())))
    tensors = [tensor for tensor in found if tensor.device.type in devices]
    if not tensors:
        return function(*args, **kwargs)
    device = tensors[0].device.type
    target = _target(rule, tensors, torch.get_autocast_dtype(device))
    if target is not None:
        if casts.log is not None:
            casts.log.note(name, tensors, target)
        convert = dispatcher.caster(target, devices=devices)
        args = convert(args)
        kwargs = {key: convert(value) for key, value in kwargs.items()}
    if rule.kind == "float" or native:
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)
    return function(*args, **kwargs)


def _target(rule: Rule, tensors: list[torch.Tensor], half: torch.dtype) -> torch.dtype | None:
    if rule.kind == "banned" and any(tensor.dtype in HALF_TYPES for tensor in tensors):
        raise NotImplementedError(rule.message)
    if rule.kind == "promote":
        return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return {"half": half, "float": torch.float32}.get(rule.kind)
