"""Tensors, modules and optimizers as a report shows them: what is not finite, and their names."""

from __future__ import annotations

from typing import Any

import torch

from apex._compat.private import tree_leaves
from apex.ops.lists.unscale import unscale_

HALVES = (torch.float16, torch.bfloat16)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` on this rank: of a DTensor its shard, of a sparse one its values."""
    if type(tensor) is not torch.Tensor:  # a DTensor perhaps
        tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_bad(tensor: torch.Tensor) -> bool:
    """Whether an element is inf or NaN."""
    tensor = local(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return False
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    return not bool(torch.isfinite(tensor).all())


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, 0-dim; 0 of no elements."""
    if not tensor.numel():
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor.detach())  # abs() is memory: 160 us of 2**16 on a busy CPU
    return torch.maximum(-low, high)


def non_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """1.0 where an element on this rank is not finite, else 0.0: 0-dim, float32."""
    if any([t.is_meta for t in tensors]):  # noqa: C419  # faster
        tensors = [t for t in tensors if not t.is_meta]
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    if any([t.requires_grad or t.is_sparse for t in tensors]):  # noqa: C419  # faster
        tensors = [local(tensor).detach().clone() for tensor in tensors]
    found = unscale_(tensors, torch.ones((), dtype=torch.float32, device=tensors[0].device))
    assert found is not None  # asked for by a tensor
    return found


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Numbers about a tensor: shape, dtype, how many elements are not finite, which is the first.

    ``largest`` is the largest finite magnitude, ``rows`` the first indices in dimension 0 with an
    element that is not finite (at most 10), ``bad_rows`` how many there are.
    """
    tensor = local(tensor.detach())
    finite = torch.isfinite(tensor)
    numbers = tensor[finite]
    found: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "elements": tensor.numel(),
        "nan": int(torch.isnan(tensor).sum()),
        "inf": int(torch.isinf(tensor).sum()),
        "largest": float(numbers.abs().max()) if numbers.numel() else None,
    }
    if found["nan"] or found["inf"]:
        places = (~finite).nonzero()
        found["first"] = places[0].tolist()
        rows = sorted(set(places[:, 0].tolist())) if tensor.dim() else []
        found["rows"], found["bad_rows"] = rows[:10], len(rows)
    return found


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile(model)`` was given."""
    return getattr(model, "_orig_mod", model)


def params_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of the models that an optimizer steps; under amp not their masters."""
    managed = getattr(optimizer, "_amp_stash", None)
    if managed is not None:
        return [*managed.params.targets]
    return [p for group in optimizer.param_groups for p in group["params"]]


def named_in(models: list[torch.nn.Module], method: str) -> list[tuple[str, Any]]:
    """What ``model.named_modules()`` and its like give for all models.

    Of several models, names begin with the class of the model, and with its place if need be.
    """
    kinds = [type(model).__name__ for model in models]
    found = []
    for place, (kind, model) in enumerate(zip(kinds, models, strict=True)):
        front = f"{kind}[{place}]." if kinds.count(kind) > 1 else f"{kind}."
        front = front if len(models) > 1 else ""
        found += [((front + name).rstrip("."), one) for name, one in getattr(model, method)()]
    return found


def names_of_stepped(models: list[torch.nn.Module], optimizers: list[Any]) -> dict[int, str]:
    """The names of what optimizers step, by ``id``: of a master that of its parameter."""
    names = {id(one): name for name, one in named_in(models, "named_parameters")}
    for optimizer in optimizers:
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        for target, one in zip(params_of(optimizer), stepped, strict=False):
            names[id(one)] = names.get(id(target), "")
    return names
