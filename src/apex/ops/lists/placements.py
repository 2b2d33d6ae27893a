"""DTensors: gradients in the placements of their parameters, and norms over all ranks.

Kernels step the local part of a parameter with the local part of its gradient. That is the right
part only if both tensors are placed alike. Autograd places gradients otherwise: that of a norm's
replicated weight under ``SequenceParallel`` is ``Partial``, a part of the sum on each rank. So
before anything is computed from gradients they are redistributed, which is a collective where
placements differ and costs nothing where they do not.

Nothing here imports ``torch.distributed``: a DTensor is known by its ``placements``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex.ops.lists.tensor_lists import OWN_MEMORY, TensorColumn, local, local_parts, merged, taken


def placed(
    user: str, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Bring gradients to the placements of their parameters.

    A gradient that was placed otherwise is replaced, in ``param.grad`` too: what is written into
    it, and a later look at it, concern the one that is stepped.

    Args:
        user: Who asks, for messages.
        params: Parameters.
        grads: A gradient for each.

    Raises:
        RuntimeError: Only one of the two is a DTensor, or they are on different meshes.
    """
    if OWN_MEMORY.issuperset(map(type, params)) and OWN_MEMORY.issuperset(map(type, grads)):
        return grads
    pairs = [*zip(params, grads, strict=True)]
    for param, grad in pairs:  # all checks before anything changes
        if _mesh(param) != _mesh(grad):
            raise RuntimeError(
                f"{user}: a gradient is {described(grad)}, and its parameter is "
                f"{described(param)}. Make both DTensors on the same mesh."
            )
    return [_placed(param, grad) for param, grad in pairs]


