"""Tensors and modules as a report shows them: what is not finite in them, and their names."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["HALVES", "describe", "fronts", "is_bad", "local", "module_paths"]

HALVES = (torch.float16, torch.bfloat16)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` on this rank: of a DTensor its shard, of a sparse one its values."""
    if type(tensor) is not torch.Tensor:  # a DTensor perhaps
        tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor


def is_bad(tensor: torch.Tensor) -> bool:
    """Whether an element is inf or NaN."""
    tensor = local(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return False
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    return not bool(torch.isfinite(tensor).all())


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Numbers about a tensor: shape, dtype, how many elements are not finite, which is the first.

    ``largest`` is the largest finite magnitude, ``rows`` the first indices in dimension 0 with an
    element that is not finite (at most 10).
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
        found["rows"] = sorted(set(places[:, 0].tolist()))[:10] if tensor.dim() else []
    return found


def fronts(models: list[torch.nn.Module]) -> list[str]:
    """What the paths in each model begin with: of several its class, with its place if need be."""
    kinds = [type(model).__name__ for model in models]
    if len(kinds) == 1:
        return [""]
    return [f"{k}[{i}]" if kinds.count(k) > 1 else k for i, k in enumerate(kinds)]


def module_paths(models: list[torch.nn.Module]) -> dict[int, str]:
    """The path of each module by its ``id``, with those of :func:`fronts`."""
    paths: dict[int, str] = {}
    for model, front in zip(models, fronts(models), strict=True):
        for name, module in model.named_modules():
            paths.setdefault(id(module), ".".join(part for part in (front, name) if part))
    return paths
