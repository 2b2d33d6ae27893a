"""Operations on lists of tensors, as `amp_C` and gradient clipping have them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from apex.catalogue.entry import DTYPES
from apex.contrib.clip_grad import clip_grad_norm_

__all__ = ["LISTS", "ListOp", "Written"]

CHUNK = 2048 * 32  # what callers of amp_C pass; of no effect

Tensors = list[torch.Tensor]


class Written(NamedTuple):
    """What an operation writes: tensors that are rounded once, and norms of lists."""

    rounded: Sequence[torch.Tensor] = ()
    norms: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class ListOp:
    """An operation on lists.

    Attributes:
        name: For people.
        lists: How many lists it reads, of equal shapes.
        ours: Computes it, from a flag and the lists.
        exact: The same from lists in float64.
        dtypes: Names of `entry.DTYPES`.
        flags: Whether it sets the flag for inf and nan.
    """

    name: str
    lists: int
    ours: Callable[..., Written]
    exact: Callable[..., Written]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    flags: bool = True


def _amp_c(name: str, *arguments: Any) -> Any:
    """Call what users import; a check of it fails where it is not installed."""
    return getattr(importlib.import_module("amp_C"), name)(CHUNK, *arguments)


def _call(name: str, *arguments: Any, writes: bool, norms: int) -> Callable[..., Written]:
    """A function of `amp_C` that ``writes`` a list behind those it reads, and returns ``norms``."""

    def call(flag: torch.Tensor, *lists: Tensors) -> Written:
        out = [torch.empty_like(x) for x in lists[0]]
        found = _amp_c(name, flag, [*lists, out] if writes else [*lists], *arguments)
        return Written(out if writes else (), found[:norms] if norms else ())

    return call


def _norms(listed: Tensors) -> torch.Tensor:
    return torch.stack([x.square().sum() for x in listed]).sqrt()


def _norm(listed: Tensors) -> torch.Tensor:
    return _norms(listed).square().sum().sqrt().reshape(1)


def _clip(norm_type: float, flag: torch.Tensor, grads: Tensors) -> Written:
    grads = [grad.clone() for grad in grads]
    params = [torch.nn.Parameter(grad) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return Written(grads, [clip_grad_norm_(params, 0.5, norm_type)])


def _exact_clip(norm_type: float, grads: Tensors) -> Written:
    """Gradients times max_norm / (norm + 1e-6)."""
    norm = torch.cat([grad.flatten() for grad in grads]).norm(norm_type)
    return Written([grad * (0.5 / (norm + 1e-6)) for grad in grads], [norm])


BETA1, BETA2, EPS, LR, STEP = 0.9, 0.999, 1e-6, 0.01, 2


def _decays(count: int) -> torch.Tensor:
    return torch.linspace(0.0, 0.1, count, device="cpu", dtype=torch.float32)


def _lamb_stages(
    flag: torch.Tensor, grads: Tensors, params: Tensors, mean: Tensors, roots: Tensors
) -> Written:
    """LAMB in the two calls of BERT's time, with a weight decay for each tensor."""
    params, mean, terms = (
        [x.clone() for x in params],
        [x.clone() for x in mean],
        [*map(torch.empty_like, params)],
    )
    decays = _decays(len(params)).to(flag.device)
    columns = [grads, params, mean, [x.square() for x in roots], terms]
    stage1, stage2 = (f"multi_tensor_lamb_stage{n}_cuda" for n in (1, 2))
    _amp_c(stage1, flag, columns, decays, STEP, BETA1, BETA2, EPS, 4.0, 1.0)
    norms = [torch.stack([x.norm() for x in column]) for column in (params, terms)]
    _amp_c(stage2, flag, [params, terms], *norms, LR, 0.01, False)
    return Written([*terms, *params])


def _exact_lamb_stages(grads: Tensors, params: Tensors, mean: Tensors, roots: Tensors) -> Written:
    terms, stepped = [], []
    decays = _decays(len(params)).double()
    for g, p, m, root, decay in zip(grads, params, mean, roots, decays, strict=True):
        m = BETA1 * m + (1 - BETA1) * g / 4  # a norm of 4 is clipped to 1
        v = BETA2 * root**2 + (1 - BETA2) * (g / 4) ** 2
        scale = (v / (1 - BETA2 ** (STEP + 1))).sqrt() + EPS
        terms.append(m / (1 - BETA1 ** (STEP + 1)) / scale + decay.to(p) * p)
        ratio = p.norm() / terms[-1].norm() if p.any() and terms[-1].any() else 1.0
        stepped.append(p - LR * ratio * terms[-1])
    return Written([*terms, *stepped])


LISTS: tuple[ListOp, ...] = (
    ListOp(
        "multi_tensor_scale", 1, _call("multi_tensor_scale", 0.37, writes=True, norms=0),
        lambda x: Written([0.37 * one for one in x]),
    ),
    ListOp(
        "multi_tensor_axpby", 2,
        _call("multi_tensor_axpby", 0.37, -1.5, -1, writes=True, norms=0),
        lambda x, y: Written([0.37 * a - 1.5 * b for a, b in zip(x, y, strict=True)]),
    ),
    ListOp(
        "multi_tensor_l2norm", 1, _call("multi_tensor_l2norm", True, writes=False, norms=2),
        lambda x: Written((), [_norm(x), _norms(x)]),
    ),
    ListOp(
        "multi_tensor_l2norm_scale", 1,
        _call("multi_tensor_l2norm_scale", 0.37, False, writes=True, norms=1),
        lambda x: Written([0.37 * one for one in x], [_norm(x)]),
    ),
    ListOp(
        "multi_tensor_unscale_l2norm", 1,
        _call("multi_tensor_unscale_l2norm", 0.25, False, writes=False, norms=1),
        lambda x: Written((), [0.25 * _norm(x)]),
    ),
    ListOp("clip_grad_norm_", 1, partial(_clip, 2.0), partial(_exact_clip, 2.0), flags=False),
    ListOp(
        "clip_grad_norm_, largest", 1, partial(_clip, torch.inf), partial(_exact_clip, torch.inf),
        flags=False,
    ),
    ListOp(
        "lamb stage 1 and 2", 4, _lamb_stages, _exact_lamb_stages, dtypes=("fp32",), flags=False
    ),
)  # fmt: skip