def _placed(param: Any, grad: Any) -> torch.Tensor:
    if _placements(param) == _placements(grad):
        same: torch.Tensor = grad
        return same
    there: torch.Tensor = grad.redistribute(placements=param.placements)
    if param.grad is grad:
        param.grad = there
    return there


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold other elements of the tensor."""
    return any(not place.is_replicate() for place in _placements(tensor) or ())


def fits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a rank holds the same elements of both, which have one shape."""
    if local(tensor).shape != local(other).shape:
        return False
    if _placements(tensor) is None or _placements(other) is None:
        return True
    is_placed_alike = _mesh(tensor) == _mesh(other) and _placements(tensor) == _placements(other)
    return is_placed_alike or not (is_sharded(tensor) or is_sharded(other))


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether each rank holds terms of a sum."""
    return any(place.is_partial() for place in _placements(tensor) or ())


# -- sums over ranks -------------------------------------------------------------------------------


def over_ranks(
    values: torch.Tensor, tensors: Sequence[torch.Tensor], *, largest: bool = False
) -> torch.Tensor:
    """Add up what each rank computed from its part of each tensor.

    One all-reduce for each process group over which a tensor is sharded, for all tensors together:
    one for a mesh of one dimension, and for a mesh of copies of shards. Ranks that hold the same
    elements of a tensor do not add to each other. Nothing waits for a device.

    Args:
        values: ``(tensors, ...)``, floating.
        tensors: DTensors, and others, which are whole. The same and in the same order on all ranks.
        largest: Take the largest magnitude, instead of the sum; nan wins.

    Returns:
        As ``values``, of the whole tensors; the same on all ranks that hold parts of one.

    Raises:
        RuntimeError: A tensor is ``Partial``.
    """
    sharded: dict[str, tuple[Any, list[int]]] = {}
    for number, groups in enumerate(_groups_of_each(tensors)):
        for name, group in groups:
            sharded.setdefault(name, (group, []))[1].append(number)
    for group, positions in sharded.values():
        others = [*{*range(len(tensors))}.difference(positions)]
        example: Any = tensors[positions[0]]
        here = taken(values, positions)
        if here.device.type != example.device_mesh.device_type:  # parameters that are offloaded
            here = here.to(example.device_mesh.device_type)
        here = _all_reduced(here, group, largest=largest).to(values.device)
        rest = [(others, taken(values, others))] if others else []
        values = merged([(positions, here), *rest])
    return values


def _all_reduced(values: torch.Tensor, group: Any, *, largest: bool) -> torch.Tensor:
    operation = torch.distributed.ReduceOp
    if not largest:
        total = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, operation.SUM, group=group)
        return total
    # Back ends may lose a nan in a maximum. As integers, magnitudes have the same order, nan last.
    integer = torch.int64 if values.dtype == torch.float64 else torch.int32
    bits = values.abs().contiguous().view(integer)
    torch.distributed.all_reduce(bits, operation.MAX, group=group)
    return bits.view(values.dtype)


Groups = tuple[tuple[str, Any], ...]


def _groups_of_each(tensors: Sequence[torch.Tensor]) -> list[Groups]:
    """The process groups, with their names, over which each tensor is sharded."""
    known: dict[Any, Groups] = {None: ()}
    found = []
    for tensor in tensors:
        placements = _placements(tensor)
        key = None if placements is None else (_mesh(tensor), placements)
        if key not in known:
            known[key] = _groups(tensor)
        found.append(known[key])
    return found


def _groups(tensor: Any) -> Groups:
    mesh, groups = tensor.device_mesh, []
    if is_partial(tensor):
        raise RuntimeError(
            f"apex cannot compute the norm of a DTensor with placements {tensor.placements}, "
            "because its elements are sums over ranks. Call redistribute(placements=...) on it "
            "first."
        )
    for dim, place in enumerate(tensor.placements):
        if not place.is_replicate() and mesh.size(dim) > 1:
            group = mesh.get_group(dim)
            groups.append((group.group_name, group))
    return tuple(groups)


def norm_of_all(
    tensors: Sequence[torch.Tensor],
    norm: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    order: float,
    over: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute the norm of all elements together, also those that other ranks hold.

    One all-reduce for each process group over which a tensor is sharded.

    Args:
        tensors: Of any kinds; DTensors without ``Partial`` placements.
        norm: Of local tensors, of that order.
        order: Which p-norm.
        over: The tensors that there may be: parameters, of which a rank may have no gradients and
            takes part all the same. By default ``tensors``. One of both has tensors.

    Returns:
        0-dim, on the device of the first tensor; the same on each rank of a mesh.

    Raises:
        RuntimeError: A DTensor is ``Partial``.
        ValueError: Tensors are sharded, and ``order`` is not above 0.
    """
    if not over and isinstance(tensors, TensorColumn):
        return norm(tensors)
    every = [*over] or [*tensors]
    if OWN_MEMORY.issuperset(map(type, every)) or not any(map(is_sharded, every)):
        return norm([*local_parts(tensors)])
    if not order > 0:
        raise ValueError(f"the order of a norm of sharded tensors was {order}; it must be above 0.")
    kinds: dict[Groups, tuple[torch.Tensor, list[torch.Tensor]]] = {
        groups: (tensor, []) for tensor, groups in zip(every, _groups_of_each(every), strict=True)
    }
    for tensor, groups in zip(tensors, _groups_of_each(tensors), strict=True):
        kinds.setdefault(groups, (tensor, []))[1].append(local(tensor))
    device = local(tensors[0] if tensors else every[0]).device
    none = torch.zeros((), device=device, dtype=torch.float32)
    norms = [norm(some) if some else none for _, some in kinds.values()]
    dtype = functools.reduce(torch.promote_types, [one.dtype for one in norms])
    # float64, which needs no agreement on a dtype, and whose squares do not overflow
    wide = torch.stack([one.to(device, torch.float64) for one in norms])
    is_largest = order == float("inf")
    powers = over_ranks(
        wide if is_largest else wide**order,
        [example for example, _ in kinds.values()],
        largest=is_largest,
    )
    whole = powers.amax() if is_largest else powers.sum() ** (1 / order)
    return whole.to(dtype)


def norm_of_ranks(norm: torch.Tensor, group: Any, device: torch.device) -> torch.Tensor:
    """Join the Euclidean norms of what the ranks of ``group`` have, which communicates there."""
    squares = norm.to(device, torch.float64).square().reshape(1)
    return _all_reduced(squares, group, largest=False).sqrt().to(norm.dtype).reshape(())


def _placements(tensor: Any) -> Any:
    return getattr(tensor, "placements", None)


def _mesh(tensor: Any) -> Any:
    return getattr(tensor, "device_mesh", None)


def described(tensor: Any) -> str:
    """What to say of a tensor in a message about placements."""
    if _placements(tensor) is None:
        return f"a plain tensor of shape {tuple(tensor.shape)}"
    return f"a DTensor on {_mesh(tensor)} with placements {tensor.placements}"
