"""Old names of NVIDIA's Apex: reparameterization of weights, and weight normalization."""

from __future__ import annotations

from typing import TypeVar

import torch

from apex.reparameterization.reparameterization import Reparameterization, computed, install
from apex.reparameterization.weight_norm import WeightNorm

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]

_Module = TypeVar("_Module", bound=torch.nn.Module)


def apply_weight_norm(
    module: _Module, name: str = "", dim: int | None = 0, hook_child: bool = True
) -> _Module:
    """Apply :class:`WeightNorm` to one parameter or to all; see :func:`apply_reparameterization`.

    Raises:
        IndexError: A parameter has no dimension ``dim``.

    Example:
        >>> model = apply_weight_norm(torch.nn.Sequential(torch.nn.Linear(4, 2)))
        >>> list(model.state_dict())
        ['0.bias', '0.weight_g', '0.weight_v']
        >>> list(remove_weight_norm(model).state_dict())
        ['0.bias', '0.weight']
    """
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: _Module, name: str = "", remove_all: bool = False) -> _Module:
    """Remove :class:`WeightNorm`; see :func:`remove_reparameterization`."""
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: _Module,
    reparameterization: type[Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> _Module:
    """Replace one parameter, or all parameters, by others from which they are computed.

    Parameters with fewer than two dimensions and those of embeddings are skipped. The new
    parameters require gradients if the old one did. Make the optimizer after this call.

    Args:
        module: A model or a layer. It is changed in place and returned.
        reparameterization: A subclass of :class:`Reparameterization`.
        name: Name of the parameter, with dots if it belongs to a child; empty for all parameters of
            ``module`` and its children.
        dim: Argument of the reparameterization.
        hook_child: Has no effect: there are no hooks.

    Raises:
        AttributeError: There is no such parameter.
        TypeError: ``reparameterization`` is not a subclass of :class:`Reparameterization`.
        ValueError: A parameter is reparameterized already (the original nested), shared by several
            modules or lazy; or a new name is in use. Nothing changes.
    """
    names = [name] if name else [each for each, _ in module.named_parameters()]
    install(module, names, dim, reparameterization)
    return module


def remove_reparameterization(
    module: _Module,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> _Module:
    """Turn computed parameters back into ordinary parameters with their present values.

    Args:
        module: A model or a layer. It is changed in place and returned.
        reparameterization: Remove only reparameterizations of this class and its subclasses.
        name: As in :func:`apply_reparameterization`.
        remove_all: Remove all of them, whatever ``name`` is.

    Raises:
        AttributeError: There is no such parameter.
        ValueError: The named parameter has no reparameterization of this class.
        RuntimeError: The class of a module has changed since, as ``fully_shard`` does.
    """
    if name and not remove_all:
        owner, leaf = Reparameterization.get_module_and_name(module, name)
        fn = computed(owner).get(leaf)
        if not isinstance(fn, reparameterization):
            found = f", but by {type(fn).__name__}" if fn else ""
            raise ValueError(
                f"{name} is not reparameterized by {reparameterization.__name__}{found}."
            )
        fn.remove(owner)
        return module
    for owner in module.modules():
        for fn in [*computed(owner).values()]:
            if isinstance(fn, reparameterization):
                fn.remove(owner)
    return module
