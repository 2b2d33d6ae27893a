"""Master and model parameters: float32 masters of 16-bit weights, and what happens to both.

``table`` maps each 16-bit weight to its :class:`Master` for as long as the weight lives.
:class:`Pairs` holds weights and their masters in columns: those of an optimizer, in whose
``param_groups`` masters stay, as in Apex, or those of a model.

**Whoever writes to a master so that its** ``_version`` **or its memory changes writes to its
weight.** Each write of amp's own is noted: both versions and both addresses. The notes are compared
at each forward of the model, at each step and by ``state_dict``:

* A master that has changed is rounded into its weight. One that ``amp.master_params`` handed out
  counts as changed until the next forward.
* A weight that has changed is taken over: elements that equal the rounded master keep the master.
* Where both have changed, elements whose weight is within one rounding of the master keep the
  master. Of the others the weight is taken, with a warning.

A write through ``.data``, NumPy or a collective into a master taken from the groups changes neither
version nor address. docs/recipes.md has the line that works.

With many small weights Python overhead dominates a step. So each operation on all of them is one
comprehension or C loop here, without a call for each tensor, and small float32 gradients keep their
memory.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import warnings
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from apex import _compat
from apex.amp.gradients.accumulation import (
    IS_SPARSE,
    Stash,
    accumulate,
    any_nonzero,
    stored_values,
    unshared,
    write_zeros,
)
from apex.ops.columns import OWN_MEMORY

Sharers = dict[int, set[int]]  # ids of ledgers, by the id of a tensor that they share

_VERSION = operator.attrgetter("_version")
_GRAD = operator.attrgetter("grad")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

_WITH_MEMORY = {*OWN_MEMORY, type(None)}

_numbers = itertools.count(1)
_newest = 0  # the number of the last note

# Elements up to which the memory of a master's gradient is kept between steps. To allocate it costs
# 1.3 us a tensor, as much as to fill 2**14 elements; larger ones would only cost memory.
_MOST_KEPT = 2**14


class Master:
    """The float32 value of a 16-bit weight.

    Attributes:
        tensor: float32 leaf, same shape and device as the weight.
        noted: ``_version`` and address of the weight and of ``tensor`` when the weight last was
            the rounded tensor; with a fifth entry the tensor was handed out.
        is_stepped: Whether an optimizer steps it; else ``state_dict`` has made it, and it is
            dropped when the weight is written.
        taken: The gradient on the weight that the master's gradient already contains. It stays on
            the weight, for programs that read it there, until the next training forward.
        taken_version: Its ``_version`` then.
        waiting: ids of the ledgers whose optimizers share this master and have yet to step.
    """

    __slots__ = ("is_stepped", "noted", "taken", "taken_version", "tensor", "waiting")

    def __init__(self, tensor: torch.Tensor, *, is_stepped: bool = True) -> None:
        self.tensor = tensor
        self.is_stepped = is_stepped
        self.noted: tuple[Any, ...] = (None, None, None, None)
        self.taken: torch.Tensor | None = None
        self.taken_version = 0
        self.waiting: set[int] = set()

    def value_for(self, weight: torch.Tensor, *, within: float = 0.0) -> torch.Tensor:
        """The float32 value of ``weight``: the master's where ``weight`` equals it, rounded.

        Args:
            weight: The weight.
            within: How far, relative to the master, a weight may be off that counts as equal.
        """
        master = self.tensor.detach().to(weight.device)
        wide = weight.detach().to(master.dtype)
        same = master.to(weight.dtype) == weight
        if within:
            same |= (wide - master).abs() <= within * master.abs()
        return torch.where(same, master, wide)

    @torch.no_grad()
    def refresh(self, weight: torch.Tensor, *, within: float = 0.0) -> None:
        """Take over what somebody else wrote into ``weight``, see :meth:`value_for`."""
        master = self.tensor
        if master.is_meta:  # made before its weight had memory
            master.data = weight.detach().to(master.dtype)
        elif master.device != weight.device:
            master.data = master.data.to(weight.device)
            table.changes += 1
        master.copy_(self.value_for(weight, within=within))

    @torch.no_grad()
    def load(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Take the float32 ``value``, which has just been loaded, rounded, into ``weight``."""
        value = value.to(device=weight.device, dtype=self.tensor.dtype)
        same = value.to(weight.dtype) == weight
        self.tensor.copy_(torch.where(same, value, weight.to(self.tensor.dtype)))
        Pairs([weight], [self]).note()


