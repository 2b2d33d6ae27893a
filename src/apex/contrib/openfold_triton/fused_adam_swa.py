"""``FusedAdamSWA``: one launch steps Adam, rounds the weights into the model and averages them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops._check import ArgumentError
from apex.ops.lists.storage import StepOptions
from apex.ops.lists.tensor_lists import Scalar, are_uniform
from apex.ops.updates.adam_swa import AdamSwa, adam_swa_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._step import Launch

_COMPUTE = (torch.float32, torch.bfloat16, torch.float16)


class AdamMathType(enum.Enum):
    """The kind of weight decay: decoupled with ``ApexAdamW``, an L2 penalty with the others.

    In the original ``ApexAdam`` and ``PyTorchAdam`` differ in the order of roots and divisions.
    Here both use the same formula.
    """

    ApexAdam = 0
    ApexAdamW = 1
    PyTorchAdam = 2


class FusedAdamSWA(FusedOptimizer):
    """Adam on float32 weights, which are rounded into the model, and averaged (SWA).

    The docstring of :mod:`apex.ops.updates.adam_swa` has the formula. The gradients are those of
    ``compute_params``. A parameter without a gradient does not change. A step is one launch.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: The float32 weights, or groups of them.
        compute_params: The parameters of the model, in the order of the weights, in float32,
            bfloat16 or float16. A step writes the rounded weights into them.
        swa_params: The float32 averages, in the same order.
        swa_decay_rate: Weight of the old average in the new one, from 0 to 1.
        adam_math_mode: Kind of weight decay.
        capturable: Not supported.
        master_weights: Not supported; ``params`` are the masters.

    Raises:
        ValueError: The lists differ in lengths, shapes, dtypes or devices, a tensor is not
            contiguous, or a number is out of range.
        NotImplementedError: You passed ``amsgrad``, ``capturable`` or ``master_weights``.

    Attributes:
        compute_param_groups: List of one group with ``compute_params``.
        swa_param_groups: List of one group with ``swa_params`` and ``"n_averaged"``, the number of
            averaged steps. The first step sets the average to the weight.

    Example:
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> weights = [param.detach().float() for param in model.parameters()]
        >>> averages = [weight.clone() for weight in weights]
        >>> optimizer = FusedAdamSWA(weights, [*model.parameters()], averages, 0.999)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
        >>> optimizer.step(grad_clip_scale=0.5)
    """

    slots = ("exp_avg", "exp_avg_sq")
    _algorithm, _numbers = staticmethod(adam_swa_), AdamSwa
    _not_in_torch = ("bias_correction",)
    _clip_scale: Scalar | None = None

    def __init__(  # noqa: PLR0913 - the original's signature
        self,
        params: Any,
        compute_params: Iterable[torch.Tensor],
        swa_params: Iterable[torch.Tensor],
        swa_decay_rate: float,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_math_mode: AdamMathType = AdamMathType.PyTorchAdam,
        weight_decay: float | torch.Tensor = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        asked = {"amsgrad": amsgrad, "capturable": capturable, "master_weights": master_weights}
        for name, value in asked.items():
            if value:
                raise NotImplementedError(
                    f"FusedAdamSWA: {name}={value!r} is not supported; leave it out. Use "
                    "apex.optimizers.FusedAdam for capturable and master_weights."
                )
        if not isinstance(adam_math_mode, AdamMathType) or not 0 <= swa_decay_rate <= 1:
            raise ArgumentError(
                f"FusedAdamSWA: adam_math_mode is {adam_math_mode!r} and swa_decay_rate "
                f"{swa_decay_rate!r}. Pass an AdamMathType, and a number from 0 to 1."
            )
        self.adam_math_mode, self.swa_decay_rate = adam_math_mode, swa_decay_rate
        self.compute_param_groups = [{"params": [*compute_params]}]
        self.swa_param_groups: list[dict[str, Any]] = [{"params": [*swa_params], "n_averaged": 0}]
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self._check_lists()

    @classmethod
    def from_optim(
        cls,
        adam_optimizer: torch.optim.Adam,
        fp32_params: Iterable[torch.Tensor],
        bf16_params: Iterable[torch.Tensor],
        swa_params: Iterable[torch.Tensor],
        swa_decay_rate: float,
    ) -> FusedAdamSWA:
        """Continue from a ``torch.optim.Adam`` or ``AdamW`` with its options, state and step.

        Raises:
            ValueError: The optimizer has several groups, or options that this class lacks.
        """
        if len(adam_optimizer.param_groups) != 1:
            raise ArgumentError(
                f"FusedAdamSWA.from_optim: the optimizer has {len(adam_optimizer.param_groups)} "
                "groups; pass one with one group."
            )
        group = adam_optimizer.param_groups[0]
        decoupled = group.get("decoupled_weight_decay", False)
        mode = AdamMathType.ApexAdamW if decoupled else AdamMathType.PyTorchAdam
        made = cls(fp32_params, bf16_params, swa_params, swa_decay_rate, adam_math_mode=mode)
        made.load_state_dict(adam_optimizer.state_dict())
        return made

    # -- what the update takes beside the numbers of a group ---------------------------------------

    @property
    def adam_w_mode(self) -> bool:
        """Whether the weight decay is decoupled."""
        return self.adam_math_mode is AdamMathType.ApexAdamW

    @property
    def share(self) -> float:
        """What a weight enters its average by."""
        return 1 - self.swa_decay_rate

    @property
    def is_first(self) -> bool:
        """Whether the next step makes the averages."""
        return not self.swa_param_groups[0]["n_averaged"]

    # -- the lists ---------------------------------------------------------------------------------

    def _three_lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        params = [*chain.from_iterable(group["params"] for group in self.param_groups)]
        return params, self.compute_param_groups[0]["params"], self.swa_param_groups[0]["params"]

    def _check_lists(self) -> None:
        """Raise ``ValueError`` if the three lists do not fit together."""
        params, computes, averages = self._three_lists()
        named = {"compute_params": (computes, _COMPUTE), "swa_params": (averages, (torch.float32,))}
        named["params"] = params, (torch.float32,)
        for name, (tensors, dtypes) in named.items():
            if len(tensors) != len(params):
                raise ArgumentError(
                    f"FusedAdamSWA: {len(params)} params and {len(tensors)} {name}; pass one for "
                    "each."
                )
            for number, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
                like = tensor.shape, tensor.device
                fits = like == (param.shape, param.device) and tensor.dtype in dtypes
                if not (fits and tensor.is_contiguous()):
                    raise ArgumentError(
                        f"FusedAdamSWA: {name}[{number}] is {tensor.dtype}, {[*tensor.shape]} on "
                        f"{tensor.device} with strides {[*tensor.stride()]}. Pass a contiguous "
                        f"{' or '.join(map(str, dtypes))} of shape {[*param.shape]} on "
                        f"{param.device}, as params[{number}] is."
                    )

    # -- the step ----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of ``compute_params``."""
        super().zero_grad(set_to_none)
        grads = [x.grad for x in self._three_lists()[1] if x.grad is not None]
        if grads and not set_to_none:
            private.foreach_zero_([grad.detach_() for grad in grads])
        for tensor in self._three_lists()[1] if set_to_none else ():
            tensor.grad = None

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_clip_scale: Scalar | None = None,
        **historic: Any,
    ) -> Any:
        """Take one step.

        Args:
            closure: Function that evaluates the loss again.
            grad_clip_scale: Factor for the gradients, such as a clipping coefficient. A tensor of
                one element is read on its device.
            **historic: As in the base class.
        """
        self._clip_scale = grad_clip_scale
        return self._stepped(closure, historic)

    @_runtime.not_compiled
    def step_scaled(
        self,
        factor: Scalar = 1.0,
        noop: torch.Tensor | None = None,
        *,
        write_grads: bool = False,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Take one step on gradients that are still scaled, see the base.

        The host reads ``noop``: it has to know which average is the first.

        Raises:
            RuntimeError: ``copies`` or ``grads``, of ``amp.initialize``: this optimizer has masters
                of its own.
        """
        if copies or grads:
            raise RuntimeError(
                "FusedAdamSWA already has float32 weights besides those of the model. Leave it out "
                "of amp.initialize, and pass the scale of the gradients to "
                "step(grad_clip_scale=...)."
            )
        clip, self._clip_scale = self._clip_scale, None
        if noop is not None and noop.item():
            return
        params, computes, averages = self._three_lists()
        if not are_uniform([params, averages]):
            self._check_lists()
        pairs = [*zip(params, computes, strict=True)]
        super().step_scaled(
            factor if clip is None else factor * clip,
            write_grads=write_grads,
            copies={param: x for param, x in pairs if x is not param},
            grads={param: x.grad for param, x in pairs},  # type: ignore[misc]
        )
        self.swa_param_groups[0]["n_averaged"] += 1

    def _update(self, group: dict[str, Any], launch: Launch, options: StepOptions) -> Any:
        params, _, averages = self._three_lists()
        of = dict(zip(params, averages, strict=True))
        columns = [*launch.columns, [of[param] for param in launch.params]]
        return super()._update(group, launch._replace(columns=columns), options)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with ``"n_averaged"`` in its first group."""
        saved = super().state_dict()
        saved["param_groups"][0]["n_averaged"] = self.swa_param_groups[0]["n_averaged"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also of ``torch.optim.Adam``, which leaves ``"n_averaged"`` unchanged."""
        super().load_state_dict(state_dict)
        groups: Sequence[dict[str, Any]] = self.param_groups
        count = groups[0].pop("n_averaged", self.swa_param_groups[0]["n_averaged"])
        self.swa_param_groups[0]["n_averaged"] = count
