"""The first steps of an optimizer, watched: does it train what backward gives gradients to?"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from apex.amp.gradients.masters import table
from apex.amp.gradients.parameters import Parameters, grads_of
from apex.amp.gradients.tensors import any_nonzero, pieces, stored_values
from apex.amp.training import Training
from apex.ops.lists.tensor_lists import OWN_MEMORY

_MOST_STEPS = 10  # without a change


class StepCheck:
    """The first steps of an optimizer, watched: does it step the masters in its groups?

    Some step another list of parameters: one that they keep, or that of an optimizer inside
    (ZeroRedundancyOptimizer). Then nothing trains, or in 16 bits alone. This is checked until a
    step has changed a master; a few optimizers wait some steps first. Many write through ``.data``,
    which changes no version. So amp compares values: in the first step one piece of each tensor,
    where some gradients are not zero, and in the next steps all of it. On a GPU the checked steps
    wait for the device and cannot be captured in a CUDA graph: warm up first.
    """

    def __init__(self, optimizer: Any, params: Parameters) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._params = params
        # Masters, their versions, and looks at them and at their weights; none at zeros.
        self._seen: list[tuple[torch.Tensor, int, list[_Look]]] = []
        self._unchanged = 0  # steps

    def begin(self, *, again: bool = False) -> None:
        """Remember the masters that the step should change; ``again``: unless that was done."""
        if again and self._seen:
            return
        self._seen = []
        for group in getattr(self._optimizer(), "param_groups", ()):
            if group.get("lr") is not None and float(group["lr"]) == 0.0:
                continue  # no change is expected
            for param in group["params"]:
                weight, grad, number = table.weight_of(param), param.grad, None
                if weight is None or grad is None or param.is_meta:
                    continue
                is_first = not self._unchanged and type(grad) in OWN_MEMORY and not grad.is_sparse
                if is_first:
                    parts = enumerate(pieces(grad.detach()))
                    number = next((number for number, (part,) in parts if part.any()), None)
                both = (param, weight) if number is not None or not is_first else ()
                self._seen.append((param, param._version, [_Look(one, number) for one in both]))

    def end(self, level: str) -> bool:
        """Say whether a master has changed; raise if one should have and has not.

        One should have where gradients were not zero, and its model weight was stepped instead or
        none has changed in many steps.
        """
        seen, self._seen = self._seen, []
        same = [looks for param, version, looks in seen if param._version == version]
        same = [looks for looks in same if not any([look.is_changed() for look in looks[:1]])]
        if not any([look.is_changed() for looks in same for look in looks[1:]]):
            if len(same) < len(seen):
                return True
            grads = [param.grad for param, *_ in seen]
            if not any([grad is not None and bool(stored_values(grad).any()) for grad in grads]):
                return False
            self._unchanged += 1
            if self._unchanged < _MOST_STEPS:
                return False
        self._params.write()  # whatever was stepped instead
        name = type(self._optimizer()).__name__
        raise RuntimeError(
            f"amp: {name}.step() did not change the float32 masters that amp put into its "
            f"param_groups at {level}, so the model would not train. It seems to update another "
            "list of parameters, or to call another optimizer that it contains. Pass "
            "amp.initialize an optimizer that updates its param_groups, or use O1 or O4, which "
            "have no masters."
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
        self._seen: dict[int, _Look] = {}
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
        is_changed = any([id(w) in self._seen and self._seen[id(w)].is_changed() for w, _ in both])
        self._seen |= {id(w): _Look(w) for w, _ in both if id(w) not in self._seen}
        if is_changed or not both or not any_nonzero([stored_values(grad) for _, grad in both]):
            return True
        self._steps += 1
        if self._steps < _MOST_STEPS:
            return False
        raise RuntimeError(
            f"amp: {type(self._optimizer()).__name__} has none of the model's weights in its "
            f"param_groups, and {_MOST_STEPS} steps have not changed them although they had "
            f"gradients, so the model does not train. At {self._training.properties.opt_level} "
            "amp.initialize cast them to 16 bits, so they are no longer views of a flat parameter. "
            "Pass amp.initialize an optimizer of model.parameters(), or use O1 or O4, which do not "
            "cast weights. If the model is not meant to train, freeze it: "
            "model.requires_grad_(False)."
        )


def share_memory(optimizer: Any, weights: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``weights`` is, or shares memory with, a tensor of the optimizer."""
    stepped = (param for group in optimizer.param_groups for param in group["params"])
    return not _memory(stepped).isdisjoint(_memory(weights))


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    plain = [x for x in tensors if type(x) in OWN_MEMORY and x.layout == torch.strided]
    return {storage._cdata for x in plain if (storage := x.untyped_storage()).nbytes()}


class _Look:
    """Numbers that change with the values of a tensor, with little memory; they wait for a device.

    ``number``: of the only piece (:func:`pieces`) that it reads; ``None`` for all of them.
    """

    def __init__(self, tensor: torch.Tensor, number: int | None = None) -> None:
        self._tensor = tensor
        self._range = (0, None) if number is None else (number, number + 1)
        self._before = self._now()

    def _now(self) -> list[Any]:
        value = self._tensor.detach()
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
        return [
            number
            for (part,) in itertools.islice(pieces(value), *self._range)
            for number in (
                int(part.view(bits).sum(dtype=torch.int64)),
                float(torch.linalg.vector_norm(part, dtype=torch.float64)),
            )
        ]

    def is_changed(self) -> bool:
        """Whether the numbers are others now."""
        return self._now() != self._before
