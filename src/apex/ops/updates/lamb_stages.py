"""LAMB in two calls, with norms from outside and a weight decay for each tensor.

The interface of BERT-era programs: the first call writes Adam's term, the caller measures weights
and terms, the second call applies the trust ratio. See :mod:`apex.ops.updates.lamb` for the
formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.ops.lists.columns import Column, Scalar
from apex.ops.lists.multi_tensor import run
from apex.ops.updates.adam import unbiased
from apex.ops.updates.lamb import APPLY, TERM, ApplyScalars, TermScalars


def coefficient(norm: Scalar, max_norm: Scalar) -> Scalar:
    """What clips a norm to ``max_norm``, which disables clipping where it is 0; nothing waits."""
    if not isinstance(norm, torch.Tensor) and not isinstance(max_norm, torch.Tensor):
        return max_norm / norm if max_norm and norm > max_norm else 1.0
    if not isinstance(max_norm, torch.Tensor):
        assert isinstance(norm, torch.Tensor)
        return torch.where(norm > max_norm, max_norm / norm, 1.0) if max_norm else 1.0
    return torch.where((max_norm < norm) & (max_norm != 0), max_norm / norm, 1.0)


def stage1_(
    columns: Sequence[Column],
    decays: torch.Tensor,
    *,
    factor: Scalar,
    betas: tuple[float, float],
    eps: float,
    step: int | torch.Tensor,
) -> None:
    """Write the moments and the terms.

    Args:
        columns: Gradients, weights, first moments, second moments, terms; each of one dtype, all on
            one device and of the same sizes.
        decays: float32 on that device, one for each tensor.
        factor: What gradients are multiplied by.
        betas: Decays of the two moments.
        eps: Added to the corrected root.
        step: Which step this is, from 1; a tensor is read on its device.
    """
    beta1, beta2 = betas
    scalars = TermScalars(
        factor, beta1, 1 - beta1, beta2, 1 - beta2, eps, unbiased(beta1, step),
        unbiased(beta2, step), 0.0, decays,
    )  # fmt: skip
    run(TERM, columns, ((2, 1), (3, 2), (4, 0)), scalars)


def stage2_(params: Column, terms: Column, rates: torch.Tensor) -> None:
    """Subtract each term times its rate; tensors are of one dtype a column, on one device."""
    run(APPLY, [terms, params], ((1, 0),), ApplyScalars(rates))
