"""Pairs of master and model parameters, of an optimizer or a model, and what happens to both.

**Whoever writes to a master so that its** ``_version`` **or its memory changes writes to its
weight.** Each write of amp's own is recorded: both versions and both addresses. These are compared
at each forward of the model, at each step and by ``state_dict``:

* A master that has changed is rounded into its weight. One that ``amp.master_params`` has exposed
  to the program counts as changed until the next forward.
* A weight that has changed is taken over: elements that equal the rounded master keep the master.
* Where both have changed, elements whose weight is within one rounding of the master keep the
  master. Of the others the weight is taken, with a warning.

A write through ``.data``, NumPy or a collective into a master taken from the groups changes neither
version nor address. docs/recipes.md has the line that works. As Python overhead dominates a step of
many small weights, each operation on all of them is one comprehension or C loop here.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Sequence
from typing import Any

import torch

from apex.amp.gradients.accumulation import (
    IS_SPARSE,
    KeptGradients,
    accumulate,
    addresses,
    any_grad,
    any_nonzero,
    grads_of,
    stored_values,
    write_zeros,
)
from apex.amp.gradients.masters import Master, table
from apex.amp.gradients.stash import Stash
from apex.ops.lists.tensor_lists import OWN_MEMORY

Owners = dict[int, set[int]]  # ids of ledgers, by the id of a tensor that they share

_VERSION = operator.attrgetter("_version")
_GRAD = operator.attrgetter("grad")

_WITH_MEMORY = {*OWN_MEMORY, type(None)}

_numbers = itertools.count(1)
_newest = 0  # the number of the last record


class Pairs:
    """16-bit weights, each with its master; ``tensors`` are the masters' tensors.

    Attributes:
        exposed: Whether ``amp.master_params`` gave the masters to the program since the last
            forward: they count as written.
        are_freed: Whether no master has a gradient since the last step.
    """

    def __init__(self, both: Sequence[tuple[torch.Tensor, Master]]) -> None:
        self.weights = [weight for weight, _ in both]
        self.masters = [master for _, master in both]
        self.tensors = [master.tensor for _, master in both]
        self.exposed = self.are_freed = False
        self._rows = list(zip(self.weights, self.tensors, self.masters, strict=True))
        self._seen: tuple[Any, ...] = ()  # versions and addresses that the masters have recorded
        self._number = -1  # of the last record then
        self._kept = KeptGradients()

    def without(self, done: set[int]) -> Pairs:
        """Those whose weight's id is not in ``done``."""
        return Pairs(
            [(weight, master) for weight, _, master in self._rows if id(weight) not in done]
        )

    # -- values --------------------------------------------------------------------------------

    def _now(self) -> tuple[Any, ...]:
        """The columns of :attr:`Master.recorded` as they would be now."""
        weights, tensors = self.weights, self.tensors
        versions = list(map(_VERSION, weights)), list(map(_VERSION, tensors))
        return versions[0], addresses(weights), versions[1], addresses(tensors)

    def record(self) -> None:
        """Record that every weight is its rounded master now."""
        global _newest  # noqa: PLW0603
        self._seen = self._now()
        for master, recorded in zip(self.masters, zip(*self._seen, strict=True), strict=True):
            master.recorded = recorded
        self._number = _newest = next(_numbers)
        if self.exposed:
            self.expose()

    def expose(self) -> None:
        """Count the masters as written."""
        global _newest  # noqa: PLW0603
        self.exposed, self._number = True, -1
        _newest = next(_numbers)
        for master in self.masters:
            master.recorded = (*master.recorded[:4], "exposed")

    def reconcile(self, *, compare: bool = False) -> None:
        """Bring what others have written to masters and weights since to both of them.

        ``compare`` the values of all weights with their masters; else only of those whose version
        or address has changed.

        Nearly always nothing has changed. Microseconds for 100 and 1,000 weights on a CPU: 31 and
        284 to read versions and addresses; in all 33 and 307 by the first way out, 42 and 380 by
        the second one, 110 and 1,020 row by row.
        """
        now = self._now()
        # No `Pairs` has recorded since this one did, so what it recorded is what masters have.
        if not compare and self._number == _newest and now == self._seen:
            return
        # Another one, such as the model's, has recorded: ask the masters themselves.
        seen_rows = list(zip(*now, strict=True))
        if not compare and seen_rows == [master.recorded for master in self.masters]:
            self._seen, self._number = now, _newest
            return
        rounded: list[Any] = []
        with torch.no_grad():
            for row, seen in zip(self._rows, seen_rows, strict=True):
                weight, _, master = row
                is_written = master.recorded[2:4] != seen[2:]
                counts_as_written = is_written or len(master.recorded) > len(seen)
                is_weight_written = master.recorded[:2] != seen[:2]
                is_weight_written |= compare and not counts_as_written
                if is_weight_written and (master.is_stepped or is_written):
                    master.take_over(weight, both=is_written)
                elif is_weight_written:
                    table.pop(weight)
                elif counts_as_written:
                    rounded.append(row)
            if rounded:
                weights, tensors, _ = zip(*rounded, strict=True)
                torch._foreach_copy_(list(weights), list(tensors))
        self.record()

    def is_written(self) -> bool:
        """Whether a weight or a master was written or moved since amp has last recorded them."""
        now = self._now()
        if now == self._seen:
            return False
        return list(zip(*now, strict=True)) != [master.recorded[:4] for master in self.masters]

    def are_equal(self) -> bool:
        """Whether every weight is its rounded master."""
        return all(torch.equal(weight, t.to(weight.dtype)) for weight, t, _ in self._rows)

    def write(self) -> None:
        """Round every master into its weight."""
        if self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.tensors)
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
        rows, grads = self._rows, list(map(_GRAD, self.weights))
        kinds = set(map(type, grads))
        if type(None) in kinds:
            rows = [row for row, grad in zip(rows, grads, strict=True) if grad is not None]
            grads = [weight.grad for weight, _, _ in rows]
        if any(map(IS_SPARSE, grads)) or not _WITH_MEMORY.issuperset(kinds):
            grads = grads_of([weight for weight, _, _ in rows])
            copies = [grad.float() for grad in grads]
        else:
            masters = table.changes, [master for _, _, master in rows]
            copies = self._kept.like(grads, masters)
            if fill and copies:
                torch._foreach_copy_(copies, grads)
        more = []
        versions = list(map(_VERSION, grads))
        columns = zip(rows, grads, versions, copies, strict=True)
        for (_, tensor, master), grad, version, copy in columns:
            master.taken, master.taken_version = grad, version
            if tensor.grad is None:
                tensor.grad = copy
            else:
                more.append((tensor, copy))
        if owners:
            for _, tensor, master in rows:
                master.waiting = set(owners.get(id(tensor), ()))
        if rows:
            self.are_freed = False
        return grads, copies, more

    def mark_taken(self) -> None:
        """Note the weights' gradients as taken by a step."""
        for weight, _, master in self._rows:
            grad = weight.grad
            if grad is not None:
                master.taken, master.taken_version = grad, grad._version

    def stash(self, stash: Stash) -> bool:
        """Move gradients off the weights: into ``stash`` those that no master has taken yet.

        Returns what :meth:`drop_cleared` does.
        """
        edited = self.drop_cleared()
        if any_grad(self.weights):
            for weight, _, master in self._rows:
                if weight.grad is not None and master.taken is None:
                    stash.take_off(weight, weight.grad)
                weight.grad = None
        for master in self.masters:
            master.taken = None
        return edited

    def drop_cleared(self, *, zeros: bool = True) -> bool:
        """Drop the masters' gradients where the program has cleared those on weights.

        ``model.zero_grad()`` reaches the weights alone. With ``zeros`` it counts as clearing if all
        of them were written to and are zero now.

        Returns:
            Whether somebody has edited gradients that masters have taken already.
        """
        if self.are_freed:
            return False
        rows = [row for row in self._rows if row[2].taken is not None]
        left = [row for row in rows if row[0].grad is not None]
        written, edited = [], False
        for weight, tensor, master in rows:
            grad = weight.grad
            if grad is None:
                tensor.grad = master.taken = None
            elif grad is not master.taken:
                edited = True
            elif grad._version != master.taken_version:
                written.append(stored_values(grad))
        if not written:
            return edited
        if edited or not zeros or len(written) < len(left) or any_nonzero(written):
            return True
        for weight, tensor, master in left:
            weight.grad = tensor.grad = master.taken = None
        return False

    def take_new(self, owners: Owners) -> bool:
        """Add to the masters what a backward outside of ``scale_loss`` has left on weights.

        It is what is there after a training forward has cleared the gradients of passes. What is
        there instead of a taken gradient without a forward is somebody's edit of a copy.

        Returns what :meth:`drop_cleared` does.
        """
        is_changed = False
        for weight, tensor, master in self._rows:
            grad, taken = weight.grad, master.taken
            if taken is not None:
                is_changed |= grad is not taken or grad._version != master.taken_version
            elif grad is not None:
                self.are_freed = False
                new = grad.detach().coalesce() if grad.is_sparse else grad.detach()
                accumulate([(tensor, new.float())])
                master.taken, master.taken_version = grad, grad._version
                master.waiting = set(owners.get(id(tensor), ()))
        return is_changed and self.drop_cleared(zeros=False)

    def wait(self, owners: Owners, weights: Container[torch.Tensor]) -> None:
        """Keep the gradients of ``weights`` until every optimizer that shares them has stepped."""
        for weight, tensor, master in self._rows:
            if weight in weights:
                master.waiting = set(owners.get(id(tensor), ()))

    def has_grads(self) -> bool:
        """Whether a master has a gradient, or a weight one that its master has not taken."""
        new = [w.grad is not None and m.taken is None for w, _, m in self._rows]
        return any(new) or any_grad(self.tensors)

    def match_requires_grad(self) -> None:
        """Let masters require gradients where their weights do."""
        for weight, tensor in zip(self.weights, self.tensors, strict=True):
            if tensor.requires_grad != weight.requires_grad:
                tensor.requires_grad_(weight.requires_grad)

    def clear_taken(self) -> None:
        """Clear the weights' gradients that masters have taken, edited ones too."""
        self.drop_cleared()
        for weight, _, master in self._rows:
            if master.taken is not None:
                weight.grad = master.taken = None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear all gradients, but with ``set_to_none=False`` zero those on weights."""
        for master in self.masters:
            master.taken = None
        if set_to_none:
            for tensor in self.weights if self.are_freed else (*self.weights, *self.tensors):
                tensor.grad = None
            return
        for weight in self.weights:
            if weight.grad is not None:
                write_zeros(weight.grad)

    def free_grads(self, owners: Owners, stepped: int) -> None:
        """Free the masters' gradients that no ledger but ``stepped``, an id, has yet to step."""
        if not owners:
            for tensor in self.tensors:
                tensor.grad = None
            self.are_freed = True
            return
        for _, tensor, master in self._rows:
            master.waiting.discard(stepped)
            if not master.waiting:
                tensor.grad = None
