"""``DistributedFusedLAMB``: LAMB with gradients and state sharded over ranks (ZeRO stage 2).

The norm of a whole parameter is computed from the fragments on all ranks. A single all-reduce adds
up the fragments of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex.contrib.optimizers._sharded import known
from apex.contrib.optimizers._sharded_gradients import Sharding
from apex.contrib.optimizers._sharded_state import SavedShards
from apex.ops.lists.stages import finish_on_shards
from apex.ops.lists.tensor_lists import Scalar
from apex.ops.updates.lamb import SQUARES, Lamb, lamb_stages

__all__ = ["DistributedFusedLAMB"]

_TUNES = {  # arguments that tuned the original's streams and chunks, and their types
    "dwu_group_size": int, "dwu_num_blocks": int, "dwu_num_chunks": int, "dwu_num_rs_pg": int,
    "dwu_num_ar_pg": int, "dwu_num_ag_pg": int, "nccl_allgather_channels": int, "fused_norm": bool,
    "verbose": bool, "full_ar": bool, "fuse_scale": bool,
}  # fmt: skip


class DistributedFusedLAMB(SavedShards):
    """LAMB whose gradients and state are sharded over ranks.

    It works like :class:`~apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam`, and
    keeps float32 masters. The results equal those of ``FusedLAMB`` in one process with the mean
    gradients and such masters. The original's order of calls is ``set_global_scale``, backward,
    ``complete_reductions``, ``step``. You can leave out the first and the third.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups, on one device. Rank 0 sends their values at construction.
        weight_decay: Weight decay. Where it is 0, steps are not scaled by the ratio.
        adam_w_mode: Decoupled weight decay instead of an L2 penalty.
        use_nvlamb: Whether to scale steps without weight decay too.
        step_supports_amp_scaling: Must be ``True``: with a ``GradScaler``, ``step`` unscales, and
            skips on an overflow.
        overlap_reductions: Send gradients during the backward pass.
        clip_after_ar: Must be ``True``: clipping uses the norm of the reduced gradients.
        e5m2_allgather: Not supported.
        skip_allgather: Not supported.
        set_param_views_to_flat_buffer: Make parameters views of flat buffers.
        param_order: Has no effect, like ``dwu_*``, ``fused_norm``, ``verbose``, ``full_ar``,
            ``fuse_scale`` and ``nccl_allgather_channels``. They tuned streams and chunks.

    Raises:
        RuntimeError: There is no process group, or an argument is not supported.
        TypeError: An argument that has no effect has the wrong type.
        ValueError: A number is out of range.
    """

    _numbers = Lamb
    _algorithm = staticmethod(lamb_stages)

    def __init__(  # noqa: PLR0913 - the original's signature
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | torch.Tensor = 0.0,
        max_grad_norm: float = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        step_supports_amp_scaling: bool = True,
        overlap_reductions: bool = True,
        dwu_group_size: int = 0,
        dwu_num_blocks: int = 4,
        dwu_num_chunks: int = 4,
        dwu_num_rs_pg: int = 1,
        dwu_num_ar_pg: int = 4,
        dwu_num_ag_pg: int = 0,
        fused_norm: bool = False,
        e5m2_allgather: bool = False,
        verbose: bool = False,
        clip_after_ar: bool = True,
        full_ar: bool = False,
        set_param_views_to_flat_buffer: bool = False,
        skip_allgather: bool = False,
        fuse_scale: bool = False,
        param_order: Any = None,
        nccl_allgather_channels: int = 0,
    ) -> None:
        given = locals()
        for name, kind in _TUNES.items():
            if type(given[name]) is not kind:
                raise TypeError(
                    f"DistributedFusedLAMB: {name} was {given[name]!r}; it must be of type "
                    f"{kind.__name__}. apex ignores its value."
                )
        refused = {
            "step_supports_amp_scaling=False": (not step_supports_amp_scaling, "gradients are not "
                "in param.grad, so a GradScaler cannot unscale them"),
            "clip_after_ar=False": (not clip_after_ar, "use clip_after_ar=True"),
            "e5m2_allgather=True": (e5m2_allgather, "parameters would be rounded to two bits"),
            "skip_allgather=True": (skip_allgather, "parameters of ranks would differ"),
        }  # fmt: skip
        for name, (is_refused, reason) in refused.items():
            if is_refused:
                raise RuntimeError(f"DistributedFusedLAMB does not support {name}: {reason}.")
        self._check_numbers({"max_grad_norm": max_grad_norm})
        self.adam_w_mode, self.use_nvlamb = 1 if adam_w_mode else 0, use_nvlamb
        self._global_scale: Any = None
        self._norm: torch.Tensor | None = None
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        options = Sharding(
            overlap_grad_sync=overlap_reductions,
            contiguous_param_buffer=set_param_views_to_flat_buffer,
        )
        super().__init__(params, defaults, options)

    # -- norms over ranks --------------------------------------------------------------------------

    def _finish(self, updates: Any, sharded: Sequence[torch.Tensor]) -> None:
        here = {number: piece.tensor for number, (_, piece) in self._fragments.items()}
        every = [here.get(id(p), p) for p in self._params() if id(p) in self._places]

        def total(values: torch.Tensor, _: Any, *, largest: bool) -> torch.Tensor:
            values = values.contiguous()
            torch.distributed.all_reduce(values, group=self._own and self._own.shards)
            return values

        finish_on_shards(updates, every, {SQUARES}, total)

    def _clipped(self, factor: Scalar) -> Scalar:
        if not self._is_unscaled:
            factor = factor * known(self._inverse())
        largest = float(self.defaults["max_grad_norm"])
        if not largest:
            return factor
        norm = self._measure()[0].sqrt() * factor
        clip = torch.where(norm > largest, largest / norm, 1.0)
        return factor * known(clip)

    # -- the original's calls ----------------------------------------------------------------------

    def _lazy_init_stage1(self) -> None:
        """Make buckets now instead of in the first backward pass; all ranks call it."""
        self._prepare_buckets()

    def _lazy_init_stage2(self) -> None:
        """Kept from the original: there is nothing left to be made after the first stage."""
        self._prepare_buckets()

    def set_global_scale(self, global_scale: float | torch.Tensor) -> None:
        """Set the loss scale, by which ``step`` divides the gradients.

        A ``grad_scaler`` that you pass to ``step`` then only learns whether gradients are finite.
        """
        self._check_numbers({"eps": global_scale})
        self._global_scale = global_scale

    @property
    def global_scale(self) -> Any:
        """The scale that :meth:`set_global_scale` set; 1.0 by default."""
        return 1.0 if self._global_scale is None else self._global_scale

    def set_is_accumulation_step(self, is_accumulation_step: bool) -> None:
        """Set whether backward passes accumulate gradients on this rank, as in ``no_sync``."""
        self._syncs, self._greedy = not is_accumulation_step, False

    def set_last_step(self, last_step: bool) -> None:
        """Do nothing: parameters are complete after every step. Kept from the original."""

    def complete_reductions(self) -> None:
        """Reduce the remaining gradients, and compute :attr:`L2_grad_norm`.

        All ranks must call it.
        """
        self.grad_sync()
        norm = self._measure()[0].sqrt()
        self._norm = norm * self._factor if self._is_unscaled else norm / self.global_scale

    @property
    def L2_grad_norm(self) -> torch.Tensor | None:
        """Norm of all unscaled gradients at the last :meth:`complete_reductions`, 0-dim."""
        return self._norm

    def _inverse_scale(self, inverse: Any) -> Any:
        return inverse if self._global_scale is None else self._inverse()

    def _inverse(self) -> Scalar:
        scale = self.global_scale
        return scale.float().reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None
    ) -> Any:
        """Take one step, as ``DistributedFusedAdam`` does. All ranks must call it."""
        return self._stepped(closure, {"grad_scaler": grad_scaler})
