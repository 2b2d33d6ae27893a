"""``step(closure, grads, output_params, scale, grad_norms)``, as programs of 2019 call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from apex.ops.lists.tensor_lists import Scalar, refuse_nested
from apex.optimizers import _checks
from apex.optimizers._base import FusedOptimizer


class OldStep(FusedOptimizer):
    """Base of optimizers whose ``step`` takes gradients and outputs."""

    _grad_norms: list[Any] | None = None

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Scalar = 1.0,
        grad_norms: Any = None,
        **historic: Any,
    ) -> Any:
        """Take one step.

        Args:
            closure: Evaluates the loss again.
            grads: Gradients instead of the parameters' own: an iterable for the only group, or
                a list for each group. ``None`` entries stand for the parameter's own.
            output_params: 16-bit tensors that get the new values too, in the same form.
            scale: What the gradients are divided by.
            grad_norms: Norm of each group's gradients, still scaled; one number or a list. Without
                it they are measured where they are needed.
            **historic: ``grad_scaler``, a ``torch.amp.GradScaler`` that drives the step.

        Returns:
            What ``closure`` returned, else ``None``.

        Raises:
            ValueError: A list does not fit the groups.
            RuntimeError: A gradient is sparse or complex.
        """
        given = self._by_param("grads", grads)
        copies = self._by_param("output_params", output_params)
        is_plain = not isinstance(scale, torch.Tensor) and scale == 1
        if is_plain and not given and not copies and grad_norms is None:
            return self._stepped(closure, historic)
        _checks.step_arguments(self._name, historic, self._takes_arguments)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = scale.reciprocal().float() if isinstance(scale, torch.Tensor) else 1 / scale
        self._grad_norms = self._norms(grad_norms)
        try:
            self.step_scaled(factor, grads=given or None, copies=copies or None)
        finally:
            self._grad_norms = None
        return loss

    def _norms(self, norms: Any) -> list[Any] | None:
        if norms is None:
            return None
        one = isinstance(norms, int | float) or (
            isinstance(norms, torch.Tensor) and not norms.dim()
        )
        listed = [norms] if one else list(norms)
        if len(listed) != len(self.param_groups):
            raise ValueError(
                f"{self._name}: grad_norms contained {len(listed)} norms, and there are "
                f"{len(self.param_groups)} groups; pass one norm for each group."
            )
        return listed

    def _by_param(self, name: str, tensors: Any) -> dict[torch.Tensor, torch.Tensor]:
        if tensors is None:
            return {}
        groups = _as_groups(tensors)
        sizes = [len(group) for group in groups]
        wanted = [len(group["params"]) for group in self.param_groups]
        if sizes != wanted:
            raise ValueError(
                f"{self._name}: {name} contained {sizes} tensors by group, and the groups have "
                f"{wanted} parameters. For a single group pass an iterable, for several groups a "
                "list of lists."
            )
        pairs = [
            (param, tensor)
            for group, members in zip(self.param_groups, groups, strict=True)
            for param, tensor in zip(group["params"], members, strict=True)
        ]
        found = {param: tensor for param, tensor in pairs if tensor is not None}
        refuse_nested(f"{self._name}: {name}: tensor", found.values())
        return found


def _as_groups(tensors: Iterable[Any]) -> Sequence[list[Any]]:
    listed = list(tensors)
    if listed and isinstance(listed[0], torch.Tensor | None):
        return [listed]
    return [list(group) for group in listed]
