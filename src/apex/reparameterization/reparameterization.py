"""Parameters that are computed from other parameters: the base class, and how it is applied.

``module.weight`` is computed at each access, so it is never stale, see
:mod:`apex.reparameterization._computed`. The new parameters are ordinary parameters of the module:
``named_parameters`` and the state dict have the same names.

``torch.nn.utils.parametrize`` computes at each access too. Not used, because in torch 2.13

* its parameters are called ``parametrizations.weight.original0``, and a state dict with the old
  names would not fit ``named_parameters``;
* a deep copy shares its class with the original: to remove it from one breaks the other, and
  inside ``parametrize.cached()`` one computes with the weight of the other;
* its modules cannot be pickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from apex.reparameterization._computed import check_class, computed, set_computed

__all__ = ["Reparameterization"]


class Reparameterization:
    """Base class: how to compute a parameter from others.

    A subclass defines :meth:`compute_weight` and :meth:`reparameterize`. It is installed by
    :func:`apex.reparameterization.apply_reparameterization`.

    Args:
        name: Name of the parameter in ``module``.
        dim: Passed on to :meth:`reparameterize`.
        module: The module that has the parameter.
        retain_forward: Stored; the original did not use it either.

    Attributes:
        name: As above.
        dim: As above.
        module: As above.
        retain_forward: As above.
        reparameterization_names: Names of the new parameters.
        evaluated: False, because no weight is kept.
        backward_hook_key: None, because there are no hooks.

    Example:
        >>> class Squared(Reparameterization):
        ...     def compute_weight(self, module=None, name=None):
        ...         return self.get_params(module or self.module)[0] ** 2
        ...
        ...     def reparameterize(self, name, weight, dim):
        ...         return [f"{name}_root"], [torch.nn.Parameter(weight.detach().abs().sqrt())]
        >>> layer = torch.nn.Linear(4, 2)
        >>> squared = Reparameterization.apply(layer, "weight", 0, Squared)
        >>> list(layer.state_dict()), bool((layer.weight >= 0).all())
        (['bias', 'weight_root'], True)
    """

    def __init__(
        self, name: str, dim: int | None, module: torch.nn.Module, retain_forward: bool = True
    ) -> None:
        self.name = name
        self.dim = dim
        self.module = module
        self.retain_forward = retain_forward
        self.reparameterization_names: list[str] = []
        self.evaluated = False
        self.backward_hook_key: Any = None

    def compute_weight(self, module: torch.nn.Module | None = None, name: str | None = None) -> Any:
        """Compute the parameter; called at each access of it.

        Args:
            module: The module that has the parameters; None for ``self.module``.
            name: Name of the parameter; None for ``self.name``.

        Raises:
            NotImplementedError: A subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define compute_weight.")

    def reparameterize(
        self, name: str, weight: torch.Tensor, dim: int | None
    ) -> tuple[Sequence[str], Sequence[Any]]:
        """Make the parameters from which :meth:`compute_weight` computes.

        Args:
            name: Name of the parameter.
            weight: The parameter.
            dim: What ``dim`` was when it was applied.

        Returns:
            The names of the new parameters, and the parameters.

        Raises:
            NotImplementedError: A subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define reparameterize.")

    @staticmethod
    def apply(
        module: torch.nn.Module,
        name: str,
        dim: int | None,
        reparameterization: type[Reparameterization] | None = None,
        hook_child: bool = True,
    ) -> Reparameterization | None:
        """Install a reparameterization of one parameter.

        Args:
            module: The module, or one above it.
            name: Name of the parameter, with dots where it belongs to a child.
            dim: Passed on.
            reparameterization: A subclass.
            hook_child: No effect: there are no hooks.

        Returns:
            The new object; None where the parameter has fewer than two dimensions or belongs to an
            embedding. Nothing is changed then.

        Raises:
            AttributeError: There is no such parameter.
            TypeError: ``reparameterization`` is no subclass of this class.
            ValueError: As in :func:`apex.reparameterization.apply_reparameterization`.
        """
        found = plan(module, [name], dim, reparameterization)
        for each in found:
            each.install()
        return found[0].fn if found else None

    @staticmethod
    def get_module_and_name(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
        """Find the module to which a parameter belongs.

        Args:
            module: The module, or one above it.
            name: Name of the parameter, with dots where it belongs to a child.

        Returns:
            The module, and the name without dots.

        Raises:
            AttributeError: There is no such module, or it has no such attribute.
        """
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if leaf not in computed(owner) and not hasattr(owner, leaf):
            names = ", ".join(found for found, _ in module.named_parameters()) or "none"
            raise AttributeError(
                f"{type(module).__name__} has no parameter {name!r}. Its parameters: {names}."
            )
        return owner, leaf

    def get_params(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters of ``module`` from which the weight is computed."""
        return [getattr(module, name) for name in self.reparameterization_names]

    def remove(self, module: torch.nn.Module) -> None:
        """Put the weight back as a parameter, with the value that it has now.

        It comes last among the module's parameters. It requires a gradient if one of those that it
        was computed from does.

        Args:
            module: The module that has the parameters.

        Raises:
            ValueError: This object is not installed in ``module``.
            RuntimeError: The class of ``module`` was changed after that, as ``fully_shard`` does.
        """
        table = computed(module)
        if table.get(self.name) is not self:
            raise ValueError(
                f"{type(self).__name__} of {self.name!r} is not installed in this "
                f"{type(module).__name__}. Pass the module that has the parameter."
            )
        with torch.no_grad():
            weight = self.compute_weight(module, self.name)
        requires_grad = any(param.requires_grad for param in self.get_params(module))
        set_computed(module, {k: fn for k, fn in table.items() if fn is not self})
        for name in self.reparameterization_names:
            del module._parameters[name]
        module.register_parameter(self.name, torch.nn.Parameter(weight, requires_grad))

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Do nothing: in the original the hook that computed the weight before a forward."""

    def backward_hook(self, module: torch.nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Do nothing: in the original the hook that dropped the weight after a backward."""


