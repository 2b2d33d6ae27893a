"""One training: what an ``initialize`` call made; and those of the process that are alive.

A training holds scalers and settings, and weak references to models and optimizers: an optimizer
keeps its training alive (through ``_amp_stash``), never the reverse.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apex.amp.levels import Properties
from apex.amp.scale import Scale
from apex.amp.unnoticed import Unnoticed

moments = itertools.count(1)  # of new trainings and of passes, to tell which was first


@dataclass(eq=False)
class Training:
    """The models, optimizers, scalers and settings of one ``initialize`` call.

    ``policy`` is, for each model, the modules that one keeps in float32; ``None`` without a policy.
    ``shared`` has ids of ledgers, by the id of a tensor that several of them step. ``last_pass`` is
    0 before the first ``scale_loss``, ``loaded`` before the first ``amp.load_state_dict``; later
    they say when the last one was. ``casts`` returns the function casts of its models, if any.

    Attributes:
        has_several: Whether it has, or had, several optimizers.
    """

    properties: Properties
    loss_scalers: list[Scale]
    verbosity: int
    max_skipped_steps: int
    casts_functions: bool = False
    fused_step: bool = False
    process_group: Any = None
    policy: list[dict[str, str]] | None = None
    shared: dict[int, set[int]] = field(default_factory=dict)
    made: int = field(default_factory=moments.__next__)
    last_pass: int = 0
    loaded: int = 0
    unnoticed: Unnoticed = field(default_factory=Unnoticed)
    casts: Callable[[], Any] = lambda: None
    has_several: bool = field(init=False, default=False)
    _models: list[tuple[weakref.ref[torch.nn.Module], weakref.ref[Any]]] = field(
        default_factory=list
    )
    _ledgers: list[weakref.ref[Any]] = field(default_factory=list)

    def add_models(self, models: Sequence[torch.nn.Module], records: Sequence[Any]) -> None:
        """Remember ``models``, and the records of their forwards."""
        for record in records:
            record.training = weakref.ref(self)
        both = zip(models, records, strict=True)
        self._models = [(weakref.ref(model), weakref.ref(record)) for model, record in both]

    def add_ledger(self, ledger: Any) -> None:
        """Remember the gradients of one optimizer."""
        self._ledgers.append(weakref.ref(ledger))
        self.has_several = len(self._ledgers) > 1
        self.find_shared()

    def ledgers(self) -> list[Any]:
        """The ledgers of the optimizers that are alive."""
        return [ledger for reference in self._ledgers if (ledger := reference()) is not None]

    def is_dynamic(self) -> bool:
        """Whether one of its scales is."""
        return any([scaler.dynamic for scaler in self.loss_scalers])

    def shown_scalers(self) -> list[Scale]:
        """What ``_amp_state.loss_scalers`` is while this is the newest training.

        Those that a checkpoint has, but until the next ``scale_loss`` those that were just made:
        programs set their scale after ``initialize``.
        """
        trainings = alive()
        if not all([one.last_pass < trainings[-1].made for one in trainings]):
            trainings = in_use(with_scale())
        return [self, *trainings][-1].loss_scalers

    def co_owners(self, listed: Sequence[Any]) -> list[Any]:
        """The ledgers not listed whose optimizers share a parameter with one that is."""
        mine = set(map(id, listed))
        ids = set[int]().union(*[ids for ids in self.shared.values() if ids & mine])
        return [one for one in self.ledgers() if id(one) in ids and one not in listed]

    def find_shared(self) -> None:
        """Note which tensors are in the groups of several optimizers."""
        owners: dict[int, set[int]] = {}
        for ledger in self.ledgers():
            for param in ledger.params.in_groups():
                owners.setdefault(id(param), set()).add(id(ledger))
        self.shared = {param: ids for param, ids in owners.items() if len(ids) > 1}

    def records_of(self, weights: Sequence[torch.Tensor]) -> tuple[list[Any], frozenset[int]]:
        """The records of the models that ``weights`` belong to, and ids of those of no model."""
        ids, found, records = set(map(id, weights)), set(), []
        for reference, record in self._models:
            model = reference()
            mine = ids & set(map(id, () if model is None else model.parameters()))
            if mine:
                records.append(record())
                found |= mine
        return records, frozenset(ids - found)

    def weights_without_optimizer(self) -> list[torch.Tensor]:
        """The weights of the models of which no optimizer that amp manages has any."""
        stepped = set[int]().union(*[state.params.ids for state in managed_states()])
        models = [model for reference, _ in self._models if (model := reference()) is not None]
        weights = [list(model.parameters()) for model in models]
        return [w for own in weights if stepped.isdisjoint(map(id, own)) for w in own]

    def is_over(self) -> bool:
        """Whether none of its optimizers, or of its models where it has none, is left to amp."""
        if self._ledgers:
            return self not in alive()
        return all(reference() is None for reference, _ in self._models)

    def name_of(self, weight: torch.Tensor | None) -> str:
        """The name of a model weight, with the model's number when there are several."""
        for number, (reference, _) in enumerate(self._models):
            model = reference()
            for name, parameter in () if model is None else model.named_parameters():
                if parameter is weight:
                    prefix = f"models[{number}]." if len(self._models) > 1 else ""
                    return f"'{prefix}{name}'"
        shape = None if weight is None else tuple(weight.shape)
        return f"of shape {shape} (in no model passed to initialize)"


# -- optimizers of the process, weakly held --------------------------------------------------------

managed: weakref.WeakSet[Any] = weakref.WeakSet()  # that carry a record of amp
disabled: weakref.WeakSet[Any] = weakref.WeakSet()  # that a disabled initialize was given


def managed_states() -> list[Any]:
    """The records of all optimizers that amp manages, of type ``OptimizerState``."""
    return [optimizer._amp_stash for optimizer in list(managed)]


def is_disabled(optimizer: Any) -> bool:
    """Whether ``optimizer`` was passed to an ``initialize`` with ``enabled=False``."""
    try:
        return optimizer in disabled
    except TypeError:  # anything may be passed to a disabled initialize
        return False


def alive() -> list[Training]:
    """The trainings with an optimizer that can be stepped, oldest first."""
    trainings = {state.training for state in managed_states() if not state.superseded}
    return sorted(trainings, key=lambda one: one.made)


def with_scale() -> list[Training]:
    """Those alive whose scale changes; if there is none, all of them."""
    trainings = alive()
    return [one for one in trainings if one.is_dynamic()] or trainings


def in_use(trainings: Sequence[Training]) -> list[Training]:
    """Those that had a ``scale_loss``; if there is none, all of them.

    What was loaded after the last ``scale_loss`` of all is what goes on: a run that is resumed
    while the model of the first one is still there.
    """
    last = max([one.last_pass for one in trainings], default=0)
    if resumed := [one for one in trainings if one.loaded > last]:
        return resumed
    return [one for one in trainings if one.last_pass] or list(trainings)
