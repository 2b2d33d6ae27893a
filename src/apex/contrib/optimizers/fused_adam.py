"""``FusedAdam`` as it was in 2019: per-parameter steps, clipping by norm, eps inside the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.contrib.optimizers._old_step import OldStep
from apex.ops import _runtime
from apex.ops.lists.clip import l2_norm_of_all
from apex.ops.lists.storage import StepOptions
from apex.ops.lists.tensor_lists import Scalar
from apex.ops.updates.adam import Adam, adam_
from apex.optimizers._step import GroupGrads, Launch, check_captured, scalar


class FusedAdam(OldStep):
    """AdamW with the bias corrections in the learning rate and ``eps`` beside what it corrects.

    ::

        g = grad / scale
        param -= lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step) * (m / root + decay * param)
        root = sqrt(v) + eps      or, with eps_inside_sqrt, sqrt(v + eps)

    so that weight decay is multiplied by the corrections too. Steps are counted per parameter.

    The arguments that are not below are those of :class:`~apex.optimizers._base.FusedOptimizer`.

    Args:
        params: Parameters or groups.
        eps_inside_sqrt: Add ``eps`` to the second moment instead, below the root.
        weight_decay: Decoupled weight decay; a tensor is read on its device.
        max_grad_norm: Largest norm of each group's gradients; 0 turns clipping off.
        use_mt: Of no effect: there is always one launch for many tensors.
        amp_scale_adjustment: What gradients are divided by in addition, under amp.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedAdam(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step(scale=1.0)
    """

    slots = ("exp_avg", "exp_avg_sq")
    _not_in_torch = ("bias_correction", "max_grad_norm")
    eps_inside_sqrt, eps_mode, use_mt, amp_scale_adjustment = False, 1, False, 1.0
    _factors: dict[int, Scalar]  # by the id of a group, in a step
    _counts_steps = False  # in the groups; here each parameter has its own

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float | torch.Tensor = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        self.eps_inside_sqrt = bool(eps_inside_sqrt)
        self.eps_mode = 0 if eps_inside_sqrt else 1
        self.use_mt = use_mt
        self.amp_scale_adjustment = amp_scale_adjustment
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults, amsgrad=amsgrad)

    @property
    def _joins_groups(self) -> bool:  # type: ignore[override]
        # each group is clipped by its own norm
        return not any(group["max_grad_norm"] for group in self.param_groups)

    def _prepare_step(
        self, active: Sequence[GroupGrads], factor: Scalar, noop: torch.Tensor | None
    ) -> None:
        """Find what each group's gradients are multiplied by."""
        if hasattr(self, "_amp_stash"):
            factor = factor / self.amp_scale_adjustment
        self._factors = {}
        for number, (group, _, grads) in enumerate(active):
            clip = factor
            if group["max_grad_norm"] > 0:
                norm = self._grad_norms and self._grad_norms[number]
                if norm is None:
                    norm = l2_norm_of_all(grads, 1.0, group["params"], self._partition)
                clip = _clipped(factor, norm, group["max_grad_norm"])
            self._factors[id(group)] = clip

    def _update(self, group: dict[str, Any], launch: Launch, options: StepOptions) -> None:
        device = launch.device
        factor = self._factors[id(group)]
        if isinstance(factor, torch.Tensor):
            factor = factor.to(device, torch.float32, non_blocking=True).reshape(())
        lr = scalar(group["lr"], device)
        beta1, beta2 = group["betas"]
        for step, members in self._by_step(launch, options.noop):
            rate = _corrected(lr, beta1, beta2, step) if group["bias_correction"] else lr
            decay = scalar(group["weight_decay"], device)
            numbers = Adam(
                rate, beta1, beta2, group["eps"], decay, True, False, step, self.eps_mode == 0
            )
            extra = None if options.extra is None else [options.extra[i] for i in members]
            part = [[column[i] for i in members] for column in launch.columns]
            adam_(part, numbers, options._replace(factor=factor, extra=extra))

    def _by_step(
        self, launch: Launch, noop: torch.Tensor | None
    ) -> list[tuple[int | torch.Tensor, list[int]]]:
        """Count the step of each parameter; those of one count belong together."""
        found: dict[Any, tuple[int | torch.Tensor, list[int]]] = {}
        for number, param in enumerate(launch.params):
            state = self.state[param]
            before = state.get("step", 0)
            # Counts on a device by who they are, so as not to wait. An id is above 0, so the
            # negative of a number is no id.
            key = id(before) if isinstance(before, torch.Tensor) else -before
            if key not in found:
                found[key] = (_next(before, noop, launch.device), [])
            state["step"], members = found[key]
            members.append(number)
        return list(found.values())

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        found = super()._from_torch(state_dict)
        for number, state in state_dict["state"].items():
            if isinstance(state, dict) and "step" in state:
                found["state"][number]["step"] = int(state["step"])
        for group in state_dict["param_groups"]:  # where apex.optimizers.FusedAdam counts
            for number in found["state"].keys() & {*group["params"]} if "step" in group else ():
                found["state"][number].setdefault("step", int(group["step"]))
        return found


def _next(
    before: int | torch.Tensor, noop: torch.Tensor | None, device: torch.device
) -> int | torch.Tensor:
    """The next step: on the device where that may be skipped there, and then written in place."""
    if _runtime.capturing():
        check_captured(before, device)
    if noop is None and not isinstance(before, torch.Tensor):
        return before + 1
    step = torch.as_tensor(before, dtype=torch.int32, device=device)
    taken = 1 if noop is None else noop.to(device, non_blocking=True).reshape(()) == 0
    return step.add_(taken)


def _corrected(lr: Scalar, beta1: float, beta2: float, step: int | torch.Tensor) -> Scalar:
    """The rate with both bias corrections; of a step on a device in float64, as on the host."""
    exact: Any = step.double().reshape(()) if isinstance(step, torch.Tensor) else step
    found: Scalar = lr * (1 - beta2**exact) ** 0.5 / (1 - beta1**exact)
    return found.float() if isinstance(found, torch.Tensor) else found


def _clipped(factor: Scalar, norm: Any, largest: float) -> Scalar:
    """``factor``, so that gradients of the norm ``norm`` end at most at ``largest``."""
    if isinstance(norm, torch.Tensor) and norm.device.type == "cpu":
        norm = norm.item()
    if not isinstance(norm, torch.Tensor) and not isinstance(factor, torch.Tensor):
        over = (norm * factor + 1e-6) / largest
        return factor / over if over > 1 else factor
    over = ((norm * factor).reshape(()) + 1e-6) / largest
    return factor / torch.where(over > 1, over, 1.0)
