"""Pairs of master and model parameters, and the groups of an optimizer, which has such pairs.

A weight and its master are two tensors. Who writes to one of them writes to the other one too:

| who has written what | when it is noticed | who wins |
|---|---|---|
| a master: in place, other memory | forward, ``state_dict``, step | it is rounded into the weight |
| a weight or a master: a collective | as in place | as in place |
| a master from ``amp.master_params``, in any way | the next forward | the same |
| a weight: in place, other memory | forward, ``state_dict``, step | all but the rounded master |
| both | the same | within one rounding the master, else the weight, with a warning |
| a weight that is put back before a step | the same | the master has its bits again |
| a weight, in any way, before the first step | the first step, by value | as above |
| an optimizer its masters, in any way | the end of its step | they are rounded into the weights |
| code inside of a step either of them | functions of torch in it, its end | who wrote last |
| ``load_state_dict`` a weight | at once | the float32 value that was loaded |

Versions and addresses tell what was written: each write of amp's own is recorded with both. They
are compared at each forward of the model, at each step and by ``state_dict``. "All but the rounded
master": elements of the weight that equal the rounded master leave the master its low bits. Inside
of a step see :mod:`~apex.amp.gradients.inside_step`.

A write through ``.data`` or NumPy into a master taken from the groups, outside of a step, changes
neither version nor address. docs/recipes.md has the line that works. As Python overhead dominates a
step of many small weights, each operation on all of them is one comprehension or C loop here.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from apex._compat import private
from apex.amp.gradients.masters import Master, Values, table
from apex.amp.gradients.tensors import (
    accumulate,
    any_nonzero,
    is_alone,
    is_rounded,
    stored_values,
    write_zeros,
)
from apex.amp.levels import HALF_TYPES
from apex.ops import _runtime
from apex.ops.lists import unscale
from apex.ops.lists.tensor_lists import OWN_MEMORY

Owners = dict[int, set[int]]  # ids of ledgers, by the id of a tensor that they share
Row = tuple[torch.Tensor, torch.Tensor, Master]  # a weight, its master's tensor, the master

_VERSION = operator.attrgetter("_version")
_GRAD = operator.attrgetter("grad")
_IS_SPARSE = operator.attrgetter("is_sparse")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

_WEIGHT, _MASTER, _EXPOSED = slice(0, 2), slice(2, 4), "exposed"  # in Master.recorded
_WITH_MEMORY = {*OWN_MEMORY, type(None)}


def grads_of(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of those ``weights`` that have one; sparse ones become coalesced."""
    grads = [grad for weight in weights if (grad := weight.grad) is not None]
    if not any(map(_IS_SPARSE, grads)):
        return grads
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
    return [grad for weight in weights if (grad := weight.grad) is not None]


