"""How many steps of an optimizer were taken and skipped, counted where that is decided."""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex.ops import _runtime


class Outcome(NamedTuple):
    """What became of an optimizer's steps, without waiting for the device that decides.

    0-dim tensors; later steps do not change them.

    Attributes:
        stepped: Whether the last step was taken, not skipped: bool.
        taken: How many steps were taken: int64.
        skipped: How many were skipped.
        scale: The loss scale now: float32.
    """

    stepped: torch.Tensor
    taken: torch.Tensor
    skipped: torch.Tensor
    scale: torch.Tensor

    def numbers(self) -> tuple[bool, int, int, float]:
        """The same as Python numbers: one transfer, which waits for the device."""
        stepped, taken, skipped, scale = torch.stack([value.double() for value in self]).tolist()
        return bool(stepped), int(taken), int(skipped), scale


class TakenSteps:
    """Counts the steps of an optimizer whose parameters are on ``device``.

    The numbers are one tensor there, always written in place: a CUDA graph counts at each replay,
    and no Python code runs then. Steps between replays count in the same memory.

    Raises:
        RuntimeError: A CUDA graph is being captured, whose replays would set the counts to 0.
    """

    def __init__(self, device: torch.device) -> None:
        if _runtime.capturing():
            raise RuntimeError(
                "amp: the first step of an optimizer was captured in a CUDA graph, whose replays "
                "would count from 0 each time. Take some training steps before capturing."
            )
        self._may_be_in_a_row = False  # whether a step was, or may have been, skipped
        with torch.inference_mode(False):  # else steps outside of it could not write them
            self._set(torch.zeros(3, dtype=torch.int64, device=device))

    def _set(self, numbers: torch.Tensor) -> None:
        """Have the counts in ``numbers``: taken, all steps, skipped in a row."""
        self._numbers = numbers
        self._taken, self._steps, self._in_a_row = numbers.unbind()
        self._taken_and_steps, self._steps_and_in_a_row = numbers[:2], numbers[1:]

    def count(self, taken: bool | torch.Tensor) -> None:
        """Count a step; a tensor is 0-dim, bool, on the device that decides.

        Raises:
            RuntimeError: A CUDA graph is being captured, and the counts are on the CPU.
        """
        if isinstance(taken, torch.Tensor) and self._numbers.device != taken.device:
            taken = self._meet(taken)
        if isinstance(taken, torch.Tensor):
            self._may_be_in_a_row = True
            self._steps_and_in_a_row.add_(1)
            self._in_a_row.masked_fill_(taken, 0)
            self._taken.add_(taken)
        elif not taken:
            self._may_be_in_a_row = True
            self._steps_and_in_a_row.add_(1)
        else:
            self._taken_and_steps.add_(1)
            if self._may_be_in_a_row:
                self._in_a_row.zero_()

    def _meet(self, taken: torch.Tensor) -> torch.Tensor:
        """Bring counts that are on the CPU to the flag, else the flag to them."""
        if self._numbers.device.type != "cpu":
            return taken.to(self._numbers.device, non_blocking=True)
        self.check_capture()
        with torch.inference_mode(False):
            self._set(self._numbers.to(taken.device, non_blocking=True))
        return taken

    def are_captured(self) -> bool:
        """Whether a step that is counted now is in the capture of a CUDA graph."""
        return _runtime.waits(self._numbers.device) and _runtime.capturing()

    def check_capture(self) -> None:
        """Raise ``RuntimeError`` if a graph is being captured and the counts are on the CPU."""
        if not _runtime.waits(self._numbers.device) and _runtime.capturing():
            raise RuntimeError(
                "amp: a step was captured in a CUDA graph, and the counts of amp.outcome are on "
                "the CPU, where replays could not count. Move the model to the GPU before "
                "amp.initialize, and take some training steps before capturing "
                "(docs/optimizers.md, CUDA graphs)."
            )

    @property
    def in_a_row(self) -> torch.Tensor:
        """How many steps were skipped since the last one that was taken: 0-dim, a copy."""
        return self._in_a_row.clone()

    @property
    def stepped(self) -> torch.Tensor:
        """Whether the last step was taken: 0-dim, bool."""
        return (self._in_a_row == 0) & (self._steps > 0)

    def outcome(self, scale: torch.Tensor | float) -> Outcome:
        """Copies of the counts, with ``scale``, on the device of the counts or of the scale."""
        device = self._numbers.device
        if isinstance(scale, torch.Tensor) and device.type == "cpu":
            device = scale.device
        if isinstance(scale, torch.Tensor):
            now = scale.to(device, torch.float32, non_blocking=device.type != "cpu", copy=True)
        else:
            now = torch.full((), scale, dtype=torch.float32, device=device)
        found = self.stepped, self._taken, self._steps - self._taken
        stepped, taken, skipped = [
            value.to(device, non_blocking=device.type != "cpu", copy=True) for value in found
        ]
        return Outcome(stepped, taken, skipped, now)
