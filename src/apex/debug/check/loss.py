"""The rule of the loss: what is computed in 16 bits after the network, in float32 beside it."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from apex.debug.check.facts import CheckRule, Facts, distance, is_low
from apex.debug.check.finding import Place
from apex.debug.check.values import CASTS, MOVES, FunctionCall

_MOST = 16  # outputs of networks that are kept until backward
_LEAST = 0.01  # losses in float32 have 0.001 to 0.002: one rounding to bfloat16


@dataclass
class _Shadow:
    """What float32 gives for a tensor, and the first 16-bit operation on the way to it."""

    ref: weakref.ref[torch.Tensor]
    value: torch.Tensor
    first: Place | None


class LossInHalf(CheckRule):
    """A loss that is computed in 16 bits.

    Sees functions that the program calls outside of its networks, and repeats those of 16-bit
    tensors in float32. At backward it compares the gradients at the outputs of the networks. Prints
    their difference and both losses, at the first 16-bit operation that computes. Silent below 1 %;
    for steps whose gradients are not finite; where a random function, an in-place one or a function
    of the program's own comes between; and in networks. A module that returns a loss is no network,
    but the modules that it calls are.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._shadows: dict[int, _Shadow] = {}
        self._outputs: deque[torch.Tensor] = deque(maxlen=_MOST)

    def network_ends(self, tensors: list[torch.Tensor]) -> None:
        """The loss begins here, perhaps."""
        self._outputs.extend(one for one in tensors if one.requires_grad)

    def _find(self, tensor: torch.Tensor) -> _Shadow | None:
        found = self._shadows.get(id(tensor))
        return found if found is not None and found.ref() is tensor else None

    def function(self, call: FunctionCall) -> None:
        """Repeat a function of 16-bit tensors in float32."""
        if self.facts.network or not torch.is_grad_enabled():
            return
        shadows = [found for one in call.given if (found := self._find(one))]
        if not shadows and call.name in CASTS:
            if call.low and call.given and call.given[0].dtype == torch.float32:
                self._keep(call.got, call.given, None)
            return
        trained = [t for t in (*call.given, *call.got) if t.requires_grad]
        computes = call.name not in CASTS | MOVES
        low = computes and any(is_low(t) and t.numel() > 1 for t in trained)
        if not shadows and not low:
            return
        if any(one.is_leaf for one in trained):  # a layer without a module
            self.network_ends(call.got)
        elif call.writes:
            for one in call.given:
                self._shadows.pop(id(one), None)
        elif not call.is_random() and any(one.is_floating_point() for one in call.got):
            first = next((one.first for one in shadows if one.first), None)
            wide = call.again(self._widen, torch.float32)
            self._keep(call.got, wide, first or (call.place if low else None))

    def _keep(self, tensors: list[torch.Tensor], exact: list[Any], first: Place | None) -> None:
        for one, value in zip(tensors, exact, strict=False):
            if one.is_floating_point() and one.shape == value.shape:
                self._shadows[id(one)] = _Shadow(weakref.ref(one), value, first)

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._find(tensor)
        if found is not None:
            return found.value
        return tensor.float() if is_low(tensor) else tensor

    def scales(self, losses: list[Any], scaled: list[Any], factor: float) -> None:
        """A scaled loss is known as well."""
        for one, result in zip(losses, scaled, strict=False):
            if (found := self._find(one)) is not None:
                self._keep([result], [found.value * factor], found.first)

    def backward_begins(self, roots: list[Any], scales: set[float | None], at: Place) -> None:
        """Compare the gradients that enter the networks."""
        found = self._find(roots[0]) if len(roots) == 1 and not self.facts.has_hooks else None
        if found is None or not (found.first and found.value.requires_grad and self._outputs):
            return
        options: Any = {"retain_graph": True, "allow_unused": True}
        with torch.autocast(roots[0].device.type, enabled=False):
            ours = torch.autograd.grad(roots[0], [*self._outputs], **options)
            exact = torch.autograd.grad(found.value, [*self._outputs], **options)
        apart = distance(zip(ours, exact, strict=True))
        if apart >= _LEAST:
            loss, wide = float(roots[0].detach()), float(found.value.detach())
            text = f"the gradient of the network's output differs by {100 * apart:.3g} % from "
            text += (
                f"float32 (norm of the difference); the loss is {loss:.5g} instead of {wide:.5g}"
            )
            self.facts.tell("loss-in-16-bits", text, found.first, size=apart)

    def backward_ends(self, written: list[Any]) -> None:
        """Let the graph go; other losses of the step may come."""
        self._outputs.clear()
        self._shadows = {k: one for k, one in self._shadows.items() if one.ref() is not None}

    def attempt_ends(self, optimizer: Any, *, skipped: bool) -> None:
        """Forget the step."""
        self._shadows.clear()
        self._outputs.clear()


RULES = (LossInHalf,)
