"""`GradScaler`: torch's, with one overflow flag for all ranks of a group.

Where a model is spread over ranks, each of them sees the gradients of its own part. If one found an
inf and skipped its step alone, the parts would drift apart, and so would the loss scales. So the
flags are reduced with MAX wherever torch sets them: in ``unscale_`` or in ``step``, and ``update``
reads the same. One collective of one number for each optimizer.
"""

from typing import Any

import torch

from apex.ops import _runtime
from apex.transformer.utils import check_member


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that skips a step on all ranks if one of them found an inf or nan.

    Without ``torch.distributed`` it is torch's. Every rank of the group calls ``unscale_`` or
    ``step`` for as many optimizers, in the same order; a rank whose optimizer got no gradient
    takes part too.

    An optimizer whose ``_custom_amp_unscale_grads`` is true unscales its gradients itself:
    ``optimizer.unscale_grads(inv_scale, found_inf, allow_fp16)`` is called and returns the flags, a
    dict from device to tensor.

    Arguments that are not listed are torch's.

    Args:
        device: Type of the device that losses are on; by default this machine's accelerator, or
            ``"cpu"`` where there is none.
        process_group: The ranks that skip together; by default all. In Megatron's programs it is
            the model-parallel group.

    Raises:
        ArgumentError: This process is not in ``process_group``.

    Example:
        >>> scaler = GradScaler(init_scale=8.0)
        >>> scaler.scale(torch.tensor(2.0))
        tensor(16.)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | None = None,
        process_group: Any = None,
    ) -> None:
        if device is None:
            found = torch.accelerator.current_accelerator() if _runtime.has_accelerator() else None
            device = found.type if found else "cpu"
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        if process_group is not None:
            check_member("GradScaler", process_group)
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        args = (inv_scale, found_inf, allow_fp16)
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            flags: dict[torch.device, torch.Tensor] = optimizer.unscale_grads(*args)  # type: ignore[attr-defined]
        else:
            flags = super()._unscale_grads_(optimizer, *args)
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return flags
        shared = torch.zeros_like(found_inf)  # also where no parameter has a gradient
        for flag in flags.values():
            shared = torch.maximum(shared, flag.to(shared.device, shared.dtype))
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.process_group)
        return {shared.device: shared}
