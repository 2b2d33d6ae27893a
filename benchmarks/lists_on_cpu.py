"""Optimizer steps and clipping on a CPU beside the fastest torch expression that is as exact.

For each operation over a list of float32 tensors there are some ways to write it with torch: its
own optimizer (``foreach=True``, ``fused=True``), or foreach functions by hand where torch has none.
All of them, and ours, take three steps on the same numbers first, and are compared with float64:
the rms error in roundings of float32, of weights for an optimizer, of the norm and the clipped
gradients for clipping. A way is a yardstick if it is within the bound of our tests, 8 roundings
(one number alone: 24). The fastest of these is what ours is divided by; a way that is less exact is
listed with its error and is no goal.

All ways take turns in one process on one thread. What is timed is the
CPU time of the thread, so that other programs count less. The ratio is the median of the ratios of
neighbouring turns, with their quartiles. The goal for lists of 100 tensors and more is 1.10; one
tensor alone may take 6 us more. Linux only.

    python -m benchmarks.lists_on_cpu [WORD ...] [--rounds 200]   # rows with one of the words
"""

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from apex import optimizers
from apex.catalogue.tolerance import ROUNDINGS, roundings
from apex.contrib.clip_grad import clip_grad_norm_
from benchmarks.turns import one_core, ratio, take_turns, timed
from tools import quiet_without_reader

GOAL, ALONE_US = 1.10, 6.0
TURN_US = 400.0  # a turn repeats its call until it takes that long
LISTS: dict[str, list[tuple[int, ...]]] = {
    "100 of 8x8": [(8, 8)] * 100,
    "1000 of 8x8": [(8, 8)] * 1000,
    "300 of 33000": [(33000,)] * 300,
    "1 of 1e6": [(1000000,)],
}

Step = Callable[[], Any]
Params = list[Any]  # parameters, each with a gradient


class Row(NamedTuple):
    """An operation over one list: how to make ours, and each of torch's ways, from parameters.

    A way returns a step. What a step returns is compared with float64 too, if it is a tensor.
    """

    name: str
    shapes: list[tuple[int, ...]]
    ours: Callable[[Params], Step]
    torchs: dict[str, Callable[[Params], Step]]


def rows() -> Iterator[Row]:
    """Every row."""
    sgd: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
    adam: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
    for size, shapes in LISTS.items():
        yield Row(
            f"FusedSGD {size}",
            shapes,
            lambda params: optimizers.FusedSGD(params, **sgd).step,
            {way: _torchs(torch.optim.SGD, way, sgd) for way in ("foreach", "fused")},
        )
        yield Row(
            f"FusedAdam {size}",
            shapes,
            lambda params: optimizers.FusedAdam(params, **adam).step,
            {way: _torchs(torch.optim.AdamW, way, adam) for way in ("foreach", "fused")},
        )
        yield Row(
            f"FusedAdagrad {size}",
            shapes,
            lambda params: optimizers.FusedAdagrad(params, lr=0.01).step,
            {way: _torchs(torch.optim.Adagrad, way, {"lr": 0.01}) for way in ("foreach", "fused")},
        )
        yield Row(
            f"FusedLAMB {size}",
            shapes,
            lambda params: optimizers.FusedLAMB(params, lr=0.01).step,
            {"foreach": lamb, "fused Adam": lamb_by_adam},
        )
        yield Row(
            f"FusedNovoGrad {size}",
            shapes,
            lambda params: optimizers.FusedNovoGrad(params, lr=0.01, weight_decay=0.01).step,
            {"foreach": novograd, "foreach, rows": novograd_by_rows},
        )
        yield Row(
            f"FusedLion {size}",
            shapes,
            lambda params: optimizers.FusedLion(params, lr=1e-3, weight_decay=0.1).step,
            {"foreach": lion},
        )
        yield Row(
            f"clip_grad_norm_ {size}",
            shapes,
            lambda params: lambda: clip_grad_norm_(params, 1.0),
            {
                "torch.nn.utils": lambda params: lambda: nn.utils.clip_grad_norm_(params, 1.0),
                "float64 norms": clip_in_float64,
                "norms of rows": clip_by_rows,
            },
        )
    for count in (400,):
        yield Row(
            f"FusedAdam {count} groups, equal numbers",
            [(8, 8)] * count,
            lambda params: optimizers.FusedAdam([{"params": [p]} for p in params], **adam).step,
            {
                "fused": lambda params: (
                    torch.optim.AdamW([{"params": [p]} for p in params], fused=True, **adam).step
                )
            },
        )
        yield Row(
            f"FusedAdam {count} groups, each its lr",
            [(8, 8)] * count,
            lambda params: optimizers.FusedAdam(_own_rates(params), **adam).step,
            {
                "fused": lambda params: (
                    torch.optim.AdamW(_own_rates(params), fused=True, **adam).step
                )
            },
        )