class MasterTable:
    """The masters of all 16-bit weights in the process, found from the weight or the master.

    Attributes:
        changes: Counts masters that were added, dropped or moved to another device.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._lock = threading.RLock()
        self._masters: Any = WeakTensorKeyDictionary()  # weight -> Master
        # A master's tensor -> a weak reference to its weight.
        self._weights: Any = WeakTensorKeyDictionary()

    def get(self, weight: Any) -> Master | None:
        """The master of ``weight``, if it has one."""
        with self._lock:
            found: Master | None = self._masters.get(weight)
        return found

    def add(self, weight: torch.Tensor, value: torch.Tensor, *, is_stepped: bool = True) -> Master:
        """Make a master of ``value`` for ``weight``, unless it has one; nothing is noted yet."""
        with self._lock:
            master: Master | None = self._masters.get(weight)
            if master is None:
                tensor = value.detach().requires_grad_(weight.requires_grad)
                master = self._masters[weight] = Master(tensor, is_stepped=is_stepped)
                self._weights[tensor] = TensorWeakRef(weight)
                self.changes += 1
            master.is_stepped |= is_stepped
            return master

    def pop(self, weight: torch.Tensor) -> Master | None:
        """Take the master of ``weight`` out of the table."""
        with self._lock:
            master: Master | None = self._masters.pop(weight, None)
            if master is not None:
                self._weights.pop(master.tensor, None)
                self.changes += 1
        return master

    def weight_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The weight whose master ``tensor`` is, if it is one."""
        with self._lock:
            reference = self._weights.get(tensor)
        weight: torch.Tensor | None = None if reference is None else reference()
        return weight


table = MasterTable()


