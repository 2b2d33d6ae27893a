"""Overflow: who decides that a step is skipped, how the host learns of it, and counts of steps.

On a CPU the host reads the flags of the passes before the step. On a GPU, kernels that can skip by
themselves read the flag, and the host does not wait: an :class:`AsyncCopy` of it arrives later, for
the message and for the error after too many skipped steps. Steps that were taken and skipped are
counted where that is decided.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from apex.amp import _speech
from apex.amp.gradients.ledger import Ledger, Pass
from apex.amp.gradients.tensors import stored_values
from apex.amp.scale import SCALE
from apex.ops import _runtime
from apex.ops._async_copy import AsyncCopy as AsyncCopy
from apex.ops.lists.tensor_lists import local


def runs_behind(device: torch.device) -> bool:
    """Whether the host can run ahead of ``device``."""
    return device.type in ("cuda", "meta")


class SkippedStep(NamedTuple):
    """A skipped step.

    Attributes:
        skipped: How many in a row.
        place: Of the first pass that was not finite, in the passes of the step.
        loss_id: The number of its scaler.
        scale: That scaler's scale now.
        is_new: Whether a pass was made since the step before, which else was skipped as well.
    """

    skipped: int
    place: int
    loss_id: int
    scale: float
    is_new: bool

    def describe(self, cause: str) -> str:
        """The text of the error after too many skipped steps."""
        return (
            f"amp: {self.skipped} steps in a row were skipped because of non-finite gradients; the "
            f"loss scale is now {self.scale}. {cause} (initialize(max_skipped_steps=...) sets the "
            "limit.)"
        )


@dataclass
class Overflow:
    """The skipped steps of one optimizer: logged with ``verbosity``, ``limit`` in a row raise."""

    verbosity: int
    limit: int
    counts: TakenSteps
    told: int = 0  # steps in all, as far as replays of a CUDA graph have told
    # Copies of the flags of deferred steps that have not arrived.
    sent: deque[tuple[list[int], bool, AsyncCopy]] = field(default_factory=deque)

    def read(self, passes: Sequence[Pass], *, is_new: bool = True) -> SkippedStep | None:
        """Let the host decide: one read of a device. ``is_new``: see :class:`SkippedStep`.

        Returns the skipped step, or ``None`` for a step to be taken; the scalers count it.
        """
        if not passes:
            self.counts.count(True)
            return None
        # Passes are here because `note_flag` put them here with a flag: those of a static scale
        # have none, and are not. So no value is None (the condition is for the type checker): each
        # flag has its scaler's scale behind it. All go to the host in one transfer, which waits for
        # the device: two for each pass would wait as many times.
        device = passes[0].scaler.numbers.device
        values = [value for one in passes for value in (one.found_inf, one.scaler.numbers[SCALE])]
        flags = torch.stack([v.to(device, non_blocking=True) for v in values if v is not None])
        numbers = flags.tolist()
        for index, one in enumerate(passes):
            if numbers[2 * index]:
                self.counts.count(False)
                skipped = int(self.counts.in_a_row)
                return SkippedStep(skipped, index, one.index, numbers[2 * index + 1], is_new)
        self.counts.count(True)
        for one in passes:
            one.scaler.count_step(since=one.counted)
        return None

    def defer(self, passes: Sequence[Pass], *, is_new: bool) -> torch.Tensor:
        """Let the device decide, and send for a report.

        Returns whether the step is to be skipped: float32, 0-dim, on the device of the first pass.
        """
        found = [one.found_inf for one in passes if one.found_inf is not None]
        device = found[0].device
        flags = [flag.to(device, torch.float32, non_blocking=True) for flag in found]
        noop = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        taken = noop == 0
        self.counts.count(taken)
        skipped = self.counts.in_a_row.to(device, torch.float32, non_blocking=True)
        scales = [one.scaler.numbers[SCALE].to(device, non_blocking=True) for one in passes]
        copy = AsyncCopy(torch.stack([skipped, *flags, *scales]))
        if copy.arrives:
            self.sent.append(([one.index for one in passes], is_new, copy))
        for one in passes:
            one.scaler.count_step(taken, since=one.counted)
        return noop

    def log_reports(self) -> None:
        """Log deferred steps that were skipped, as far as known; raise after too many in a row."""
        while self.sent:
            indices, is_new, copy = self.sent[0]
            values = copy.read()
            if values is None:
                return
            self.sent.popleft()
            if not values[0]:
                continue
            flags, scales = values[1 : 1 + len(indices)], values[1 + len(indices) :]
            place = next(number for number, flag in enumerate(flags) if flag)
            report = SkippedStep(int(values[0]), place, indices[place], scales[place], is_new)
            self.log(report)
            if report.skipped >= self.limit:
                raise RuntimeError(report.describe("(The flags of a GPU arrive some steps late.)"))

    def log(self, report: SkippedStep) -> None:
        """Log a skipped step."""
        if self.verbosity > 0:
            text = (
                f"Gradient overflow.  Skipping step, loss scaler {report.loss_id} "
                f"reducing loss scale to {report.scale}"
            )
            if not report.is_new:
                text = (
                    "Gradients of a skipped step were not cleared.  Skipping step, loss scaler "
                    f"{report.loss_id} keeping loss scale {report.scale}"
                )
            _speech.say(text, logging.WARNING)


HOW_TO_WATCH = "amp.initialize(..., debug=True) names the operation where it begins."


def describe_dead_training(ledger: Ledger, report: SkippedStep, loss: torch.Tensor) -> str:
    """The text of the error after too many skipped steps: who was not finite."""
    where = "All gradients of this optimizer on this rank are finite."
    params = ledger.params
    for tensor, target in zip(params.stepped, params.targets, strict=True):
        grad = target.grad if tensor.grad is None else tensor.grad
        if grad is not None and not bool(torch.isfinite(stored_values(local(grad))).all()):
            name = ledger.training.name_of(target)
            where = f"The first non-finite gradient is that of parameter {name}."
            break
    cause = (
        "The loss itself was finite, so gradients overflow even at this scale, or backward "
        "produces nan."
        if bool(torch.isfinite(loss).all())
        else "The loss itself was not finite, so scaling is not the cause. Train at O0. If the "
        "loss is not finite at O0 either, check the data and the learning rate. Otherwise a "
        "function of the forward exceeds the range of 16 bits (docs/nan.md shows how to find "
        "it)."
    )
    return report.describe(f"{where} {cause}")


# -- counts of steps -------------------------------------------------------------------------------


def counts_of(params: Iterable[torch.Tensor]) -> TakenSteps:
    """New counts for an optimizer: on the device of its parameters where the host runs ahead."""
    device = next((param.device for param in params), torch.device("cpu"))
    if device.type == "meta" or not runs_behind(device):
        device = torch.device("cpu")
    return TakenSteps(device)


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
                "would count from 0 each time. Make some training steps before capturing."
            )
        self._may_be_in_a_row = False  # whether a step was, or may have been, skipped
        with torch.inference_mode(False):  # else steps outside of it could not write them
            self._set(torch.zeros(3, dtype=torch.int64, device=device))

    def _set(self, numbers: torch.Tensor) -> None:
        """Have the counts in ``numbers``: taken, all steps, skipped in a row."""
        self.numbers = numbers
        self._taken, self._steps, self._in_a_row = numbers.unbind()
        self._taken_and_steps, self._steps_and_in_a_row = numbers[:2], numbers[1:]

    def count(self, taken: bool | torch.Tensor) -> None:
        """Count a step; a tensor is 0-dim, bool, on the device that decides.

        Raises:
            RuntimeError: A CUDA graph is being captured, and the counts are on the CPU.
        """
        if isinstance(taken, torch.Tensor) and self.numbers.device != taken.device:
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
        if self.numbers.device.type != "cpu":
            return taken.to(self.numbers.device, non_blocking=True)
        self.check_capture()
        with torch.inference_mode(False):
            self._set(self.numbers.to(taken.device, non_blocking=True))
        return taken

    def are_captured(self) -> bool:
        """Whether a step that is counted now is in the capture of a CUDA graph."""
        return _runtime.waits(self.numbers.device) and _runtime.capturing()

    def check_capture(self) -> None:
        """Raise ``RuntimeError`` if a graph is being captured and the counts are on the CPU."""
        if not _runtime.waits(self.numbers.device) and _runtime.capturing():
            raise RuntimeError(
                "amp: a step was captured in a CUDA graph, and the counts of amp.outcome are on "
                "the CPU, where replays cannot increase them. Move the model to the GPU before "
                "amp.initialize, and make some training steps before capturing "
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
        device = self.numbers.device
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
