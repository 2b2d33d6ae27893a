"""What programs look for on an optimizer, and find at amp's masters: the state of a weight.

At O2 and O5 masters are in the groups, and the state is theirs. A program that keeps something in
``optimizer.state[weight]`` for a weight of the model is given the master's entry, and the other way
round, so that its optimizer, which walks through the groups, finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex.amp.gradients.masters import table
from apex.amp.gradients.parameters import Parameters


class SharedState(defaultdict[Any, Any]):
    """An optimizer's state, where a weight stands for its master; copies and pickles are plain."""

    def __init__(self, entries: dict[Any, Any], params: Parameters) -> None:
        super().__init__(dict)
        self.update(entries)
        self._params = params

    def _key(self, key: Any) -> Any:
        """The master of a weight that the optimizer steps; any other key itself."""
        params = self._params
        if params.is_swapped or id(key) not in params.ids:
            return key
        master = table.get(key)
        return key if master is None or not master.is_stepped else master.tensor

    def __missing__(self, key: Any) -> Any:
        other = self._key(key)
        return super().__missing__(key) if other is key else self[other]

    def __setitem__(self, key: Any, entry: Any) -> None:
        super().__setitem__(self._key(key), entry)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or super().__contains__(self._key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry, or ``default``."""
        return super().get(key if super().__contains__(key) else self._key(key), default)

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    copy = __copy__

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def share(owners: Sequence[Any], params: Parameters) -> None:
    """Give an optimizer and those inside of it, with the tensors ``params``, shared states."""
    _replace(owners, defaultdict, lambda state: SharedState(state, params))


def unshare(owners: Sequence[Any]) -> None:
    """Give them plain states again."""
    _replace(owners, SharedState, lambda state: defaultdict(dict, state))


def _replace(owners: Sequence[Any], kind: type, make: Callable[[Any], dict[Any, Any]]) -> None:
    """Replace states of a type; a wrapper may have the state of what it wraps by another name."""
    states: list[Any] = [getattr(one, "state", None) for one in owners]
    others = {id(state): make(state) for state in states if type(state) is kind}
    for one in owners:
        for name, value in list(vars(one).items()):
            if id(value) in others:
                setattr(one, name, others[id(value)])


def complete(optimizer: Any) -> None:
    """Give a wrapper made without ``Optimizer.__init__`` what torch's methods look for.

    Lookahead wrappers of 2019 set ``param_groups`` and ``state`` alone. torch's ``zero_grad`` and
    ``state_dict``, and each ``step`` after them, raise AttributeError on such a one.
    """
    is_torchs = isinstance(optimizer, torch.optim.Optimizer)
    if is_torchs and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        if not hasattr(optimizer, "defaults"):
            optimizer.defaults = {}
        torch.optim.Optimizer.__setstate__(optimizer, {})  # as for those that older torch pickled