def any_grad(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` has a gradient."""
    for tensor in tensors:  # noqa: SIM110  # a generator: 0.23 us, not 0.08, for an empty list
        if tensor.grad is not None:
            return True
    return False


def addresses(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """Where the tensors' memory is; 0 for those that have none of their own."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # fake tensors, and wrappers of several tensors
        return [0] * len(tensors)


# -- pairs -----------------------------------------------------------------------------------------


class Pairs:
    """16-bit weights, each with its master; ``tensors`` are the masters' tensors.

    Attributes:
        exposed: Whether ``amp.master_params`` gave the masters to the program since the last
            forward: they count as written.
        records: Of the forwards of the models that an optimizer's parameters belong to.
    """

    records: Sequence[Any] = ()

    def __init__(self, both: Sequence[tuple[torch.Tensor, Master]]) -> None:
        self.weights = [weight for weight, _ in both]
        self.masters = [master for _, master in both]
        self.tensors = [master.tensor for _, master in both]
        self.exposed = False
        self.rows = list(zip(self.weights, self.tensors, self.masters, strict=True))
        self._all = [*self.weights, *self.tensors]

    def without(self, done: set[int]) -> Pairs:
        """Those whose weight's id is not in ``done``."""
        return Pairs(
            [(weight, master) for weight, _, master in self.rows if id(weight) not in done]
        )

    # -- values --------------------------------------------------------------------------------

    def _now(self) -> list[tuple[int, ...]]:
        """Versions and addresses, as :attr:`Master.recorded` has them."""
        versions, where = list(map(_VERSION, self._all)), addresses(self._all)
        n = len(self.weights)
        return [*zip(versions[:n], where[:n], versions[n:], where[n:], strict=True)]

    def record(self) -> None:
        """Record that every weight is its rounded master now."""
        for master, recorded in zip(self.masters, self._now(), strict=True):
            master.recorded = recorded
        if self.exposed:
            self.expose()

    def expose(self) -> None:
        """Count the masters as written."""
        self.exposed = True
        for master in self.masters:
            master.recorded = (*master.recorded[:4], _EXPOSED)

    def reconcile(self, *, compare: bool = False, may_return: bool = False) -> None:
        """Bring what others have written to masters and weights since to both of them.

        ``compare`` the values of all weights with their masters; else only of those whose version
        or address has changed. ``may_return``: no training follows, so what was in weights may be
        put back, as it may where gradients wait for a step.

        Nearly always nothing has changed. On a CPU that takes 42 us for 100 weights, and 380 for
        1,000; row by row it would be 110 and 1,020.
        """
        now = self._now()
        if not compare and now == [master.recorded for master in self.masters]:
            return
        rounded: list[Any] = []
        with torch.no_grad():
            for row, seen in zip(self.rows, now, strict=True):
                weight, tensor, master = row
                is_written = master.recorded[_MASTER] != seen[_MASTER]
                counts_as_written = is_written or _EXPOSED in master.recorded
                is_weight_written = master.recorded[_WEIGHT] != seen[_WEIGHT]
                if compare and not (is_weight_written or counts_as_written):
                    if _runtime.waits(weight.device):  # as where it differs: nothing waits
                        master.refresh(weight)
                        continue
                    is_weight_written = not is_rounded(weight, tensor)
                if is_weight_written and (master.is_stepped or is_written):
                    waits = may_return or tensor.grad is not None
                    master.take_over(weight, both=is_written, may_return=waits)
                elif is_weight_written:
                    table.pop(weight)
                elif counts_as_written:
                    master.before = None if is_written else master.before
                    rounded.append(row)
            if rounded:
                weights, tensors, _ = zip(*rounded, strict=True)
                private.foreach_copy_(list(weights), list(tensors))
        self.record()

    def is_written(self) -> bool:
        """Whether a weight or a master was written or moved since amp has last recorded them."""
        return self._now() != [master.recorded[:4] for master in self.masters]

    def changes(self) -> list[tuple[bool, bool]]:
        """Whether the weight, and the master, of each row was written since it was recorded."""
        both = zip(self._now(), self.masters, strict=True)
        return [
            (
                seen[_WEIGHT] != master.recorded[_WEIGHT],
                seen[_MASTER] != master.recorded[_MASTER] or _EXPOSED in master.recorded,
            )
            for seen, master in both
        ]

    def take(self) -> None:
        """Take over what was written into the weights, after what was written to masters."""
        for weight, _, master in self.rows:
            master.refresh(weight)
            master.before = None
        self.record()

    def write(self) -> None:
        """Round every master into its weight."""
        if table.with_before:
            table.forget_before()
        if self.weights:
            with torch.no_grad():
                private.foreach_copy_(self.weights, self.tensors)
            self.record()

    def for_kernel(self) -> dict[torch.Tensor, torch.Tensor]:
        """Weights that the kernel of a step can write, by their masters: all, or none."""
        if any([tensor.grad is None for tensor in self.tensors]):
            return {}
        if {type(weight.data) for weight in self.weights} - {torch.Tensor}:
            return {}
        return dict(zip(self.tensors, self.weights, strict=True))

    # -- gradients -----------------------------------------------------------------------------

    def widen(
        self, owners: Owners, *, fill: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Make float32 copies of the weights' gradients; a master without a gradient gets its copy.

        ``fill=False`` leaves it to the caller to fill the copies.

        Returns:
            The gradients, their copies, and those copies that are still to be added to a master's
            gradient, with its tensor.
        """
        rows, grads = self.rows, list(map(_GRAD, self.weights))
        kinds = set(map(type, grads))
        if type(None) in kinds:
            rows = [row for row, grad in zip(rows, grads, strict=True) if grad is not None]
            grads = [weight.grad for weight, _, _ in rows]
        if any(map(_IS_SPARSE, grads)) or not _WITH_MEMORY.issuperset(kinds):
            grads, fill = grads_of([weight for weight, _, _ in rows]), True
        if fill:
            copies = list(map(torch.Tensor.float, grads))  # 0.6 of .to(torch.float32, copy=True)
            if any(map(operator.is_, copies, grads)):  # float32 already (param.grad_dtype)
                pairs = zip(copies, grads, strict=True)
                copies = [copy.clone() if copy is grad else copy for copy, grad in pairs]
        else:
            copies = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        more = []
        for (_, tensor, master), grad, copy in zip(rows, grads, copies, strict=True):
            master.taken = grad, grad._version
            if tensor.grad is None:
                tensor.grad = copy
            else:
                more.append((tensor, copy))
        if owners:
            for _, tensor, master in rows:
                master.waiting = set(owners.get(id(tensor), ()))
        return grads, copies, more

    def mark_taken(self) -> None:
        """Note the weights' gradients as taken by a step."""
        for weight, _, master in self.rows:
            grad = weight.grad
            if grad is not None:
                master.taken = grad, grad._version

    def take_off(self) -> tuple[bool, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Take the gradients off the weights.

        Returns what :meth:`drop_cleared` does, and those that no master has taken yet.
        """
        edited = self.drop_cleared()
        rows = [row for row in self.rows if row[0].grad is not None]
        new = [(weight, weight.grad) for weight, _, master in rows if master.taken is None]
        for weight, _, _ in rows:
            weight.grad = None
        for master in self.masters:
            master.taken = None
        return edited, new  # type: ignore[return-value]  # none of these is None

    def drop_cleared(self) -> bool:
        """Drop the masters' gradients where the program has cleared those on weights.

        ``model.zero_grad()`` reaches the weights alone. It counts as clearing if all of them were
        written to and are zero now.

        Returns:
            Whether somebody has edited gradients that masters have taken already.
        """
        written, left, is_replaced = [], [], False
        for row in self.rows:
            weight, tensor, master = row
            if master.taken is None:
                continue
            grad, (taken, version) = weight.grad, master.taken
            if grad is None:
                tensor.grad = master.taken = None
                continue
            left.append(row)
            is_replaced |= grad is not taken
            if grad is taken and grad._version != version:
                written.append(stored_values(grad))
        if written and len(written) == len(left) and not any_nonzero(written):
            for _, tensor, master in left:  # the next step takes the zeros, which are on weights
                tensor.grad = master.taken = None
            return False
        return bool(written or is_replaced) and any_grad(self.tensors)  # else they were stepped

    def are_cleared(self) -> bool:
        """Whether neither weights nor masters have gradients, but for zeros in place of others."""
        taken = (m.taken is not None for weight, _, m in self.rows if weight.grad is not None)
        if any_grad(self.tensors) or any(taken):
            return False  # stepped, and nobody cleared it: no look at values, which waits
        grads = [stored_values(one.grad) for one in self.weights if one.grad is not None]
        return not grads or not any_nonzero(grads)

    def keep_untouched(self, stash: Values) -> None:
        """Leave gradients of before a block on weights that it has not reached, as torch does."""
        if type(None) not in set(map(type, map(_GRAD, self.weights))):
            return
        for weight, tensor, master in self.rows:
            if weight.grad is None and tensor.grad is not None:
                grad = stash.get(weight)  # else a forward has freed it since
                weight.grad = grad = tensor.grad.to(weight.dtype) if grad is None else grad
                master.taken = grad, grad._version

    def take_new(self, owners: Owners) -> bool:
        """Add to the masters what a backward outside of ``scale_loss`` has left on weights.

        It is what is there after a training forward has cleared the gradients of passes. What is
        there instead of a taken gradient without a forward is somebody's edit of a copy.

        Returns what :meth:`drop_cleared` does.
        """
        edited = has_new = False
        both = zip(map(_GRAD, self.weights), self.masters, strict=True)
        taken = [(grad, *master.taken) for grad, master in both if master.taken is not None]
        if any([now is not grad or grad._version != version for now, grad, version in taken]):
            edited = self.drop_cleared()
        for weight, tensor, master in self.rows:
            grad = weight.grad
            if grad is not None and master.taken is None:
                has_new = True
                new = grad.detach().coalesce() if grad.is_sparse else grad.detach()
                accumulate([(tensor, new.float())])
                master.taken = grad, grad._version
                master.waiting = set(owners.get(id(tensor), ()))
        if has_new:
            self.clear_before_next_forward()
        return edited

    def clear_before_next_forward(self) -> None:
        """Have the gradients on weights that masters have taken, to which none may add, cleared."""
        for record in self.records:
            record.has_taken[id(self)] = self

    def wait(self, owners: Owners, weights: Container[torch.Tensor]) -> None:
        """Keep the gradients of ``weights`` until every optimizer that shares them has stepped."""
        for weight, tensor, master in self.rows:
            if weight in weights:
                master.waiting = set(owners.get(id(tensor), ()))

    def match_requires_grad(self) -> None:
        """Let masters require gradients where their weights do."""
        for weight, tensor in zip(self.weights, self.tensors, strict=True):
            if tensor.requires_grad != weight.requires_grad:
                tensor.requires_grad_(weight.requires_grad)

    def clear_taken(self) -> None:
        """Clear the weights' gradients that masters have taken, edited ones too."""
        self.drop_cleared()
        for weight, _, master in self.rows:
            if master.taken is not None:
                weight.grad = master.taken = None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear all gradients, but with ``set_to_none=False`` zero those on weights."""
        for master in self.masters:
            master.taken = None
        if set_to_none:
            for tensor in self._all:
                tensor.grad = None
            return
        for weight in self.weights:
            if weight.grad is not None:
                write_zeros(weight.grad)

    def free_grads(self, owners: Owners, stepped: int) -> None:
        """Free the masters' gradients that no ledger but ``stepped``, an id, has yet to step."""
        if table.with_before:
            table.forget_before()
        if not owners:
            for tensor in self.tensors:
                tensor.grad = None
            return
        for _, tensor, master in self.rows:
            master.waiting.discard(stepped)
            if not master.waiting:
                tensor.grad = None


# -- an optimizer's groups -------------------------------------------------------------------------


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
        outside: ids of the parameters that belong to none of the models of :attr:`records`.
        is_swapped: Whether groups and state hold model weights for now, see :meth:`swapped`.
    """

    def __init__(
        self, optimizer: Any, use_masters: bool, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.use_masters = use_masters
        self._changed = changed
        self.outside: frozenset[int] = frozenset()
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

    def has_pre_hooks(self) -> bool:
        """Whether torch calls hooks before a step of the optimizer."""
        own = getattr(self._optimizer(), "_optimizer_step_pre_hooks", None)
        return bool(own or private.global_optimizer_pre_hooks)

    @torch.no_grad()
    def _replace(self, full: Values) -> None:
        """Give all 16-bit weights in the groups masters, and remember what is there."""
        stepped, targets = [], []
        for group in self.groups():
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
            params = group["params"]
            for index, param in enumerate(params):
                weight = table.weight_of(param) if self.use_masters else None
                target = param if weight is None else weight
                if self.use_masters and target.dtype in HALF_TYPES:
                    params[index] = self._master_of(target, full)
                else:
                    params[index] = target
                stepped.append(params[index])
                targets.append(target)
        self._remember(stepped, targets)
        new = [(weight, master) for weight, _, master in self.rows if master.recorded[0] is None]
        Pairs(new).record()
        self._changed()

    def compare_groups(self, full: Values | None = None) -> None:
        """Give new 16-bit weights in the groups masters; ``full`` may have their float32 values."""
        optimizer = self._optimizer()  # in_groups() would be two more Python calls in each step
        groups = () if optimizer is None else optimizer.param_groups
        now = [param for group in groups for param in group["params"]]
        if len(now) == len(self.stepped) and all(map(operator.is_, now, self.stepped)):
            return
        self._replace(full or {})

    def _master_of(self, weight: torch.Tensor, full: Values) -> torch.Tensor:
        """The master of ``weight``, made now if there is none."""
        optimizer = self._optimizer()
        master = table.get(weight)
        if master is not None and not master.is_stepped:  # of a state_dict
            Pairs([(weight, master)]).reconcile()
        if master is None or not master.is_stepped:
            value = full.get(weight)
            if value is None:
                value = weight.float()
            elif not is_alone(value):
                value = full.pop(weight).clone()
            master = table.add(weight, value)
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

    def for_stepped(self, stash: Values) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
        self.compare_groups()
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
    grads: Sequence[torch.Tensor],
    pairs: Pairs,
    owners: Owners,
    scale: torch.Tensor | float,
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
