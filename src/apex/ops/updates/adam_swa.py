"""Adam, and a running average of the weights, over lists of tensors.

    Adam's step of :mod:`apex.ops.updates.adam`
    average += share * (param - average)

The average is the weight itself after the first step, whatever it was before.

Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization",
arXiv:1803.05407, with the exponential average of AlphaFold, ``share = 1 - decay``.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from apex._compat import private
from apex.ops.lists.multi_tensor import Update, Values
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions
from apex.ops.lists.tensor_lists import Scalar, TensorList
from apex.ops.updates import adam, cpu_fused

_List = list[torch.Tensor]

AdamSwaScalars = namedtuple(
    "AdamSwaScalars",
    "factor lr beta1 one_minus_beta1 beta2 one_minus_beta2 eps unbias1 unbias2 l2 decay share",
)


def reference(values: Values, s: AdamSwaScalars, *, first: bool = False) -> Values:
    """Compute the definition; ``first``: the average becomes the weight."""
    average = values[4]
    param, exp_avg, exp_avg_sq, grad = adam.reference(values, s)  # type: ignore[arg-type]  # it has the fields
    average = param if first else average + s.share * (param - average)
    return param, exp_avg, exp_avg_sq, average, grad


ADAM_SWA = Update(reference, "adam_swa:adam_swa", AdamSwaScalars)
ADAM_SWA_FIRST = Update(
    functools.partial(reference, first=True), "adam_swa:adam_swa_first", AdamSwaScalars
)


@dataclass
class AdamSwa(adam.AdamNumbers):
    """``share``: of the weight in the average; ``is_first``: whether there is no average yet."""

    share: float
    is_first: bool

    def scalars(self, factor: Scalar) -> AdamSwaScalars:
        """What the update takes."""
        return AdamSwaScalars(*adam.scalars(self, factor), self.share)


def adam_swa_(
    columns: Sequence[TensorList], hyper: AdamSwa, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step; the states are first and second moments and the average."""
    update = ADAM_SWA_FIRST if hyper.is_first else ADAM_SWA
    cpu_fused.step_or_run(update, _torchs, columns, hyper, options)


def _torchs(hyper: AdamSwa) -> Callable[..., None]:
    """Torch's fused kernel and its ``lerp`` for float32 columns of the CPU."""
    step = adam.torchs(hyper)

    def kernel(grads: _List, params: _List, *states: _List) -> None:
        step(grads, params, *states[:2])
        if hyper.is_first:
            private.foreach_copy_(states[2], params)
        else:
            private.foreach_lerp_(states[2], params, hyper.share)

    return kernel
