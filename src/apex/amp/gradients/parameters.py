"""What an optimizer steps: the tensors in its groups, with masters instead of 16-bit weights."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from apex.amp.gradients.masters import table
from apex.amp.gradients.pairs import Owners, Pairs
from apex.amp.gradients.stash import Stash
from apex.amp.policy import HALF_TYPES
from apex.ops import _runtime
from apex.ops.lists import unscale


class Parameters(Pairs):
    """The tensors in the groups of one optimizer, with masters instead of 16-bit weights.

    The groups stay the user's own dicts and lists. amp compares them before each pass and step, so
    that weights added by hand, by ``add_param_group`` or put back by a program get masters, and
    calls ``changed`` after other tensors were found in them.

    Attributes:
        stepped: What the optimizer steps, in the order of its groups: masters, or model weights.
        targets: What backward writes gradients to: always the model's weights, in that order.
        plain: Model weights that the optimizer steps themselves.
        ids: Of ``targets``.
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
        self.ids = frozenset(map(id, targets))
        both = list(zip(stepped, targets, strict=True))
        self.plain = [tensor for tensor, target in both if tensor is target]
        weights = [target for tensor, target in both if tensor is not target]
        super().__init__([(weight, master) for weight in weights if (master := table.get(weight))])

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def in_groups(self) -> list[torch.Tensor]:
        """Every tensor in the optimizer's groups."""
        return [param for group in self.groups() for param in group["params"]]

    @torch.no_grad()
    def _replace(self, full: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give all 16-bit weights in the groups masters, and remember what is there."""
        stepped, targets = [], []
        for group in self.groups():
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
            params = group["params"]
            for index, param in enumerate(params):
                weight = table.weight_of(param) if self._use_masters else None
                target = param if weight is None else weight
                if self._use_masters and target.dtype in HALF_TYPES:
                    params[index] = self._master_of(target, full)
                else:
                    params[index] = target
                stepped.append(params[index])
                targets.append(target)
        self._remember(stepped, targets)
        new = [(weight, master) for weight, _, master in self._rows if master.recorded[0] is None]
        Pairs(new).record()
        self._changed()

    def sync(self, full: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Give new 16-bit weights in the groups masters; ``full`` may have their float32 values."""
        now = [param for group in self.groups() for param in group["params"]]  # no more frames
        if len(now) == len(self.stepped) and all(map(operator.is_, now, self.stepped)):
            return
        self._replace(full or {})

    def _master_of(
        self, weight: torch.Tensor, full: Mapping[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The master of ``weight``, made now if there is none."""
        optimizer = self._optimizer()
        value = full.get(weight)
        master = table.get(weight)
        if master is not None and not master.is_stepped:  # of a state_dict
            Pairs([(weight, master)]).reconcile()
        if master is None or not master.is_stepped:
            master = table.add(weight, weight.float() if value is None else value.clone())
        tensor = master.tensor
        entry = None if optimizer is None else optimizer.state.get(weight)  # a lookup leaves {}
        if entry and entry is not optimizer.state.get(tensor):  # type: ignore[union-attr]
            state = optimizer.state[tensor] = optimizer.state.pop(weight)  # type: ignore[union-attr]
            kept = state.pop("master_param", None) if isinstance(state, dict) else None
            if kept is not None:  # the optimizer kept masters itself: one is enough
                weight.copy_(tensor.copy_(kept))
        if weight.grad is not None and master.taken is None:  # unscaled, from before
            tensor.grad, weight.grad = weight.grad.float(), None
        return tensor

    def forget_lookups(self) -> None:
        """Drop what ``optimizer.state[weight]`` left for a weight whose state is its master's."""
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.state
        keys = state.keys()  # a state where weights stand for masters has none of these
        for weight in self.weights:
            if weight in keys and not state[weight]:
                del state[weight]

    def for_stepped(self, stash: Stash) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients by what is stepped, given by what backward writes to."""
        stepped = dict(zip(map(id, self.targets), self.stepped, strict=True))
        rows = [(stepped[id(target)], grad) for target, grad in stash.items()]
        return [(tensor, grad.to(tensor.dtype)) for tensor, grad in rows]

    def restore(self) -> None:
        """Put the model's weights back into groups and state, for masters."""
        self._swap(dict(zip(map(id, self.stepped), self.targets, strict=True)))
        self._remember([], [])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside this context, the model's weights in groups and state."""
        self.sync()
        stepped, targets = self.stepped, self.targets
        self.is_swapped = True
        self._swap(dict(zip(map(id, stepped), targets, strict=True)))
        try:
            yield
        finally:
            self.is_swapped = False
            self._swap(dict(zip(map(id, targets), stepped, strict=True)))

    def _swap(self, others: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors in groups and state, given by id."""
        for group in self.groups():
            kind = type(group["params"])
            params = [others.get(id(param), param) for param in group["params"]]
            if kind is list:
                group["params"][:] = params
            else:
                group["params"] = kind(params)
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.state
        for param in list(state):
            other = others.get(id(param), param)
            if other is not param:
                state[other] = state.pop(param)


def unscale_into(
    grads: Sequence[torch.Tensor], pairs: Pairs, owners: Owners, scale: torch.Tensor | float
) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Unscale ``grads`` in place, and the gradients of 16-bit weights into float32 copies.

    Where a kernel can run it writes the copies in the same pass over memory: 6 bytes for each
    16-bit gradient instead of 14.

    Returns:
        The flag that :func:`apex.ops.lists.unscale.unscale_` returns, and the copies that are still
        to be added to a master's gradient, with its tensor.
    """
    if not pairs.weights:
        return unscale.unscale_(grads, scale), []
    by_kernel = _runtime.can_fuse(pairs.weights[0].device)
    if by_kernel:
        by_kernel = unscale.takes([*grads, *[w.grad for w in pairs.weights if w.grad is not None]])
    halves, wide, more = pairs.widen(owners, fill=not by_kernel)
    if not by_kernel:
        return unscale.unscale_([*grads, *wide], scale), more
    is_dynamic = isinstance(scale, torch.Tensor)
    device = scale.device if isinstance(scale, torch.Tensor) else (*grads, *halves)[0].device
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    outs = [*grads, *wide]
    unscale.unscale_into([*grads, *halves], outs, unscale.inverse(scale), found_inf)
    return (found_inf if is_dynamic else None), more
