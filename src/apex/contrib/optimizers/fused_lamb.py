"""``FusedLAMB`` with the signature of 2019, before NVLAMB."""

from __future__ import annotations

from typing import Any

import torch

from apex.optimizers.fused_lamb import FusedLAMB as _FusedLAMB


class FusedLAMB(_FusedLAMB):
    """:class:`apex.optimizers.FusedLAMB` without ``use_nvlamb``; see there.

    The original clips with a norm that the host has read; here nothing waits for it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | torch.Tensor = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode,
            grad_averaging, set_grad_none, max_grad_norm,
        )  # fmt: skip