def _torchs(kind: Any, way: str, numbers: dict[str, Any]) -> Callable[[Params], Step]:
    return lambda params: kind(params, **{way: True}, **numbers).step


def _own_rates(params: Params) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 1e-3 * (1 + i / 1000)} for i, p in enumerate(params)]


# -- by hand, with torch's foreach functions -------------------------------------------------------


def lamb(params: Params) -> Step:
    """The formula of ``apex.ops.updates.lamb`` with the defaults of FusedLAMB, lr 0.01."""
    firsts, seconds = ([torch.zeros_like(p) for p in params] for _ in range(2))
    beta1, beta2, eps, decay, lr, number = 0.9, 0.999, 1e-6, 0.01, 0.01, 0

    @torch.no_grad()
    def step() -> None:
        nonlocal number
        number += 1
        grads = [p.grad for p in params]
        norm = _norm(grads)
        if norm > 1.0:
            grads = [*torch._foreach_mul(grads, 1.0 / norm)]
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(seconds)
        torch._foreach_div_(roots, (1 - beta2**number) ** 0.5)
        torch._foreach_add_(roots, eps)
        terms = torch._foreach_div(firsts, roots)
        torch._foreach_div_(terms, 1 - beta1**number)
        torch._foreach_add_(terms, params, alpha=decay)
        _apply(params, terms, lr)

    return step


def lamb_by_adam(params: Params) -> Step:
    """As :func:`lamb`; the term is the step of torch's fused Adam from zero."""
    firsts, seconds = ([torch.zeros_like(p) for p in params] for _ in range(2))
    steps = [torch.zeros(())] * len(params)

    @torch.no_grad()
    def step() -> None:
        steps[0].add_(1)
        grads = [p.grad for p in params]
        norm = _norm(grads)
        if norm > 1.0:
            grads = [*torch._foreach_mul(grads, 1.0 / norm)]
        terms = torch._foreach_mul(params, 0.01)
        torch._fused_adam_(
            terms, grads, firsts, seconds, [], steps,
            lr=-1.0, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-6,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        _apply(params, terms, 0.01)

    return step


def _norm(tensors: list[torch.Tensor]) -> float:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))).item()


def _apply(params: Params, terms: Any, lr: float) -> None:
    """Move the weights by LAMB's terms, scaled by the trust ratios."""
    weights = torch.stack(torch._foreach_norm(params))
    sizes = torch.stack(torch._foreach_norm(terms))
    ratios = torch.where((weights > 0) & (sizes > 0), weights / sizes, 1.0)
    torch._foreach_addcmul_(params, terms, (-lr * ratios).unbind())


def novograd(params: Params) -> Step:
    """The formula of ``apex.ops.updates.novograd`` with FusedNovoGrad's defaults, lr 0.01."""
    return _novograd(params, lambda grads: torch.stack(torch._foreach_norm(grads)))


def novograd_by_rows(params: Params) -> Step:
    """As :func:`novograd`, with norms of rows for long gradients."""
    return _novograd(params, lambda grads: torch.stack([*map(norm_by_rows, grads)]))


def _novograd(params: Params, measure: Callable[[Any], torch.Tensor]) -> Step:
    moments = [torch.zeros_like(p) for p in params]
    beta1, beta2, eps, decay, lr, number = 0.9, 0.999, 1e-8, 0.01, 0.01, 0
    norms = torch.empty(0)

    @torch.no_grad()
    def step() -> None:
        nonlocal number, norms
        number += 1
        grads = [p.grad for p in params]
        found = measure(grads)
        norms = found if number == 1 else (beta2 * norms**2 + (1 - beta2) * found**2).sqrt()
        scales = (norms / (1 - beta2**number) ** 0.5 + eps).unbind()
        torch._foreach_lerp_(moments, grads, 1 - beta1)
        updates = torch._foreach_div(moments, scales)
        torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_add_(params, updates, alpha=-lr / (1 - beta1**number))

    return step


def lion(params: Params) -> Step:
    """The formula of ``apex.ops.updates.lion`` with FusedLion's defaults, lr 1e-3, decay 0.1.

    torch's sign of nan is 0, so that a broken run would go on, and ``lerp`` of inf is nan. This
    keeps both: the sign is a multiple of 2**-22.
    """
    averages = [torch.zeros_like(p) for p in params]
    large, shrunk, beta1, beta2 = map(torch.tensor, (2.0**127, 1 - 1e-3 * 0.1, 0.9, 0.99))

    @torch.no_grad()
    def step() -> None:
        grads = [p.grad for p in params]
        updates = torch._foreach_mul(averages, beta1)
        torch._foreach_add_(updates, grads, alpha=0.1)
        torch._foreach_mul_(updates, large)
        torch._foreach_clamp_min_(updates, -(2.0**-22))
        torch._foreach_clamp_max_(updates, 2.0**-22)
        torch._foreach_mul_(params, shrunk)
        torch._foreach_add_(params, updates, alpha=-1e-3 * 2**22)
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, grads, alpha=0.01)

    return step


