"""Loss scaling: the scale, its growth counter and its rules.

The numbers that change (scale, clean steps since it last changed, steps ever counted) are one small
float32 tensor on the gradients' device, and nothing here waits for the device. The host learns them
when a step reads whether to skip, in the same transfer. They are always written in place, because a
CUDA graph goes on reading and writing the memory of its capture. What programs get is a copy: a
pass that began keeps the scale it began with.

* A pass with a non-finite gradient multiplies the scale by ``backoff_factor``, at once.
* A step that is taken counts one; ``growth_interval`` such steps multiply it by ``growth_factor``.

Checks are per element. Source: Micikevicius et al., "Mixed Precision Training",
arXiv:1710.03740, section 3.2; names of the factors as in ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import Any

import torch

from apex.amp.newest import _amp_state, master_params, maybe_print
from apex.ops import _runtime
from apex.ops.lists.unscale import unscale_

__all__ = [
    "LossScaler",
    "_amp_state",
    "axpby_check_overflow_python",
    "iter_params",
    "master_params",
    "maybe_print",
    "scale_check_overflow",
    "scale_check_overflow_python",
]

# Smallest normal float32: the reciprocal of the scale stays finite.
TINY = torch.finfo(torch.float32).tiny
HUGE = 2.0**127  # largest power of two in float32

SCALE, CLEAN, STEPS = range(3)  # indices into a scaler's numbers, see the top of this file


class LossScaler:
    """One loss scale, dynamic or static.

    Args:
        loss_scale: ``"dynamic"`` or a number, which never changes and skips no step.
        init_scale: Where a dynamic scale starts.
        scale_factor: Kept from the old signature: sets both factors below to it and its inverse.
        scale_window: Clean steps after which the scale grows.
        min_loss_scale: Floor; ``None`` means the smallest normal float32.
        max_loss_scale: Ceiling; ``None`` means none.
        growth_factor: What the scale grows by; ``None`` means ``scale_factor``.
        backoff_factor: What an overflow multiplies it by; ``None`` means ``1 / scale_factor``.

    Raises:
        ValueError: A factor, the window or a bound is out of range.
    """

    # Read by old programs. Nothing here is a fallback, so nothing is warned about.
    has_fused_kernel = True
    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False

    def __init__(
        self,
        loss_scale: str | float,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
        *,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
    ) -> None:
        growth_factor = scale_factor if growth_factor is None else growth_factor
        backoff_factor = 1.0 / scale_factor if backoff_factor is None else backoff_factor
        most = inf if max_loss_scale is None else max_loss_scale
        check("growth_factor", growth_factor, lambda x: x >= 1.0, "at least 1")
        check("backoff_factor", backoff_factor, lambda x: 0.0 < x <= 1.0, "in the range (0, 1]")
        check("growth_interval", scale_window, lambda x: x >= 1, "at least 1")
        check("growth_interval", scale_window, lambda x: type(x) is int, "an integer")
        check("init_scale", init_scale, lambda x: 0.0 < x <= HUGE, "above 0, at most 2**127")
        check("max_loss_scale", most, lambda x: x > 0.0, "above 0")
        if min_loss_scale is not None:
            allowed = f"at least 0, at most max_loss_scale ({max_loss_scale})"
            check("min_loss_scale", min_loss_scale, lambda x: 0.0 <= x <= most, allowed)
        if loss_scale != "dynamic":
            check("loss_scale", float(loss_scale), lambda x: 0.0 < x < inf, "finite, above 0")
        dynamic = loss_scale == "dynamic"
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._scale_seq_len = scale_window
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._found: torch.Tensor | None = None  # of the pass under way
        self._unchecked: torch.Tensor | None = None  # seen by delay_overflow_check passes
        start = self._bounded(init_scale) if dynamic else float(loss_scale)
        with torch.inference_mode(False):  # else passes outside of it could not write it
            self._state = torch.tensor([start, 0.0, 0.0], dtype=torch.float32, device="cpu")
        self._static = None if dynamic else start

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes; may be switched in mid-training."""
        return self._static is None

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        if value == self.dynamic:
            return
        scale = self._loss_scale
        self._static = None if value else scale
        self._write(SCALE, scale)

    def _bounded(self, scale: float) -> float:
        return max(min(scale, self._ceiling), self._floor)

    @property
    def _floor(self) -> float:
        return max(float(self._min_loss_scale or 0.0), TINY)

    @property
    def _ceiling(self) -> float:
        return HUGE if self._max_loss_scale is None else min(self._max_loss_scale, HUGE)

    # Plain attributes in Apex: any number may be written and takes effect at once.
    @property
    def _loss_scale(self) -> float:
        return self._static if self._static is not None else self._read()[SCALE]

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        if self._static is not None:
            self._static = float(value)
        self._write(SCALE, value)

    @property
    def _unskipped(self) -> int:
        return int(self._read()[CLEAN])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._write(CLEAN, value)

    # What others read. No Python call: several are read in each step.
    static: Any = property(attrgetter("_static"), doc="The scale that never changes, or ``None``.")
    numbers: Any = property(
        attrgetter("_state"), doc="At ``SCALE``, ``CLEAN`` and ``STEPS`` what changes; no copy."
    )

    @property
    def _waits_for_nothing(self) -> bool:
        """Whether reading the state is free; then the host handles the usual case."""
        return self._state.device.type == "cpu"

    def _read(self) -> list[float]:
        values: list[float] = self._state.tolist()
        return values

    def _write(self, index: int, value: float) -> None:
        self._state[index] = float(value)

    def loss_scale(self) -> float:
        """The scale as a Python float; waits for the device when the scale is dynamic."""
        return self._loss_scale

    def scale_on(self, device: torch.device) -> torch.Tensor | float:
        """The scale to multiply a loss on ``device`` by: a 0-dim tensor there, or a float.

        Raises:
            RuntimeError: A CUDA graph is being captured, and the numbers are still on the CPU.
        """
        if self._static is not None:
            return self._static
        if self._state.device != device and self._state.device.type == "cpu":
            self._move_to(device)
        return self._state[SCALE].to(device, non_blocking=device.type != "cpu", copy=True)

    def _move_to(self, device: torch.device) -> None:
        """Move the numbers to the first GPU, where they stay: graphs may use them there."""
        if _runtime.capturing():
            raise RuntimeError(
                "amp: a first scale_loss block was captured in a CUDA graph. The loss scale is "
                "still on the CPU, so each replay would start from its value now. Take some "
                "training steps before capturing (docs/optimizers.md, CUDA graphs)."
            )
        with torch.inference_mode(False):
            self._state = self._state.to(device, non_blocking=True)

    def take(self, numbers: torch.Tensor) -> None:
        """Take the numbers of another rank: float32, 3 elements."""
        self._state.copy_(numbers)
        if self._static is not None:
            self._static = float(numbers[SCALE])

    def finish_pass(
        self, found: torch.Tensor, *, check: bool = True, before: torch.Tensor | None = None
    ) -> None:
        """Take the flag of a pass and back off if it is set; nothing waits.

        With ``check=False`` the scale stays, and the next check counts this flag too. ``before`` is
        the flag with which the same pass was finished before.
        """
        if before is not None:
            found = found * (1.0 - before.to(found))
        self._found = found
        if not check:
            seen = self._unchecked
            self._unchecked = found if seen is None else torch.maximum(seen, found)
            return
        if self._unchecked is not None:
            found, self._unchecked = torch.maximum(found, self._unchecked), None
        if self._waits_for_nothing and not found.item():
            return  # the usual case: nothing changes
        scale, clean, steps = self._state.unbind()
        lower = (scale * self._backoff_factor).clamp_min(self._floor)
        backed_off = torch.stack((lower, torch.zeros_like(clean), steps))
        found = found.to(self._state.device, non_blocking=True)
        self._state.copy_(torch.where(found != 0, backed_off, self._state))

    @property
    def steps(self) -> torch.Tensor:
        """How many steps were counted: 0-dim; later steps do not change the tensor."""
        return self._state[STEPS].clone()

    def count_step(
        self, taken: torch.Tensor | None = None, *, since: torch.Tensor | None = None
    ) -> None:
        """Count a step, unless another was counted after ``since``; grow when there were enough.

        ``taken`` says whether it was, where only the device knows: 0-dim, bool. ``since`` is
        :attr:`steps` at the pass that the step is for.
        """
        if self._static is not None:
            return
        if self._waits_for_nothing and taken is None:
            values = self._read()
            if since is not None and float(since) != values[STEPS]:
                return
            if values[CLEAN] + 1 < self._scale_seq_len:
                self._state[CLEAN:] += 1
                return
        scale, clean, steps = self._state.unbind()
        counts = torch.ones_like(steps) if taken is None else taken.to(steps)
        if since is not None:
            counts = counts * (since.to(steps.device, non_blocking=True) == steps)
        clean = clean + counts
        full = (clean >= self._scale_seq_len) & (counts > 0)
        grown = (scale * self._growth_factor).clamp(self._floor, self._ceiling)
        state = torch.where(full, grown, scale), torch.where(full, 0.0, clean), steps + counts
        self._state.copy_(torch.stack(state))

    # -- what only old programs call -----------------------------------------------------------

    @property
    def _has_overflow(self) -> bool:
        return self._found is not None and bool(self._found.item())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._found = self._state.new_tensor(float(value))

    @property
    def _overflow_buf(self) -> torch.Tensor:
        """The flag as a one-element int tensor."""
        found = self._state.new_zeros(()) if self._found is None else self._found
        return found.reshape(1).to(torch.int32)

    @_overflow_buf.setter
    def _overflow_buf(self, value: torch.Tensor) -> None:
        self._found = value.detach().reshape(-1)[0].float().to(self._state.device)

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
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        unused_scale: Any,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``model_grads / scale`` into ``master_grads``, which may be the same tensors."""
        if models_are_masters and scale_override is None and self._static == 1.0:
            return
        scale = self._loss_scale if scale_override is None else scale_override
        self.unscale_with_stashed(model_grads, None, master_grads, (scale, 1.0, 1.0))

    @torch.no_grad()
    def unscale_with_stashed(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor] | None,
        master_grads: Sequence[torch.Tensor],
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
        scale, stash_scale, out_scale = scale_override or (self._loss_scale, 1.0, 1.0)
        for index, (grad, out) in enumerate(zip(model_grads, master_grads, strict=True)):
            wide = grad.to(torch.promote_types(out.dtype, torch.float32))
            if self.dynamic:
                flag = (~torch.isfinite(wide)).any().float().to(self._state.device)
                self._found = flag if self._found is None else torch.maximum(self._found, flag)
            result = wide * (out_scale / scale)
            if stashed_master_grads is not None:
                result = result + stashed_master_grads[index] * (out_scale / stash_scale)
            out.copy_(result)

    def unscale_python(
        self,
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        """:meth:`unscale` with the scale given."""
        self.unscale_with_stashed(model_grads, None, master_grads, (scale, 1.0, 1.0))

    def unscale_with_stashed_python(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
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


def check(name: str, value: Any, is_right: Callable[[Any], bool], allowed: str) -> None:
    """Raise ``ValueError`` unless ``value`` is right."""
    try:
        right = is_right(value)
    except TypeError:  # no number
        right = False
    if not right:
        raise ValueError(f"loss scaling: {name} was {value!r}; it must be {allowed}.")


def iter_params(param_groups: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield every tensor of ``param_groups``."""
    for group in param_groups:
        yield from group["params"]


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
