"""The 2018 optimizer wrapper: several losses, each with a scaler of its own.

It is ``scale_loss`` with the loss's number counted instead of given; all the work is done by the
same state that ``initialize`` gives an optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from apex.amp._wrapped_optimizer import WrappedOptimizer
from apex.amp.legacy.scaler import LossScaler
from apex.amp.optimizer import state_of
from apex.amp.scaling import scale_loss


class OptimWrapper(WrappedOptimizer):
    """An optimizer with ``num_loss`` scaled losses between two steps.

    ``handle.wrap_optimizer`` makes it. The losses have a scaler each; a step is skipped if a
    gradient of one of them was not finite. With an inactive handle this is a pass-through. Anything
    else is the wrapped optimizer's.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or is wrapped already.
        ValueError: ``num_loss`` is not an integer above 0.
        RuntimeError: ``optimizer`` went through ``amp.initialize``.

    Example:
        >>> handle = amp.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
        >>> for _ in range(2):
        ...     loss = model(torch.ones(1, 4)).float().mean()
        ...     with optimizer.scale_loss(loss) as scaled_loss:
        ...         scaled_loss.backward()
        >>> optimizer.step()
    """

    _own = ("_amp_handle", "_num_loss", "_loss_idx", "_scalers")

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        if not isinstance(num_loss, int) or num_loss < 1:
            raise ValueError(f"amp: num_loss was {num_loss!r}; it must be an integer above 0.")
        if isinstance(optimizer, OptimWrapper):
            raise TypeError(
                "amp: optimizer was wrapped already. Wrap the optimizer inside it: "
                "handle.wrap_optimizer(optimizer.optim)."
            )
        super().__init__(optimizer)
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._scalers: list[LossScaler] = amp_handle.new_scalers(num_loss)
        if amp_handle.is_active():
            amp_handle.manage(optimizer, self._scalers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optim" not in self.__dict__:  # asked while it is copied
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optim, name)

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale the next loss; the n-th block since the last step uses the n-th scaler.

        Raises ``AssertionError`` where there are more blocks than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise AssertionError(
                f"amp: scale_loss was entered {self._loss_idx + 1} times since the last step; "
                f"wrap_optimizer was called with num_loss={self._num_loss}. Call step(), or pass "
                "a larger num_loss."
            )
        first = self._amp_handle.manage(self.optim, self._scalers)
        with scale_loss(loss, self.optim, loss_id=first + self._loss_idx) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """The optimizer's step, skipped if a gradient was not finite.

        Raises:
            NotImplementedError: A closure was given while amp is active.
        """
        if closure is None:
            self._loss_idx = 0
            return self.optim.step()
        if self._amp_handle.is_active():
            raise NotImplementedError(
                "amp: the step() of a wrapped optimizer does not accept a closure."
            )
        record = state_of(self.optim)
        if record is not None and record.training.properties.opt_level is None:
            record.detach()  # of amp.init: its step may be skipped, so it refuses closures
        return self.optim.step(closure)

    _optimizer = property(attrgetter("optim"))  # its name in 2018
