"""16-bit weights of a model and their float32 masters: what happens to all of them in a step.

A step of many small weights is host time. So each thing that has to be done to all is one tight
loop here, with no call for each tensor. On an AMD EPYC one visit of 300 tensors (reading each
gradient, say) takes 20 us when they are in the cache and 90 us after a forward or backward; what
is left of the overhead in ``benchmarks/host_overhead.py`` is a handful of such visits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.amp.casting.models import Master
from apex.amp.passes import accumulate

Twin = tuple[torch.Tensor, torch.Tensor, Master]  # weight, master's tensor, master
Sharing = dict[int, set[int]]  # ids of optimizers' states by the id of a tensor they share


class Twins:
    """Pairs of a weight and its master, in an optimizer's order.

    Args:
        rows: The weight, the master's tensor and the master, of each.

    Attributes:
        weights: The 16-bit weights.
        tensors: The float32 masters.
    """

    def __init__(self, rows: Sequence[Twin]) -> None:
        self._rows = list(rows)
        self.weights = [weight for weight, _, _ in rows]
        self.tensors = [tensor for _, tensor, _ in rows]
        self._masters = [master for _, _, master in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def without(self, done: set[int]) -> Twins:
        """Those whose weight's id is not in ``done``."""
        return Twins([row for row in self._rows if id(row[0]) not in done])

    # -- values --------------------------------------------------------------------------------

    def refresh(self, *, every: bool) -> None:
        """Take over what somebody else wrote into weights since.

        Args:
            every: Look at all values; else only where a ``_version`` has changed.
        """
        if not every:
            versions = [weight._version for weight in self.weights]
            if versions == [master.version for master in self._masters]:
                return
        for weight, _, master in self._rows:
            if every or weight._version != master.version:
                master.refresh(weight)

    @torch.no_grad()
    def write(self) -> None:
        """Round every master into its weight."""
        torch._foreach_copy_(self.weights, self.tensors)
        self.note_written()

    def note_written(self) -> None:
        """Remember that every weight is its rounded master now."""
        for weight, master in zip(self.weights, self._masters, strict=True):
            master.version = weight._version

    # -- gradients -----------------------------------------------------------------------------

    def widen(
        self, sharing: Sharing, *, empty: bool
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """float32 copies of what backward left on weights, given to masters that have none yet.

        Args:
            sharing: See :class:`apex.amp.training.Training`.
            empty: Make the copies for somebody else to fill.

        Returns:
            The copies, and those to be added to what a master has already, with its tensor.
        """
        wide, more = [], []
        for weight, tensor, master in self._rows:
            grad = weight.grad
            if grad is None:
                continue
            if grad.is_sparse:
                grad = weight.grad = grad.coalesce()
            master.left = grad
            master.left_version = grad._version
            if sharing:
                master.wait_for(sharing.get(id(tensor)))
            copy = torch.empty_like(grad, dtype=torch.float32) if empty else grad.float()
            if tensor.grad is None:
                tensor.grad = copy
            else:
                more.append((tensor, copy))
            wide.append(copy)
        return wide, more

    def leave(self) -> dict[torch.Tensor, torch.Tensor]:
        """Note the gradients on weights as left by a pass; return the weights by their masters."""
        left = {}
        for weight, tensor, master in self._rows:
            if weight.grad is not None:
                master.left, master.left_version = weight.grad, weight.grad._version
                left[tensor] = weight
        return left

    def take_over(self) -> bool:
        """Give masters what a backward outside of ``scale_loss`` has left on weights.

        Returns:
            Whether somebody has written into gradients that a pass had left.
        """
        changed = False
        for weight, tensor, master in self._rows:
            grad = weight.grad
            if grad is None:
                continue
            if grad is master.left:
                changed = changed or grad._version != master.left_version
                continue
            new = grad.detach().coalesce() if grad.is_sparse else grad.detach()
            accumulate([(tensor, new.float())])
            master.left, master.left_version = grad, grad._version
        return changed

    def has_more(self) -> bool:
        """Whether a backward outside of ``scale_loss`` has left gradients on weights."""
        return any(w.grad is not None and w.grad is not m.left for w, _, m in self._rows)

    def has_grads(self) -> bool:
        """Whether a master has a gradient."""
        return any(tensor.grad is not None for tensor in self.tensors)

    def has_all_grads(self) -> bool:
        """Whether every master has a gradient."""
        return all(tensor.grad is not None for tensor in self.tensors)

    def forget_left(self) -> None:
        """Take what is on weights for new."""
        for master in self._masters:
            master.left = None

    def drop_left(self) -> None:
        """Clear the gradients that a pass has left on weights."""
        for weight, _, master in self._rows:
            if master.left is not None:
                if master.has_left(weight.grad):
                    weight.grad = None
                master.left = None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear all gradients, but with ``set_to_none=False`` zero those on weights."""
        self.forget_left()
        for weight, tensor in zip(self.weights, self.tensors, strict=True):
            if set_to_none:
                weight.grad = None
                tensor.grad = None
            elif weight.grad is not None:
                weight.grad.detach_().zero_()

    def free_grads(self, sharing: Sharing, stepped: int) -> None:
        """Free the masters' gradients, where nobody else has yet to step on them.

        Args:
            sharing: See :class:`apex.amp.training.Training`.
            stepped: id of the optimizer's state that has stepped.
        """
        if not sharing:
            for tensor in self.tensors:
                tensor.grad = None
            return
        for _, tensor, master in self._rows:
            master.waiting.discard(stepped)
            if not master.waiting:
                tensor.grad = None
