"""The state that an optimizer's gradients are in, and the one place that changes it.

* ``UNSCALED``: what is in memory, if anything, is unscaled. So it is whenever user code outside of
  a ``scale_loss`` block sees it, except after a delayed pass.
* ``OPEN``: inside a ``scale_loss`` block. Gradients from before are stashed, so that backward
  leaves only this pass's, scaled.
* ``DELAYED``: the program left the gradients scaled by the pass's scale, for the next pass.
* ``FOR_STEP``: amp left them scaled for a fused step (:mod:`apex.amp.gradients.fused`).

| event | UNSCALED | OPEN | DELAYED | FOR_STEP |
|---|---|---|---|---|
| ``scale_loss`` | stash, OPEN | refused | continued: OPEN; else unscale, stash, OPEN | as DELAYED |
| its body raises | | put the stash back; the state before | | |
| its end | | unscale, add the stash, UNSCALED; or FOR_STEP | | |
| its end, delayed | | DELAYED | | |
| step | | refused | unscale, UNSCALED | as it is, UNSCALED |
| clipping | | refused | unscale, UNSCALED | a factor for the step |
| ``zero_grad`` | clear | clear the stash | clear, UNSCALED | clear, UNSCALED |

A pass is delayed by ``delay_unscale=True``, or by ``no_sync()`` of DistributedDataParallel. The
next pass continues it if it has the same optimizers and the same scaler or static scale: it uses
the scale of the first one and accumulates in ``.grad`` in place, so that a reducer, hooks and an
``all_reduce`` in the last block see the whole sum. An overflow in one optimizer of a block skips
the step of all; where gradients are reduced by hand after the block, each goes by its own.

A skipped step leaves its gradients in ``.grad``, and its passes count until these are gone, see
:mod:`apex.amp.gradients.left`. Where a device decides, the host keeps the passes of every step for
this, and the device drops what a taken one would keep.
"""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from apex._compat.program import stacklevel
from apex.amp.gradients import agreement
from apex.amp.gradients.forwards import ForwardRecord, are_reduced, is_final
from apex.amp.gradients.fused import FusedGradients
from apex.amp.gradients.inside_step import InsideStep
from apex.amp.gradients.left import Left
from apex.amp.gradients.parameters import Parameters, any_grad, grads_of, unscale_into
from apex.amp.gradients.stash import Stash
from apex.amp.gradients.tensors import accumulate
from apex.amp.scale import Scale
from apex.amp.training import Training
from apex.ops import _runtime
from apex.ops.lists.storage import ScaledStep
from apex.ops.lists.unscale import unscale_

_MOST_PASSES = 100  # that an optimizer looks at whose parameters others train

_EDITED = (
    "amp: gradients of 16-bit model weights were changed after scale_loss (by clipping, or by "
    "another backward of the same forward?). This has no effect, because the optimizer updates the "
    "float32 masters. Use amp.clip_grad_norm_(optimizer, max_norm) or clip "
    "amp.master_params(optimizer); call every backward in scale_loss."
)
_SCALED = (
    "amp: amp.master_params was called inside the scale_loss block, where gradients are still "
    "multiplied by the loss scale. Clip them and read them after the block."
)
_MOVED = (
    "amp: before the scale_loss block, .grad of a 16-bit weight was a part of a larger tensor. It "
    "no longer is, and the optimizer uses the gradients of the masters. So zeroing, reducing or "
    "clipping the larger tensor has no effect. Use amp.clip_grad_norm_, or the gradients of "
    "amp.master_params(optimizer); at O1 and O4 .grad stays a part of your tensor."
)


class State(enum.Enum):
    """See the top of this file."""

    UNSCALED = enum.auto()
    OPEN = enum.auto()
    DELAYED = enum.auto()
    FOR_STEP = enum.auto()


