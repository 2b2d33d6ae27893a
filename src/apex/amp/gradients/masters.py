"""Float32 masters of 16-bit weights, one by one.

``table`` maps each 16-bit weight to its :class:`Master` for as long as the weight lives.
:mod:`apex.amp.gradients.parameters` has what is done to all masters of an optimizer or a model.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from apex._compat.program import stacklevel
from apex.amp.gradients.tensors import pieces
from apex.ops.lists.tensor_lists import OWN_MEMORY

Values = dict[torch.Tensor, torch.Tensor]  # by the tensor that they belong to


class Master:
    """The float32 value of a 16-bit weight.

    Both can have a gradient. ``taken`` says whether the master has the weight's:

    | weight's | ``taken`` | master's | |
    |---|---|---|---|
    | none | none | any | nothing new |
    | G | none | any | new, of a backward outside of blocks or zeros: the next step adds it |
    | G | G | any | the master has it, since the end of a block or a step began |
    | G | G | none | it was stepped; the next forward clears it |
    | G, written since | G | any | an edit, which has no effect; all zeros: cleared |
    | another | G | any | the same |
    | none | G | any | cleared by the program: the master's goes, too |

    Attributes:
        tensor: float32 leaf, same shape and device as the weight.
        recorded: ``_version`` and address of the weight and of ``tensor`` when the weight last was
            the rounded tensor; with a fifth entry the program has the tensor.
        is_stepped: Whether an optimizer steps it; else ``state_dict`` has made it, and it is
            dropped when the weight is written.
        taken: The gradient on the weight that the master has taken, and its ``_version`` then.
        waiting: ids of the ledgers whose optimizers share this master and have yet to step.
        before: Its value before a weight that was written meanwhile, which the program may put
            back: an average for an evaluation, an attack between two backwards. It costs 4 bytes
            for each element of such a weight, until the next step at the latest. A value that is
            loaded into the master, or written to it, is newer: then it is dropped.
    """

    __slots__ = (
        *("before", "is_stepped", "recorded", "taken", "tensor", "waiting"),
        "__weakref__",
    )

    def __init__(self, tensor: torch.Tensor, *, is_stepped: bool = True) -> None:
        self.tensor = tensor
        self.is_stepped = is_stepped
        self.recorded: tuple[Any, ...] = (None, None, None, None)
        self.taken: tuple[torch.Tensor, int] | None = None
        self.waiting: set[int] = set()
        self.before: torch.Tensor | None = None

    def value_for(self, weight: torch.Tensor) -> torch.Tensor:
        """The float32 value of ``weight``: the master's where ``weight`` equals it, rounded."""
        return _value_for(self.tensor.detach().to(weight.device), weight.detach())

    @torch.no_grad()
    def refresh(self, weight: torch.Tensor, *, within: float = 0.0) -> None:
        """Take over what somebody else wrote into ``weight``, but what is the rounded master.

        A weight counts as equal if it is off by at most ``within``, relative to the master.
        """
        master = self.tensor
        if master.is_meta:  # made before its weight had memory
            master.data = weight.detach().to(master.dtype)
        elif master.device != weight.device:
            master.data = master.data.to(weight.device)
            table.changes += 1
        before = [] if self.before is None else [self.before.to(weight.device)]
        for part, new, *old in pieces(master.detach(), weight.detach(), *before):
            value = _value_for(part, new, within)
            for one in old:
                value = torch.where(one.to(new.dtype) == new, one, value)
            part.copy_(value)

    def take_over(self, weight: torch.Tensor, *, both: bool, may_return: bool) -> None:
        """Take over what was written into ``weight``; ``both``: the master has changed as well.

        ``may_return``: the program may put back what was there, and gets the master's bits then.
        """
        if not both:
            if may_return and self.before is None:
                table.keep_before(self)
            self.refresh(weight)
            if not may_return:
                self.before = None
            return
        self.before = None
        within = torch.finfo(weight.dtype).eps
        before = self.tensor.detach().clone()
        self.refresh(weight, within=within)
        if not torch.equal(before, self.tensor):
            warnings.warn(
                f"amp: a 16-bit weight of shape {list(weight.shape)} and its float32 master were "
                "both written to since the last step, with different values. apex keeps the values "
                "of the weight. Write to only one of the two.",
                stacklevel=stacklevel(),
            )
        weight.copy_(self.tensor)

    @torch.no_grad()
    def load(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Take the float32 ``value``, which has just been loaded, rounded, into ``weight``."""
        self.before = None
        value = value.to(device=weight.device, dtype=self.tensor.dtype)
        same = value.to(weight.dtype) == weight
        self.tensor.copy_(torch.where(same, value, weight.to(self.tensor.dtype)))


def _value_for(master: torch.Tensor, weight: torch.Tensor, within: float = 0.0) -> torch.Tensor:
    wide = weight.to(master.dtype)
    same = master.to(weight.dtype) == weight
    if within:
        same |= (wide - master).abs() <= within * master.abs()
    return torch.where(same, master, wide)


class MasterTable:
    """The masters of all 16-bit weights in the process, found from the weight or the master.

    Attributes:
        changes: How many masters were added, dropped or moved to another device.
        with_before: Weak references to masters that have a :attr:`Master.before`.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.with_before: list[weakref.ref[Master]] = []
        self._lock = threading.RLock()
        self._masters: Any = WeakTensorKeyDictionary()  # weight -> Master
        # A master's tensor -> a weak reference to its weight.
        self._weights: Any = WeakTensorKeyDictionary()
        # Both by their address, and what `changes` was when they were.
        self._by_address: tuple[int, dict[int, Any]] = -1, {}

    def get(self, weight: Any) -> Master | None:
        """The master of ``weight``, if it has one."""
        with self._lock:
            found: Master | None = self._masters.get(weight)
        return found

    def add(self, weight: torch.Tensor, value: torch.Tensor, *, is_stepped: bool = True) -> Master:
        """Make a master of ``value`` for ``weight``, unless it has one; nothing is recorded yet."""
        with self._lock:
            master: Master | None = self._masters.get(weight)
            if master is None:
                with torch.inference_mode(False):  # where a validation may save the model
                    kept = value.clone() if value.is_inference() else value.detach()
                    tensor = kept.requires_grad_(weight.requires_grad)
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

    def keep_before(self, master: Master) -> None:
        """Keep the value of a master whose weight was written."""
        with self._lock:
            master.before = master.tensor.detach().clone()
            self.with_before.append(weakref.ref(master))

    def forget_before(self) -> None:
        """Free the values that written weights were not given back."""
        with self._lock:
            found, self.with_before = self.with_before, []
        for reference in found:
            master = reference()
            if master is not None:
                master.before = None

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count writes that torch has not counted: to weights, masters, and what has their memory.

        It is looked up by address, since programs pass ``p.data``.
        """
        with self._lock:
            if self._by_address[0] != self.changes:
                both = [*self._masters.items()]
                mine = [one for weight, master in both for one in (weight, master.tensor)]
                found = {address_of(one): TensorWeakRef(one) for one in mine}
                found.pop(-1, None)
                self._by_address = self.changes, found
            references = [self._by_address[1].get(address_of(one)) for one in tensors]
        owners = [reference() for reference in references if reference is not None]
        torch.autograd.graph.increment_version([x for x in owners if x is not None])

    def weight_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The weight whose master ``tensor`` is, if it is one."""
        with self._lock:
            reference = self._weights.get(tensor)
        weight: torch.Tensor | None = None if reference is None else reference()
        return weight


table = MasterTable()


def has_version(tensor: torch.Tensor) -> bool:
    """Whether writes to ``tensor`` are counted: not to one made in ``torch.inference_mode``.

    After ``tensor.data = ...`` its ``is_inference()`` is false, and still nothing is counted.
    """
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of ``tensor`` is; -1 where no write to it is counted, or it has none."""
    if type(tensor) not in OWN_MEMORY or not has_version(tensor) or tensor.is_meta:
        return -1
    return tensor.data_ptr() or -1


def grads_to_step(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that optimizers will step: a master's, and what it has not taken yet."""
    found: list[torch.Tensor | None] = []
    for weight in weights:
        master = table.get(weight)
        if master is not None:
            found.append(master.tensor.grad)
        if master is None or master.taken is None or weight.grad is not master.taken[0]:
            found.append(weight.grad)
    return [grad for grad in found if grad is not None]


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor the optimizer steps: the float32 masters at O2 and O5.

    Args:
        optimizer: Anything with ``param_groups``.

    Raises:
        TypeError: ``optimizer`` has no ``param_groups``, for example because it is a model.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp.master_params was given {type(optimizer).__name__}; pass the optimizer."
        )
    expose = getattr(getattr(optimizer, "_amp_stash", None), "expose", None)
    if expose is not None:
        expose()
    for group in optimizer.param_groups:
        yield from group["params"]
