"""The state that an optimizer's gradients are in, and the one place that changes it.

* ``UNSCALED``: what is in memory, if anything, is unscaled. So it is whenever user code outside of
  a ``scale_loss`` block sees it, except after a delayed pass.
* ``OPEN``: inside a ``scale_loss`` block. Gradients from before are stashed, so that backward
  leaves only this pass's, scaled.
* ``SCALED``: after a delayed pass. The gradients in memory are scaled by the pass's scale.

| event | UNSCALED | OPEN | SCALED |
|---|---|---|---|
| ``scale_loss`` | stash, OPEN | refused | pass continues: OPEN; else unscale, stash, OPEN |
| its body raises | | put the stash back; the state before | |
| its end | | unscale, add the stash, UNSCALED | |
| its end, delayed | | SCALED | |
| step, clipping | | refused | unscale, add the stash, UNSCALED (a fused step: as it is) |
| ``zero_grad`` | clear | clear the stash | clear, UNSCALED |

A pass is delayed by ``delay_unscale=True``, by ``no_sync()`` of DistributedDataParallel,
or by ``fused_step`` (:mod:`apex.amp.gradients.fused`). The next pass continues it if it has the
same optimizers and the same scaler or static scale: it uses the scale of the first one and
accumulates in ``.grad`` in place, so that a reducer, hooks and an ``all_reduce`` in the last block
see the whole sum. An error in its body leaves what backward has added so far, as without amp.

A pass belongs to all optimizers of its block: an overflow in one skips the step of all. Where
gradients are reduced by hand after the block, each optimizer goes by its own.
"""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from apex.amp.gradients import agreement
from apex.amp.gradients.accumulation import Stash, accumulate, coalesced, unshared
from apex.amp.gradients.forwards import ForwardRecord
from apex.amp.gradients.fused import FusedGradients
from apex.amp.gradients.parameters import Parameters
from apex.amp.gradients.unscaling import unscale_into
from apex.amp.scaler import LossScaler
from apex.amp.training import Training

_MOST_PASSES = 100  # that an optimizer looks at whose parameters others train


class State(enum.Enum):
    """See the module's docstring."""

    UNSCALED = enum.auto()
    OPEN = enum.auto()
    SCALED = enum.auto()


@dataclass(eq=False, slots=True)
class Pass:
    """One backward pass, or several delayed ones that accumulate in the same gradients.

    Attributes:
        scaler: The loss scaler.
        index: Its number.
        scale: What the loss was multiplied by: float32, 0-dim, or a float.
        ledgers: Of the optimizers in the block.
        loss: Of the last pass, to tell whether it was finite.
        synchronised: Whether the last pass was outside of ``no_sync()``.
        is_final: Whether the flag is complete after the block, see ``overflow.check_again``.
        found_inf: float32, 0-dim, after unscaling; ``None`` for a static scale.
        counted: How many steps the scaler had counted when the gradients were unscaled: 0-dim.
        outcome: Whether one of the optimizers found inf or nan later, see ``overflow.check_again``.
    """

    scaler: LossScaler
    index: int
    scale: torch.Tensor | float
    ledgers: list[Ledger]
    loss: torch.Tensor
    synchronised: bool = True
    is_final: bool = True
    found_inf: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    outcome: torch.Tensor | None = None

    def begin(self) -> Pass:
        """Open the ledgers; return this pass, or the delayed one that it continues."""
        for record in dict.fromkeys(r for ledger in self.ledgers for r in ledger.records):
            record.begin_pass()
        before = self.ledgers[0].scaled
        in_place = before is not None and all(
            ledger.scaled is before and ledger.can_continue(self) for ledger in self.ledgers
        )
        if not in_place:
            for ledger in (*self.ledgers, *self.ledgers[0].training.sharers(self.ledgers)):
                ledger.unscale_delayed()
            for ledger in self.ledgers:
                ledger.forget_cleared_passes()
            self.scale = self.scaler.scale_on(
                self.loss.device
            )  # the scale may just have been lowered
        try:
            for ledger in self.ledgers:
                ledger.open(stash=not in_place)
        except BaseException:
            self.abandon()
            raise
        if in_place and before is not None:
            before.loss = self.loss
            return before
        return self

    def abandon(self, *, drop: bool = False) -> None:
        """Leave a block after an error; one in unscaling has to ``drop`` delayed passes too."""
        for ledger in reversed(self.ledgers):  # the first to open has stashed what is shared
            if ledger.state is State.OPEN:
                if drop:
                    ledger.scaled = None
                ledger.abandon()

    def end(self, *, delayed: bool, check: bool) -> None:
        """Leave a block: unscale, or leave the gradients scaled.

        Args:
            delayed: Whether the program asked to leave them scaled.
            check: ``False`` leaves the loss scale alone.
        """
        self._look_at_forwards()
        delayed = delayed or not self.synchronised
        for_step = not delayed and check and self._try_to_keep_scaled()
        for ledger in self.ledgers:
            if ledger.fused is not None:
                ledger.fused.active = for_step
        if delayed or for_step:
            for ledger in self.ledgers:
                ledger.scaled, ledger.state = self, State.SCALED
        else:
            self.unscale(check=check)

    def _look_at_forwards(self) -> None:
        """Note whether DistributedDataParallel reduces the gradients of this pass."""
        records = [record for ledger in self.ledgers for record in ledger.records]
        used = [record for record in records if not record.is_used] or records
        self.synchronised = not any(record.synchronises is False for record in used)
        self.is_final = agreement.is_final(self.ledgers, records)
        for record in records:
            record.end_pass()

    def _try_to_keep_scaled(self) -> bool:
        """Whether the gradients stay scaled until the step, see :mod:`~.fused`."""
        ledger = self.ledgers[0]
        fused = ledger.fused
        if fused is None or len(self.ledgers) > 1 or ledger.training.sharing or ledger.stash:
            return False
        by_program = ledger.scaled is not None and not fused.active  # delayed before
        if by_program or not fused.takes():
            return False
        fused.keep(self.scale)
        return True

    def unscale(self, *, check: bool = True, also: torch.Tensor | None = None) -> None:
        """Unscale the gradients, and tell optimizers and scaler whether all were finite.

        Args:
            check: As for :meth:`end`.
            also: Another flag, of gradients that may have been cleared since.
        """
        done: set[int] | None = set() if len(self.ledgers) > 1 else None
        flags = [ledger.unscale(self.scale, done) for ledger in self.ledgers]
        found = [flag for flag in (*flags, also) if flag is not None]
        if found:
            self.finish(found[0] if len(found) == 1 else torch.stack(found).amax(), check=check)

    def finish(self, found_inf: torch.Tensor, *, check: bool = True) -> None:
        """Note the flag of the whole pass for the step, and let the scale back off.

        Where gradients can be reduced after the block, ``overflow.check_again`` does the latter.
        """
        self.found_inf, self.counted = found_inf, self.scaler.steps
        for ledger in self.ledgers:
            ledger.passes.append(self)
        for ledger in self.ledgers[0].training.sharers(
            self.ledgers
        ):  # one of them may not step for a long time
            ledger.passes = [*ledger.passes[-_MOST_PASSES:], self]
        if self.is_final or not check:
            self.scaler.finish_pass(agreement.agree_(found_inf, self.ledgers), check=check)