class Plan(NamedTuple):
    """What was found and made for one parameter; nothing is changed yet."""

    owner: torch.nn.Module
    fn: Reparameterization
    params: list[torch.nn.Parameter]

    def install(self) -> None:
        """Replace the parameter."""
        set_computed(self.owner, {**computed(self.owner), self.fn.name: self.fn})
        del self.owner._parameters[self.fn.name]
        for name, param in zip(self.fn.reparameterization_names, self.params, strict=True):
            self.owner.register_parameter(name, param)


def plan(
    module: torch.nn.Module,
    names: Iterable[str],
    dim: int | None,
    reparameterization: type[Reparameterization] | None,
) -> list[Plan]:
    """Check everything, and make the new parameters; those that are skipped have no plan.

    Arguments and errors are those of :func:`apex.reparameterization.apply_reparameterization`.
    """
    kind = reparameterization
    if not (isinstance(kind, type) and issubclass(kind, Reparameterization)):
        raise TypeError(f"reparameterization was {kind!r}; pass a subclass of Reparameterization.")
    uses = Counter(id(p) for owner in module.modules() for p in owner._parameters.values())
    plans = []
    for name in names:
        owner, leaf = Reparameterization.get_module_and_name(module, name)
        weight = _parameter(owner, leaf, name)
        if weight.dim() <= 1 or isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if uses[id(weight)] > 1:
            raise ValueError(
                f"{name} is shared by several modules and cannot be reparameterized. Give each "
                "module a parameter of its own, or name the parameters to reparameterize."
            )
        plans.append(_plan(owner, leaf, weight, dim, kind))
    return plans


def _parameter(owner: torch.nn.Module, leaf: str, name: str) -> torch.nn.Parameter:
    for old, fn in computed(owner).items():
        if leaf in (old, *fn.reparameterization_names):
            raise ValueError(
                f"{name} is reparameterized already: {old!r} is computed from "
                f"{fn.reparameterization_names}. Call remove_reparameterization first."
            )
    weight = owner._parameters.get(leaf)
    if weight is None:
        raise AttributeError(f"{name} is no parameter of this {type(owner).__name__}.")
    if torch.nn.parameter.is_lazy(weight):
        raise ValueError(f"{name} has no shape yet. Run the model on a batch first.")
    return weight


def _plan(
    owner: torch.nn.Module,
    leaf: str,
    weight: torch.nn.Parameter,
    dim: int | None,
    kind: type[Reparameterization],
) -> Plan:
    fn = kind(leaf, dim, owner)
    names, values = fn.reparameterize(leaf, weight, dim)
    fn.reparameterization_names = list(names)
    if not len(names) == len(set(names)) == len(values):
        raise ValueError(
            f"{kind.__name__}.reparameterize returned the names {names} and {len(values)} "
            "parameters. Return a name for each."
        )
    for name in names:
        if hasattr(owner, name):
            raise ValueError(
                f"{kind.__name__} of {leaf!r} adds a parameter {name!r}, and the "
                f"{type(owner).__name__} has an attribute of that name. Rename it."
            )
    check_class(owner, leaf)
    params = [torch.nn.Parameter(value, weight.requires_grad) for value in values]
    return Plan(owner, fn, params)
