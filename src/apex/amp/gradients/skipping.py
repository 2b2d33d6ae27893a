"""Who decides whether an optimizer's step is skipped, and what its own step is given for that.

| | optimizers | who decides | the step is given |
|---|---|---|---|
| :class:`HostSkips` | all others | the host | nothing |
| :class:`DeviceSkips` | torch's with ``fused=True`` | the flags' device | ``found_inf`` |
| :class:`OptimizerScales` | those of :mod:`apex.optimizers` | the same | a ``ScaledStep`` |

A device decides where the host runs ahead of it; else the host reads the flags, here too. A
``ScaledStep`` also has the factor of gradients that stay scaled until the step, and the 16-bit
weights that the kernel writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from apex.amp.gradients import captures, overflow
from apex.amp.gradients.parameters import Parameters
from apex.ops.lists.storage import ScaledStep

MARK = "_step_supports_amp_scaling"  # by which torch's optimizers say that they take a flag
SCALED = "_scaled_step"  # what those of apex.optimizers read


class HostSkips:
    """The step takes no flag: the host reads the flags, which waits for a device.

    Attributes:
        takes_flag: Whether a device can decide.
        scales: Whether the step multiplies gradients by a factor.
    """

    takes_flag = scales = False

    def __init__(self, optimizer: Any, params: Parameters) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._params = params

    def may_defer(self, flags: Sequence[torch.Tensor | None]) -> bool:
        """Whether to leave it to the device: its kernels can skip, and the host runs ahead."""
        if not all([flag is not None and overflow.runs_behind(flag.device) for flag in flags]):
            return False
        return self.scales or not captures.may_leave_uninitialized(self._optimizer())

    def given(self, noop: torch.Tensor | None, scaled: ScaledStep | None) -> dict[str, Any]:
        """The attributes that the optimizer has in its step.

        ``noop`` is the flag of a device that decides, ``scaled`` what a fused step reads.
        """
        return {}


class DeviceSkips(HostSkips):
    """The step takes the flag as torch's GradScaler sets it."""

    takes_flag = True

    def given(self, noop: torch.Tensor | None, scaled: ScaledStep | None) -> dict[str, Any]:
        """See :class:`HostSkips`."""
        return {} if noop is None else {"grad_scale": None, "found_inf": noop}


class OptimizerScales(DeviceSkips):
    """The step takes a :class:`ScaledStep`."""

    scales = True

    def given(self, noop: torch.Tensor | None, scaled: ScaledStep | None) -> dict[str, Any]:
        """See :class:`HostSkips`."""
        if scaled is not None:
            return {SCALED: replace(scaled, noop=noop)}
        copies = self._params.for_kernel() if self._params.weights else None
        if copies or noop is not None:
            return {SCALED: ScaledStep(1.0, noop, copies)}
        return {}


def skipping_of(optimizer: Any, params: Parameters) -> HostSkips:
    """Choose for one optimizer, before amp marks it."""
    if hasattr(optimizer, "step_scaled"):
        return OptimizerScales(optimizer, params)
    return (DeviceSkips if getattr(optimizer, MARK, False) else HostSkips)(optimizer, params)