class Ledger:
    """The gradients of one optimizer.

    Args:
        params: What the optimizer steps.
        training: What the optimizer was initialised with.
        fused: For gradients that stay scaled until the step; ``None`` where they do not.

    Attributes:
        state: See the module's docstring.
        scaled: The pass that the gradients are scaled by, in the state ``SCALED`` and in a block
            that continues it.
        stash: Unscaled gradients from before this pass.
        passes: Unscaled passes since the last step, for the step to look at.
        records: Of the forwards of the models that the parameters belong to.
        belongs_to_models: Whether all parameters belong to these models.
    """

    def __init__(
        self, params: Parameters, training: Training, fused: FusedGradients | None
    ) -> None:
        self.params = params
        self.training = training
        self.fused = fused
        self.state = State.UNSCALED
        self.scaled: Pass | None = None
        self.stash: Stash = {}
        self.passes: list[Pass] = []
        self.records: list[ForwardRecord] = []
        self.belongs_to_models = False
        self._has_stepped = False
        self._had_grads = False  # whether the last pass left any
        self._unreduced = False  # whether passes under no_sync() were unscaled
        self._warned = False

    def with_sharers(self) -> list[Ledger]:
        """This ledger, and those whose optimizers share a parameter."""
        return [self, *self.training.sharers([self])]

    # -- one pass ------------------------------------------------------------------------------

    def open(self, *, stash: bool) -> None:
        """Enter a ``scale_loss`` block: stash gradients, or let the pass accumulate in place."""
        self.params.sync()
        if stash:
            self._stash_gradients()
        self.state = State.OPEN

    def forget_cleared_passes(self) -> None:
        """Forget an overflow whose gradients the program has cleared itself."""
        if not self.passes:
            return
        pairs = self.params.pairs
        pairs.drop_cleared()
        cleared = not (pairs.has_grads() or pairs.has_new()) and all(
            weight.grad is None for weight in self.params.plain
        )
        if cleared and agreement.may_forget(self, had_grads=self._had_grads):
            for one in self.passes:
                if not one.is_final and one.found_inf is not None:  # no step will lower the scale
                    one.scaler.finish_pass(agreement.agree_(one.found_inf, [self]))
            self.passes.clear()

    def _stash_gradients(self) -> None:
        stash: Stash = {}
        for weight in self.params.plain:
            if weight.grad is not None:
                stash[weight] = unshared(weight.grad)
                weight.grad = None
        if self.params.pairs.stash(stash):
            self._warn_of_edits()
        has_unreduced = self._unreduced and (stash or self.params.pairs.has_grads())
        if has_unreduced and any(record.synchronises for record in self.records):
            for target, grad in stash.items():
                target.grad = grad
            raise RuntimeError(
                "amp: gradients of passes under no_sync() were unscaled (by clipping, a step or a "
                "pass with another loss_id) before the synchronising pass, which would not reduce "
                "them. Clip and step after that pass, and use one loss_id for all of them."
            )
        self.stash = stash

    def abandon(self) -> None:
        """Leave a block whose body has raised."""
        if self.scaled is not None:
            self.state = State.SCALED
            if self.fused is not None and self.fused.active:
                self.fused.keep(self.scaled.scale)
            return
        stash, self.stash = self.stash, {}
        for target in self.params.targets:
            target.grad = stash.get(target)
        self.state = State.UNSCALED

    @torch.no_grad()
    def unscale(
        self, scale: torch.Tensor | float, done: set[int] | None = None
    ) -> torch.Tensor | None:
        """Unscale what backward left, and add the stash.

        Args:
            scale: What the loss was multiplied by.
            done: ids of tensors that another optimizer of this pass has dealt with; extended.
                ``None`` when there is no other.

        Returns:
            The non-finite flag, see :func:`apex.amp.gradients.unscaling.unscale_`.
        """
        plain, pairs, sharing = self.params.plain, self.params.pairs, self.training.sharing
        if done is not None:
            plain = [tensor for tensor in plain if id(tensor) not in done]
            pairs = pairs.without(done)
            done.update(map(id, self.params.targets))
        grads = [grad for weight in plain if (grad := coalesced(weight)) is not None]
        found_inf, widened = unscale_into(grads, pairs, sharing, scale)
        accumulate(widened)
        if pairs:
            self.params.pairs.are_freed = False
            self.clear_before_next_forward()
        if self.stash:
            self.params.pairs.are_freed = False
            accumulate(self.params.for_stepped(self.stash))
            if sharing:
                self.params.pairs.wait(sharing, self.stash)
            self.stash = {}
        self._had_grads = any(tensor.grad is not None for tensor in self.params.stepped)
        self.scaled, self.state = None, State.UNSCALED
        return found_inf

    def clear_before_next_forward(self) -> None:
        """Have the scaled gradients on 16-bit weights cleared when the next forward begins.

        They are there to be read. A backward outside of a block must not add to them.
        """
        for record in self.records:
            record.to_clear.add(self.params.pairs)

    def can_continue(self, new: Pass) -> bool:
        """Whether the pass may accumulate in place in what delayed passes have left."""
        old = self.scaled
        if old is None or set(old.ledgers) != set(new.ledgers):
            return False
        is_same = isinstance(new.scale, float) and new.scale == old.scale
        if old.scaler is not new.scaler and not is_same:
            return False
        return self.fused is None or not self.fused.active or self.fused.can_continue()

    def unscale_delayed(self, *, check: bool = True) -> None:
        """Unscale what delayed passes have left; ``check`` what a fused step was to read scaled."""
        scaled = self.scaled
        if scaled is None or self.state is State.OPEN:
            return
        fused = self.fused if self.fused is not None and self.fused.active else None
        if fused is not None:
            if check:
                fused.check()
            fused.active = False
        for ledger in scaled.ledgers:
            ledger._unreduced |= not scaled.synchronised
        scaled.unscale(also=None if fused is None else fused.found_inf)
        if fused is not None:
            fused.apply_clip()

    # -- what the step, clipping and readers need ----------------------------------------------

    def collect(self) -> None:
        """Bring every gradient to where the optimizer looks for it, unscaled."""
        for ledger in self.with_sharers():
            ledger.unscale_delayed()
        self.params.sync()
        pairs = self.params.pairs
        if not pairs:
            return
        pairs.refresh(compare=not self._has_stepped)
        if pairs.take_new(self.training.sharing):
            self._warn_of_edits()
        self.clear_before_next_forward()

    def _warn_of_edits(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "amp: gradients of 16-bit model weights were changed after scale_loss (by "
                "clipping, or by another backward of the same forward?). That has no effect: the "
                "optimizer steps the float32 masters. Use amp.clip_grad_norm_(optimizer, max_norm) "
                "or clip amp.master_params(optimizer); call every backward in scale_loss.",
                stacklevel=5,
            )

    def after_step(self) -> None:
        """Free the masters' gradients: ``model.zero_grad()`` cannot reach them."""
        self._unreduced = False
        self._has_stepped = True
        self.params.pairs.free_grads(self.training.sharing, id(self))

    def clear(self, *, set_to_none: bool) -> None:
        """Forget all gradients, of which the optimizer has cleared its own."""
        self.stash = {}
        self.passes.clear()
        self._unreduced = False
        self.params.pairs.zero_grad(set_to_none=set_to_none)
        if self.state is State.SCALED:
            self.scaled, self.state = None, State.UNSCALED

    def step_options(self) -> dict[str, Any]:
        """Arguments for ``step_scaled`` of a fused step; empty where gradients are unscaled."""
        scaled, fused = self.scaled, self.fused
        if scaled is None or fused is None or not fused.active:
            return {}
        options, found_inf = fused.step_options(compare=not self._has_stepped)
        self.scaled, self.state = None, State.UNSCALED
        self.clear_before_next_forward()
        if found_inf is not None:
            scaled.is_final = True  # the gradients were read just now
            scaled.finish(found_inf)
        return options