@dataclass(eq=False, slots=True)
class Pass:
    """One backward pass, or several delayed ones that accumulate in the same gradients.

    Attributes:
        index: The scaler's number.
        ledgers: Of the optimizers in the block.
        loss: Of the last pass, to tell whether it was finite.
        scale: What the loss was multiplied by: float32, 0-dim, or a float.
        synchronised: Whether the last pass was outside of ``no_sync()``.
        is_final: Whether nobody reduces the gradients after the block.
        found_inf: float32, 0-dim, after unscaling; ``None`` for a static scale.
        counted: How many steps the scaler had counted when the gradients were unscaled: 0-dim.
        outcome: What ``check_again`` has found for another optimizer of the block.
    """

    scaler: Scale
    index: int
    ledgers: list[Ledger]
    loss: torch.Tensor
    scale: torch.Tensor | float = 1.0
    synchronised: bool = True
    is_final: bool = True
    found_inf: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    outcome: torch.Tensor | None = None

    def _records(self) -> Sequence[ForwardRecord]:
        if len(self.ledgers) == 1:
            return self.ledgers[0].params.records
        return list(dict.fromkeys([r for ledger in self.ledgers for r in ledger.params.records]))

    def begin(self) -> Pass:
        """Open the ledgers; return this pass, or the delayed one that it continues."""
        for record in self._records():
            record.begin_pass()
        before = self.ledgers[0].scaled
        if before is not None and all([ledger.can_continue(self) for ledger in self.ledgers]):
            before.loss = self.loss
            for ledger in self.ledgers:
                ledger.open(stash=False)
            return before
        training = self.ledgers[0].training
        others = training.co_owners(self.ledgers) if training.shared else ()
        for ledger in (*self.ledgers, *others):
            if ledger.scaled is not None:
                ledger.unscale_delayed()
        for ledger in self.ledgers:
            if ledger.passes:
                ledger.forget_cleared_passes()
            if ledger.left.passes:
                ledger.drop_left()
        self.scale = self.scaler.scale_on(self.loss.device)
        for ledger in self.ledgers:
            ledger.open(stash=True)
        return self

    def abandon(self, *, drop: bool = False) -> None:
        """Leave a block after an error; one in unscaling has to ``drop`` delayed passes too."""
        for ledger in reversed(self.ledgers):  # the first to open has stashed what is shared
            if ledger.state is State.OPEN:
                if drop:
                    ledger.scaled = None
                ledger.abandon()

    def has_written(self) -> bool:
        """Whether gradients were computed in the block."""
        return any(
            [
                weight.grad is not None and ledger.stash.is_written(weight)
                for ledger in self.ledgers
                for weight in ledger.params.targets
            ]
        )

    def end(self, *, delayed: bool, check: bool) -> None:
        """Leave a block: unscale, or leave the gradients scaled if the program asked for that."""
        for ledger in self.ledgers:
            if ledger.stash:
                ledger.stash.refuse_written()
        records = self._records()
        self.synchronised = are_reduced(records)
        self.is_final = is_final(self.ledgers, records)
        for record in records:
            record.is_used = True
        is_captured = _runtime.waits(self.loss.device) and _runtime.capturing()
        for ledger in self.ledgers:
            ledger.is_captured = is_captured
            if is_captured:
                ledger.in_graphs += ledger.stash.values()
        delayed = delayed or not self.synchronised
        if delayed or (check and self.ledgers[0].fused and self._try_to_keep_scaled()):
            for ledger in self.ledgers:
                ledger.scaled = self
                ledger.state = State.DELAYED if delayed else State.FOR_STEP
        else:
            self.unscale(check=check)

    def _try_to_keep_scaled(self) -> bool:
        """Whether the gradients stay scaled until the step, see :mod:`~.fused`."""
        ledger = self.ledgers[0]
        if ledger.fused is None or len(self.ledgers) > 1 or ledger.training.shared or ledger.stash:
            return False
        return ledger.fused.try_to_keep(self.scale)

    def unscale(self, *, check: bool = True, also: torch.Tensor | None = None) -> None:
        """Unscale; ``also`` is another flag, of gradients that may have been cleared since."""
        done: set[int] = set()  # ids of tensors, for optimizers that share some
        flags = [ledger.unscale(self.scale, done) for ledger in self.ledgers]
        found = [flag for flag in (*flags, also) if flag is not None]
        if found:
            self.note_flag(found[0] if len(found) == 1 else torch.stack(found).amax(), check=check)

    def note_flag(self, found_inf: torch.Tensor, *, check: bool = True) -> None:
        """Note the flag for the step; let the scale back off, if ``check_again`` does not later."""
        self.found_inf, self.counted = found_inf, self.scaler.steps
        training = self.ledgers[0].training
        for ledger in self.ledgers:
            ledger.passes.append(self)
        # One that shares a parameter may not step for a long time.
        for ledger in training.co_owners(self.ledgers) if training.shared else ():
            ledger.passes = [*ledger.passes[-_MOST_PASSES:], self]
        if self.is_final or not check:
            flag = found_inf if self.is_final else agreement.agree_(found_inf, self.ledgers)
            self.scaler.finish_pass(flag, check=check)


