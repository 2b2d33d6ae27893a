"""Updates that need sums over whole tensors, of which a rank may hold only a part.

LAMB, NovoGrad and LARC scale by norms of whole tensors. Their updates are generators with two
stages. The first ends by yielding :class:`Sums` over the tensors that it was given. It is sent the
same sums over the whole tensors, and the second uses them. So an update does not know of ranks, and
the sums of all updates of a step are added up over ranks together:

* :func:`finish` runs one update, for a caller whose tensors are whole, or who adds up himself;
* :func:`finish_on_shards` runs all updates of a step on DTensors, with one all-reduce for each
  process group over which a tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from apex.ops.lists.placements import over_ranks
from apex.ops.lists.tensor_lists import merged, taken


class Kind(NamedTuple):
    """What an update yields for each tensor.

    Attributes:
        numbers: How many numbers.
        largest: Whether they are largest magnitudes, instead of sums.
    """

    numbers: int
    largest: bool = False


class Sums(NamedTuple):
    """What the first stage of an update ends with.

    Attributes:
        values: float32 ``(numbers, tensors)``.
        largest: Whether they are largest magnitudes, instead of sums.
    """

    values: torch.Tensor
    largest: bool = False

    @property
    def kind(self) -> Kind:
        """What they are."""
        return Kind(len(self.values), self.largest)


Stages = Generator[Sums, torch.Tensor, None]


def finish(stages: Stages, whole: Callable[[Sums], torch.Tensor] = attrgetter("values")) -> None:
    """Run an update to its end.

    Args:
        stages: The update.
        whole: Makes sums over the whole tensors of those over the local parts, of the same shape.
            Not called if the update needs none.
    """
    for sums in stages:
        _send(stages, whole(sums))


def _send(stages: Stages, whole: torch.Tensor) -> None:
    try:
        stages.send(whole)
    except StopIteration:
        return
    raise AssertionError("an update has two stages")


@torch.no_grad()
def finish_on_shards(
    updates: Iterable[tuple[Sequence[torch.Tensor], Stages | None]],
    sharded: Sequence[torch.Tensor],
    kinds: Collection[Kind],
    total: Callable[..., torch.Tensor] = over_ranks,
) -> None:
    """Run the updates of one step to their ends, with sums over all ranks.

    A collective, for each of ``kinds``. The layout of what is sent depends on ``sharded`` and
    ``kinds`` alone, so a rank without local elements, or without gradients, takes part.

    Args:
        updates: The parameters that each update steps, and the update, if it is not done already.
            Parameters are in the order of ``sharded``; those that are not in it are whole.
        sharded: All sharded parameters of the optimizer, in the same order on all ranks.
        kinds: What the updates may yield, the same on all ranks.
        total: Adds up over ranks, see :func:`apex.ops.lists.placements.over_ranks`.
    """
    # All first stages run before the first collective: one for each kind then serves all updates.
    begun = [(params, stages, next(stages, None)) for params, stages in updates if stages]
    place = {id(param): number for number, param in enumerate(sharded)}
    for kind in sorted(kinds):
        parts: list[tuple[list[int], torch.Tensor]] = []
        waiting = []
        for params, stages, sums in begun:
            if sums is None or sums.kind != kind:
                continue
            # Positions of sharded parameters: in this update, and in what all ranks send.
            mine = [n for n, param in enumerate(params) if id(param) in place]
            there = [place[id(params[n])] for n in mine]
            values = sums.values.t()
            waiting.append((stages, values, mine, there))
            if mine:
                parts.append((there, taken(values, mine)))
        whole = total(_all_places(parts, sharded, kind), sharded, largest=kind.largest)
        for stages, values, mine, there in waiting:
            new = values
            if mine:  # its sharded parameters get the sums of all ranks, the others keep their own
                others = [*{*range(len(values))}.difference(mine)]
                found = taken(whole, there).to(values.device, non_blocking=not values.is_cpu)
                new = merged([(mine, found), *_if_any(others, values)])
            _send(stages, new.t())


def _if_any(positions: list[int], values: torch.Tensor) -> list[tuple[list[int], torch.Tensor]]:
    return [(positions, taken(values, positions))] if positions else []


def _all_places(
    parts: list[tuple[list[int], torch.Tensor]], sharded: Sequence[torch.Tensor], kind: Kind
) -> torch.Tensor:
    """One matrix of the parts, with zeros for the parameters that are not stepped here."""
    device = parts[0][1].device if parts else sharded[0].device
    known = {number for there, _ in parts for number in there}
    missing = [number for number in range(len(sharded)) if number not in known]
    moved = [(there, x.to(device, non_blocking=device.type != "cpu")) for there, x in parts]
    if missing:
        zeros = torch.zeros(len(missing), kind.numbers, device=device, dtype=torch.float32)
        moved.append((missing, zeros))
    return merged(moved)
