"""Whether an optimizer steps the masters that it was given."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from apex.amp.gradients.accumulation import stored_values
from apex.amp.gradients.parameters import Parameters


class StepCheck:
    """The first steps of an optimizer, watched: does it step the masters in its groups?

    Some step another list of parameters: one that they keep, or that of an optimizer inside
    (ZeroRedundancyOptimizer). Then nothing trains. This is checked until a step has changed a
    master; a few optimizers wait some steps first. Many write through ``.data``, which changes no
    version. On a GPU the checked steps wait for the device and cannot be captured in a CUDA graph:
    warm up first.
    """

    most_steps = 10  # without a change, where nothing else was stepped instead

    def __init__(self, optimizer: Any, params: Parameters) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._params = params
        self._watched: list[tuple[torch.Tensor, int, tuple[int, float]]] = []
        self._unchanged = 0  # steps

    def begin(self) -> None:
        """Remember the masters that the step should change."""
        masters = set(map(id, self._params.tensors))
        self._watched = [
            (param, param._version, _fingerprint(param))
            for group in getattr(self._optimizer(), "param_groups", ())
            if group.get("lr") is None or float(group["lr"]) != 0.0  # else no change is expected
            for param in group["params"]
            if id(param) in masters and param.grad is not None and not param.is_meta
        ]

    def end(self, level: str) -> bool:
        """Say whether a master has changed; raise if one should have and none has.

        One should have where gradients were not zero, and model weights were stepped instead or it
        has been so for many steps.
        """
        if any([param._version != version for param, version, _ in self._watched]):
            return True
        if any([_fingerprint(param) != before for param, _, before in self._watched]):
            return True
        grads = [param.grad for param, _, _ in self._watched]
        if not any([grad is not None and bool(stored_values(grad).any()) for grad in grads]):
            return False
        self._unchanged += 1
        if self._params.are_equal() and self._unchanged < self.most_steps:
            return False
        self._params.write()  # whatever was stepped instead
        name = type(self._optimizer()).__name__
        raise RuntimeError(
            f"amp: {name}.step() did not change the float32 masters that amp put into its "
            f"param_groups at {level}, so the model would not train. It seems to step another list "
            "of parameters, or another optimizer that it contains. Pass amp.initialize an "
            "optimizer that steps its param_groups, or use O1 or O4, which have no masters."
        )


def _fingerprint(param: torch.Tensor) -> tuple[int, float]:
    """Numbers that change with the bits of a float32 tensor; no copy of it is made."""
    value = param.detach()
    norm = torch.linalg.vector_norm(value, dtype=torch.float64)
    return int(value.view(torch.int32).sum(dtype=torch.int64)), float(norm)
