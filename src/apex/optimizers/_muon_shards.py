"""Matrices that are sharded over ranks, each computed whole on one rank, its owner.

The shards of a matrix are gathered at its owner, which computes the update of the whole matrix and
hands each rank its shard of that. All matrices of a mesh travel together: one all-to-all for each
mesh dimension that shards them, and one back. With two such dimensions (FSDP and tensor
parallelism) a matrix is first gathered along one of them and then, between the ranks that hold its
parts, along the other. Along dimensions that replicate, each replica computes for itself.

Which matrices are stacked, and who owns a stack, depends on the parameters alone. So all ranks call
the same collectives, and a stack is multiplied as one process multiplies it. A rank that has no
gradient for a sharded matrix takes part with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, product
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from apex.ops.updates.newton_schulz import (
    Iteration,
    chosen_runs,
    most,
    multiplications,
    orthogonalized,
    stacks,
)

Parts = dict[int, torch.Tensor]  # by the number of the matrix, in order

# Elements of the matrices that travel together, for each rank: 256 MiB of bfloat16.
SENT = 2**27


class Leg(NamedTuple):
    """A mesh dimension that shards a dimension of a tensor, and the sizes of the shards there."""

    mesh_dim: int
    dim: int
    sizes: tuple[int, ...]

    def shard(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The shard of the rank of this number."""
        return tensor.narrow(self.dim, sum(self.sizes[:number]), self.sizes[number])


