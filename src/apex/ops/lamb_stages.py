"""LAMB in two calls, with norms from outside and a weight decay for each tensor.

The interface of BERT-era programs: the first call writes Adam's term, the caller measures weights
and terms, the second call applies the trust ratio. See :mod:`apex.ops.lamb` for the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.ops.adam import unbiased
from apex.ops.lamb import APPLY, TERM
from apex.ops.multi_tensor import Column, Scalar, Update, Values, run


def stage1_reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition; ``own``: the decoupled decay of each tensor."""
    return TERM.reference(values, (*scalars, own[0]), own)


STAGE1 = Update(stage1_reference, "lamb_stages:lamb_stage1")


def coefficient(norm: Scalar, max_norm: Scalar) -> Scalar:
    """What clips a norm to ``max_norm``, which disables clipping where it is 0; nothing waits."""
    if not isinstance(norm, torch.Tensor) and not isinstance(max_norm, torch.Tensor):
        return max_norm / norm if max_norm and norm > max_norm else 1.0
    if not isinstance(norm, torch.Tensor):
        assert isinstance(max_norm, torch.Tensor)
        norm = torch.full_like(max_norm, norm)
    clips = (norm > max_norm) & torch.as_tensor(max_norm != 0, device=norm.device)
    return torch.where(clips, max_norm / norm, 1.0)


def stage1_(
    columns: Sequence[Column],
    decays: torch.Tensor,
    *,
    factor: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | torch.Tensor,
) -> None:
    """Write the moments and the terms.

    Args:
        columns: Gradients, weights, first moments, second moments, terms; each of one dtype, all on
            one device and of the same sizes.
        decays: float32 on that device, one for each tensor.
        factor: What gradients are multiplied by.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the corrected root.
        step: Which step this is, from 1; a tensor is read on its device.
    """
    scalars = (
        factor,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        unbiased(beta1, step),
        unbiased(beta2, step),
        0.0,
    )
    run(STAGE1, columns, ((2, 1), (3, 2), (4, 0)), scalars, own=(decays,))


def stage2_(params: Column, terms: Column, rates: torch.Tensor) -> None:
    """Subtract each term times its rate; tensors are of one dtype a column, on one device."""
    run(APPLY, [terms, params], ((1, 0),), own=(rates,))


def rates(params: torch.Tensor, terms: torch.Tensor, lr: Scalar, adapts: Scalar) -> torch.Tensor:
    """Learning rate times trust ratio for each tensor.

    Args:
        params: Norms of the weights.
        terms: Norms of the terms.
        lr: Learning rate.
        adapts: Not 0 where there are trust ratios.
    """
    trusted = (params != 0) & (terms != 0) & torch.as_tensor(adapts != 0, device=params.device)
    return torch.where(trusted, lr * params / terms, lr)
