"""Lists of tensors, as `amp_C` and gradient clipping have them: scaling, sums, norms, flags."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from apex.bench import tolerance
from apex.bench.selftest.check import (
    DTYPES,
    Check,
    Measured,
    Setting,
    differing,
    one_rounding,
    random,
    same_again,
)
from apex.contrib.clip_grad import clip_grad_norm_

__all__ = ["checks", "tensors"]

AREA = "lists of tensors"
SHAPES = ((), (1,), (0,), (7,), (33, 5), (1025,), (8193,))  # 8193: one more than a block
LARGE = ((1_000_003,), (3000, 1000))
CHUNK = 2048 * 32  # what callers of amp_C pass; of no effect

Tensors = list[torch.Tensor]


def tensors(
    setting: Setting, dtype: torch.dtype, seed: int, shapes: Sequence[tuple[int, ...]] = ()
) -> Tensors:
    """A list of awkward sizes, and of large tensors on a GPU."""
    every = shapes or (*SHAPES, *(LARGE if setting.large else ()))
    return [random(s, dtype, setting, seed=100 * seed + n) for n, s in enumerate(every)]


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for dtype in DTYPES:
        for name, run in CHECKS.items():
            yield Check(AREA, f"{name}, {dtype}", _of(run, DTYPES[dtype]))
    yield Check(AREA, "lamb stage 1 and 2, fp32", _lamb_stages)


def _of(
    run: Callable[[Setting, torch.dtype], Iterator[Measured]], dtype: torch.dtype
) -> Callable[[Setting], Iterator[Measured]]:
    return lambda setting: run(setting, dtype)


def _amp_c() -> Any:
    """The module that users import; a check of it fails where it is not installed."""
    return importlib.import_module("amp_C")


def _doubles(listed: Tensors) -> Tensors:
    return [x.double() for x in listed]


def _flag(setting: Setting) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=setting.device)


def _flagged(flag: torch.Tensor, expected: int) -> Measured:
    return Measured(f"flag, {expected} expected", abs(int(flag) - expected), 0, "off")


def _near(what: str, found: torch.Tensor, exact: torch.Tensor) -> Measured:
    """A norm: few numbers, each off by the additions of a sum."""
    if found.shape != exact.shape:
        return Measured(what, float("inf"), 0, "wrong shape")
    return Measured(what, tolerance.errors_in_eps(found, exact), tolerance.NORM, "eps")


def _norm(listed: Tensors) -> torch.Tensor:
    return torch.stack([x.double().square().sum() for x in listed]).sum().sqrt()


def _scale(setting: Setting, dtype: torch.dtype) -> Iterator[Measured]:
    """``multi_tensor_scale``: out = scale * x, and a flag for inf and nan."""
    x = tensors(setting, dtype, 0)
    outs = [[torch.empty_like(one) for one in x] for _ in range(2)]
    flag = _flag(setting)
    for out in outs:
        _amp_c().multi_tensor_scale(CHUNK, flag, [x, out], 0.37)
    exact = [0.37 * one for one in _doubles(x)]
    yield from one_rounding("output", zip(outs[0], exact, strict=True), setting)
    yield same_again("second call", *outs)
    yield _flagged(flag, 0)
    for bad in (float("inf"), float("nan")):
        x[-1].view(-1)[-1] = bad
        flag.zero_()
        _amp_c().multi_tensor_scale(CHUNK, flag, [x, outs[0]], 0.37)
        yield _flagged(flag, 1)


def _axpby(setting: Setting, dtype: torch.dtype) -> Iterator[Measured]:
    """``multi_tensor_axpby``: out = a * x + b * y."""
    x, y = tensors(setting, dtype, 1), tensors(setting, dtype, 2)
    out = [torch.empty_like(one) for one in x]
    flag = _flag(setting)
    _amp_c().multi_tensor_axpby(CHUNK, flag, [x, y, out], 0.37, -1.5, -1)
    pairs = zip(_doubles(x), _doubles(y), strict=True)
    exact = [0.37 * left - 1.5 * right for left, right in pairs]
    yield from one_rounding("output", zip(out, exact, strict=True), setting)
    yield _flagged(flag, 0)


def _norms(setting: Setting, dtype: torch.dtype) -> Iterator[Measured]:
    """``multi_tensor_l2norm``: of everything and of each tensor."""
    x = tensors(setting, dtype, 3)
    flag = _flag(setting)
    first, second = (_amp_c().multi_tensor_l2norm(CHUNK, flag, [x], True) for _ in range(2))
    exact = torch.stack([_norm([one]) for one in x])
    yield _near("norm", first[0], _norm(x).reshape(1))
    yield _near("norm of each tensor", first[1], exact)
    yield same_again("second call", first, second)
    yield _flagged(flag, 0)
    scaled = [torch.empty_like(one) for one in x]
    found, _ = _amp_c().multi_tensor_l2norm_scale(CHUNK, flag, [x, scaled], 0.37, False)
    yield _near("norm while scaling", found, _norm(x).reshape(1))
    found, _ = _amp_c().multi_tensor_unscale_l2norm(CHUNK, flag, [x], 0.25, False)
    yield _near("norm of the unscaled", found, 0.25 * _norm(x).reshape(1))


def _clipped(setting: Setting, dtype: torch.dtype) -> Iterator[Measured]:
    """``clip_grad_norm_``: the norm, and gradients multiplied by max_norm / (norm + 1e-6)."""
    for norm_type in (2.0, float("inf")):
        params = [torch.nn.Parameter(x) for x in tensors(setting, dtype, 4)]
        for param, grad in zip(params, tensors(setting, dtype, 5), strict=True):
            param.grad = grad
        before = [grad.double() for grad in _grads(params)]
        exact = _norm(before)
        if norm_type != 2.0:
            exact = torch.stack([one.abs().max() for one in before if one.numel()]).max()
        found = clip_grad_norm_(params, 0.5, norm_type)
        wanted = [one * (0.5 / (exact + 1e-6)) for one in before]
        kind = f"norm of order {norm_type:g}"
        yield _near(kind, found, exact)
        yield from one_rounding(
            f"gradients, {kind}", zip(_grads(params), wanted, strict=True), setting
        )


def _grads(params: Sequence[torch.nn.Parameter]) -> Tensors:
    return [param.grad for param in params if param.grad is not None]


CHECKS = {
    "multi_tensor_scale": _scale,
    "multi_tensor_axpby": _axpby,
    "multi_tensor_l2norm": _norms,
    "clip_grad_norm_": _clipped,
}


def _lamb_stages(setting: Setting) -> Iterator[Measured]:
    """LAMB in the two calls of BERT's time, with a weight decay for each tensor."""
    grads, params, moments, squares = (tensors(setting, torch.float32, 10 + n) for n in range(4))
    squares = [one.square() for one in squares]
    old = [_doubles(column) for column in (grads, params, moments, squares)]
    terms = [torch.empty_like(one) for one in params]
    decays = torch.linspace(0.0, 0.1, len(params)).to(setting.device)
    beta1, beta2, eps, lr, step = 0.9, 0.999, 1e-6, 0.01, 2
    flag, columns = _flag(setting), [grads, params, moments, squares, terms]
    stage1 = _amp_c().multi_tensor_lamb_stage1_cuda
    stage1(CHUNK, flag, columns, decays, step, beta1, beta2, eps, 4.0, 1.0)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for g, p, m, v, decay, term in zip(*old, decays.double(), terms, strict=True):
        mean = beta1 * m + (1 - beta1) * g / 4  # a norm of 4 is clipped to 1
        square = beta2 * v + (1 - beta2) * (g / 4) ** 2
        root = (square / (1 - beta2 ** (step + 1))).sqrt() + eps
        pairs.append((term, mean / (1 - beta1 ** (step + 1)) / root + decay * p))
    yield from one_rounding("update", pairs, setting)
    sizes, lengths = (torch.stack([x.norm() for x in column]) for column in (params, terms))
    stage2 = _amp_c().multi_tensor_lamb_stage2_cuda
    stage2(CHUNK, flag, [params, terms], sizes, lengths, lr, 0.01, False)
    wanted = []
    for p, term, size, length in zip(old[1], terms, sizes, lengths, strict=True):
        ratio = float(size) / float(length) if size * length else 1.0
        wanted.append(p - lr * ratio * term.double())
    yield from one_rounding("weights", zip(params, wanted, strict=True), setting)
    finite = sum(differing(x, x.nan_to_num(math.pi)) for x in params)
    yield Measured("weights that are not finite", finite, 0, "elements")
