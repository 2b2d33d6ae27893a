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

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

import torch

from apex.ops import _runtime

# Smallest normal float32: the reciprocal of the scale stays finite.
TINY = torch.finfo(torch.float32).tiny
HUGE = 2.0**127  # largest power of two in float32

SCALE, CLEAN, STEPS = range(3)  # indices into a scaler's numbers, see the top of this file


class Scale:
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

    Attributes:
        numbers: Scale, clean steps and steps: float32, 3 elements, written in place.
        static: The scale of a static one; ``None`` while the scale is dynamic.
    """

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
        check("growth_factor", growth_factor, lambda x: x >= 1.0, "at least 1")
        check("backoff_factor", backoff_factor, lambda x: 0.0 < x <= 1.0, "in the range (0, 1]")
        check("growth_interval", scale_window, lambda x: x >= 1, "at least 1")
        check("growth_interval", scale_window, lambda x: type(x) is int, "an integer")
        check("init_scale", init_scale, lambda x: 0.0 < x <= HUGE, "above 0, at most 2**127")
        check_bounds(min_loss_scale, max_loss_scale)
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
            self.numbers = torch.tensor([start, 0.0, 0.0], dtype=torch.float32, device="cpu")
        self.static = None if dynamic else start

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes; may be switched in mid-training."""
        return self.static is None

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        if value == self.dynamic:
            return
        scale = self.loss_scale()
        self.static = None if value else scale
        self.numbers[SCALE] = float(scale)

    def _bounded(self, scale: float) -> float:
        return bounded(scale, self._min_loss_scale, self._max_loss_scale)

    @property
    def _waits_for_nothing(self) -> bool:
        """Whether reading the state is free; then the host handles the usual case."""
        return self.numbers.device.type == "cpu"

    def loss_scale(self) -> float:
        """The scale as a Python float; waits for the device when the scale is dynamic."""
        return self.static if self.static is not None else self.numbers[SCALE].item()

    def set(self, scale: float) -> None:
        """Go on from another scale, at once."""
        if self.static is not None:
            self.static = float(scale)
        self.numbers[SCALE] = float(scale)

    def scale_on(self, device: torch.device) -> torch.Tensor | float:
        """The scale to multiply a loss on ``device`` by: a 0-dim tensor there, or a float.

        Raises:
            RuntimeError: A CUDA graph is being captured, and the numbers are still on the CPU.
        """
        if self.static is not None:
            return self.static
        if self.numbers.device != device and self.numbers.device.type == "cpu":
            self._move_to(device)
        return self.numbers[SCALE].to(device, non_blocking=device.type != "cpu", copy=True)

    def _move_to(self, device: torch.device) -> None:
        """Move the numbers to the first GPU, where they stay: graphs may use them there."""
        if _runtime.capturing():
            raise RuntimeError(
                "amp: a first scale_loss block was captured in a CUDA graph. The loss scale is "
                "still on the CPU, so each replay would start from its current value. Make some "
                "training steps before capturing (docs/optimizers.md, CUDA graphs)."
            )
        with torch.inference_mode(False):
            self.numbers = self.numbers.to(device, non_blocking=True)

    def entry(self) -> dict[str, float | int]:
        """What ``amp.state_dict`` saves of it."""
        return {"loss_scale": self.loss_scale(), "unskipped": int(self.numbers[CLEAN])}

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Go on from what was saved, within the bounds; a static scale stays."""
        if self.dynamic:
            self.set(self._bounded(loss_scale))
            self.numbers[CLEAN] = float(unskipped)

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = {"_state": "numbers", "_static": "static"}  # their names in pickles of 1.0.0
        vars(self).update({known.get(name, name): value for name, value in state.items()})

    def take(self, numbers: torch.Tensor) -> None:
        """Take the numbers of another rank: float32, 3 elements."""
        self.numbers.copy_(numbers)
        if self.static is not None:
            self.static = float(numbers[SCALE])

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
        scale, clean, steps = self.numbers.unbind()
        lower = (scale * self._backoff_factor).clamp_min(self._bounded(0.0))
        backed_off = torch.stack((lower, torch.zeros_like(clean), steps))
        found = found.to(self.numbers.device, non_blocking=True)
        self.numbers.copy_(torch.where(found != 0, backed_off, self.numbers))

    @property
    def steps(self) -> torch.Tensor:
        """How many steps were counted: 0-dim; later steps do not change the tensor."""
        return self.numbers[STEPS].clone()

    def count_step(
        self, taken: torch.Tensor | None = None, *, since: torch.Tensor | None = None
    ) -> None:
        """Count a step, unless another was counted after ``since``; grow when there were enough.

        ``taken`` says whether it was, where only the device knows: 0-dim, bool. ``since`` is
        :attr:`steps` at the pass that the step is for.
        """
        if self.static is not None:
            return
        if self._waits_for_nothing and taken is None:
            values: list[float] = self.numbers.tolist()
            if since is not None and float(since) != values[STEPS]:
                return
            if values[CLEAN] + 1 < self._scale_seq_len:
                self.numbers[CLEAN:] += 1
                return
        scale, clean, steps = self.numbers.unbind()
        counts = torch.ones_like(steps) if taken is None else taken.to(steps)
        if since is not None:
            counts = counts * (since.to(steps.device, non_blocking=True) == steps)
        clean = clean + counts
        full = (clean >= self._scale_seq_len) & (counts > 0)
        grown = (scale * self._growth_factor).clamp(self._bounded(0.0), self._bounded(inf))
        state = torch.where(full, grown, scale), torch.where(full, 0.0, clean), steps + counts
        self.numbers.copy_(torch.stack(state))


def check(name: str, value: Any, is_right: Callable[[Any], bool], allowed: str) -> None:
    """Raise ``ValueError`` unless ``value`` is right."""
    try:
        right = is_right(value)
    except TypeError:  # no number
        right = False
    if not right:
        raise ValueError(f"loss scaling: {name} was {value!r}; it must be {allowed}.")


def check_bounds(least: float | None, most: float | None) -> None:
    """Raise ``ValueError`` unless these can be the bounds of a scale; ``None`` is float32's."""
    highest = inf if most is None else most
    check("max_loss_scale", highest, lambda x: x > 0.0, "above 0")
    if least is not None:
        allowed = f"at least 0, at most max_loss_scale ({most})"
        check("min_loss_scale", least, lambda x: 0.0 <= x <= highest, allowed)


def bounded(scale: float, least: float | None, most: float | None, highest: float = HUGE) -> float:
    """The scale nearest to ``scale`` within these bounds and those of float32."""
    return float(max(min(scale, highest if most is None else most, highest), least or TINY, TINY))


def iter_params(param_groups: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield every tensor of ``param_groups``."""
    for group in param_groups:
        yield from group["params"]
