"""Two mistakes that train in silence, each of which one warning names.

A static loss scale skips no step, so one that is too large writes inf into the weights. And a
program with a dynamic scale that never enters a ``scale_loss`` block trains float16 gradients that
nothing has scaled.

The second is seen from the model's outputs: until the first block of a training, a backward that
reaches one of them while no block is open puts hooks on two weights of each optimizer, and if
these gradients are then stepped, it was the mistake. Silent are a step before the first backward,
gradients that are set by hand, received, or taken by ``torch.autograd.grad``, an optimizer of a
model without 16-bit operations, and ``GradScaler``. :func:`is_outside` also says to ``apex check``
what counts as outside.
"""

from __future__ import annotations

import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from apex._compat import private
from apex._compat.program import stacklevel
from apex.amp.gradients.tensors import stored_values
from apex.ops import _runtime
from apex.ops.lists.tensor_lists import local

EACH, FIRST = 16, 8  # blocks that are looked at: the first ones, later one of so many
_STATIC = (
    "amp: gradients are inf or NaN while the loss is finite, and a static loss scale ({scale:g}) "
    "skips no step, so the weights become inf or NaN. If the scale is too large, use "
    "loss_scale='dynamic' or a smaller number (128.0). Otherwise apex debug finds the operation."
)
_OUTSIDE = (
    "amp: the optimizer steps with gradients of float16 operations, but the program entered no "
    "amp.scale_loss block. Without the loss scale ({scale:g}) small gradients become zero. Call "
    "backward in a block: with amp.scale_loss(loss, optimizer) as scaled_loss: "
    "scaled_loss.backward(). Or use opt_level='O4' or 'O5', which need no loss scale."
)


def is_outside(training: Any, ledger: Any) -> bool:
    """Whether a backward now writes gradients of float16 that the training wants scaled, and none.

    Args:
        training: Of the optimizer.
        ledger: The optimizer's gradients.
    """
    properties = training.properties
    is_low = properties.casts_anything and properties.half_dtype == torch.float16
    return is_low and _scales(training) and ledger.state.name == "UNSCALED"


def _scales(training: Any) -> bool:
    return any([one.dynamic or one.static != 1.0 for one in training.loss_scalers])


@dataclass(eq=False)
class Unnoticed:
    """What is known of both mistakes in one training.

    Attributes:
        blocks: How many blocks of a static scale there were.
        sent: A flag that is on its way from the device.
        has_told: The warnings that were given, or will not be.
        written: Weights, by id, whose gradients a backward outside of every block has written.
    """

    blocks: int = 0
    sent: Any = None
    has_told: set[str] = field(default_factory=set)
    written: dict[int, Any] = field(default_factory=dict)
    _is_low: bool | None = None
    _hooks: list[Any] = field(default_factory=list)

    # -- a static scale ------------------------------------------------------------------------

    def look_at(
        self,
        scale: float,
        loss: torch.Tensor,
        weights: Iterable[torch.Tensor],
        send: Callable[[torch.Tensor], Any],
    ) -> None:
        """Look at what a block with a static scale has left, now and then; nothing waits.

        ``send`` begins a copy from a device (:class:`apex.amp.gradients.overflow.AsyncCopy`).
        """
        if _STATIC in self.has_told or scale == 1.0:
            return
        if self.sent is not None and (values := self.sent.read()) is not None:
            self.sent = None
            self._tell_static(values[0], scale)
        self.blocks += 1
        if (self.blocks > FIRST and self.blocks % EACH) or self.sent is not None:
            return
        grads = [stored_values(local(one.grad)) for one in weights if one.grad is not None]
        grads = [one.detach() for one in grads if one.numel()]
        if not grads or _runtime.capturing():
            return
        device = grads[0].device
        sizes = [torch.linalg.vector_norm(one, float("inf")).float() for one in (*grads, loss)]
        every = torch.stack([one.to(device, non_blocking=True) for one in sizes]).isfinite()
        flag = every[-1] & ~every[:-1].all()
        if device.type == "cpu":
            self._tell_static(float(flag), scale)
            return
        copy = send(flag.float().reshape(1))
        self.sent = copy if copy.arrives else None

    def _tell_static(self, flag: float, scale: float) -> None:
        if flag:
            self.has_told.add(_STATIC)
            warnings.warn(_STATIC.format(scale=scale), stacklevel=stacklevel())

    # -- no block ------------------------------------------------------------------------------

    def watch(self, training: Any, output: Any) -> None:
        """Watch for a backward that reaches what a model has given, before the first block."""
        if _OUTSIDE in self.has_told or not training.is_dynamic() or self._is_low is False:
            return
        if isinstance(output, (tuple, list)):
            tensors = [*output]
        else:
            tensors = [*output.values()] if isinstance(output, dict) else [output]
        for one in tensors:
            if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                if self._is_low is None:
                    self._is_low = one.dtype == torch.float16 or has_casts(one.grad_fn)
                if self._is_low:
                    one.grad_fn.register_prehook(partial(_reached, weakref.ref(training)))

    def reached(self, training: Any) -> None:
        """Have two weights of each optimizer say whether this backward writes their gradients."""
        self._remove_hooks()
        for ledger in training.ledgers() if not training.last_pass else ():
            weights = [one for one in ledger.params.targets if one.requires_grad]
            for weight in weights[:1] + weights[1:][-1:] if is_outside(training, ledger) else ():
                note = partial(_wrote, weakref.ref(self), private.current_graph_task_id())
                self._hooks.append(weight.register_post_accumulate_grad_hook(note))

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def before_step(self, training: Any, weights: Iterable[torch.Tensor]) -> None:
        """Warn if an optimizer steps gradients that a backward outside of every block has left."""
        self._remove_hooks()
        written, self.written = self.written, {}
        kept = [one for one in weights if id(one) in written and one.grad is not None]
        if training.last_pass or not any([one.grad is written[id(one)]() for one in kept]):
            return
        self.has_told.add(_OUTSIDE)
        if not _is_in_grad_scaler():
            scale = training.loss_scalers[0].loss_scale()
            warnings.warn(_OUTSIDE.format(scale=scale), stacklevel=stacklevel())


def _reached(training: weakref.ref[Any], gradients: Any) -> None:
    if (now := training()) is not None and not now.last_pass:
        now.unnoticed.reached(now)


def _wrote(unnoticed: weakref.ref[Unnoticed], task: int, weight: torch.Tensor) -> None:
    now = unnoticed()
    if now is not None and weight.grad is not None and private.current_graph_task_id() == task:
        now.written[id(weight)] = weakref.ref(weight.grad)


def has_casts(node: Any) -> bool:
    """Whether a tensor was cast: at O1 weights are, where an operation computes in float16."""
    nodes, seen = [node] if node else [], {node}
    for one in nodes:  # which grows
        if one.name().startswith("ToCopyBackward"):
            return True
        following = {x for x, _ in one.next_functions if x is not None} - seen
        seen |= following
        nodes += following
    return False


def _is_in_grad_scaler() -> bool:
    """Whether a GradScaler steps, which has scaled the loss."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
    return any([file.endswith("grad_scaler.py") for file in files])
