"""The base class of optimizers that wrap another one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


def _of_wrapped(name: str) -> property:
    """An attribute of the wrapped optimizer; empty where that one has it not."""

    def get(self: Any) -> Any:
        return getattr(self.optim, name, {})

    return property(get, lambda self, value: setattr(self.optim, name, value))


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer that wraps another one; groups, state, hooks and checkpoints are the other's.

    The wrappers of the original were no ``torch.optim.Optimizer``, which learning-rate schedulers
    refused.

    Args:
        optimizer: The optimizer to wrap.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.

    Attributes:
        optim: The wrapped optimizer.
    """

    #: Attributes that copies and pickles have, beside :attr:`optim`.
    _own: ClassVar[tuple[str, ...]] = ()

    def __init__(self, optimizer: Any) -> None:
        # torch's own, which would make groups and a state, is not called
        if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(self).__name__}: optimizer was {optimizer!r}; it must be an optimizer to "
                "wrap."
            )
        self.optim = optimizer

    def __getattr__(self, name: str) -> Any:
        # Not everything: an optimizer's ways to step that are not step() would bypass the wrapper.
        if name == "_amp_stash" or name.startswith("_optimizer_"):
            return getattr(self.__dict__["optim"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    param_groups: Any = _of_wrapped("param_groups")
    state: Any = _of_wrapped("state")
    defaults: Any = _of_wrapped("defaults")

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        mine = vars(self)
        return {name: mine[name] for name in ("optim", *self._own) if name in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's; nothing is added."""
        found: dict[str, Any] = self.optim.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)
