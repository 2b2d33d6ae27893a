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

import torch

from apex.amp.gradients.accumulation import accumulate, addresses
from apex.ops.lists.columns import OWN_MEMORY


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
        self._zeroed: dict[torch.Tensor, torch.Tensor] = {}  # that have stayed where they were
        self._versions: dict[torch.Tensor, int] = {}  # of those, and of what is here, if no copy

    def take_off(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Put the gradient of a 16-bit weight aside for its master."""
        self[weight] = self.unshared(grad)
        self.has_moved |= not self.by_wrapper and _is_part(grad)

    def unshared(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient, copied if it is a part of a tensor that the next backward may write to."""
        return grad.clone() if self.has_buckets or _is_part(grad) else grad

    @torch.no_grad()
    def take(self, weights: Iterable[torch.Tensor], *, outside: AbstractSet[int]) -> None:
        """Put the gradients of ``weights`` aside; ``outside`` are ids of those of no model."""
        for weight in weights:
            grad = weight.grad
            if grad is None:
                continue
            if not self.by_wrapper and (_is_part(grad) or _is_dense(grad, weight, outside)):
                self[weight] = grad.clone()
                self._zeroed[weight] = grad.zero_()
                continue
            self[weight] = self.unshared(grad)
            if self[weight] is grad and not grad.is_inference():
                self._versions[weight] = grad._version
            weight.grad = None
        for weight, grad in self._zeroed.items():  # parts of one tensor have one version
            self._versions[weight] = grad._version

    def refuse_written(self) -> None:
        """Raise where backward has written to a gradient that was put aside."""
        for weight, version in self._versions.items():
            if weight not in self._zeroed and self[weight]._version != version:
                raise RuntimeError(
                    "amp.scale_loss: the gradient that a weight of shape "
                    f"{tuple(weight.shape)} had before the block was written to in it, so that "
                    "unscaled and scaled values are added up. Are the gradients of other weights "
                    "parts of it? Pass amp.initialize an optimizer of the tensors that backward "
                    "reaches, model.parameters(), or call optimizer.zero_grad() before the block."
                )

    def is_written(self, weight: torch.Tensor) -> bool:
        """Whether ``.grad`` of ``weight`` has been set or written to in the block."""
        grad = self._zeroed.get(weight)
        return weight.grad is not grad or (
            grad is not None and grad._version != self._versions[weight]
        )

    @torch.no_grad()
    def restore(self, weights: Iterable[torch.Tensor]) -> None:
        """Give ``weights`` the gradients that they had, for a block that has raised."""
        for weight in weights:
            grad, zeroed = self.get(weight), self._zeroed.get(weight)
            weight.grad = grad if grad is None or zeroed is None else zeroed.copy_(grad)

    @torch.no_grad()
    def add(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add gradients from before to those that the block has left.

        ``pairs``: what is stepped, and what was put aside for it.
        """
        rows = [(tensor, grad, now) for tensor, grad in pairs if (now := tensor.grad) is not None]
        kept = [row for row in rows if self._keeps(*row)]
        memory = [address for address in addresses([grad for _, grad, _ in kept]) if address]
        if self.by_wrapper or len({*memory}) < len(memory):  # two weights have one gradient
            kept = []
        elif kept:
            torch._foreach_add_([grad for _, grad, _ in kept], [now for _, _, now in kept])
            for tensor, grad, _ in kept:
                tensor.grad = grad
        done = {id(tensor) for tensor, _, _ in kept}
        accumulate([pair for pair in pairs if id(pair[0]) not in done])

    def _keeps(self, tensor: torch.Tensor, grad: torch.Tensor, now: torch.Tensor) -> bool:
        """Whether ``grad``, put aside as it was, can be ``.grad`` again, instead of ``now``."""
        return (
            self.get(tensor) is grad  # not a copy for a master
            and tensor not in self._zeroed
            and OWN_MEMORY.issuperset((type(now), type(grad)))
            and now.layout == grad.layout == torch.strided
            and not (now.is_neg() or grad.is_neg())
        )


def _is_part(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a part of a larger tensor."""
    if grad.is_sparse:
        return False
    return grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()


def _is_dense(grad: torch.Tensor, weight: torch.Tensor, among: AbstractSet[int]) -> bool:
    """Whether ``weight`` is ``among`` these ids, and its gradient a dense tensor."""
    return id(weight) in among and type(grad) in OWN_MEMORY and grad.layout == torch.strided
