"""The groups of an optimizer, checked before anything of them is taken."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch.optim.optimizer import required

from apex.ops.lists.placements import is_partial
from apex.ops.lists.storage import STORAGES, Storage
from apex.ops.lists.tensor_lists import refuse_nested
from apex.optimizers._eight_bit import STATES, check_placement

HALF = (torch.float16, torch.bfloat16)
_AT_LEAST_0 = ("lr", "eps", "weight_decay", "momentum", "max_grad_norm", "step")
_NAMES = {"lr": "learning rate", "eps": "epsilon value"}
_SPELLED = {"learning_rate": "lr"}  # as other libraries spell it


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups are checked, and whose weights are stored in one of some ways.

    Args:
        params: Parameters or groups.
        defaults: Values of the group's numbers.
        storage: How weights are stored, see :mod:`apex.ops.lists.storage`.
        state: How the state is stored, see :mod:`apex.optimizers._eight_bit`.

    Raises:
        ValueError: There is no such storage or state.
    """

    #: Whether groups have ``lr`` and ``step`` as tensors on the device, for CUDA graphs.
    _on_device = False
    #: Keys of groups that other optimizers know, and that change what is computed.
    _refused_keys: tuple[str, ...] = ("amsgrad", "maximize")

    # What optimizers that an older Apex pickled whole may lack.
    storage = "plain"
    #: The argument ``state``: the name is that of torch's dictionary.
    _state_form = "plain"

    def __init__(
        self, params: Any, defaults: dict[str, Any], storage: str, state: str = "plain"
    ) -> None:
        known = {"storage": (storage, STORAGES), "state": (state, STATES)}
        for name, (given, allowed) in known.items():
            if given not in allowed:
                raise ValueError(
                    f"{self._name}: {name} was {given!r}; allowed are "
                    f"{', '.join(map(repr, allowed))}."
                )
        self.storage, self._state_form = storage, state
        super().__init__(params, defaults)

    @property
    def _name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @property
    def _storage(self) -> Storage:
        return STORAGES[self.storage]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its numbers and tensors are checked first.

        A parameter that is in the group several times is stepped once, and torch warns.

        Raises:
            ValueError: A misspelt key, one that another optimizer or the constructor takes, or a
                number out of range. Keys of the program's own are kept.
            RuntimeError: A parameter that cannot be stepped.
            TypeError: A parameter is a nested tensor.
        """
        if isinstance(param_group, dict):
            self._check_keys(param_group)
            if "params" in param_group:
                if not isinstance(param_group["params"], torch.Tensor | set):
                    param_group = {**param_group, "params": list(param_group["params"])}
                self._check_params(param_group["params"])
            self._check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        first = {id(p): place for place, p in reversed([*enumerate(group["params"])])}
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][place] for place in sorted(first.values())]
        self._prepare(group)

    def _prepare(self, group: dict[str, Any]) -> None:
        """Make ``lr`` and ``step`` tensors where the group's parameters are, if they are to be."""
        if self._on_device and group["params"]:
            device = group["params"][0].device
            lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            step = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=device)
            group["lr"] = lr.detach().clone().reshape(())
            group["step"] = step.detach().clone().reshape(1)

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments that hold for all groups; each is an attribute."""
        names: set[str] = set()
        for kind in type(self).__mro__:
            if "__init__" in vars(kind):
                parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
                if "defaults" in parameters:  # a base
                    break
                names |= {*parameters}
        names -= {"self", "params", "step", *self.defaults}
        found = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return found | ({"state": self._state_form} if "state" in found else {})

    def _check_keys(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a key that would be expected to change what is computed.

        Programs keep what they like in groups (timm's ``lr_scale``, Megatron's ``wd_mult``, a
        name). torch's ``ZeroRedundancyOptimizer`` puts the constructor's arguments there.
        """
        numbers, arguments = {*self.defaults, "step"}, self._arguments()
        for key, value in group.items():
            if key in numbers or key in ("params", "param_names"):
                continue
            if key in arguments:
                if value != arguments[key]:
                    raise ValueError(
                        f"{self._name}: a group has {key}={value!r}, and the optimizer "
                        f"{key}={arguments[key]!r}, which holds for all groups. Pass it to the "
                        "constructor; for different values make several optimizers."
                    )
            elif key in self._refused_keys:
                if value:
                    raise ValueError(
                        f"{self._name}: a group has {key}={value!r}, which this optimizer does not "
                        "support. Leave it out."
                    )
            elif meant := _meant(key, {*numbers, *arguments}):
                raise ValueError(
                    f"{self._name}: a group has the unknown key {key!r}. Write {meant!r}, or give "
                    "a key of your own another name."
                )

    def _check_complete(self) -> None:
        """Raise ``KeyError`` if a group lacks one of its numbers."""
        for number, group in enumerate(self.param_groups):
            for key in self.defaults.keys() - group.keys():
                raise KeyError(
                    f"{self._name}: group {number} has no {key!r} any more. Put it back; its "
                    f"default is {self.defaults[key]!r}."
                )

    def _check_numbers(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for a number out of range."""
        for key in _AT_LEAST_0:
            value = group.get(key, 0.0)
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"{self._name}: {key} was a tensor of shape {tuple(value.shape)}; it must "
                        "have one element."
                    )
                if value.is_meta:
                    continue
                value = value.item()
            if value is not required and not (isinstance(value, Real) and float(value) >= 0):
                raise ValueError(
                    f"Invalid {_NAMES.get(key, key + ' value')}: {value}. "
                    f"{self._name} needs a number of at least 0."
                )
        given = group.get("betas", (0.0, 0.0))
        betas = tuple(given) if isinstance(given, Iterable) else (given,)
        if len(betas) != 2:
            raise ValueError(f"Invalid betas: {betas}. {self._name} needs two, 0 <= beta < 1.")
        for number, beta in enumerate(betas):
            if not (isinstance(beta, Real | torch.Tensor) and 0.0 <= float(beta) < 1.0):
                raise ValueError(
                    f"Invalid beta parameter at index {number}: {beta}. {self._name} "
                    "needs 0 <= beta < 1."
                )

    def _tensors(self, params: Any) -> list[torch.Tensor]:
        """The tensors among parameters (maybe with names); ``TypeError`` if one is nested."""
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        pairs = (isinstance(entry, tuple) and len(entry) == 2 for entry in listed)
        every = [x[1] if is_pair else x for x, is_pair in zip(listed, pairs, strict=True)]
        tensors = [x for x in every if isinstance(x, torch.Tensor)]  # torch's own error says others
        refuse_nested(f"{self._name}: parameter", tensors)
        return tensors

    def _check_params(self, params: Any) -> None:
        """Raise for a tensor (maybe with its name) that cannot be stepped."""
        for tensor in self._tensors(params):
            if tensor.dtype not in (*HALF, torch.float32, torch.float64):
                raise RuntimeError(
                    f"{self._name} only support fp16 and fp32 (and bf16, fp64); a parameter has "
                    f"{tensor.dtype}."
                )
            if tensor.is_neg():
                raise RuntimeError(
                    f"{self._name}: the sign of a parameter is a bit of the tensor (is_neg()) and "
                    "not in its memory. Make the parameter of `data.resolve_neg()`."
                )
            self._check_stored([tensor])
            if self._state_form == "8bit":
                check_placement(self._name, tensor)
            if is_partial(tensor):
                raise RuntimeError(
                    f"{self._name}: a parameter is a DTensor whose ranks hold terms of a sum "
                    "(Partial). Call redistribute(placements=...) first, and make the parameter of "
                    "the result."
                )

    def _check_stored(self, params: Sequence[torch.Tensor]) -> None:
        """Raise ``RuntimeError`` for a parameter that the storage does not keep."""
        if self.storage == "plain":
            return
        if others := {param.dtype for param in params} - {torch.bfloat16}:
            raise RuntimeError(
                f"{self._name}: storage={self.storage!r} keeps bfloat16 weights; a parameter has "
                f"{others.pop()}. Convert the model with .bfloat16() first; for a model that was "
                "converted since, make a new optimizer, whose load_state_dict takes this one's "
                "state."
            )


def _meant(key: str, known: Collection[str]) -> str | None:
    """What is probably meant by a misspelt key; not what ``no_weight_decay`` contains."""
    written = key.lower()
    near = [name for name in known if abs(len(name) - len(key)) <= 1]
    close = difflib.get_close_matches(_SPELLED.get(written, written), near, n=1, cutoff=0.85)
    return close[0] if close else _SPELLED.get(written)
