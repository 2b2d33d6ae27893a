"""The base class of optimizers that wrap another one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optim.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        found: dict[str, Any] = getattr(self.optim, "defaults", {})
        return found

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optim.defaults = value

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("optim", *self._own)}

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
