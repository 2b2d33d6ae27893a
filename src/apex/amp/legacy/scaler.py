"""``LossScaler``: the loss scale with the names and methods that it had from 2019 on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apex.amp.legacy.amp_state import _amp_state, master_params, maybe_print
from apex.amp.newest import Newest
from apex.amp.scale import CLEAN, Scale, iter_params
from apex.ops.lists.unscale import unscale_

_Grads = Sequence[torch.Tensor]


class LossScaler(Scale):
    """A :class:`~apex.amp.scale.Scale`, which has the arguments, with the names of 2019."""

    # Nothing here is a fallback, so nothing is warned about.
    has_fused_kernel = True
    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False

    # Plain attributes in Apex: any number may be written and takes effect at once.
    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.set(value)

    @property
    def _unskipped(self) -> int:
        return int(self.numbers[CLEAN])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.numbers[CLEAN] = float(value)

    @property
    def _has_overflow(self) -> bool:
        return self._found is not None and bool(self._found.item())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._found = self.numbers.new_tensor(float(value))

    @property
    def _overflow_buf(self) -> torch.Tensor:
        """The flag as a one-element int tensor."""
        found = self.numbers.new_zeros(()) if self._found is None else self._found
        return found.reshape(1).to(torch.int32)

    @_overflow_buf.setter
    def _overflow_buf(self, value: torch.Tensor) -> None:
        self._found = value.detach().reshape(-1)[0].float().to(self.numbers.device)

    def clear_overflow_state(self) -> None:
        """Forget the evidence of the last pass."""
        self._found = None

    def update_scale(self) -> bool:
        """End a pass by hand: back off or count a step, and say whether to skip; this waits."""
        overflow = self.dynamic and self._has_overflow
        if overflow and self._found is not None:
            self.finish_pass(self._found)
        else:
            self.count_step()
        return overflow

    def unscale(
        self,
        model_grads: _Grads,
        master_grads: _Grads,
        unused_scale: Any,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``model_grads / scale`` into ``master_grads``, which may be the same tensors."""
        if models_are_masters and scale_override is None and self.static == 1.0:
            return
        scale = self.loss_scale() if scale_override is None else scale_override
        self.unscale_python(model_grads, master_grads, scale)

    @torch.no_grad()
    def unscale_with_stashed(
        self,
        model_grads: _Grads,
        stashed_master_grads: _Grads | None,
        master_grads: _Grads,
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write ``model_grads * (out / scale) + stashed * (out / stash_scale)``.

        Args:
            model_grads: Scaled gradients; only these are checked for inf and nan.
            stashed_master_grads: Gradients accumulated before, or ``None`` for zero.
            master_grads: Where to write, same shapes, any floating dtype.
            scale_override: ``(scale, stash_scale, out_scale)``; the default is the current scale
                and 1, 1.
        """
        scale, stash_scale, out_scale = scale_override or (self.loss_scale(), 1.0, 1.0)
        for index, (grad, out) in enumerate(zip(model_grads, master_grads, strict=True)):
            wide = grad.to(torch.promote_types(out.dtype, torch.float32))
            if self.dynamic:
                flag = (~torch.isfinite(wide)).any().float().to(self.numbers.device)
                self._found = flag if self._found is None else torch.maximum(self._found, flag)
            result = wide * (out_scale / scale)
            if stashed_master_grads is not None:
                result = result + stashed_master_grads[index] * (out_scale / stash_scale)
            out.copy_(result)

    def unscale_python(self, model_grads: _Grads, master_grads: _Grads, scale: float) -> None:
        """:meth:`unscale` with the scale given."""
        self.unscale_with_stashed(model_grads, None, master_grads, (scale, 1.0, 1.0))

    def unscale_with_stashed_python(
        self,
        model_grads: _Grads,
        stashed_master_grads: _Grads,
        master_grads: _Grads,
        a: float,
        b: float,
    ) -> None:
        """Write ``a * model_grads + b * stashed_master_grads`` into ``master_grads``."""
        scales = (1.0 / a, 1.0 / b, 1.0)
        self.unscale_with_stashed(model_grads, stashed_master_grads, master_grads, scales)

    def unscale_and_update(self, param_groups: Iterable[dict[str, Any]], scale: float) -> bool:
        """Unscale the gradients of ``param_groups`` in place, update, say whether to skip."""
        grads = [param.grad for param in iter_params(param_groups) if param.grad is not None]
        self.clear_overflow_state()
        self.unscale_python(grads, grads, scale)
        return self.update_scale()


Newest.scaler_type = LossScaler  # initialize makes these: programs call their methods


@torch.no_grad()
def scale_check_overflow(d_grads: torch.Tensor, scale: float) -> bool:
    """Multiply ``d_grads`` by ``scale`` in place; return whether an element is inf or nan."""
    factor = torch.tensor(1.0 / scale, dtype=torch.float32, device="cpu")
    return bool(unscale_([d_grads], factor))


@torch.no_grad()
def scale_check_overflow_python(
    model_grad: torch.Tensor, master_grad: torch.Tensor, scale: float, check_overflow: bool = False
) -> bool:
    """Write ``model_grad * scale``; with ``check_overflow`` return True on inf or nan."""
    zeros = master_grad.new_zeros((), dtype=torch.float32)
    return axpby_check_overflow_python(model_grad, zeros, master_grad, scale, 0.0, check_overflow)


@torch.no_grad()
def axpby_check_overflow_python(
    model_grad: torch.Tensor,
    stashed_grad: torch.Tensor,
    master_grad: torch.Tensor,
    a: float,
    b: float,
    check_overflow: bool = False,
) -> bool:
    """Write ``a * model_grad + b * stashed_grad``; checks ``model_grad`` as above."""
    if check_overflow and not bool(torch.isfinite(model_grad).all()):
        return True
    wide = torch.promote_types(master_grad.dtype, torch.float32)
    master_grad.copy_(a * model_grad.to(wide) + b * stashed_grad.to(wide))
    return False
