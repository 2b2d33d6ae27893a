"""``fused_step``: gradients that stay scaled until the step.

The contract: with ``initialize(fused_step=True)``, or ``FusedSGD(materialize_master_grads=False)``,
``p.grad`` is scaled between the block and the step. Clip with ``amp.clip_grad_norm_``.
``amp.master_params``, step pre-hooks and closures see unscaled, clipped gradients. Collectives
after the block and writes through ``.data`` are not allowed: amp cannot notice them. Other changes
are refused, except setting ``.grad`` to ``None``. The step frees the gradients; the smallest one is
zeros until the next block. All this is the same on every device.

Gradients are read once for finiteness and norm, and once by the update, which multiplies them by
``clip / scale`` in registers and writes the 16-bit weights too. Bytes for each parameter in a step
of Adam, clipped or not: 32 with float32 gradients, 30 with 16-bit ones and float32 masters. The
default moves 36, and 48 with clipping; so does torch's own scaler.

It holds for one optimizer of :mod:`apex.optimizers` in a block, with dense gradients and none from
before. Else, and where a second pass would add up in 16 bits, the block's end unscales.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.gradients.parameters import Parameters, any_grad, grads_of
from apex.ops.lists.multi_tensor import FUSABLE
from apex.ops.lists.storage import ScaledStep
from apex.ops.lists.tensor_norms import square_sums
from apex.ops.lists.unscale import inverse

Factor = torch.Tensor | float


class FusedGradients:
    """The scaled gradients of one optimizer, from the end of a block to the step.

    ``found_inf``: whether one was not finite, once they were measured: float32, 0-dim.
    """

    def __init__(self, params: Parameters) -> None:
        self._params = params
        self._scale: Factor = 1.0
        self._seen: list[Any] = []
        self._clip: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self._freed: list[torch.Tensor] = []  # by the last step
        # What shows how the program clears gradients after it, and its version.
        self._shows: tuple[torch.Tensor | None, int] = None, 0

    def try_to_keep(self, scale: Factor) -> bool:
        """Leave the gradients scaled, if they are such that a fused step can read them so."""
        if any_grad(self._params.tensors):
            return False
        grads = self._grads().values()
        kinds = {(type(grad), grad.layout) for grad in grads}
        is_fusable = FUSABLE.issuperset([grad.dtype for grad in grads])
        if kinds != {(torch.Tensor, torch.strided)} or not is_fusable:
            return False
        self.keep(scale)
        return True

    def keep(self, scale: Factor) -> None:
        """Leave the gradients scaled by ``scale``."""
        self._scale = scale
        self._clip = self._norm = self.found_inf = None
        self._seen = [_traces(target.grad) for target in self._params.targets]

    def can_continue(self) -> bool:
        """Whether another pass may accumulate in the scaled gradients."""
        if self._params.weights or self._clip is not None:
            return False
        self.check()
        return True

    def check(self) -> None:
        """Raise if somebody has changed the gradients since, in a way that leaves a trace."""
        now = [target.grad for target in self._params.targets]
        same = len(now) == len(self._seen) and all(
            grad is None or (seen is not None and grad is seen[0] and _traces(grad)[1:] == seen[1:])
            for grad, seen in zip(now, self._seen, strict=True)
        )
        if not same:
            raise RuntimeError(
                "amp: gradients changed while they were scaled. With fused_step=True they stay "
                "scaled until the step. Call every backward in scale_loss. Clip with "
                "amp.clip_grad_norm_. To change gradients in another way, first call "
                "list(amp.master_params(optimizer)), which unscales them. The gradients of this "
                "step are lost; call optimizer.zero_grad()."
            )

    def _grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """What backward left, by what the optimizer steps."""
        both = zip(self._params.stepped, self._params.targets, strict=True)
        return {tensor: target.grad for tensor, target in both if target.grad is not None}

    def _measure(self) -> None:
        """Measure the unscaled norm and look for inf and nan; nothing is written."""
        grads = list(self._grads().values())
        first = grads[0] if grads else self._scale
        device = first.device if isinstance(first, torch.Tensor) else "cpu"
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        sums = square_sums(grads, factor=inverse(self._scale), flag=self.found_inf)
        self._norm = sums.sum().sqrt()

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> torch.Tensor | None:
        """Leave it to the step to clip to ``max_norm``.

        Returns the norm before clipping, 0-dim; ``None`` where gradients were clipped already and
        have to be unscaled first.
        """
        if self._clip is not None:
            return None
        self.check()
        if self._norm is None:
            self._measure()
        norm = self._norm
        assert norm is not None
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"amp.clip_grad_norm_: the total norm of the gradients is {norm.item()}. "
                "Pass error_if_nonfinite=False to let amp skip the step."
            )
        self._clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def apply_clip(self) -> None:
        """Multiply unscaled gradients by what :meth:`clip` left to the step."""
        clip, self._clip = self._clip, None
        if clip is not None:
            for grad in grads_of(self._params.stepped):
                grad.mul_(clip.to(grad.device, non_blocking=True))

    def options_of_step(self, *, compare: bool) -> tuple[ScaledStep, torch.Tensor | None]:
        """Hand the gradients to the step as they are; ``compare`` all weights with their masters.

        Returns what the step is given, and whether a gradient was not finite: 0-dim; ``None`` for a
        static scale.
        """
        params = self._params
        params.compare_groups()
        self.check()
        is_dynamic = isinstance(self._scale, torch.Tensor)
        if is_dynamic and self.found_inf is None:
            self._measure()
        params.reconcile(compare=compare)
        params.mark_taken()
        rows = zip(params.weights, params.tensors, strict=True)
        copies = {tensor: weight for weight, tensor in rows if weight.grad is not None}
        factor = inverse(self._scale) if self._clip is None else self._clip * inverse(self._scale)
        options = ScaledStep(factor, grads=self._grads(), copies=copies)
        return options, self.found_inf if is_dynamic else None

    def free(self) -> None:
        """Free the gradients of what the optimizer steps itself: they are scaled.

        The smallest one stays, as zeros: it shows whether the program sets gradients to zeros then,
        by ``model.zero_grad(set_to_none=False)``, or to ``None``.
        """
        self._seen = []
        self._freed = [weight for weight in self._params.plain if weight.grad is not None]
        smallest = min(self._freed, key=torch.numel, default=None)
        for weight in self._freed:
            weight.grad = None
        if smallest is not None:
            smallest.grad = torch.zeros_like(smallest)
            self._shows = smallest.grad, smallest.grad._version

    def give_zeros(self) -> None:
        """Give zeros to what a step has freed, if the program has set gradients to zeros since."""
        freed, self._freed = self._freed, []
        for smallest in [weight for weight in freed if weight.grad is self._shows[0]]:
            if smallest.grad._version == self._shows[1]:  # type: ignore[union-attr]
                smallest.grad = None
            else:
                for weight in freed:
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        self._shows = None, 0


def _traces(grad: torch.Tensor | None) -> Any:
    """The gradient, with what a change in place leaves a trace in."""
    return None if grad is None else (grad, grad.data_ptr(), grad._version)
