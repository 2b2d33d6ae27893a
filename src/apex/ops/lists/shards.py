"""Flat buckets of parameters, of which each rank owns a part: its shard.

A bucket has parameters of one dtype, one after the other. Each begins at a multiple of ``ALIGN``
elements, and the bucket is padded so that every shard is as long and begins at such a multiple too:
then kernels find aligned addresses. A parameter may cross borders of shards. The part of it that
this rank owns is its *fragment*, a 1-dimensional tensor that the rank's own optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from apex._compat import private
from apex.ops.lists.collectives import all_gather, reduce_scatter, wait

ALIGN = 8  # elements: 16 bytes of the narrowest dtype


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Kinds(NamedTuple):
    """dtypes of a bucket: of the state, of gradients and of parameters as they are sent.

    Attributes:
        raw: Whether parameters are sent as bytes.
    """

    state: torch.dtype
    grad: torch.dtype
    param: torch.dtype
    raw: bool


class Piece(NamedTuple):
    """The fragment of a parameter.

    Attributes:
        place: Which of the bucket's parameters.
        part: Its elements of the flattened parameter.
        here: Where these are in the shard.
        tensor: What is stepped.
    """

    place: int
    part: slice
    here: slice
    tensor: torch.Tensor


class Sent(NamedTuple):
    """Gradients on their way."""

    bucket: ShardBucket
    work: Any
    shard: torch.Tensor
    flat: torch.Tensor


class ShardBucket:
    """Some parameters with the gradients of a step.

    Args:
        params: Of one dtype and device.
        kinds: dtypes.
        rank: Of this process among those that share the bucket.
        world: How many these are.
        stores: Whether the shard keeps the weights in the dtype of the state; else fragments are
            made of the parameters at each step.

    Attributes:
        flat: This rank's gradients that were not sent yet, of the whole bucket; ``None`` for none.
        sums: The shard of the reduced gradients; ``None`` for none.
        filled: Places of parameters whose gradients are in ``flat``.
        arrivals: How many gradients of each parameter arrived in this step.
        rounds: How often gradients were sent in this step.
        buffer: Persistent memory of all parameters, which are views of it; ``None`` for none.
        versions: Of the parameters when this optimizer wrote them; ``None`` after loading.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], kinds: Kinds, rank: int, world: int, *, stores: bool
    ) -> None:
        self.params, self.kinds = list(params), kinds
        self.device, self.shapes = params[0].device, [param.shape for param in params]
        self.starts, size = list[int](), 0
        for param in params:
            self.starts.append(size)
            size += _up(param.numel(), ALIGN)
        self.shard_size = _up(max(size, 1), world * ALIGN) // world
        self.size = self.shard_size * world
        self.own = slice(rank * self.shard_size, (rank + 1) * self.shard_size)
        self.main = params[0].new_zeros(self.shard_size, dtype=kinds.state) if stores else None
        self.pieces = [*map(self._piece, range(len(params)))]
        self.pieces = [piece for piece in self.pieces if piece.part.stop > piece.part.start]
        self.stepped = params[0].new_empty(0)  # without stored weights: those of this step
        self.flat: torch.Tensor | None = None
        self.grad_buffer: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.viewed: set[int] = set()
        self.versions: list[int] | None = None
        self.forget()
        if self.main is not None:
            for piece in self.pieces:
                piece.tensor.copy_(self.part_of_param(piece))
        self.note_versions()

    def _piece(self, place: int) -> Piece:
        # Positions in the bucket. If this rank has nothing of the parameter, `first` and `last` are
        # the same border of it, and the slices are empty.
        start, size = self.starts[place], self.params[place].numel()
        first = min(max(self.own.start, start), start + size)
        last = max(min(self.own.stop, start + size), first)
        here = slice(first - self.own.start, last - self.own.start)
        param = self.params[place]
        tensor = param.detach().new_empty(0) if self.main is None else self.main[here]
        return Piece(place, slice(first - start, last - start), here, tensor)

    def part_of_param(self, piece: Piece) -> torch.Tensor:
        """The fragment of the parameter as it is now."""
        return self.params[piece.place].detach().reshape(-1)[piece.part]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of ``flat``, in their shapes."""
        pairs = zip(self.starts, self.params, strict=True)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in pairs]

    def forget(self) -> None:
        """Drop the gradients of this step; none may be on its way."""
        self.sums = None
        self.filled: set[int] = set()
        self.arrivals = [0] * len(self.params)
        self.rounds = 0
        self.flat = None
        if self.grad_buffer is not None:
            self._use(self.grad_buffer.zero_())
        self.expect()

    # -- gradients ---------------------------------------------------------------------------------

    def expect(self) -> None:
        """Find the places of parameters whose gradients the next round waits for."""
        self.missing = {
            place
            for place, (param, count) in enumerate(zip(self.params, self.arrivals, strict=True))
            if param.requires_grad and count <= self.rounds
        }

    def _use(self, flat: torch.Tensor) -> None:
        self.flat, self._grad_views = flat, self.views(flat)

    def add(self, place: int) -> None:
        """Take over the gradient of a parameter; nothing if that is in the buffer already.

        While the persistent buffer is on its way other memory is used: to wait for it in a backward
        pass would be to wait for ranks that may be in another collective, which waits for this one.
        """
        param = self.params[place]
        grad, param.grad = param.grad, None
        if self.flat is None:
            self._use(param.new_zeros(self.size, dtype=self.kinds.grad))
        view = self._grad_views[place]
        if grad is not None and grad.data_ptr() != view.data_ptr():
            if place in self.filled or place in self.viewed:
                view.add_(grad)
            else:
                view.copy_(grad)
        self.filled.add(place)

    def arrived(self, place: int) -> None:
        """Count the gradient of a parameter."""
        self.arrivals[place] += 1
        if self.arrivals[place] > self.rounds:
            self.missing.discard(place)

    def keep_grads(self) -> None:
        """Make the buffer of gradients persistent."""
        if self.grad_buffer is None:
            self.grad_buffer = self.params[0].new_zeros(self.size, dtype=self.kinds.grad)
            self._use(self.grad_buffer)

    def send(self, group: Any, scale: float) -> Sent:
        """Begin to sum the gradients over ranks; zeros for those that did not arrive."""
        flat = self.flat
        if flat is None:
            flat = self.params[0].new_zeros(self.size, dtype=self.kinds.grad)
        if scale != 1.0:
            flat.mul_(scale)
        shard = flat.new_empty(self.shard_size)
        work = reduce_scatter(shard, flat, group)
        self.flat, self.filled = None, set()
        self.rounds += 1
        self.expect()
        return Sent(self, work, shard, flat)

    def receive(self, sent: Sent, user: str, copies: Any) -> None:
        """Wait for what was sent and add it up; ``copies``: the group of equal shards, if any."""
        wait(sent.work, user, sent.shard, sent.flat)
        if copies is not None:
            work = torch.distributed.all_reduce(sent.shard, group=copies, async_op=True)
            wait(work, user, sent.shard)
        self.sums = sent.shard if self.sums is None else self.sums.add_(sent.shard)
        if self.grad_buffer is sent.flat:
            self.grad_buffer.zero_()
            if self.flat is None:
                self._use(self.grad_buffer)

    def grad_of(self, piece: Piece) -> torch.Tensor:
        """The reduced gradient of a fragment."""
        assert self.sums is not None
        return self.sums[piece.here]

    # -- weights -----------------------------------------------------------------------------------

    def note_versions(self) -> None:
        """Remember that the parameters are now as this optimizer wrote them."""
        self.versions = [param._version for param in self.params]

    def moved(self) -> torch.Tensor | None:
        """A parameter whose device or shape changed, or that left the buffer, if there is one."""
        memory = self.views(self.buffer) if self.buffer is not None else self.params
        for param, shape, view in zip(self.params, self.shapes, memory, strict=True):
            if (param.device, param.shape) != (self.device, shape):
                return param
            if param.data_ptr() != view.data_ptr():
                return param
        return None

    def open(self, states: Mapping[torch.Tensor, Any]) -> None:
        """Make fragments ready for a step.

        A weight that somebody else wrote since the last step is taken over: a master becomes the
        weight where it would not be rounded to it, low bits become 0.

        Args:
            states: From a fragment to its state.
        """
        if self.main is None:
            if self.buffer is None:
                self.stepped = self.params[0].new_zeros(self.shard_size)
            else:
                self.stepped = self.buffer[self.own]
        for piece in self.pieces:
            param, versions = self.params[piece.place], self.versions
            written = versions is not None and param._version != versions[piece.place]
            weight = self.part_of_param(piece)
            if self.main is None:
                if self.buffer is None:
                    self.stepped[piece.here].copy_(weight)
                piece.tensor.data = self.stepped[piece.here]
                if written and "low_bits" in states.get(piece.tensor, ()):
                    states[piece.tensor]["low_bits"].zero_()
            elif written:
                same = piece.tensor.to(weight.dtype) == weight
                piece.tensor.copy_(torch.where(same, piece.tensor, weight))

    def gather(self, group: Any) -> tuple[Any, torch.Tensor]:
        """Begin to collect the stepped shards; returns what to wait for, and where they will be."""
        self.note_versions()
        flat, own = self.buffer, self.stepped if self.main is None else self.main
        if flat is None:
            flat = self.params[0].new_empty(self.size, dtype=self.kinds.param)
        if own.dtype != flat.dtype:
            own = flat[self.own].copy_(own)
        if self.kinds.raw:
            return all_gather(flat.view(torch.uint8), own.view(torch.uint8), group), flat
        return all_gather(flat, own, group), flat

    @torch.no_grad()
    def close(self, work: Any, flat: torch.Tensor, user: str) -> None:
        """Wait for the shards of all ranks and write the parameters.

        Raises:
            RuntimeError: A parameter was written since :meth:`gather`.
        """
        wait(work, user, flat)
        if self.versions != [param._version for param in self.params]:
            raise RuntimeError(
                f"{user}: the program wrote to a parameter while its new value was being gathered. "
                "With overlap_param_sync=True call param_sync() before writing to parameters."
            )
        if self.buffer is None:
            private.foreach_copy_(self.params, self.views(flat))
        else:
            torch.autograd.graph.increment_version(self.params)
        if self.main is None and self.buffer is None:
            self.stepped = flat.new_empty(0)  # frees the memory of the step
            for piece in self.pieces:
                piece.tensor.data = self.stepped
        self.note_versions()

    @torch.no_grad()
    def make_buffer(self) -> None:
        """Move the parameters into one buffer, of which they become views."""
        if self.buffer is None:
            flat = self.params[0].new_zeros(self.size)
            for param, view in zip(self.params, self.views(flat), strict=True):
                param.data = view.copy_(param)
            self.buffer = flat
            self.note_versions()
