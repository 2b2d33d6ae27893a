"""A function mode that shows rules the functions of torch which a program calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apex.debug.check.facts import Facts
from apex.debug.check.finding import Place, here
from apex.debug.tensors import HALVES

_RANDOM = ("rand", "drop", "bernoulli", "multinomial", "normal", "poisson", "exponential")
# Functions that compute nothing: their result has the values of an argument.
CASTS = {"to", "half", "bfloat16", "float", "double", "type", "type_as"}
MOVES = {
    "reshape", "view", "view_as", "flatten", "contiguous", "__getitem__", "gather", "index_select",
    "cat", "stack", "clone", "transpose", "permute", "squeeze", "unsqueeze", "expand", "chunk",
    "split", "unbind", "masked_select", "take_along_dim", "roll", "detach", "t", "expand_as",
    "select", "narrow", "take", "repeat", "unflatten", "movedim", "swapaxes", "diagonal",
}  # fmt: skip


class Call:
    """A call of a function of torch.

    Attributes:
        name: Of the function.
        given: The tensors among its arguments, also in lists.
        got: Those of its result; empty before it has run.
        low: Whether a result has 16 bits.
    """

    __slots__ = ("__dict__", "args", "func", "given", "got", "kwargs", "low", "name")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = getattr(func, "__name__", "")
        self.given = _flat((*args, *kwargs.values()))
        self.got: list[torch.Tensor] = []
        self.low = False

    @cached_property
    def place(self) -> Place:
        """The line of the call."""
        return here()

    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return any(word in self.name for word in _RANDOM)

    def again(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        wide: torch.dtype,
        first: torch.Tensor | None = None,
    ) -> Any:
        """Call the function with other tensors, and ``wide`` for 16-bit types.

        ``first`` is put before its arguments. ``None`` if the function cannot be called so.
        """
        func = self.func
        if self.name in ("half", "bfloat16"):
            func = torch.Tensor.float if wide == torch.float32 else torch.Tensor.double

        def changed(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return change(leaf)
            if isinstance(leaf, list | tuple) and type(leaf) in (list, tuple):
                return type(leaf)(changed(one) for one in leaf)
            return wide if isinstance(leaf, torch.dtype) and leaf in HALVES else leaf

        device = next((t.device.type for t in self.given), "cpu")
        try:
            with torch.autocast(device, enabled=False):
                args = changed(self.args) if first is None else (first, *changed(self.args))
                return func(*args, **{k: changed(v) for k, v in self.kwargs.items()})
        except Exception:  # noqa: BLE001  # a function that takes no wider type
            return None


class Values(TorchFunctionMode):
    """Calls ``writes`` before in-place functions and ``function`` after all, of each rule."""

    def __init__(self, facts: Facts, send: Callable[..., None]) -> None:
        super().__init__()
        self._facts, self._send = facts, send

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = self._facts
        if facts.busy or facts.quiet or not facts.measuring:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        if is_in_place(call.name) and call.given:
            self._send("writes", call)
        result = func(*args, **kwargs)
        call.got = _flat((result,))
        if call.got:
            call.low = any(one.dtype in HALVES for one in call.got)
            self._send("function", call)
        return result


def is_in_place(name: str) -> bool:
    """Whether a function writes to its first argument, by its name."""
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))


def _flat(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += [t for t in one if isinstance(t, torch.Tensor)]
    return found
