"""``FusedMixedPrecisionLamb``: LAMB with float32 masters, driven by torch's ``GradScaler``."""

from __future__ import annotations

from typing import Any

import torch

from apex.multi_tensor_apply import list_functions
from apex.optimizers.fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """:class:`FusedLAMB` with float32 masters, and with ``lr`` and ``step`` on the device.

    The first step makes float32 masters of parameters in ``reduced_precision_dtype``, so you can
    still broadcast weights before it. Masters are part of the state. The moments of a parameter
    with a master are float32. If ``GradScaler`` finds an overflow, the device skips the step.
    Clipping uses the unscaled gradients of all groups, whatever their dtypes.

    See :class:`FusedLAMB` for the other arguments.

    Args:
        params: Parameters or groups. A group may have its own ``lr`` and ``step``.
        step: Steps taken so far, for bias correction.
        reduced_precision_dtype: dtype of the parameters that get masters; ``None`` for no masters.

    Example:
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> optimizer = FusedMixedPrecisionLamb(
        ...     model.parameters(), reduced_precision_dtype=torch.bfloat16
        ... )
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    _keeps_saved_dtypes = True
    reduced_precision_dtype: torch.dtype | None = None
    _first_step: int | torch.Tensor = 0
    _on_device = _step_supports_amp_scaling = True
    # Subclasses with a step of their own call these, as in the original.
    multi_tensor_l2norm = staticmethod(list_functions.multi_tensor_l2norm_mp)
    multi_tensor_lamb = staticmethod(list_functions.multi_tensor_lamb_mp)

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        step: int | torch.Tensor = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | torch.Tensor = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        state: str = "plain",
    ) -> None:
        self.reduced_precision_dtype = reduced_precision_dtype
        self._first_step = step
        if reduced_precision_dtype is not None:
            self._mastered = frozenset({reduced_precision_dtype}) - {torch.float32}
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode,
            grad_averaging, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb, state=state,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` and ``step`` move to the device of its parameters."""
        if isinstance(param_group, dict):
            param_group = {"step": self._first_step, **param_group}
        super().add_param_group(param_group)

    def _restore(self, loaded: dict[str, Any]) -> None:
        super()._restore(loaded)
        for group in self.param_groups:  # one without parameters lost its step
            group.setdefault("step", self._first_step)

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """The groups, with the master instead of each parameter that already has one."""
        self._follow_written()
        return [
            {**group, "params": [self._so_far(param) for param in group["params"]]}
            for group in self.param_groups
        ]

    def _so_far(self, param: torch.Tensor) -> torch.Tensor:
        master: torch.Tensor = self.state.get(param, {}).get("master_param", param)
        return master

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        return torch.float32 if param.dtype in self._mastered else super()._slot_dtype(slot, param)
