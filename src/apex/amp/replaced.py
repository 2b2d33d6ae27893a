"""The methods and attributes that amp puts on an optimizer, and takes off again."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch


class Replaced:
    """What amp has put on one optimizer: ``methods`` for its own ones, and other ``attributes``."""

    def __init__(
        self, optimizer: Any, methods: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> None:
        self.inner = {name: getattr(optimizer, name) for name in methods}
        self._before = {n: v for n, v in vars(optimizer).items() if n in {*methods, *attributes}}
        self._attributes = list(attributes)
        self._hooks: list[Any] = []
        self.is_on = True
        for name, method in methods.items():
            setattr(optimizer, name, types.MethodType(self._replacement(name, method), optimizer))
        for name, value in attributes.items():
            setattr(optimizer, name, value)

    def _replacement(self, name: str, method: Any) -> Any:
        """A function instead of the optimizer's ``name``, marked like the original.

        The marks are those by which torch's schedulers know a step that they have wrapped.
        """
        inner = self.inner[name]

        @functools.wraps(getattr(inner, "__func__", inner))
        def replacement(_: Any, *args: Any, **kwargs: Any) -> Any:
            # a scheduler may still hold this after the optimizer was released
            return (method if self.is_on else inner)(*args, **kwargs)

        return replacement

    def take_off(self, optimizer: Any) -> None:
        """Give the optimizer its own methods and attributes back."""
        self.is_on = False
        for hook in self._hooks:
            hook.remove()
        wrapped = [
            n for n in self.inner if not isinstance(vars(optimizer).get(n), types.MethodType)
        ]
        for name in (*self.inner, *self._attributes):
            if name in wrapped:
                continue  # wrapped by other code since: what that code holds calls through now
            if name in self._before:
                setattr(optimizer, name, self._before[name])
            else:
                vars(optimizer).pop(name, None)

    def watch(self, optimizer: Any, record: weakref.ref[Any]) -> None:
        """Put hooks on state dicts, and on steps of the optimizers inside of a wrapper."""

        def before(inner: Any, args: Any, kwargs: Any) -> None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args has the optimizer
            if (state := record()) is not None:
                state.before_inner_step(inner, has_closure=closure is not None)

        def after(inner: Any, args: Any, kwargs: Any) -> None:
            if (state := record()) is not None:
                state.after_inner_step()

        def forget_lookups(_: Any) -> None:
            if (state := record()) is not None:
                state.params.forget_lookups()

        inside = optimizers_inside(optimizer)
        for one in inside:
            self._hooks.append(one.register_step_pre_hook(before))
            self._hooks.append(one.register_step_post_hook(after))
        for one in (optimizer, *inside):
            if hasattr(one, "register_state_dict_pre_hook"):
                self._hooks.append(one.register_state_dict_pre_hook(forget_lookups))


def optimizers_inside(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Torch's optimizers inside of a wrapper, or of a wrapper in it, with the same groups."""
    found: list[torch.optim.Optimizer] = []
    wrappers = [optimizer]
    for wrapper in wrappers:
        for inner in list(getattr(wrapper, "__dict__", {}).values()):
            is_known = any(inner is other for other in wrappers)
            if is_known or getattr(inner, "param_groups", None) is not optimizer.param_groups:
                continue
            wrappers.append(inner)
            if isinstance(inner, torch.optim.Optimizer):
                found.append(inner)
    return found