class Matrix(NamedTuple):
    """A parameter that is stepped as a matrix, or as a stack of them.

    Attributes:
        param: The parameter, as it is placed.
        numbers: Of the iteration.
        flatten: Whether it is one matrix, from dim 1 on flattened.
        dtype: Of its direction.
        device: Of its direction.
        split: How many blocks of rows it is.
    """

    param: Any
    numbers: Iteration
    flatten: bool
    dtype: torch.dtype
    device: torch.device
    split: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole matrices, or their blocks."""
        shape = self.param.shape
        rows, columns = (shape[0], shape[1:].numel()) if self.flatten else shape[-2:]
        return rows // self.split, columns


class Batch(NamedTuple):
    """Stacks that are computed at once, and whose shards travel together.

    Attributes:
        stacks: The numbers of matrices.
        mesh: Where they are sharded; ``None`` if they are not.
        dims: The dimensions of the mesh that shard them, in the order in which they are gathered.
        legs: By the number of a matrix, for each of these dimensions.
    """

    stacks: list[list[int]]
    mesh: Any
    dims: tuple[int, ...]
    legs: Mapping[int, tuple[Leg, ...]]


def legs(param: Any, flatten: bool) -> tuple[Leg, ...]:
    """How the shards of a DTensor are gathered; none for a tensor that is not sharded.

    Args:
        param: The tensor.
        flatten: Whether all its dimensions are of one matrix, or the last two: shards of a stack
            have whole matrices.

    Raises:
        RuntimeError: It is placed in a way that is not known.
    """
    placements = getattr(param, "placements", ())
    shape, found, first = list(param.shape), [], 0 if flatten else param.dim() - 2
    shards = [number for number, place in enumerate(placements) if not place.is_replicate()]
    strided = [number for number in shards if hasattr(placements[number], "split_factor")]
    # A strided shard is one of what the mesh dimensions behind it have sharded already.
    for number in sorted(shards, key=strided.__contains__):
        dim = getattr(placements[number], "dim", None)
        coordinate = param.device_mesh.get_coordinate()
        if dim is None or len(strided) > 1 or coordinate is None:
            raise RuntimeError(_UNKNOWN.format(placements))
        dim %= len(shape)
        sizes = _shards(shape[dim], param.device_mesh.size(number))
        shape[dim] = sizes[coordinate[number]]
        if dim >= first and len(sizes) > 1:
            found.append(Leg(number, dim, sizes))
    if placements and tuple(shape) != param.to_local().shape:
        raise RuntimeError(_UNKNOWN.format(placements))
    return tuple(reversed(found))


_UNKNOWN = (
    "FusedMuon supports the placements that fully_shard and parallelize_module make, on a mesh "
    "that contains this rank; a parameter has placements {} or another mesh. Redistribute it, or "
    "give its group algorithm='adam' so that Adam updates it."
)


def _shards(size: int, count: int) -> tuple[int, ...]:
    """The sizes into which ``torch.chunk`` cuts, with zeros for the chunks that it leaves out."""
    full = -(-size // count)
    return tuple(max(0, min(full, size - number * full)) for number in range(count))


def planned(matrices: Sequence[Matrix]) -> list[Batch]:
    """Which matrices are stacked, and which stacks are computed at once; the same on all ranks."""
    each = {number: legs(one.param, one.flatten) for number, one in enumerate(matrices)}
    routes: dict[Any, list[int]] = {}
    for number, one in enumerate(matrices):
        mesh = one.param.device_mesh if each[number] else None
        dims = tuple(leg.mesh_dim for leg in each[number])
        routes.setdefault((mesh, dims, one.dtype, one.device), []).append(number)
    batches = []
    for (mesh, dims, _, device), numbers in routes.items():
        some = [matrices[number] for number in numbers]
        kinds = [(one.shape, one.numbers, one.flatten, one.split) for one in some]
        limit = most(device)
        capacity = SENT * math.prod(mesh.size(dim) for dim in dims) if dims else limit
        left = -1
        for stack in stacks(kinds, [one.param.numel() for one in some], limit):
            size = sum(some[place].param.numel() for place in stack)
            if left < size:
                batches.append(Batch([], mesh, dims, each))
                left = capacity
            batches[-1].stacks.append([numbers[place] for place in stack])
            left -= size
    return batches


def orthogonalize(batch: Batch, matrices: Sequence[Matrix], parts: Parts) -> Parts:
    """Orthogonalise a batch; collectives if it is sharded, the same on all ranks.

    Args:
        batch: Of :func:`planned`.
        matrices: All.
        parts: The directions of the batch, local parts.

    Returns:
        Of each the local part of the orthogonalised one.
    """
    dims, mesh = batch.dims, batch.mesh
    owners = _owners(batch.stacks, matrices, [mesh.size(dim) for dim in dims])
    parts = dict(sorted(parts.items()))
    like = next(iter(parts.values())).new_empty(0)
    trips, shapes = [], []  # shapes of the parts here, before each trip
    for level, dim in enumerate(dims):
        owned = {number: owner[level] for number, owner in owners.items()}
        along = {number: batch.legs[number][level] for number in owners}
        trips.append(_Trip(mesh.get_group(dim), mesh.get_local_rank(dim), owned, along, like))
        shapes.append({number: part.shape for number, part in parts.items()})
        parts = trips[-1].gathered(parts)
    for stack in batch.stacks:
        if stack[0] in parts:
            first = matrices[stack[0]]
            whole = [parts[number] for number in stack]
            done = orthogonalized(whole, first.numbers, first.flatten, first.split)
            parts.update(zip(stack, done, strict=True))
    for trip, before in zip(reversed(trips), reversed(shapes), strict=True):
        parts = trip.scattered(parts, before)
    return parts


def _owners(
    plan: Sequence[Sequence[int]], matrices: Sequence[Matrix], sizes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Give each stack an owner, the dearest stack first to the owner who has least.

    Returns:
        By the number of a matrix: coordinates in mesh dimensions of these sizes.
    """
    costs = []  # multiplications
    for stack in plan:
        first = matrices[stack[0]]
        elements = sum(matrices[number].param.numel() for number in stack)
        each = multiplications(*first.shape, chosen_runs(*first.shape, first.numbers))
        costs.append(each * elements // max(1, math.prod(first.shape)))
    coordinates = [*product(*map(range, sizes))]
    loads, owners = [0] * len(coordinates), {}
    for cost, stack in sorted(zip(costs, plan, strict=True), key=lambda one: -one[0]):
        owner = loads.index(min(loads))
        loads[owner] += cost
        owners.update(dict.fromkeys(stack, coordinates[owner]))
    return owners


class _Trip(NamedTuple):
    """Between the ranks along one mesh dimension and the owners among them.

    Attributes:
        group: The ranks.
        me: Which of them this is.
        owners: Who owns each matrix, by its number.
        legs: How each is sharded.
        like: An empty tensor of the dtype and on the device of all.
    """

    group: Any
    me: int
    owners: Mapping[int, int]
    legs: Mapping[int, Leg]
    like: torch.Tensor

    def gathered(self, parts: Parts) -> Parts:
        """The parts that are owned here, joined from those of all ranks."""
        mine = [number for number in parts if self.owners[number] == self.me]
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.group.size())]
        for number, part in parts.items():
            outgoing[self.owners[number]].append(part)
        incoming = []
        for source in range(len(outgoing)):
            shapes = [[*parts[number].shape] for number in mine]
            for number, shape in zip(mine, shapes, strict=True):
                shape[self.legs[number].dim] = self.legs[number].sizes[source]
            incoming.append(shapes)
        shards = zip(*self._exchanged(outgoing, incoming), strict=True)
        return {
            number: torch.cat(some, self.legs[number].dim)
            for number, some in zip(mine, shards, strict=True)
        }

    def scattered(self, parts: Parts, shapes: Mapping[int, torch.Size]) -> Parts:
        """Undo :meth:`gathered`: the parts here, of these shapes, from all owners."""
        outgoing = [
            [self.legs[number].shard(whole, target) for number, whole in parts.items()]
            for target in range(self.group.size())
        ]
        of_owner: list[list[int]] = [[] for _ in outgoing]
        for number in shapes:
            of_owner[self.owners[number]].append(number)
        incoming = [[[*shapes[number]] for number in some] for some in of_owner]
        received = self._exchanged(outgoing, incoming)
        found = zip(chain(*of_owner), chain(*received), strict=True)
        return dict(sorted(found, key=itemgetter(0)))

    def _exchanged(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[list[int]]]
    ) -> list[list[torch.Tensor]]:
        """Send tensors to each rank, and receive those of these shapes from each."""
        flat = [x.reshape(-1) for some in outgoing for x in some]
        sent = torch.cat([self.like, *flat])
        lengths = [[math.prod(shape) for shape in some] for some in incoming]
        received = self.like.new_empty(sum(map(sum, lengths)))
        # As bytes: not every back end has every dtype.
        size = self.like.element_size()
        torch.distributed.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * sum(some) for some in lengths],
            [size * sum(x.numel() for x in some) for some in outgoing],
            group=self.group,
        )
        pieces = iter(torch.split(received, [*chain(*lengths)]))
        return [[next(pieces).view(shape) for shape in some] for some in incoming]