@dataclass(eq=False)
class Ledger:
    """The gradients of one optimizer, which steps ``params``.

    Attributes:
        fused: For gradients that stay scaled until the step; ``None`` where they do not.
        before: The state before the block.
        scaled: The pass that the gradients are scaled by, in the states ``DELAYED`` and
            ``FOR_STEP`` and in a block that continues it.
        stash: Gradients from before the open pass.
        passes: Unscaled ones since the last step, for the next one to look at.
        left: Those of the last step, if it was skipped or a device has decided that; their
            gradients may still be there.
        had_grads: Whether the last pass left gradients, where there is a ``process_group``.
        is_unreduced: Whether passes of ``no_sync()`` were unscaled since the last step.
        is_captured: Whether the last block was captured in a CUDA graph; ``None`` after a step.
        in_graphs: Gradients that were put aside in captures: the graphs read and write them.
        began: How many times a block was opened or gradients were cleared.
        steps: How many steps were taken or skipped, as far as the host has made them. Before the
            first one, weights are compared by value.
        stepped_in: The thread that made the last one.
        scaled_elsewhere: Weights with the gradients that a block without this optimizer has
            written, scaled, and the versions of these.
    """

    params: Parameters
    training: Training
    fused: FusedGradients | None
    state: State = State.UNSCALED
    before: State = State.UNSCALED
    scaled: Pass | None = None
    stash: Stash = field(default_factory=Stash)
    passes: list[Pass] = field(default_factory=list)
    left: Left = field(default_factory=Left)
    had_grads: bool = False
    is_unreduced: bool = False
    is_captured: bool | None = None
    in_graphs: list[torch.Tensor] = field(default_factory=list)
    began: int = 0
    steps: int = 0
    stepped_in: int = 0
    scaled_elsewhere: list[tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    def with_co_owners(self) -> list[Ledger]:
        """This ledger, and those whose optimizers share a parameter."""
        return [self, *self.training.co_owners([self])] if self.training.shared else [self]

    def record_scaled_elsewhere(self, written: list[torch.Tensor]) -> None:
        """Record that a block without this optimizer has ``written`` gradients of these weights."""
        grads = [(weight, weight.grad) for weight in written if weight.grad is not None]
        self.scaled_elsewhere = [(weight, grad, grad._version) for weight, grad in grads]

    def refuse_scaled_elsewhere(self) -> None:
        """Raise if the gradients are still as a block without this optimizer has left them."""
        written, self.scaled_elsewhere = self.scaled_elsewhere, []
        if any([end.grad is grad and grad._version == number for end, grad, number in written]):
            raise RuntimeError(
                "amp: a scale_loss block without this optimizer wrote its gradients, so they are "
                "still multiplied by the loss scale. Pass all optimizers whose parameters the loss "
                "reaches: amp.scale_loss(loss, [first, second]). Or call zero_grad() before the "
                "backward pass of this step."
            )

    # -- one pass ------------------------------------------------------------------------------

    def open(self, *, stash: bool) -> None:
        """Enter a ``scale_loss`` block."""
        self.began, self.scaled_elsewhere = self.began + 1, []
        self.params.compare_groups()
        if stash:
            self._stash_gradients()
        self.before, self.state = self.state, State.OPEN

    def _are_cleared(self) -> bool:
        """Whether the program has cleared all gradients itself."""
        if self.fused is not None:
            self.fused.give_zeros()
        self.params.drop_cleared()
        return not any_grad(self.params.plain) and self.params.are_cleared()

    def forget_cleared_passes(self) -> None:
        """Forget an overflow whose gradients the program has cleared itself."""
        if self._are_cleared() and agreement.may_forget(self):
            for one in self.passes:
                if not one.is_final and one.found_inf is not None:  # no step will lower the scale
                    one.scaler.finish_pass(agreement.agree_(one.found_inf, [self]))
            self.passes.clear()

    def take_passes(self, *, collect: bool = True) -> tuple[list[Pass], bool]:
        """What a step goes by: the passes since the last one, and left ones.

        ``collect`` the gradients first, unless the step reads them scaled. Also returned is whether
        a pass was made since the last step.
        """
        if collect:
            self.collect()
            late = [one for one in self.passes if not one.is_final]
            if late:
                self.check_again(late)
            elif (
                not self.passes and not self.params.use_masters
            ):  # of O3: its weights may have entries of a state_dict
                for record in self.params.records:
                    record.reconcile()
        passes, self.passes, is_new = self.passes, [], bool(self.passes)
        if self.left.passes and not self.forget_left():
            grads = [] if passes else grads_of(self.params.stepped)
            passes = [*self.left.for_step(self, grads), *passes]
            self.left = Left()
        return passes, is_new

    def check_again(self, late: Sequence[Pass]) -> None:
        """Look at gradients that may have been reduced after the blocks of the ``late`` passes.

        With several ranks and no DistributedDataParallel around the forward, nothing says when a
        program reduces. So that all ranks do the same, each optimizer goes by what is in its own
        gradients now, here and on the ranks that share its model, and the scale backs off here:
        once for each scaler and block.
        """
        scale = late[0].scale
        assert isinstance(scale, torch.Tensor)
        grads = grads_of(self.params.stepped)
        found_inf = unscale_(grads, torch.ones_like(scale))
        if not grads:  # cleared by the program
            flags = [one.found_inf for one in late if one.found_inf is not None]
            found_inf = torch.stack(flags).amax()
        assert found_inf is not None
        agreement.agree_(found_inf, [self])
        for one in {one.scaler: one for one in late}.values():
            before = one.outcome  # of another optimizer of the block
            one.scaler.finish_pass(found_inf, before=before)
            one.outcome = found_inf if before is None else torch.maximum(before, found_inf)
        self.passes = [
            one if one.is_final else replace(one, found_inf=found_inf, is_final=True)
            for one in self.passes
        ]

    def leave(self, passes: list[Pass]) -> None:
        """Note that a step of ``passes`` is skipped, or that a device decides whether it is."""
        self.left = Left(passes, (*self.params.plain, *self.params.tensors))
        for record in self.params.records:
            record.may_have_left = True

    def forget_left(self) -> bool:
        """Forget a skipped step whose gradients the program has cleared; whether it has."""
        params, training = self.params, self.training
        others = training.co_owners([self]) if training.shared else []
        # With a process_group a rank may have no gradients where others do.
        if training.process_group is not None or any([one.stash for one in others]):
            return False
        if not self._are_cleared():
            self.left = self.left.without_zeros(self, [*params.stepped, *params.weights])
            return False
        self.left = Left()
        return True

    def drop_left(self) -> None:
        """Set what a skipped step has left to zeros; where a device decided, the device does."""
        left, self.left = self.left, Left()
        left.drop(grads_of(self.params.stepped))

    def _stash_gradients(self) -> None:
        params, records = self.params, self.params.records
        if self.fused is not None:
            self.fused.give_zeros()
        edited, new = params.take_off() if params.weights else (False, [])
        if edited:
            self._warn(_EDITED)
        stash = self.stash  # nothing is in it between blocks
        if new or any_grad(params.plain):
            stash = Stash(
                by_wrapper=any([record.synchronises is not None for record in records]),
                has_buckets=any([record.has_buckets for record in records]),
            )
            stash.take(params.plain, outside=params.outside)
            for weight, grad in new:
                stash.take_off(weight, grad)
            if stash.has_moved:
                self._warn(_MOVED)
        has_unreduced = self.is_unreduced and (stash or any_grad(params.tensors))
        if has_unreduced and any([record.synchronises for record in records]):
            stash.restore(stash)
            raise RuntimeError(
                "amp: gradients of backward passes under no_sync() were unscaled (by clipping, a "
                "step or a pass with another loss_id) before the synchronising pass, which would "
                "then not reduce them. Clip and step after the synchronising pass, and use one "
                "loss_id for all passes."
            )
        self.stash = stash

    def abandon(self) -> None:
        """Leave a block whose body has raised."""
        if self.scaled is not None:
            self.state = self.before
            if self.fused is not None and self.state is State.FOR_STEP:
                self.fused.keep(self.scaled.scale)
            return
        stash, self.stash = self.stash, Stash()
        stash.restore(self.params.targets)
        self.state = State.UNSCALED

    def unscale(self, scale: torch.Tensor | float, done: set[int]) -> torch.Tensor | None:
        """Unscale what backward left, and add the stash; return the non-finite flag.

        ``done`` has the ids of what other optimizers of this pass have dealt with, and gets more.
        """
        params, shared = self.params, self.training.shared
        plain, pairs = params.plain, params if not done else params.without(done)
        if done:
            plain = [tensor for tensor in plain if id(tensor) not in done]
        done |= params.ids
        found_inf, widened = unscale_into(grads_of(plain), pairs, shared, scale)
        if widened:
            accumulate(widened)
        if self.stash:
            self.stash.add(params.for_stepped(self.stash))
            if shared:
                params.wait(shared, self.stash)
        if params.weights:
            params.clear_before_next_forward()
            params.keep_untouched(self.stash)
        if self.stash:
            self.stash = Stash()
        if self.training.process_group is not None:
            self.had_grads = any_grad(params.stepped)
        self.scaled, self.state = None, State.UNSCALED
        return found_inf

    def can_continue(self, new: Pass) -> bool:
        """Whether the pass may accumulate in place in what delayed passes have left."""
        old = self.scaled
        if old is None or old is not new.ledgers[0].scaled or set(old.ledgers) != set(new.ledgers):
            return False
        static = new.scaler.static
        if old.scaler is not new.scaler and (static is None or static != old.scale):
            return False
        return self.fused is None or self.state is State.DELAYED or self.fused.can_continue()

    def unscale_delayed(self, *, check: bool = True) -> None:
        """Unscale what delayed passes have left; ``check`` what a fused step was to read scaled."""
        scaled = self.scaled
        if scaled is None or self.state is State.OPEN:
            return
        fused = self.fused if self.state is State.FOR_STEP else None
        if fused is not None and check:
            fused.check()
        for ledger in scaled.ledgers:
            ledger.is_unreduced |= not scaled.synchronised
        scaled.unscale(also=None if fused is None else fused.found_inf)
        if fused is not None:
            fused.apply_clip()

    # -- what the step, clipping and readers need ----------------------------------------------

    def collect(self) -> None:
        """Bring every gradient to where the optimizer looks for it, unscaled."""
        shared = self.training.shared
        if self.fused is not None and self.scaled is None:
            self.fused.give_zeros()
        for ledger in self.with_co_owners() if shared else (self,):
            if ledger.scaled is not None:
                ledger.unscale_delayed()
        params = self.params
        params.compare_groups()
        if params.weights:
            params.reconcile(compare=not self.steps)
            if params.take_new(shared):
                self._warn(_EDITED)

    def _warn(self, text: str) -> None:
        """Warn once; of what the caller of ``scale_loss``, ``step`` or clipping has done."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=stacklevel())

    def warn_of_scaled(self) -> None:
        """Warn if the program may read gradients in a block, where they are scaled."""
        if self.training.properties.loss_scale != 1.0 and any_grad(self.params.targets):
            self._warn(_SCALED)

    def after_step(
        self, *, is_taken: bool, is_written: bool = False, inside: InsideStep | None = None
    ) -> None:
        """Write the masters to the model, unless the step was skipped or has done so itself.

        ``inside`` has watched code of the program in it. Free the masters' gradients in any case:
        ``model.zero_grad()`` cannot reach them.
        """
        params = self.params
        self.is_unreduced = False
        self.is_captured = None
        self.steps += 1
        self.stepped_in = threading.get_ident()
        if inside is not None:
            inside.finish()
            if params.drop_cleared():
                self._warn(_EDITED)
        elif is_written:
            params.record()
        elif is_taken and params.weights:
            params.write()
        if params.weights:
            params.free_grads(self.training.shared, id(self))

    def clear(self, *, set_to_none: bool) -> None:
        """Forget all gradients, of which the optimizer has cleared its own."""
        self.began, self.scaled_elsewhere = self.began + 1, []
        if self.stash:
            self.stash = Stash()
        self.passes.clear()
        if self.left.passes:
            self.left = Left()
        self.is_unreduced = False
        if self.fused is not None:
            self.fused.give_zeros()
        if self.params.weights:
            self.params.zero_grad(set_to_none=set_to_none)

    def take_for_step(self) -> ScaledStep | None:
        """What a fused step reads, and ``UNSCALED`` from now on; ``None`` where it reads grads.

        Hooks before the step see gradients unscaled, and so does the step then.
        """
        scaled, fused = self.scaled, self.fused
        if self.params.has_pre_hooks():
            self.unscale_delayed()
        if scaled is None or fused is None or self.state is not State.FOR_STEP:
            return None
        options, found_inf = fused.options_of_step(compare=not self.steps)
        self.scaled, self.state = None, State.UNSCALED
        self.params.clear_before_next_forward()
        if found_inf is not None:
            scaled.is_final = True  # the gradients were read just now
            scaled.note_flag(agreement.agree_(found_inf, scaled.ledgers))
        return options