class Pairs:
    """Model weights and their masters.

    Args:
        weights: The 16-bit weights.
        masters: The master of each.

    Attributes:
        weights: The 16-bit weights.
        tensors: The masters' tensors.
        handed_out: Whether ``amp.master_params`` gave the masters to the program since the last
            forward: they count as written.
        are_freed: Whether no master has a gradient since the last step.
    """

    def __init__(self, weights: Sequence[torch.Tensor], masters: Sequence[Master]) -> None:
        self.weights = list(weights)
        self.masters = list(masters)
        self.tensors = [master.tensor for master in masters]
        self.handed_out = self.are_freed = False
        self._rows = list(zip(self.weights, self.tensors, self.masters, strict=True))
        self._seen: tuple[Any, ...] = ()  # versions and addresses that the masters have noted
        self._number = -1  # of the last note then
        self._kept: _Kept | None = None

    def without(self, done: set[int]) -> Pairs:
        """Those whose weight's id is not in ``done``."""
        rows = [(weight, master) for weight, _, master in self._rows if id(weight) not in done]
        return Pairs([weight for weight, _ in rows], [master for _, master in rows])

    # -- values --------------------------------------------------------------------------------

    def _now(self) -> tuple[Any, ...]:
        """The columns of :attr:`Master.noted` as they would be now."""
        weights, tensors = self.weights, self.tensors
        versions = list(map(_VERSION, weights)), list(map(_VERSION, tensors))
        return versions[0], _addresses(weights), versions[1], _addresses(tensors)

    def note(self) -> None:
        """Note that every weight is its rounded master now."""
        global _newest  # noqa: PLW0603
        self._seen = self._now()
        for master, noted in zip(self.masters, zip(*self._seen, strict=True), strict=True):
            master.noted = noted
        self._number = _newest = next(_numbers)
        if self.handed_out:
            self.hand_out()

    def hand_out(self) -> None:
        """Count the masters as written."""
        global _newest  # noqa: PLW0603
        self.handed_out, self._number = True, -1
        _newest = next(_numbers)
        for master in self.masters:
            master.noted = (*master.noted[:4], "handed out")

    def reconcile(self, *, compare: bool = False) -> None:
        """Bring what others have written to masters and weights since to both of them.

        Args:
            compare: Compare the values of all weights with their masters; else only those whose
                version or address has changed.
        """
        now = self._now()
        if not compare and self._number == _newest and now == self._seen:
            return  # nobody has noted anything since
        seen_rows = list(zip(*now, strict=True))
        if not compare and seen_rows == [master.noted for master in self.masters]:
            self._seen, self._number = now, _newest
            return
        rounded = Pairs([], [])
        with torch.no_grad():
            for row, seen in zip(self._rows, seen_rows, strict=True):
                weight, _, master = row
                is_written = master.noted[2:4] != seen[2:]
                counts_as_written = is_written or len(master.noted) > len(seen)
                is_weight_written = master.noted[:2] != seen[:2]
                is_weight_written |= compare and not counts_as_written
                if is_weight_written and (master.is_stepped or is_written):
                    _take_over(weight, master, both=is_written)
                elif is_weight_written:
                    table.pop(weight)
                elif counts_as_written:
                    rounded._rows.append(row)
            if rounded._rows:
                weights, tensors, _ = zip(*rounded._rows, strict=True)
                torch._foreach_copy_(list(weights), list(tensors))
        self.note()

    def are_equal(self) -> bool:
        """Whether every weight is its rounded master."""
        return all(torch.equal(weight, t.to(weight.dtype)) for weight, t, _ in self._rows)

    def write(self) -> None:
        """Round every master into its weight."""
        if self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.tensors)
            self.note()

    def for_kernel(self) -> dict[torch.Tensor, torch.Tensor]:
        """Weights that the kernel of a step can write, by their masters: all, or none."""
        if any([tensor.grad is None for tensor in self.tensors]):
            return {}
        if {type(weight.data) for weight in self.weights} - {torch.Tensor}:
            return {}
        return dict(zip(self.tensors, self.weights, strict=True))

    # -- gradients -----------------------------------------------------------------------------

    def widen(
        self, sharers: Sharers, *, fill: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Make float32 copies of the weights' gradients; a master without a gradient gets its copy.

        Args:
            sharers: See :class:`apex.amp.training.Training`.
            fill: ``False`` leaves it to the caller to fill the copies.

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
            grads = [_coalesced(weight) for weight, _, _ in rows]
            copies = [grad.float() for grad in grads]
        else:
            copies = self._float32_like(grads, [master for _, _, master in rows])
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
        if sharers:
            for _, tensor, master in rows:
                master.waiting = set(sharers.get(id(tensor), ()))
        if rows:
            self.are_freed = False
        return grads, copies, more

    def _float32_like(
        self, grads: Sequence[torch.Tensor], masters: Sequence[Master]
    ) -> list[torch.Tensor]:
        """Uninitialised float32 tensors like ``grads``; the small ones' memory is kept."""
        if _compat.storage_use_count is None:
            return [_empty_float32(grad) for grad in grads]
        kept = self._kept
        if kept is None or not kept.fits(masters):
            kept = self._kept = _Kept(grads, masters)
        if len(kept.tensors) == len(grads):
            return list(kept.tensors)
        tensors, both = iter(kept.tensors), zip(grads, kept.is_small, strict=True)
        return [next(tensors) if is_small else _empty_float32(grad) for grad, is_small in both]

    def mark_taken(self) -> None:
        """Note the weights' gradients as taken by a step."""
        for weight, _, master in self._rows:
            grad = weight.grad
            if grad is not None:
                master.taken, master.taken_version = grad, grad._version

    def stash(self, stash: Stash) -> bool:
        """Move gradients off the weights: into ``stash`` those that no master has taken yet.

        Returns:
            Whether somebody has edited gradients that masters have taken already.
        """
        edited = self.drop_cleared()
        if any_grad(self.weights):
            for weight, _, master in self._rows:
                if weight.grad is not None and master.taken is None:
                    stash[weight] = unshared(weight.grad)
                weight.grad = None
        for master in self.masters:
            master.taken = None
        return edited

    def drop_cleared(self, *, zeros: bool = True) -> bool:
        """Drop the masters' gradients where the program has cleared those on weights.

        ``model.zero_grad()`` reaches the weights alone.

        Args:
            zeros: Whether it counts as clearing if all of them were written to and are zero now.

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

    def take_new(self, sharers: Sharers) -> bool:
        """Add to the masters what a backward outside of ``scale_loss`` has left on weights.

        It is what is there after a training forward has cleared the gradients of passes. What is
        there instead of a taken gradient without a forward is somebody's edit of a copy.

        Args:
            sharers: See :class:`apex.amp.training.Training`.

        Returns:
            Whether somebody has edited gradients that masters have taken already.
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
                master.waiting = set(sharers.get(id(tensor), ()))
        return is_changed and self.drop_cleared(zeros=False)

    def wait(self, sharers: Sharers, weights: Container[torch.Tensor]) -> None:
        """Keep the gradients of ``weights`` until every optimizer that shares them has stepped."""
        for weight, tensor, master in self._rows:
            if weight in weights:
                master.waiting = set(sharers.get(id(tensor), ()))

    def has_grads(self) -> bool:
        """Whether a master has a gradient."""
        return any_grad(self.tensors)

    def has_new(self) -> bool:
        """Whether a weight has a gradient that its master has not taken."""
        return any([w.grad is not None and m.taken is None for w, _, m in self._rows])

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

    def free_grads(self, sharers: Sharers, stepped: int) -> None:
        """Free the masters' gradients, where no other optimizer has yet to step on them.

        Args:
            sharers: See :class:`apex.amp.training.Training`.
            stepped: id of the ledger whose optimizer has stepped.
        """
        if not sharers:
            for tensor in self.tensors:
                tensor.grad = None
            self.are_freed = True
            return
        for _, tensor, master in self._rows:
            master.waiting.discard(stepped)
            if not master.waiting:
                tensor.grad = None


def grads_to_step(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that optimizers will step: a master's, and what it has not taken yet."""
    found: list[torch.Tensor | None] = []
    for weight in weights:
        master = table.get(weight)
        if master is not None:
            found.append(master.tensor.grad)
        if master is None or weight.grad is not master.taken:
            found.append(weight.grad)
    return [grad for grad in found if grad is not None]


# -- tensors -----------------------------------------------------------------------------------


def _addresses(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """Where the tensors' memory is; 0 for those that have none of their own."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # fake tensors, and wrappers of several tensors
        return [0] * len(tensors)


def _take_over(weight: torch.Tensor, master: Master, *, both: bool) -> None:
    """Give ``master`` what was written into ``weight``; ``both`` if it has changed as well."""
    if not both:
        master.refresh(weight)
        return
    within = torch.finfo(weight.dtype).eps
    before = master.tensor.detach().clone()
    master.refresh(weight, within=within)
    if not torch.equal(before, master.tensor):
        warnings.warn(
            f"amp: a 16-bit weight of shape {list(weight.shape)} and its float32 master were both "
            "written to since the last step, with different values. The weight's are taken. Write "
            "to one of the two.",
            stacklevel=2,
        )
    weight.copy_(master.tensor)


class _Kept:
    """Small float32 gradients whose memory is kept from pass to pass.

    It is used again when nothing else holds a tensor or its memory: when they have as many owners,
    in Python and in C++, as at first. Memory that was shared with another process has moved.
    """

    def __init__(self, grads: Sequence[torch.Tensor], masters: Sequence[Master]) -> None:
        self._masters = masters  # whose gradients, the larger ones too
        self._changes = table.changes
        self.is_small = [grad.numel() <= _MOST_KEPT for grad in grads]
        both = zip(grads, self.is_small, strict=True)
        self.tensors = [_empty_float32(grad) for grad, is_small in both if is_small]
        self._storages = [tensor.untyped_storage() for tensor in self.tensors]
        self._in_c = [storage._cdata for storage in self._storages]
        self._at_first = self._state()

    def _state(self) -> tuple[Any, ...]:
        tensors, in_c = self.tensors, self._in_c
        count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
        in_python = list(map(sys.getrefcount, tensors)), list(map(sys.getrefcount, self._storages))
        owners = *in_python, list(map(count, tensors)), list(map(_compat.storage_use_count, in_c))
        return *owners, _addresses(tensors), list(map(_REQUIRES_GRAD, tensors))

    def fits(self, masters: Sequence[Master]) -> bool:
        """Whether they are gradients of ``masters`` where these are now, and nothing holds them."""
        is_same = self._changes == table.changes and self._masters == masters
        return is_same and self._state() == self._at_first


def _empty_float32(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad, dtype=torch.float32, requires_grad=False)


def _coalesced(weight: torch.Tensor) -> torch.Tensor:
    """The gradient of ``weight``, coalesced if it is sparse."""
    grad = weight.grad
    assert grad is not None
    if grad.is_sparse:
        grad = weight.grad = grad.coalesce()
    return grad


def any_grad(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` has a gradient."""
    return next((True for tensor in tensors if tensor.grad is not None), False)
