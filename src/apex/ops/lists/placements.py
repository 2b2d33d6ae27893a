"""DTensors: gradients in the placements of their parameters, and norms over all ranks.

Kernels step the local part of a parameter with the local part of its gradient. That is the right
part only if both tensors are placed alike. Autograd places gradients otherwise: that of a norm's
replicated weight under ``SequenceParallel`` is ``Partial``, a part of the sum on each rank. So
before anything is computed from gradients they are redistributed, which is a collective where
placements differ and costs nothing where they do not.

Nothing here imports ``torch.distributed``: a DTensor is known by its ``placements``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex.ops.lists.columns import OWN_MEMORY, local, local_parts


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
                f"{user}: a gradient is {_described(grad)}, and its parameter is "
                f"{_described(param)}. Make both DTensors of one mesh."
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


def norm_of_all(
    tensors: Sequence[torch.Tensor],
    norm: Callable[[list[torch.Tensor]], torch.Tensor],
    order: float,
) -> torch.Tensor:
    """Compute the norm of all elements together, also those that other ranks hold.

    Args:
        tensors: At least one, of any kinds; DTensors without ``Partial`` placements.
        norm: Of local tensors, of that order.
        order: Which p-norm.

    Returns:
        0-dim, the same on each rank of a mesh.
    """
    if OWN_MEMORY.issuperset(map(type, tensors)) or not any(map(is_sharded, tensors)):
        return norm([*local_parts(tensors)])
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (_mesh(tensor), _placements(tensor)) if is_sharded(tensor) else None
        groups.setdefault(key, []).append(tensor)
    norms = [_over_ranks(norm([*map(local, some)]), some[0], order) for some in groups.values()]
    return _joined([part.to(norms[0]) for part in norms], order)


def _over_ranks(norm: torch.Tensor, example: Any, order: float) -> torch.Tensor:
    """Join the norms of the shards of tensors that are placed as ``example``."""
    for dim, place in enumerate(_placements(example) or ()):
        if place.is_replicate():
            continue
        group = example.device_mesh.get_group(dim)
        here = norm.to(example.device_mesh.device_type)
        parts = [torch.empty_like(here) for _ in range(example.device_mesh.size(dim))]
        torch.distributed.all_gather(parts, here, group=group)
        norm = _joined(parts, order).to(norm.device)
    return norm


def _joined(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack([*norms]), order)
    return joined


def _placements(tensor: Any) -> Any:
    return getattr(tensor, "placements", None)


def _mesh(tensor: Any) -> Any:
    return getattr(tensor, "device_mesh", None)


def _described(tensor: torch.Tensor) -> str:
    if _placements(tensor) is None:
        return "no DTensor"
    return f"a DTensor of {_mesh(tensor)}"