def clip_in_float64(params: Params) -> Step:
    """``torch.nn.utils.clip_grad_norm_`` with norms in float64, which torch computes on the way."""
    return _clip(params, lambda grad: torch.linalg.vector_norm(grad, dtype=torch.float64))


def clip_by_rows(params: Params) -> Step:
    """``torch.nn.utils.clip_grad_norm_`` with norms of rows, which lose less than one of all."""
    return _clip(params, norm_by_rows)


def norm_by_rows(x: torch.Tensor) -> torch.Tensor:
    """The norm of the norms of rows of 1,000, where the tensor has more elements than that."""
    rows = x.view(-1, 1000) if x.numel() > 1000 else x
    return torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=-1))


def _clip(params: Params, measure: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    @torch.no_grad()
    def step() -> torch.Tensor:
        grads = [p.grad for p in params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([*map(measure, grads)])).float()
        torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return step


# -- measuring -------------------------------------------------------------------------------------


def parameters(shapes: list[tuple[int, ...]]) -> Params:
    """Parameters with gradients, the same ones at each call."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for number, param in enumerate(params):  # every other one of equal elements
        one = torch.randn((1,) * param.dim(), generator=generator).expand_as(param).contiguous()
        param.grad = one if number % 2 else torch.randn(param.shape, generator=generator)
    return params


def error(row: Row, make: Callable[[Params], Step]) -> tuple[float, bool]:
    """Roundings of float32 between a way and ours in float64, and whether our tests allow them."""
    params = parameters(row.shapes)
    exact: Params = [nn.Parameter(p.detach().double()) for p in params]
    for param, wide in zip(params, exact, strict=True):
        wide.grad = param.grad.double()
    clips = row.name.startswith("clip")
    step, exactly = make(params), row.ours(exact)
    for _ in range(1 if clips else 3):
        for param, wide in zip(params, exact, strict=True):  # FusedLAMB writes into gradients
            param.grad.copy_(wide.grad)
        kept = copy.deepcopy([wide.grad for wide in exact])
        norms = step(), exactly()
        if not clips:
            for wide, grad in zip(exact, kept, strict=True):
                wide.grad.copy_(grad)
    of = [(p.grad if clips else p.detach()).flatten() for p in params]
    wanted = [(p.grad if clips else p.detach()).flatten() for p in exact]
    found = roundings(torch.cat(of), torch.cat(wanted))
    allowed = found <= ROUNDINGS[torch.float32]
    if clips:
        of_norm = roundings(norms[0], norms[1])
        found, allowed = max(found, of_norm), allowed and of_norm <= 3 * ROUNDINGS[torch.float32]
    return found, allowed


def measure(row: Row, rounds: int) -> list[str]:
    """Time the ways in turns; return the lines to print."""
    makers = {"apex": row.ours, **row.torchs}
    errors = {name: error(row, make) for name, make in makers.items()}
    steps = {name: make(parameters(row.shapes)) for name, make in makers.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    calls = max(1, round(TURN_US * 1e-6 / timed(steps["apex"])))
    times = take_turns({name: partial(timed, step, calls) for name, step in steps.items()}, rounds)
    us = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    exact = [name for name in row.torchs if errors[name][1]]
    best = min(exact, key=lambda name: us[name], default=None)
    lines = []
    for name in row.torchs:
        found, ours, theirs = ratio(times["apex"], times[name]), us["apex"], us[name]
        verdict = "" if errors[name][1] else "less exact"
        if name == best:
            alone = len(row.shapes) < 100
            met = found.median <= GOAL or (alone and ours <= GOAL * theirs + ALONE_US)
            verdict = "met" if met else "missed"
        lines.append(
            f"{row.name:38} {name:14} {ours:8.0f} {theirs:8.0f}   {found}  "
            f"{errors['apex'][0]:5.2f} {errors[name][0]:8.2f}  {verdict}"
        )
    return lines


def main() -> None:
    """Print a line for each operation, list and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose name has one of the words")
    parser.add_argument("--rounds", type=int, default=200, help="turns of each way")
    args = parser.parse_args()
    one_core()
    print(
        f"{'operation':38} {'beside':14} {'apex us':>8} {'torch us':>8}  ratio [quartiles]  "
        "errors, apex and torch"
    )
    for row in rows():
        if not args.words or any(word in row.name for word in args.words):
            long = sum(torch.Size(shape).numel() for shape in row.shapes) > 10**6
            print(
                *measure(row, max(3, args.rounds // 10 if long else args.rounds)),
                sep="\n",
                flush=True,
            )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
