"""Gradients from before a ``scale_loss`` block, put aside so that backward leaves its own alone.

``.grad`` is ``None`` in the block, so that backward hands over a tensor of its own: nothing is
added up, and no memory is read. At its end the sum goes into the tensor that was there, which is
``.grad`` again: programs keep references to it.

A gradient that is a part of a larger tensor stays where it is, since a program may zero, reduce or
clip that tensor as a whole: zeros take its place, and a copy of it is put aside. The same goes for
the gradient of a parameter of no model, as under ``amp.init``: the gradients of weights that the
optimizer does not have may be parts of it, and backward writes to those alone.

DistributedDataParallel has tensors of its own as gradients, and may write to them in each backward.
Inside of one gradients are put aside as copies where that is so, and ``.grad`` is what it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter, itemgetter

import torch

from apex._compat import private
from apex.amp.gradients.parameters import addresses
from apex.amp.gradients.tensors import accumulate
from apex.ops.lists.tensor_lists import OWN_MEMORY

_LAYOUT, _REQUIRES_GRAD = attrgetter("layout"), attrgetter("requires_grad")
_FIRST, _SECOND = itemgetter(0), itemgetter(1)


class Stash(dict[torch.Tensor, torch.Tensor]):
    """Unscaled gradients, by the weight that they belong to.

    Attributes:
        by_wrapper: Whether the block's forward ran inside of a DistributedDataParallel.
        has_buckets: Whether that keeps gradients as parts of its buckets.
        has_moved: Whether a part of a larger tensor was taken off a 16-bit weight with a master.
    """

    def __init__(self, *, by_wrapper: bool = False, has_buckets: bool = False) -> None:
        self.by_wrapper = by_wrapper
        self.has_buckets = has_buckets
        self.has_moved = False
        # Weights with gradients that are here as they were, and their versions.
        self._own: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        # By id of the weight, gradients that have stayed where they were, and their versions.
        self._zeroed: dict[int, tuple[torch.Tensor, int]] = {}

    @torch.no_grad()
    def take(self, weights: Iterable[torch.Tensor], *, outside: AbstractSet[int]) -> None:
        """Put the gradients of ``weights`` aside; ``outside`` are ids of those of no model."""
        both = [(weight, grad) for weight in weights if (grad := weight.grad) is not None]
        parts = []
        for weight, grad in both:
            is_part = _is_part(grad)
            if not self.by_wrapper and (is_part or id(weight) in outside) and _are_plain([grad]):
                parts.append((weight, grad))
                continue
            is_copied = is_part or self.has_buckets
            self[weight] = grad.clone() if is_copied else grad
            weight.grad = None
            if not is_copied and not grad.is_inference():
                self._own.append((weight, grad, grad._version))
        if parts:
            self._zero(parts, addresses([grad for _, grad in both]))

    def _zero(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], memory: Sequence[int]
    ) -> None:
        """Put copies of gradients aside, and leave zeros; but of those that two weights have."""
        for weight, grad in parts:
            self[weight] = grad.clone()
            if memory.count(grad.data_ptr()) > 1:
                weight.grad = None
            else:
                self._zeroed[id(weight)] = grad, 0
        for grad, _ in self._zeroed.values():
            grad.zero_()
        # Afterwards: parts of one tensor have one version.
        self._zeroed = {key: (grad, grad._version) for key, (grad, _) in self._zeroed.items()}

    def take_off(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Put the gradient of a 16-bit weight aside for its master."""
        is_part = _is_part(grad)
        self[weight] = grad.clone() if is_part or self.has_buckets else grad
        self.has_moved |= is_part and not self.by_wrapper

    def refuse_written(self) -> None:
        """Raise where backward has written to a gradient that was put aside."""
        for weight, grad, version in self._own:
            if grad._version != version:
                raise RuntimeError(
                    "amp.scale_loss: backward added scaled values to the unscaled gradient that a "
                    f"weight of shape {tuple(weight.shape)} had before the block. Is this gradient "
                    "shared with other weights? Pass amp.initialize an optimizer of the tensors "
                    "that backward reaches, model.parameters(), or call optimizer.zero_grad() "
                    "before the block."
                )

    def is_written(self, weight: torch.Tensor) -> bool:
        """Whether ``.grad`` of ``weight`` has been set or written to in the block."""
        grad, version = self._zeroed.get(id(weight), (None, 0))
        return weight.grad is not grad or (grad is not None and grad._version != version)

    @torch.no_grad()
    def restore(self, weights: Iterable[torch.Tensor]) -> None:
        """Give ``weights`` the gradients that they had, for a block that has raised."""
        for weight in weights:
            grad, (zeroed, _) = self.get(weight), self._zeroed.get(id(weight), (None, 0))
            weight.grad = grad if grad is None or zeroed is None else zeroed.copy_(grad)

    @torch.no_grad()
    def add(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add gradients from before to those that the block has left.

        ``pairs``: what is stepped, and what was put aside for it.
        """
        own = [] if self.by_wrapper else [(weight, grad) for weight, grad, _ in self._own]
        both = [(grad, now) for weight, grad in own if (now := weight.grad) is not None]
        if not _are_plain([*map(_FIRST, both), *map(_SECOND, both)]):  # sparse ones, for example
            own = [(w, g) for w, g in own if w.grad is None or _are_plain([g, w.grad])]
            both = [(grad, now) for weight, grad in own if (now := weight.grad) is not None]
        memory = [address for address in addresses([*map(_FIRST, both)]) if address]
        if len({*memory}) < len(memory):  # two weights have one gradient
            own = both = []
        if both:
            private.foreach_add_([*map(_FIRST, both)], [*map(_SECOND, both)])
        for weight, grad in own:
            weight.grad = grad
        done = {id(weight) for weight, _ in own}
        accumulate([pair for pair in pairs if id(pair[0]) not in done])


def _is_part(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a part of a larger tensor."""
    if grad.is_sparse:
        return False
    return grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()


def _are_plain(grads: Sequence[torch.Tensor]) -> bool:
    """Whether all are dense tensors with memory of their own, which no graph needs."""
    return (
        OWN_MEMORY.issuperset(map(type, grads))
        and {torch.strided}.issuperset(map(_LAYOUT, grads))
        and not any(map(torch.Tensor.is_neg, grads))
        and not any(map(_REQUIRES_GRAD, grads))
        and not any(map(torch.Tensor.is_inference, grads))
    )
