"""``FP16_Optimizer``: float32 masters and loss scaling around an optimizer, called by hand.

In the groups of the wrapped optimizer float32 masters stand for 16-bit parameters. ``backward``
leaves scaled gradients on the model's parameters. ``update_master_grads`` writes them, divided by
the scale, into the masters' ``.grad``. ``step`` rounds the masters into the model.

The original had two sets of rules, of 2018 and of 2025. These hold here:

* All gradients that are still scaled carry the present scale: where the scale changes, they are
  multiplied. So passes add up, whatever the scale did between them.
* An overflow lowers the scale when it is found, in ``update_master_grads``, and once until the
  gradients are cleared. A step that was taken counts towards growth.
* ``step``, ``clip_master_grads`` and ``inspect_master_grad_data`` call ``update_master_grads``
  themselves if a ``backward`` has left that to the program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from apex.amp import _speech
from apex.amp.casting import cpu_float16
from apex.amp.gradients.tensors import write_zeros
from apex.fp16_utils import checkpoint
from apex.fp16_utils.fp16util import FP16_Module, conversion_helper, fp16_to_fp32, fp32_to_fp16
from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, check_scale
from apex.fp16_utils.masters import MasterOptimizer
from apex.multi_tensor_apply import list_functions

__all__ = ["FP16_Module", "FP16_Optimizer", "conversion_helper", "fp16_to_fp32", "fp32_to_fp16"]

MAX_OVERFLOWS = 50  # in a row, as amp.initialize(max_skipped_steps=50)


class FP16_Optimizer(MasterOptimizer):
    """Step float32 masters of 16-bit parameters, with a scaled loss.

    Args:
        init_optimizer: The optimizer to wrap. Its groups change in place. float16 and bfloat16
            parameters get masters; float32 and float64 parameters do not. The optimizer's state
            moves to the masters.
        static_loss_scale: A loss scale that never changes. No step is skipped.
        dynamic_loss_scale: Adjust the scale during the training, and skip steps that overflow.
        dynamic_loss_args: Options of the dynamic scale: ``init_scale`` (2**16 by default),
            ``scale_factor`` (2), ``scale_window`` (2000), ``min_loss_scale`` (``None``) and
            ``max_loss_scale`` (2**24, or ``init_scale`` if that is larger). See
            :class:`~apex.fp16_utils.DynamicLossScaler`.
        verbose: Log the number of parameters with masters, and each overflow.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer, a parameter is not a real floating
            tensor or is lazy, or an option is unknown.
        ValueError: A number is out of range, or the groups contain a parameter twice.
        RuntimeError: ``init_optimizer`` went through ``amp.initialize``.

    Attributes:
        loss_scaler: A :class:`~apex.fp16_utils.LossScaler` or ``DynamicLossScaler``.
        overflow: Whether the last ``update_master_grads`` found an inf or NaN. Always False with a
            static scale.
        fp16_groups: For each group, the list of its 16-bit parameters.
        fp32_from_fp16_groups: For each group, the list of their masters.
        fp32_from_fp32_groups: For each group, the list of parameters without masters.

    Example:
        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0, verbose=False)
        >>> loss = model(torch.ones(1, 4, dtype=torch.float16)).float().sum()
        >>> optimizer.zero_grad()
        >>> optimizer.backward(loss)
        >>> optimizer.step()
    """

    #: Defaults of ``dynamic_loss_args``.
    _dynamic_defaults: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_window": 2000,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }
    # What optimizers that an older Apex pickled whole may lack.
    verbose = first_closure_call_this_step = True
    overflow = _pending = _lowered = False
    _skipped = 0
    #: Whether gradients are checked with a static scale too.
    _always_checks = False
    # What subclasses with a step of their own hand to multi_tensor_applier, as in the original.
    multi_tensor_scale = staticmethod(list_functions.multi_tensor_scale)

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.loss_scaler = (
            self._dynamic_scaler(dynamic_loss_args or {})
            if dynamic_loss_scale
            else LossScaler(check_scale("FP16_Optimizer: static_loss_scale", static_loss_scale))
        )
        super().__init__(init_optimizer)
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self._pending = False  # whether update_master_grads has still to be called
        self._lowered = False  # whether the scale was lowered for the gradients that are there
        self._skipped = 0  # steps in a row
        halves = [param for param in self.all_fp16_params if param.dtype == torch.float16]
        cpu_float16.begin(torch.float16, {param.device.type for param in halves})
        self.maybe_print(
            f"FP16_Optimizer: {len(self.all_fp16_params)} parameters of 16 bits with float32 "
            f"masters; {len(self.all_fp32_from_fp32_params)} float32 parameters without."
        )

    @functools.cached_property
    def _dummy_overflow_buf(self) -> torch.Tensor:
        """The flag for ``multi_tensor_applier``."""
        devices = [param.device for group in self.param_groups for param in group["params"][:1]]
        return torch.zeros(1, dtype=torch.int32, device=devices[0] if devices else "cpu")

    def maybe_print(self, msg: str) -> None:
        """Log ``msg`` to the ``apex.amp`` logger, on rank 0 and with ``verbose`` only."""
        if self.verbose:
            _speech.say(msg)

    # -- the loss scale ----------------------------------------------------------------------------

    def _dynamic_scaler(self, given: Mapping[str, Any]) -> LossScaler:
        allowed = inspect.signature(DynamicLossScaler).parameters
        if unknown := sorted(map(str, given.keys() - allowed)):
            raise TypeError(
                f"FP16_Optimizer: dynamic_loss_args had {', '.join(unknown)}; allowed are "
                f"{', '.join(allowed)}."
            )
        options = {**self._dynamic_defaults, **given}
        start = check_scale("dynamic_loss_args: init_scale", options["init_scale"])
        if "max_loss_scale" in self._dynamic_defaults.keys() - given.keys():
            options["max_loss_scale"] = max(options["max_loss_scale"], start)
        return DynamicLossScaler(**options)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return isinstance(self.loss_scaler, DynamicLossScaler)

    @property
    def loss_scale(self) -> float:
        """The loss scale. You can set it."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        scale = check_scale("FP16_Optimizer: loss_scale", value)
        with self._rescaling():
            self.loss_scaler.cur_scale = scale

    @contextmanager
    def _rescaling(self) -> Iterator[None]:
        """Bring all gradients that are still scaled to the scale that the block sets."""
        before = self.loss_scale
        yield
        self._rescale(self.loss_scale / before)

    def _update_scale(self, *, overflow: bool) -> None:
        with self._rescaling():
            self.loss_scaler.update_scale(overflow)

    def _scale_now(self) -> str:
        verb = "reducing loss scale to" if self.dynamic_loss_scale else "static loss scale is"
        return f"{verb} {self.loss_scale}"

    # -- gradients ---------------------------------------------------------------------------------

    def zero_grad(  # type: ignore[override]  # the original's signature
        self, set_grads_to_None: bool = False, *, set_to_none: bool | None = None
    ) -> None:
        """Clear the gradients of the masters and of the model's parameters.

        Args:
            set_grads_to_None: Free the gradients instead of writing zeros.
            set_to_none: torch's name of this option.
        """
        frees = set_grads_to_None if set_to_none is None else set_to_none
        stepped = [param for group in self.param_groups for param in group["params"]]
        for param in (*stepped, *self.all_fp16_params):
            if frees or param.grad is None:
                param.grad = None
            else:
                write_zeros(param.grad)
        self._pending = self._lowered = False

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Backpropagate ``loss`` times the loss scale. Gradients of several calls add up.

        Args:
            loss: A tensor with one element. It is scaled in float32.
            update_master_grads: Copy the gradients to the masters at once. With False the scaled
                gradients stay on the model's parameters until :meth:`update_master_grads`.
            retain_graph: Keep the graph for another backward pass.
        """
        self._add_new()
        if self._lowered:  # for these gradients, unless they were cleared since
            params = (*self.all_fp16_params, *self.all_fp32_from_fp32_params)
            self._lowered = self.loss_scaler.has_overflow(params)
        self._scale_unscaled(self.loss_scale)
        self._pending = True
        self.loss_scaler.backward(loss, retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Write the model's gradients into the masters, unscaled, and check them.

        Gradients of parameters without masters are unscaled in place, only once however often you
        call it. With a dynamic scale, an inf or NaN sets ``overflow`` and lowers the scale.
        """
        self._add_new()
        self._pending = False
        check = self.dynamic_loss_scale or self._always_checks
        self.overflow = self._unscale(self.loss_scale, check=check)
        if self.overflow and not self._lowered:
            self._lowered = True
            self._update_scale(overflow=True)

    def _update_pending(self) -> None:
        if self._pending:
            self.update_master_grads()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients that the wrapped optimizer will use by their total norm.

        Args:
            max_norm: Largest norm allowed.
            norm_type: Which p-norm; may be ``inf``.

        Returns:
            The norm before clipping, as a tensor; -1 after an overflow, when nothing is clipped.
        """
        self._update_pending()
        if self.overflow:
            return -1
        params = [param for group in self.param_groups for param in group["params"]]
        if all(param.grad is None for param in params):
            return torch.zeros((), device="cpu", dtype=torch.float32)  # torch's follows its default
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the gradients that the wrapped optimizer will use, a list for each group.

        A parameter without a gradient has ``None``. After an overflow the result is ``None``.
        """
        self._update_pending()
        if self.overflow:
            _speech.say(
                "FP16_Optimizer: gradients contain inf or nan, so there are no gradients to "
                "inspect."
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    # -- the step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model. After an overflow, skip the step.

        Args:
            closure: Function that calls ``zero_grad`` and ``backward`` of this object and returns
                the loss. It is called again as long as there is an overflow.

        Returns:
            What the wrapped ``step`` returned; ``None`` if the step was skipped.

        Raises:
            RuntimeError: There were 50 overflows in a row, or you called ``loss.backward()``
                instead of ``backward(loss)``.
        """
        if closure is None:
            self._update_pending()
            if self.overflow:
                self._skip()
                return None
            self._refuse_missed()
        self._pairs.reconcile()
        try:
            result = self.optim.step(*([] if closure is None else [self._evaluator(closure)]))
        finally:
            self._pairs.write()
            self.first_closure_call_this_step = True
        self._skipped = 0
        self._update_scale(overflow=False)
        return result

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped >= MAX_OVERFLOWS:
            raise RuntimeError(self._too_many())
        self.maybe_print(f"Gradient overflow.  Skipping step, {self._scale_now()}")
        # What a scheduler on the wrapped optimizer looks for before it warns.
        self.optim._opt_called = True

    def _refuse_missed(self) -> None:
        both = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        if any(param.grad is not None and master.grad is None for param, master in both):
            raise RuntimeError(
                "FP16_Optimizer: step() was called before gradients were copied to the masters. "
                "Call optimizer.backward(loss) instead of loss.backward(); or scale the loss "
                "by optimizer.loss_scale and call optimizer.update_master_grads() afterwards."
            )

    def _evaluator(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._pairs.write()  # the wrapped optimizer has moved the masters
            self.first_closure_call_this_step = False
            for _ in range(MAX_OVERFLOWS):
                loss = closure()
                self._update_pending()
                if not self.overflow:
                    return loss
                self.maybe_print(f"Gradient overflow.  Calling closure again, {self._scale_now()}")
            raise RuntimeError(self._too_many())

        return evaluate

    def _too_many(self) -> str:
        return (
            f"FP16_Optimizer: gradients were not finite {MAX_OVERFLOWS} times in a row, down to a "
            f"loss scale of {self.loss_scale}. Look for inf and nan in the loss itself with "
            "torch.autograd.set_detect_anomaly(True)."
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs besides the model's ``state_dict``.

        Its tensors are not copies.
        """
        return {
            "loss_scaler": checkpoint.scaler_to_dict(self.loss_scaler),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optim.state_dict(),
            "fp32_from_fp16": checkpoint.detached(self.fp32_from_fp16_groups),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` of apex, or of NVIDIA's Apex (2018 to 2025), returned.

        Load the model's weights before or afterwards. The scaler and the masters are copied.

        Raises:
            TypeError: The class of the saved scaler is unknown.
            ValueError: Keys, groups or shapes do not match. Nothing changes.
        """
        self._add_new()
        saved = self._read(state_dict)
        self.optim.load_state_dict(saved.optimizer)
        saved.copy_masters()
        with self._rescaling():
            self.loss_scaler = saved.scaler
        vars(self).update(saved.attributes)

    def _read(self, state_dict: dict[str, Any]) -> checkpoint.Saved:
        return checkpoint.read(state_dict, self)
