"""``FP16_Optimizer``: float32 masters and loss scaling around an optimizer, called by hand.

    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), 1e-3), dynamic_loss_scale=True)
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()

The one idea: in the groups of the wrapped optimizer float32 masters stand in the places of 16-bit
parameters, and the wrapped optimizer knows of nothing else. ``backward`` leaves scaled gradients on
the model's parameters. ``update_master_grads`` writes them, divided by the scale, into the masters'
``.grad``. ``step`` rounds the masters into the model.

The original had two sets of rules, of 2018 and of 2025. These hold here:

* All gradients that are still scaled carry the present scale: where the scale changes, they are
  multiplied. So passes add up, whatever the scale did between them.
* An overflow lowers the scale when it is found, in ``update_master_grads``, and once until the
  gradients are cleared. A step that was taken counts towards growth.
* ``step``, ``clip_master_grads`` and ``inspect_master_grad_data`` call ``update_master_grads``
  themselves if a ``backward`` has left that to the program.

Not to be combined with ``amp.initialize``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from apex._wrapped_optimizer import WrappedOptimizer
from apex.amp import _speech
from apex.amp.casting import cpu_float16
from apex.fp16_utils import checkpoint
from apex.fp16_utils.fp16_module import FP16_Module, conversion_helper, fp16_to_fp32, fp32_to_fp16
from apex.fp16_utils.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    check_scale,
    dynamic_scaler,
    scaled,
)
from apex.fp16_utils.masters import Groups, MasterGroups, check_optimizer, load

__all__ = ["FP16_Module", "FP16_Optimizer", "conversion_helper", "fp16_to_fp32", "fp32_to_fp16"]

MAX_OVERFLOWS = 50  # in a row, as amp.initialize(max_skipped_steps=50)


class FP16_Optimizer(WrappedOptimizer):
    """Step float32 masters of 16-bit parameters, with a scaled loss.

    Args:
        init_optimizer: The optimizer to wrap; its groups are changed in place. Its parameters may
            be float16 and bfloat16, which get masters, and float32 and float64, which do not.
            State that it has already moves to the masters.
        static_loss_scale: The loss scale, which then never changes, and no step is skipped.
        dynamic_loss_scale: Find the scale while training, and skip steps after an overflow.
        dynamic_loss_args: Options of the dynamic scale, see
            :class:`~apex.fp16_utils.DynamicLossScaler`: ``init_scale`` (2**16 here),
            ``scale_factor`` (2), ``scale_window`` (2000 here), ``min_loss_scale`` (``None``),
            ``max_loss_scale`` (2**24 here, or ``init_scale`` if that is larger).
        verbose: Say how many parameters have masters, and each overflow.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer, a parameter is not a real floating
            tensor or is lazy, or an option is unknown.
        ValueError: A number is out of range, or a parameter is in the groups twice.
        RuntimeError: ``init_optimizer`` went through ``amp.initialize``.

    Attributes:
        loss_scaler: A :class:`~apex.fp16_utils.LossScaler` or ``DynamicLossScaler``.
        overflow: Whether the last ``update_master_grads`` found inf or nan. Never with a static
            scale.

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
        "scale_factor": 2.0,
        "scale_window": 2000,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }
    #: Whether gradients are checked with a static scale too.
    _always_checks = False

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        check_optimizer(init_optimizer)
        super().__init__(init_optimizer)
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = (
            dynamic_scaler(self._dynamic_defaults, dynamic_loss_args or {})
            if dynamic_loss_scale
            else LossScaler(check_scale("FP16_Optimizer: static_loss_scale", static_loss_scale))
        )
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self._pending = False  # whether update_master_grads has still to be called
        self._lowered = False  # whether the scale was lowered for the gradients that are there
        self._skipped = 0  # steps in a row
        self._params = MasterGroups([], [], [])
        self._params.add_new(init_optimizer)
        halves = [param for param in self.all_fp16_params if param.dtype == torch.float16]
        cpu_float16.begin(torch.float16, {param.device.type for param in halves})
        self.maybe_print(
            f"FP16_Optimizer: {len(self.all_fp16_params)} parameters of 16 bits with float32 "
            f"masters; {len(self.all_fp32_from_fp32_params)} others need none."
        )

    def maybe_print(self, msg: str) -> None:
        """Say ``msg`` on rank 0 if ``verbose``, through the ``apex.amp`` logger."""
        if self.verbose:
            _speech.say(msg)

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self.optim

    # -- parameters and masters --------------------------------------------------------------------

    @property
    def fp16_groups(self) -> Groups:
        """The 16-bit parameters, a list for each group."""
        return self._params.halves

    @property
    def fp32_from_fp16_groups(self) -> Groups:
        """Their masters, a list for each group."""
        return self._params.masters

    @property
    def fp32_from_fp32_groups(self) -> Groups:
        """The parameters without masters, a list for each group."""
        return self._params.wide

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The 16-bit parameters of all groups."""
        return self._params.all_halves

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters of all groups."""
        return self._params.all_masters

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The parameters without masters of all groups."""
        return self._params.all_wide

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its 16-bit parameters get masters."""
        self.optim.add_param_group(param_group)
        try:
            self._params.add_new(self.optim)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # -- the loss scale ----------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by; may be written."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        scale, before = check_scale("FP16_Optimizer: loss_scale", value), self.loss_scale
        self.loss_scaler.cur_scale = scale
        self._params.rescale(scale / before)

    def _set_scaler(self, scaler: LossScaler) -> None:
        self._params.rescale(scaler.loss_scale / self.loss_scale)
        self.loss_scaler = scaler
        self.dynamic_loss_scale = isinstance(scaler, DynamicLossScaler)

    def _scale_now(self) -> str:
        verb = "reducing loss scale to" if self.dynamic_loss_scale else "static loss scale is"
        return f"{verb} {self.loss_scale}"

    def _update_scale(self, *, overflow: bool) -> None:
        before = self.loss_scale
        self.loss_scaler.update_scale(overflow)
        self._params.rescale(self.loss_scale / before)

    # -- gradients ---------------------------------------------------------------------------------

    def zero_grad(  # type: ignore[override]  # the original's signature
        self, set_grads_to_None: bool = False, *, set_to_none: bool | None = None
    ) -> None:
        """Clear the gradients of the masters and of the model's parameters.

        Args:
            set_grads_to_None: Free them instead of writing zeros.
            set_to_none: torch's name for it.
        """
        frees = set_grads_to_None if set_to_none is None else set_to_none
        self._params.zero_grad(self.optim, set_to_none=frees)
        self._pending = self._lowered = False

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Backpropagate ``loss`` times the loss scale.

        Gradients of several calls add up.

        Args:
            loss: A tensor with one element; it is scaled in float32.
            update_master_grads: Bring the gradients to the masters at once. With False, they stay
                on the model's parameters, scaled, until :meth:`update_master_grads`.
            retain_graph: Keep the graph for another backward pass.
        """
        self._params.add_new(self.optim)
        if self._lowered:  # for these gradients, unless they were cleared since
            params = (*self.all_fp16_params, *self.all_fp32_from_fp32_params)
            self._lowered = self.loss_scaler.has_overflow(params)
        self._params.scale_unscaled(self.loss_scale)
        self._pending = True
        scaled(loss, self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Write the model's gradients into the masters, unscaled, and check them.

        Gradients of other parameters are unscaled in place, once, however often this is called.
        With a dynamic scale inf or nan sets ``overflow`` and lowers the scale.
        """
        self._params.add_new(self.optim)
        self._pending = False
        check = self.dynamic_loss_scale or self._always_checks
        self.overflow = self._params.unscale(self.loss_scale, check=check)
        if self.overflow and not self._lowered:
            self._lowered = True
            self._update_scale(overflow=True)

    def _update_pending(self) -> None:
        if self._pending:
            self.update_master_grads()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of all gradients that the wrapped optimizer steps on.

        Args:
            max_norm: The largest norm.
            norm_type: Which norm; may be ``inf``.

        Returns:
            The norm before, a tensor; -1 after an overflow, when nothing is clipped.
        """
        self._update_pending()
        if self.overflow:
            return -1
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """The gradients that the wrapped optimizer will step on, a list for each group.

        Returns:
            Tensors, or ``None`` where there is no gradient; after an overflow ``None`` for all.
        """
        self._update_pending()
        if self.overflow:
            _speech.say("FP16_Optimizer: gradients hold inf or nan; there are none to inspect.")
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    # -- the step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model; does nothing after an overflow.

        Args:
            closure: Calls ``zero_grad`` and ``backward`` of this object and returns the loss. It is
                called again while there is an overflow.

        Returns:
            What the wrapped ``step`` returned; ``None`` if the step was skipped.

        Raises:
            RuntimeError: There were 50 overflows in a row, or ``loss.backward()`` was called in the
                place of ``backward(loss)``.
        """
        if closure is None:
            self._update_pending()
            if self.overflow:
                self._skip()
                return None
            self._params.refuse_missed()
        self._params.pairs.reconcile()
        try:
            result = self.optim.step(*([] if closure is None else [self._evaluator(closure)]))
        finally:
            self._params.pairs.write()
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

    def _evaluator(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._params.pairs.write()  # the wrapped optimizer has moved the masters
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
            f"loss scale of {self.loss_scale}. Look for inf and nan in the loss itself, with "
            "torch.autograd.set_detect_anomaly(True)."
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs besides the model's: dicts, lists, numbers and tensors.

        As in torch's optimizers tensors are not copied.
        """
        return {
            "loss_scaler": checkpoint.scaler_to_dict(self.loss_scaler),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optim.state_dict(),
            "fp32_from_fp16": [
                [master.detach() for master in group] for group in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, also in NVIDIA's Apex of 2018 to 2025.

        The model's weights may be loaded before or after. Scaler and masters are copied.

        Raises:
            TypeError: The saved scaler is of an unknown class.
            ValueError: Keys, groups or shapes do not fit; nothing was changed.
        """
        names = ("overflow", "first_closure_call_this_step")
        wanted = ("loss_scaler", *names, "optimizer_state_dict", "fp32_from_fp16")
        checkpoint.check_keys(state_dict, wanted)
        self._params.add_new(self.optim)
        scaler = checkpoint.scaler_from(state_dict["loss_scaler"])
        masters = state_dict["fp32_from_fp16"]
        checkpoint.check_masters(masters, self.fp32_from_fp16_groups)
        inner = checkpoint.in_group_order(state_dict["optimizer_state_dict"], self)
        self.optim.load_state_dict(inner)
        load(self.fp32_from_fp16_groups, masters)
        self._set_scaler(scaler)
        self.overflow, self.first_closure_call_this_step = (bool(state_dict[n]) for n in names)

    def __getstate__(self) -> dict[str, Any]:
        groups = (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups)
        # A scheduler patches the object's step, with the object inside.
        kept = {name: value for name, value in vars(self).items() if name != "step"}
        return {**kept, "_params": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._params = MasterGroups(*state["_params"])
