"""``FusedAdam``: Adam and AdamW in one launch, with masters, storage modes and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex.multi_tensor_apply import list_functions
from apex.ops.updates.adam import Adam, adam_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._checkpoint import TORCH_ONLY
from apex.optimizers._checks import HALF
from apex.optimizers._lost import PLAIN_BY_DEFAULT


class FusedAdam(FusedOptimizer):
    """Adam, or AdamW with ``adam_w_mode`` (the default), in one launch for all parameters.

    Drop-in for ``torch.optim.AdamW``, and for ``torch.optim.Adam`` with ``adam_w_mode=False``. The
    docstring of :mod:`apex.ops.updates.adam` has the formula. Moments of 16-bit parameters are
    float32. Steps are counted per group.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups.
        adam_w_mode: Decoupled weight decay (AdamW) instead of an L2 penalty (Adam).
        capturable: Keep ``lr`` and ``step`` on the device, so that a CUDA graph can replay a step.
            With torch's ``GradScaler`` the step then also unscales, and skips on an overflow.
        master_weights: Keep float32 masters of 16-bit parameters, made at the first step. Needs
            ``capturable``.
        max_grad_norm: Largest norm of all gradients together; 0 turns clipping off.
        eps_inside_sqrt: Not supported. It exists because older scripts pass ``False``.
        use_mt: Has no effect: one launch always steps all tensors.
        grad_averaging: Not supported; an option of FusedLAMB and FusedNovoGrad.

    Raises:
        RuntimeError: You passed ``master_weights`` without ``capturable``, or ``eps_inside_sqrt``.
        TypeError: You passed ``grad_averaging``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    slots = ("exp_avg", "exp_avg_sq")
    _algorithm, _numbers = staticmethod(adam_), Adam
    adam_w_mode, eps_inside_sqrt, use_mt, max_grad_norm = True, False, False, 0.0
    capturable = master_weights = False
    grad_averaging: bool | None = None
    _not_in_torch = ("bias_correction",)
    _takes_arguments = " apex.contrib.optimizers.FusedAdam still accepts them."
    # Subclasses with a step of their own call these, as in the original.
    multi_tensor_adam = staticmethod(list_functions.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(list_functions.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(
        list_functions.multi_tensor_adam_capturable_master
    )

    def __init__(  # noqa: PLR0913 - the original's signature
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float | torch.Tensor = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        storage: str = PLAIN_BY_DEFAULT,
        max_grad_norm: float = 0.0,
        eps_inside_sqrt: bool = False,
        use_mt: bool = False,
        state: str = "plain",
        grad_averaging: bool | None = None,
    ) -> None:
        if grad_averaging is not None:
            raise TypeError(
                f"FusedAdam has no grad_averaging={grad_averaging!r}: a gradient always enters the "
                "first moment with the factor 1 - beta1. Leave it out, or use FusedLAMB or "
                "FusedNovoGrad, which have it."
            )
        if eps_inside_sqrt:
            raise RuntimeError(
                "FusedAdam does not support eps_inside_sqrt=True. Use "
                "apex.contrib.optimizers.FusedAdam, which does."
            )
        if master_weights and not capturable:
            raise RuntimeError(
                "Master weights is currently only supported with the capturable version. Pass "
                "capturable=True too."
            )
        if master_weights and storage != "plain":
            raise ValueError(
                f'FusedAdam: master_weights=True needs storage="plain", not {storage!r}. Both keep '
                "the precision that 16 bits lose, so use only one."
            )
        self._check_numbers({"max_grad_norm": max_grad_norm})
        self.adam_w_mode = bool(adam_w_mode)
        self.eps_inside_sqrt = False
        self.use_mt = use_mt
        self.max_grad_norm = max_grad_norm
        self.capturable = capturable
        self._step_supports_amp_scaling = capturable  # a graph cannot wait for GradScaler's flag
        self.master_weights = master_weights
        if master_weights:
            self._mastered = frozenset(HALF)
        if capturable and not isinstance(lr, torch.Tensor):
            lr = torch.tensor(lr, dtype=torch.float32, device="cpu")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, amsgrad=amsgrad,
            state=state,
        )  # fmt: skip

    @property
    def _on_device(self) -> bool:  # type: ignore[override]
        return self.capturable

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "decoupled_weight_decay": self.adam_w_mode}  # torch's name

    def _restore(self, loaded: dict[str, Any]) -> None:
        super()._restore(loaded)
        for state in self.state.values() if not self.master_weights else ():
            if isinstance(state, dict):  # else the program's own
                state.pop("master_param", None)

    @property
    def param_groups_master(self) -> list[dict[str, Any]] | None:
        """The masters by group, as in the original; ``None`` without ``master_weights``.

        Reading this before the first step makes the masters. If you write a weight later, its
        master is updated.
        """
        if not self.master_weights:
            return None
        self._follow_written()
        return [
            {"params": [self._master_or(param) for param in group["params"]]}
            for group in self.param_groups
        ]

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        **historic: Any,
    ) -> Any:
        """Take one step.

        All arguments except ``closure`` and ``grad_scaler`` raise ``RuntimeError``. Use
        ``apex.contrib.optimizers.FusedAdam`` for a script that passes them.
        """
        old = {"grads": grads, "output_params": output_params, "scale": scale}
        return self._stepped(closure, {**old, "grad_norms": grad_norms, **historic})

    def _largest_norm(self) -> float:
        return float(self.max_grad_norm or 0.0)

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for group in state_dict["param_groups"]:
            decoupled = group.get("decoupled_weight_decay", self.adam_w_mode)
            if bool(decoupled) != self.adam_w_mode and group["weight_decay"]:
                raise ValueError(
                    f"FusedAdam: the state was saved with decoupled_weight_decay={decoupled}, by "
                    f"torch.optim.{'AdamW' if decoupled else 'Adam'}, and this optimizer has "
                    f"adam_w_mode={self.adam_w_mode}, which applies the weight decay in another "
                    f"way. Make the optimizer with adam_w_mode={bool(decoupled)}."
                )
        return super()._from_torch(state_dict)

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        group.pop("bias_correction")
        of_adam = {"amsgrad": False, "capturable": False}
        return {**group, **TORCH_ONLY, **of_adam, "decoupled_weight_decay": self.adam_w_mode}
