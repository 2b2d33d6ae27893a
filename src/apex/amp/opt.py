"""The 2018 optimizer wrapper: several losses, each with a scaler of its own.

It is ``scale_loss`` with the loss's number counted instead of given; all the work is done by the
same state that ``initialize`` gives an optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from apex.amp._amp_state import _amp_state
from apex.amp.optimizer import OptimizerState, state_of
from apex.amp.policy import Properties
from apex.amp.scaler import LossScaler
from apex.amp.scaling import scale_loss
from apex.amp.training import Training


def attach(optimizer: Any, scalers: list[LossScaler]) -> None:
    """Give ``optimizer`` a training of its own: no masters, these scalers."""
    if state_of(optimizer) is None:
        properties = Properties()
        properties._update_options_dict([("enabled", True), ("master_weights", False)])
        training = Training(
            properties, scalers, verbosity=_amp_state.verbosity, max_skipped_steps=50
        )
        OptimizerState(optimizer, training, use_masters=False, full={})


class OptimWrapper:
    """An optimizer with ``num_loss`` dynamically scaled losses between two steps.

    Args:
        optimizer: A torch optimizer.
        amp_handle: What ``amp.init`` returned; with an inactive one this is a pass-through.
        num_loss: How many ``scale_loss`` blocks there are before each ``step``.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        if amp_handle.is_active():
            attach(optimizer, [LossScaler("dynamic") for _ in range(num_loss)])

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale the next loss; the n-th block since the last step uses the n-th scaler.

        Raises:
            AssertionError: More blocks than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise AssertionError(
                f"amp: scale_loss was entered {self._loss_idx + 1} times since the last step; "
                f"wrap_optimizer was called with num_loss={self._num_loss}."
            )
        index, self._loss_idx = self._loss_idx, self._loss_idx + 1
        with scale_loss(loss, self._optimizer, loss_id=index) as scaled:
            yield scaled

    def step(self, closure: Any = None) -> Any:
        """The optimizer's step, skipped if a gradient was not finite.

        Raises:
            NotImplementedError: A closure was given while amp is active.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure)
        self._loss_idx = 0
        if closure is not None:
            raise NotImplementedError("amp: a wrapped optimizer's step() takes no closure.")
        return self._optimizer.step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own."""
        self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own."""
        self._optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own."""
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
