"""Modules with computed attributes: ``module.weight`` is a property that computes at each access.

A property belongs to a class, so the module gets a subclass of its class, of the same name. Modules
of one class with the same computed attributes share that subclass, which is never changed: copies
of a module are independent of it, and ``torch.compile`` compiles them once.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

__all__: list[str] = []


class Computes(Protocol):
    """What is installed for an attribute."""

    reparameterization_names: list[str]

    def compute_weight(self, module: torch.nn.Module, name: str) -> Any:
        """Compute the attribute ``name`` of ``module``."""


class Computed(torch.nn.Module):
    """Mixed into the class of a module that has computed attributes."""

    _computed: dict[str, Computes]

    def register_parameter(self, name: str, param: Any) -> None:
        """Refuse the name of a computed attribute; assigning a parameter comes here too."""
        if name in self._computed:
            raise AttributeError(_set_these(self, name))
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load the names that torch's parametrizations write, too."""
        for leaf, fn in self._computed.items():
            for i, name in enumerate(fn.reparameterization_names):
                value = state_dict.pop(f"{prefix}parametrizations.{leaf}.original{i}", None)
                if value is not None:
                    state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Without no_grad an RNN would put computed weights into its state that have a history, and
        # those cannot be copied.
        with torch.no_grad():
            made: Any = super().__reduce_ex__(max(protocol, 2))
        if made[0] is copyreg.__newobj__ and type(self).__bases__[0] is Computed:  # type: ignore[attr-defined]
            return (_new, (type(self).__bases__[1], *self._computed), *made[2:])
        return made


def _new(base: type[torch.nn.Module], *names: str) -> torch.nn.Module:
    """Make an empty module for ``copy`` and ``pickle``, which then set its attributes."""
    cls = _class_of(base, names)
    return cls.__new__(cls)


_classes: weakref.WeakValueDictionary[tuple[Any, ...], type[torch.nn.Module]]
_classes = weakref.WeakValueDictionary()


def _class_of(base: type[torch.nn.Module], names: tuple[str, ...]) -> type[torch.nn.Module]:
    key = (base, *sorted(names))
    cls = _classes.get(key)
    if cls is None:
        body = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        body["__doc__"] = base.__doc__ or ""
        properties = {name: _property(name) for name in names}
        cls = _classes[key] = type(base.__name__, (Computed, base), {**body, **properties})
    return cls


def _property(name: str) -> property:
    def get(module: Computed) -> Any:
        try:
            return module._computed[name].compute_weight(module, name)
        except AttributeError as error:  # torch would say that the module has no such attribute
            raise RuntimeError(f"{name!r} cannot be computed: {error}") from error

    def set_(module: Computed, value: Any) -> None:
        raise AttributeError(_set_these(module, name))

    return property(get, set_)


def _set_these(module: Computed, name: str) -> str:
    names = " and ".join(module._computed[name].reparameterization_names)
    return f"{name!r} is computed from {names}. Set these."


def computed(module: torch.nn.Module) -> Mapping[str, Computes]:
    """The computed attributes of a module, by name."""
    found: Mapping[str, Computes] = vars(module).get("_computed", {})
    return found


def set_computed(module: torch.nn.Module, table: Mapping[str, Computes]) -> None:
    """Give a module exactly these computed attributes.

    Raises:
        RuntimeError: Somebody else has derived a class from the one that was made here.
    """
    cls = _base_of(module)
    if table:
        module.__class__ = _class_of(cls, tuple(table))
        vars(module)["_computed"] = dict(table)
    else:
        module.__class__ = cls
        del vars(module)["_computed"]


def check_class(module: torch.nn.Module, name: str) -> None:
    """Raise what :func:`set_computed` would raise for a computed attribute ``name``."""
    _class_of(_base_of(module), (name,))


def _base_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module as it was before it had computed attributes."""
    cls = type(module)
    if not issubclass(cls, Computed):
        return cls
    if cls.__bases__[0] is not Computed:
        raise RuntimeError(
            f"The class of this {cls.__name__} was changed (by fully_shard?) after one of its "
            "parameters was reparameterized. Apply and remove reparameterizations before that."
        )
    base: type[torch.nn.Module] = cls.__bases__[1]
    return base
