"""The first steps of an optimizer, watched: does it train what backward gives gradients to?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from apex.amp.gradients.parameters import Parameters, grads_of
from apex.amp.gradients.tensors import any_nonzero, stored_values
from apex.amp.training import Training
from apex.ops.lists.tensor_lists import OWN_MEMORY

_MOST_STEPS = 10  # without a change


class StepCheck:
    """The first steps of an optimizer, watched: does it step the masters in its groups?

    Some step another list of parameters: one that they keep, or that of an optimizer inside
    (ZeroRedundancyOptimizer). Then nothing trains. This is checked until a step has changed a
    master; a few optimizers wait some steps first. Many write through ``.data``, which changes no
    version. On a GPU the checked steps wait for the device and cannot be captured in a CUDA graph:
    warm up first.
    """

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
        if self._params.are_equal() and self._unchanged < _MOST_STEPS:
            return False
        self._params.write()  # whatever was stepped instead
        name = type(self._optimizer()).__name__
        raise RuntimeError(
            f"amp: {name}.step() did not change the float32 masters that amp put into its "
            f"param_groups at {level}, so the model would not train. It seems to step another list "
            "of parameters, or another optimizer that it contains. Pass amp.initialize an "
            "optimizer that steps its param_groups, or use O1 or O4, which have no masters."
        )


class ModelCheck:
    """The first steps of an optimizer that has no weight of a model: does anybody step the weights?

    A model that was cast to 16 bits has weights of its own: they are no longer views of a flat
    parameter, so the optimizer of that parameter trains nothing. An optimizer of inputs, or of a
    loss's parameters, is right where the model is frozen or stepped by another one, and where its
    tensors get gradients: style transfer and inversion often leave the model as it is. These steps
    wait for the device, too.

    ``had_views``: whether weights were parts of the optimizer's tensors, see :func:`share_memory`.
    """

    def __init__(
        self, optimizer: Any, params: Parameters, training: Training, *, had_views: bool
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._params = params
        self._training = training
        self._had_views = had_views
        self._seen: dict[int, tuple[float, float]] = {}
        self._steps = 0

    def end(self) -> bool:
        """Say whether no more steps are to be watched.

        That is so where a weight has changed or has no gradient, and where the optimizer's own
        tensors have gradients.

        Raises:
            RuntimeError: The weights had gradients in all steps, and none has changed.
        """
        own = [] if self._had_views else grads_of(self._params.stepped)
        if own and any_nonzero([stored_values(grad) for grad in own]):
            return True
        weights = self._training.weights_without_optimizer()
        both = [(w, w.grad) for w in weights if w.requires_grad and w.grad is not None]
        seen, self._seen = self._seen, {id(weight): _sums(weight) for weight, _ in both}
        is_changed = any([seen.get(key, now) != now for key, now in self._seen.items()])
        if is_changed or not both or not any_nonzero([stored_values(grad) for _, grad in both]):
            return True
        self._steps += 1
        if self._steps < _MOST_STEPS:
            return False
        raise RuntimeError(
            f"amp: {type(self._optimizer()).__name__} has none of the model's weights in its "
            f"param_groups, and in {_MOST_STEPS} steps nobody has changed them, though they got "
            f"gradients: the model does not train. At {self._training.properties.opt_level} "
            "amp.initialize has cast them to 16 bits, so they are no longer views of a flat "
            "parameter. Pass amp.initialize an optimizer of model.parameters(), or use O1 or O4, "
            "which leave weights as they are. If the model is not to train, freeze it: "
            "model.requires_grad_(False)."
        )


def share_memory(optimizer: Any, weights: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``weights`` is, or shares memory with, a tensor of the optimizer."""
    stepped = (param for group in optimizer.param_groups for param in group["params"])
    return not _memory(stepped).isdisjoint(_memory(weights))


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    plain = [x for x in tensors if type(x) in OWN_MEMORY and x.layout == torch.strided]
    return {storage._cdata for x in plain if (storage := x.untyped_storage()).nbytes()}


def _sums(weight: torch.Tensor) -> tuple[float, float]:
    """Numbers that change with the values of a tensor."""
    value = weight.detach()
    norm = torch.linalg.vector_norm(value, dtype=torch.float64)
    return float(norm), float(value.sum(dtype=torch.float64))


def _fingerprint(param: torch.Tensor) -> tuple[int, float]:
    """Numbers that change with the bits of a float32 tensor; no copy of it is made."""
    value = param.detach()
    norm = torch.linalg.vector_norm(value, dtype=torch.float64)
    return int(value.view(torch.int32).sum(dtype=torch.int64)), float(norm)
