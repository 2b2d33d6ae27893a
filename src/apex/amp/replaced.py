"""Methods, attributes and hooks on an optimizer: put on, and taken off again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Replaced:
    """The methods and attributes that amp puts on one optimizer.

    Args:
        optimizer: The optimizer.
        methods: What stands for its own methods of these names.
        attributes: What is set beside them.
    """

    def __init__(
        self, optimizer: Any, methods: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> None:
        self.inner = {name: getattr(optimizer, name) for name in methods}
        self._before = {n: v for n, v in vars(optimizer).items() if n in {*methods, *attributes}}
        self._attributes = list(attributes)
        self._hooks: list[Any] = []
        self.is_on = True
        for name, method in methods.items():
            setattr(optimizer, name, types.MethodType(self._standing_in(name, method), optimizer))
        for name, value in attributes.items():
            setattr(optimizer, name, value)

    def _standing_in(self, name: str, method: Any) -> Any:
        """A function in the place of the optimizer's ``name``, marked like the original.

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

    def watch_inner_steps(self, optimizer: Any, before: Callable[[Any, bool], None]) -> None:
        """Have ``before`` called before each step of an optimizer inside of a wrapper.

        Args:
            optimizer: The wrapper, whose groups are those of the optimizer inside; else nothing
                is done.
            before: Takes the optimizer inside, and whether it was given a closure.
        """

        def hook(inner: Any, args: Any, kwargs: Any) -> None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args has the optimizer
            before(inner, closure is not None)

        for inner in optimizers_inside(optimizer):
            self._hooks.append(inner.register_step_pre_hook(hook))


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
