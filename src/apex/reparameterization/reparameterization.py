"""Parameters that are computed from other parameters: the base class, and how it is applied.

``module.weight`` is a property that computes at each access, so it is never stale. A property
belongs to a class, so the module gets a subclass of its class, of the same name. Modules of one
class with the same computed attributes share that subclass, which is never changed: copies of a
module are independent of it, and ``torch.compile`` compiles them once. The new parameters are
ordinary parameters of the module: ``named_parameters`` and the state dict have the same names.

``torch.nn.utils.parametrize`` computes at each access too. Not used, because in torch 2.13

* its parameters are called ``parametrizations.weight.original0``, and a state dict with the old
  names would not fit ``named_parameters``;
* a deep copy shares its class with the original: to remove it from one breaks the other, and
  inside ``parametrize.cached()`` one computes with the weight of the other;
* its modules cannot be pickled.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from apex._compat import private


class Reparameterization:
    """Base class of the ways to compute a parameter from others.

    A subclass defines :meth:`compute_weight` and :meth:`reparameterize`.
    ``apply_reparameterization`` makes an object for the parameter ``name`` of ``module``.
    ``retain_forward``, ``evaluated`` and ``backward_hook_key`` have no effect: there are no hooks.

    Attributes:
        reparameterization_names: Names of the new parameters.

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
        """Compute the parameter ``name`` of ``module``. The defaults are those of ``__init__``."""
        raise NotImplementedError(f"{type(self).__name__} does not define compute_weight.")

    def reparameterize(
        self, name: str, weight: torch.Tensor, dim: int | None
    ) -> tuple[Sequence[str], Sequence[Any]]:
        """Return names and values of the parameters from which ``weight`` is computed."""
        raise NotImplementedError(f"{type(self).__name__} does not define reparameterize.")

    @staticmethod
    def apply(
        module: torch.nn.Module,
        name: str,
        dim: int | None,
        reparameterization: type[Reparameterization] | None = None,
        hook_child: bool = True,
    ) -> Reparameterization | None:
        """Install a reparameterization of the parameter ``name``.

        See :func:`apex.reparameterization.apply_reparameterization` for the arguments and errors.

        Returns:
            The new object, or None if the parameter is skipped.
        """
        return next(iter(install(module, [name], dim, reparameterization)), None)

    @staticmethod
    def get_module_and_name(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
        """Return the child of ``module`` that owns a parameter, and the name without dots."""
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
        """Make the weight an ordinary parameter of ``module`` again, with its present value.

        It is the last of the module's parameters. It requires a gradient if one of the parameters
        from which it was computed does.
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
        _set_computed(module, {k: fn for k, fn in table.items() if fn is not self})
        for name in self.reparameterization_names:
            delattr(module, name)
        module.register_parameter(self.name, torch.nn.Parameter(weight, requires_grad))

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Do nothing: in the original the hook that computed the weight before a forward."""

    def backward_hook(self, module: torch.nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Do nothing. In the original this hook dropped the weight after a backward pass."""


def install(
    module: torch.nn.Module,
    names: Iterable[str],
    dim: int | None,
    reparameterization: type[Reparameterization] | None,
) -> list[Reparameterization]:
    """Replace parameters, after everything was checked; return the new objects."""
    private.need("apex.reparameterization")
    kind = reparameterization
    if not (isinstance(kind, type) and issubclass(kind, Reparameterization)):
        raise TypeError(f"reparameterization was {kind!r}; pass a subclass of Reparameterization.")
    uses = Counter(id(p) for owner in module.modules() for p in _own(owner).values())
    made: list[tuple[torch.nn.Module, Reparameterization, list[torch.nn.Parameter]]] = []
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
        fn = kind(leaf, dim, owner)
        made.append((owner, fn, _new_parameters(owner, fn, weight)))
    for owner, fn, params in made:
        _set_computed(owner, {**computed(owner), fn.name: fn})
        delattr(owner, fn.name)
        for name, param in zip(fn.reparameterization_names, params, strict=True):
            owner.register_parameter(name, param)
    return [fn for _, fn, _ in made]


def _own(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _parameter(owner: torch.nn.Module, leaf: str, name: str) -> torch.nn.Parameter:
    for old, fn in computed(owner).items():
        if leaf in (old, *fn.reparameterization_names):
            raise ValueError(
                f"{name} is reparameterized already: {old!r} is computed from "
                f"{fn.reparameterization_names}. Call remove_reparameterization first."
            )
    weight = _own(owner).get(leaf)
    if weight is None:
        raise AttributeError(f"{name} is not a parameter of this {type(owner).__name__}.")
    if torch.nn.parameter.is_lazy(weight):
        raise ValueError(f"{name} has no shape yet. Run the model on a batch first.")
    return weight


def _new_parameters(
    owner: torch.nn.Module, fn: Reparameterization, weight: torch.nn.Parameter
) -> list[torch.nn.Parameter]:
    names, values = fn.reparameterize(fn.name, weight, fn.dim)
    fn.reparameterization_names = list(names)
    if not len(names) == len(set(names)) == len(values):
        raise ValueError(
            f"{type(fn).__name__}.reparameterize returned the names {names} and {len(values)} "
            "parameters. Return a name for each."
        )
    for name in names:
        if hasattr(owner, name):
            raise ValueError(
                f"{type(fn).__name__} of {fn.name!r} adds a parameter {name!r}, and the "
                f"{type(owner).__name__} has an attribute of that name. Rename it."
            )
    _class_of(_base_of(owner), (fn.name,))  # raises what _set_computed would
    return [torch.nn.Parameter(value, weight.requires_grad) for value in values]


def computed(module: torch.nn.Module) -> Mapping[str, Reparameterization]:
    """The computed attributes of a module, by name."""
    found: Mapping[str, Reparameterization] = vars(module).get("_computed", {})
    return found


class Computed(torch.nn.Module):
    """A base of modules that have computed attributes."""

    _computed: dict[str, Reparameterization]

    def register_parameter(self, name: str, param: Any) -> None:
        """Refuse the name of a computed attribute; assigning a parameter comes here too."""
        if name in self._computed:
            raise AttributeError(_set_these(self, name))
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load the names that torch's parametrizations write, too."""
        for leaf, fn in self._computed.items():
            for i, name in enumerate(fn.reparameterization_names):
                value = state_dict.pop(f"{prefix}parametrizations.{leaf}.original{i}", None)
                if value is not None:
                    state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Without no_grad an RNN would put computed weights into its state that have a history, and
        # those cannot be copied.
        with torch.no_grad():
            made: Any = super().__reduce_ex__(max(protocol, 2))
        if made[0] is copyreg.__newobj__ and type(self).__bases__[0] is Computed:  # type: ignore[attr-defined]
            return (_new, (type(self).__bases__[1], *self._computed), *made[2:])
        return made


def _new(base: type[torch.nn.Module], *names: str) -> torch.nn.Module:
    """Make an empty module for ``copy`` and ``pickle``, which then set its attributes."""
    cls = _class_of(base, names)
    return cls.__new__(cls)


_classes: weakref.WeakValueDictionary[Any, type[torch.nn.Module]] = weakref.WeakValueDictionary()


def _class_of(base: type[torch.nn.Module], names: tuple[str, ...]) -> type[torch.nn.Module]:
    key = (base, *sorted(names))
    cls = _classes.get(key)
    if cls is None:
        body: dict[str, Any] = {name: _property(name) for name in names}
        body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
        body["__doc__"] = base.__doc__ or ""
        cls = _classes[key] = type(base.__name__, (Computed, base), body)
    return cls


def _property(name: str) -> property:
    def get(module: Computed) -> Any:
        try:
            return module._computed[name].compute_weight(module, name)
        except AttributeError as error:  # torch would say that the module has no such attribute
            raise RuntimeError(f"{name!r} cannot be computed: {error}") from error

    def set_(module: Computed, value: Any) -> None:
        raise AttributeError(_set_these(module, name))

    return property(get, set_)


def _set_these(module: Computed, name: str) -> str:
    names = " and ".join(module._computed[name].reparameterization_names)
    return f"{name!r} is computed from {names}. Set these."


def _set_computed(module: torch.nn.Module, table: Mapping[str, Reparameterization]) -> None:
    """Give a module exactly these computed attributes."""
    cls = _base_of(module)
    if table:
        module.__class__ = _class_of(cls, tuple(table))
        vars(module)["_computed"] = dict(table)
    else:
        module.__class__ = cls
        del vars(module)["_computed"]


def _base_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module as it was before it had computed attributes."""
    cls = type(module)
    if not issubclass(cls, Computed):
        return cls
    if cls.__bases__[0] is not Computed:
        raise RuntimeError(
            f"The class of this {cls.__name__} was changed (by fully_shard?) after one of its "
            "parameters was reparameterized. Apply and remove reparameterizations before that."
        )
    base: type[torch.nn.Module] = cls.__bases__[1]
    return base
