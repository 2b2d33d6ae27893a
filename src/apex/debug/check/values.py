"""A function mode that shows rules the functions of torch which a program calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apex._compat import private
from apex.debug.check.facts import Facts, is_low
from apex.debug.check.finding import Place, here
from apex.debug.tensors import HALVES

_RANDOM = re.compile(
    r"rand|dropout|bernoulli|multinomial|normal_?$|poisson$|exponential|gumbel|rrelu"
)
CASTS = {"to", "half", "bfloat16", "float", "double", "type", "type_as"}
# These compute nothing either: their result has the values of an argument.
MOVES = {
    "__getitem__", "cat", "chunk", "clone", "contiguous", "detach", "diagonal", "expand",
    "expand_as", "flatten", "gather", "index_select", "masked_select", "movedim", "narrow",
    "permute", "repeat", "reshape", "roll", "select", "split", "squeeze", "stack", "swapaxes", "t",
    "take", "take_along_dim", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip


class FunctionCall:
    """A call of a function of torch.

    Attributes:
        given: The tensors in its arguments.
        got: Those of its result.
        low: Whether one of these has 16 bits.
        writes: Whether it writes to its first argument, by its name.
        old: For rules, what they knew before it ran.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = getattr(func, "__name__", "")
        self.writes = self.name.endswith("_") and (
            not self.name.endswith("__") or self.name.startswith("__i")
        )
        self.given = _flat((*args, *kwargs.values()))
        self.got: list[torch.Tensor] = []
        self.low = False
        self.old: dict[Any, Any] = {}

    def run(self) -> Any:
        """Call the function."""
        result = self.func(*self.args, **self.kwargs)
        self.got = _flat((result,))
        self.low = any(map(is_low, self.got))
        return result

    @cached_property
    def place(self) -> Place:
        """The line of the call."""
        return here()

    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return bool(_RANDOM.search(self.name))

    def each(self) -> Iterator[FunctionCall]:
        """The calls for single tensors that a function of lists stands for; else itself."""
        if not self.name.startswith("_foreach_") or not isinstance(self.args[0], list | tuple):
            yield self
            return
        func = getattr(torch.Tensor, self.name.removeprefix("_foreach_"), None)
        for i in range(len(self.args[0])):
            args = [one[i] if isinstance(one, list | tuple) else one for one in self.args]
            one = FunctionCall(func, tuple(args), self.kwargs)
            one.got, one.old = self.got[i : i + 1], self.old
            one.writes, one.low = self.writes, self.low
            yield one

    def again(self, change: Callable[[torch.Tensor], Any], wide: torch.dtype) -> list[torch.Tensor]:
        """The results with other tensors, and ``wide`` for 16-bit types; none if that fails."""

        def changed(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return change(leaf)
            if type(leaf) in (list, tuple):
                return type(leaf)(map(changed, leaf))
            return wide if isinstance(leaf, torch.dtype) and leaf in HALVES else leaf

        kwargs = {key: changed(value) for key, value in self.kwargs.items()}
        args = list(map(changed, self.args))
        func = self.func
        if self.name in ("half", "bfloat16"):
            func, args = torch.Tensor.to, [*args, wide]
        device = next((one.device.type for one in self.given), "cpu")
        try:
            with torch.autocast(device, enabled=False):
                return _flat((func(*args, **kwargs),))
        except Exception:  # noqa: BLE001  # of a function that has no wider type
            return []


class CalledFunctions(TorchFunctionMode):
    """Sends ``writes`` before in-place functions and ``function`` after all of them."""

    def __init__(self, facts: Facts, send: Callable[..., None]) -> None:
        super().__init__()
        self._facts, self._send = facts, send

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        facts = self._facts
        if facts.busy or not facts.measuring or (facts.quiet and not _is_in_hook(facts)):
            return func(*args, **(kwargs or {}))
        call = FunctionCall(func, args, kwargs or {})
        if facts.quiet:
            result = call.run()
            self._send("hooked", call)
            return result
        seen = all(map(has_values, call.given))
        if call.writes and call.given and seen:
            self._send("writes", call)
        result = call.run()
        if call.got and seen and all(map(has_values, call.got)):
            self._send("function", call)
        return result


def has_values(tensor: torch.Tensor) -> bool:
    """Whether its numbers are here: not of a meta, sparse or nested tensor, nor of a DTensor."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return is_plain and tensor.layout == torch.strided and not tensor.is_meta


def _is_in_hook(facts: Facts) -> bool:
    """Whether the gradient of a parameter arrives, and a hook of the program has it."""
    node = private.current_autograd_node() if facts.has_hooks else None
    return node is not None and "AccumulateGrad" in node.name()


def _flat(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += [t for t in one if isinstance(t, torch.Tensor)]
    return found
