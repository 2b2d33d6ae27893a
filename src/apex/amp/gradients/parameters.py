"""What an optimizer steps: the tensors in its groups, with masters in the place of 16-bit weights.

The groups stay the user's own dicts and lists. amp looks at them again before each pass and each
step, so that weights added by hand, by ``add_param_group`` or put back by a program get masters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from apex.amp.gradients.accumulation import Stash
from apex.amp.gradients.masters import Pairs, table
from apex.amp.policy import HALF_TYPES


class Parameters:
    """The tensors in the groups of one optimizer.

    Args:
        optimizer: Anything with ``param_groups`` and ``state``.
        use_masters: Whether 16-bit weights get float32 masters.
        changed: Called after other tensors were found in the groups.

    Attributes:
        stepped: What the optimizer steps, in the order of its groups: masters, or model weights.
        targets: What backward writes gradients to: always the model's weights, in that order.
        plain: Model weights that the optimizer steps themselves.
        pairs: 16-bit weights and their masters.
        is_swapped: Whether groups and state hold model weights for now, see :meth:`swapped`.
    """

    def __init__(
        self, optimizer: Any, use_masters: bool, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._use_masters = use_masters
        self._changed = changed
        self.is_swapped = False
        self._remember([], [])

    def _remember(self, stepped: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.stepped = stepped
        self.targets = targets
        both = list(zip(stepped, targets, strict=True))
        self.plain = [tensor for tensor, target in both if tensor is target]
        weights = [target for tensor, target in both if tensor is not target]
        self.pairs = Pairs(weights, [master for w in weights if (master := table.get(w))])

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def in_groups(self) -> Iterator[torch.Tensor]:
        """Every tensor in the optimizer's groups."""
        for group in self._groups():
            yield from group["params"]

    def sync(self, full: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Look at the groups again, and put masters in the place of new 16-bit weights.

        Args:
            full: float32 values of weights before they were rounded, by weight.
        """
        now: list[torch.Tensor] = []
        for group in self._groups():
            now += group["params"]
        if len(now) == len(self.stepped) and all(map(operator.is_, now, self.stepped)):
            return
        stepped, targets = [], []
        for group in self._groups():
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
            params = group["params"]
            for index, param in enumerate(params):
                weight = table.weight_of(param) if self._use_masters else None
                target = param if weight is None else weight
                params[index] = self._stepped_for(target, full or {})
                stepped.append(params[index])
                targets.append(target)
        self._remember(stepped, targets)
        self._changed()

    @torch.no_grad()
    def _stepped_for(
        self, weight: torch.Tensor, full: Mapping[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The tensor to step for ``weight``: its master, made now if there is none, or itself."""
        if not self._use_masters or weight.dtype not in HALF_TYPES:
            return weight
        optimizer = self._optimizer()
        value = full.get(weight)
        master = table.get(weight) or table.add(
            weight, weight.float() if value is None else value.clone()
        )
        tensor = master.tensor
        if optimizer is not None and weight in optimizer.state:
            state = optimizer.state[tensor] = optimizer.state.pop(weight)
            kept = state.pop("master_param", None) if isinstance(state, dict) else None
            if kept is not None:  # the optimizer kept masters itself: one is enough
                tensor.copy_(kept)
        if weight.grad is not None and master.taken is None:  # unscaled, from before
            tensor.grad, weight.grad = weight.grad.float(), None
        return tensor

    def for_stepped(self, stash: Stash) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients by what is stepped, given by what backward writes to."""
        if not stash:
            return []
        stepped = dict(zip(map(id, self.targets), self.stepped, strict=True))
        pairs = [(stepped[id(target)], grad) for target, grad in stash.items()]
        return [(tensor, grad.to(tensor.dtype)) for tensor, grad in pairs]

    def restore(self) -> None:
        """Put the model's weights back into groups and state, in the place of masters."""
        self._swap(dict(zip(map(id, self.stepped), self.targets, strict=True)))
        self._remember([], [])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside this context, the model's weights in groups and state."""
        self.sync()
        stepped, targets = self.stepped, self.targets
        self._swap(dict(zip(map(id, stepped), targets, strict=True)))
        self.is_swapped = True
        try:
            yield
        finally:
            self.is_swapped = False
            self._swap(dict(zip(map(id, targets), stepped, strict=True)))

    def _swap(self, others: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors in groups and state, given by id."""
        for group in self._groups():
            group["params"][:] = [others.get(id(param), param) for param in group["params"]]
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.state
        for param in list(state):
            other = others.get(id(param), param)
            if other is not param:
                state[other] = state.pop(param)
