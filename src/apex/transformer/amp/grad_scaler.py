"""`GradScaler` of Megatron's programs: :class:`apex.amp.GradScaler` for a model-parallel group."""

from typing import Any

import torch

from apex import amp
from apex.ops import _runtime
from apex.transformer import parallel_state
from apex.transformer.utils import check_member


class GradScaler(amp.GradScaler):
    """:class:`apex.amp.GradScaler` that by default skips a step on all ranks of a model.

    These ranks are the model-parallel group of :mod:`apex.transformer.parallel_state`, as in Apex.
    If that is not initialised, they are all ranks of the program. Without ``torch.distributed`` the
    process decides alone.

    Every rank of the group must call ``unscale_`` or ``step`` for as many optimizers, in the same
    order. This includes ranks whose optimizer has no gradients.

    The other arguments are those of torch's ``GradScaler``.

    Args:
        device: Device type of the losses; by default this machine's accelerator, or ``"cpu"``.
        process_group: The ranks that skip steps together.

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
        if process_group is not None:
            check_member("GradScaler", process_group)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled,
            process_group=process_group,
        )  # fmt: skip
        self._finds_group = process_group is None

    def _groups_of(self, optimizer: Any) -> list[Any]:
        if not self._finds_group:
            return super()._groups_of(optimizer)
        if parallel_state.model_parallel_is_initialized():
            return [parallel_state.get_model_parallel_group()]
        distributed = torch.distributed
        ready = distributed.is_available() and distributed.is_initialized()
        return [distributed.group.WORLD] if ready else []
