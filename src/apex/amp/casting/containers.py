"""Walking through containers of tensors, keeping what they are.

A container whose tensors all come through unchanged is returned as the very same object. An object
that is found in several places, as an item and as an attribute for example, comes out as one.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MappingView, Sequence, Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LEAVES = (
    *(str, bytes, bytearray, memoryview, range, int, float, complex, torch.nn.Module, type),
    MappingView,  # cannot be made of other items
)
# Python's classes that hold items. What a subclass has changed is left out when items are read and
# written, but for those that a dict of another `items` makes where it holds no tensors. And its
# constructor is not called: it may take other arguments.
_DICTS: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
_BASES: tuple[Any, ...] = (*_DICTS, list, tuple, set, frozenset, deque)
_TRACED = (dict, list, tuple, set)  # for these there is code that Dynamo can trace


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to every tensor in ``value``.

    Entered are mappings, lists, tuples (named ones too), sets, deques and dataclasses, with their
    types kept, and the attributes of such objects. Handed to ``fn`` whole are objects whose class
    has a method ``to`` (a custom batch, a packed sequence), and other objects that have one and are
    no containers. If ``fn`` returns ``None`` for one, it has changed it in place; if it raises a
    ``TypeError``, ``ValueError`` or ``RuntimeError``, the object counts as one without ``to``.
    Modules, strings, arrays, iterators and everything else come back untouched.
    """
    return Walker(fn, is_traced=torch.compiler.is_compiling())(value)


def with_items(value: Any, items: list[Any]) -> Any:
    """A list or tuple of the class of ``value``, with its attributes and other items."""
    result = _made(tuple if isinstance(value, tuple) else list, value, items)
    own = None if type(value) in _TRACED else _attributes(value)[0]
    if own:
        object.__setattr__(result, "__dict__", dict(own))
    return result


def converted(value: Any, dtype: torch.dtype) -> Any:
    """What ``to(dtype)`` of a program's object gives, with its masks and indices as they were."""
    with _FloatingOnly():
        return value.to(dtype)


class Caster:
    """Casts floating tensors, and objects that offer ``to``, to a dtype.

    Outputs in float64 are what a model chose to give, and are left alone. Inputs in float64 (what
    NumPy makes by default) are narrowed to what the model computes in: ``keep_double=False``.
    """

    def __init__(self, dtype: torch.dtype, *, keep_double: bool = True) -> None:
        self.dtype = dtype
        self.kept = (dtype, torch.float64) if keep_double else (dtype,)

    def __call__(self, value: Any) -> Any:
        """Return the value, cast; anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return converted(value, self.dtype)
        if value.is_floating_point() and value.dtype not in self.kept:
            return value.to(self.dtype)
        return value


_CONVERSIONS = (torch.Tensor.to, torch.Tensor.type)


class _FloatingOnly(TorchFunctionMode):
    """Has ``to(dtype)`` of a program's object leave its masks, indices and complex tensors alone.

    Such a method passes what it gets on to all of its tensors, because programs call it with a
    device. A mask in float16 has no ``~``, and token numbers above 2048 would be other ones.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_asked = len(args) == 1 and not kwargs  # type() says what type it is
        if func in _CONVERSIONS and not (is_asked or args[0].is_floating_point()):
            return args[0]
        return func(*args, **(kwargs or {}))


class Walker:
    """Applies ``fn`` as :func:`applier` does.

    For an object that it was given before, or has found in one, it returns what it returned then.

    Attributes:
        is_traced: Whether Dynamo traces the calls. It would take the id of an input for a constant,
            and compile again for each new batch.
    """

    def __init__(self, fn: Callable[[Any], Any], *, is_traced: bool = False) -> None:
        self._fn = fn
        self.is_traced = is_traced
        # By id: an object, which keeps the id its own, and what comes out for it.
        self._done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Apply the function to every tensor in ``value``."""
        is_tensor = isinstance(value, torch.Tensor)
        if value is None or (not is_tensor and isinstance(value, _LEAVES)):
            return value
        key = self._number(value) if self.is_traced else id(value)
        done = self._done.get(key)
        if done is None:
            self._done[key] = value, value  # for a container that holds itself
            result = self._fn(value) if is_tensor else self._walk(value)
            done = self._done[key] = value, result
        return done[1]

    def _number(self, value: Any) -> int:
        """The key of an object, found without its id."""
        for number, (one, _) in self._done.items():
            if one is value:
                return number
        return len(self._done)

    def _walk(self, value: Any) -> Any:
        kind = type(value)
        has_to = callable(getattr(kind, "to", None))
        result = self._whole(value) if has_to else NotImplemented
        if result is not NotImplemented:
            return result
        if issubclass(kind, (Mapping, Sequence, Set)) or dataclasses.is_dataclass(kind):
            return self._container(value)
        if not has_to and inspect.isroutine(_attribute(value, "to")):
            result = self._whole(value)
        return value if result is NotImplemented else result

    def _whole(self, value: Any) -> Any:
        """Hand an object with ``to`` to the function; ``NotImplemented`` if that is refused."""
        try:
            result = self._fn(value)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError):  # its to() takes a device only, for example
            return NotImplemented
        return value if result is None else result

    def _container(self, value: Any) -> Any:
        kind = type(value)
        # Parts are its attributes (`own`, a dict that is walked as one), then its slots, then its
        # items. A plain dict, list or tuple has items only.
        base: Any = next((base for base in _BASES if issubclass(kind, base)), object)
        own, slots = (None, []) if kind is base else _attributes(value)
        parts = [own, *[slot.__get__(value) for slot in slots]]
        if base is not object:
            parts.extend(_items_of(base, value))
        walked = [self(part) for part in parts]
        if all([new is part for new, part in zip(walked, parts, strict=True)]):
            # Nothing that is seen has changed. A class without such a base, or with its own
            # `items()`, may keep items where nothing was seen.
            has_own = base is object or (base in _DICTS and kind.items is not base.items)
            return self._items(value) if has_own else value
        result = _made(base, value, walked[1 + len(slots) :])
        for slot, new in zip(slots, walked[1:], strict=False):
            slot.__set__(result, new)
        if own is not None:
            new = result if own is value else walked[0]  # an AttrDict is its own attributes
            object.__setattr__(result, "__dict__", dict(own) if new is own else new)
        return result

    def _items(self, value: Any) -> Any:
        """Walk through the items of a container that does not keep them in attributes."""
        if isinstance(value, Mapping):
            rows = [(key, item, self(item)) for key, item in value.items()]
            changed = {key: new for key, item, new in rows if new is not item}
            if not changed:
                return value
            if not hasattr(type(value), "__setitem__"):  # a read-only view
                return dict(value) | changed
            result: Any = copy.copy(value)
            for key, new in changed.items():
                result[key] = new
            return result
        items = list(value) if isinstance(value, (Sequence, Set)) else []
        walked = [self(item) for item in items]
        is_same = all([new is item for new, item in zip(walked, items, strict=True)])
        return value if is_same else type(value)(walked)


def _attribute(value: Any, name: str) -> Any:
    """An attribute; ``None`` where ``__getattr__`` is another function, and raises its errors."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001  # a KeyError of dict.__getitem__, for example
        return None


def _attributes(value: Any) -> tuple[Any, list[Any]]:
    """The ``__dict__`` of an object, or ``None``, and its slots that have a value."""
    own = _attribute(value, "__dict__")
    classes = [vars(one) for one in type(value).__mro__ if getattr(one, "__slots__", ())]
    slots = [slot for one in classes for slot in one.values()]
    members = [slot for slot in slots if isinstance(slot, types.MemberDescriptorType)]
    return (own if isinstance(own, dict) else None), [one for one in members if _is_set(one, value)]


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _items_of(base: Any, value: Any) -> Any:
    if type(value) in _TRACED or torch.compiler.is_compiling():
        return value.values() if base in _DICTS else value
    return base.values(value) if base in _DICTS else base.__iter__(value)


def _made(base: Any, value: Any, items: list[Any]) -> Any:
    """An object of the class of ``value`` with other items, made without its constructor."""
    kind = type(value)
    if kind in _TRACED:
        return dict(zip(value, items, strict=True)) if kind is dict else kind(items)
    if base in (tuple, frozenset):
        is_torchs = hasattr(kind, "n_sequence_fields")  # torch.return_types
        return kind(items) if is_torchs else base.__new__(kind, items)
    try:
        new = base.__new__(kind)
    except TypeError:  # part of it is written in C
        return copy.copy(value)
    if base in _DICTS:
        if base is defaultdict:
            new.default_factory = value.default_factory
        for key, item in zip(base.keys(value), items, strict=True):
            base.__setitem__(new, key, item)
    elif base is not object:
        base.__init__(new, items, *([value.maxlen] if base is deque else []))
    return new
