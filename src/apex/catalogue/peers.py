"""Steps of torch's optimizers, and of its foreach functions, that optimizers are timed beside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from apex._compat import private

__all__ = ["Peer", "foreach_lamb", "foreach_novograd", "of_torch"]

Params = list[torch.Tensor]
Peer = Callable[..., Callable[[], object]]  # from parameters and numbers to what takes a step


def of_torch(name: str) -> dict[str, Peer]:
    """An optimizer of torch's: its fused kernel, and foreach functions."""

    def peer(way: str, params: Params, **numbers: Any) -> Callable[[], object]:
        step: Callable[[], object] = getattr(torch.optim, name)(
            params, **numbers, **{way: True}
        ).step
        return step

    return {f"torch {way}": partial(peer, way) for way in ("fused", "foreach")}


def _stepping(params: Params, update: Callable[[Params, int], None]) -> Callable[[], object]:
    """Make a step of an update, from the gradients and the number of the step."""
    numbers = itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        update([param.grad for param in params if param.grad is not None], next(numbers))

    return step


def foreach_lamb(params: Params, *, lr: float, weight_decay: float) -> Callable[[], object]:
    """LAMB in torch's foreach functions, with the formula of `optimizers.lamb`, clipped to 1."""
    beta1, beta2 = 0.9, 0.999
    means, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))

    def update(grads: Params, taken: int) -> None:
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        scaled = private.foreach_div(grads, norm.clamp(min=1.0))
        private.foreach_lerp_(means, scaled, 1 - beta1)
        private.foreach_mul_(squares, beta2)
        private.foreach_addcmul_(squares, scaled, scaled, 1 - beta2)
        roots = private.foreach_sqrt(squares)
        private.foreach_div_(roots, (1 - beta2**taken) ** 0.5)
        private.foreach_add_(roots, 1e-6)
        terms = private.foreach_div(means, roots)
        private.foreach_div_(terms, 1 - beta1**taken)
        private.foreach_add_(terms, params, alpha=weight_decay)
        sizes = [torch.stack(private.foreach_norm(of)) for of in (params, terms)]
        ratios = torch.where((sizes[0] > 0) & (sizes[1] > 0), sizes[0] / sizes[1], 1.0)
        private.foreach_addcmul_(params, terms, (ratios * -lr).unbind())

    return _stepping(params, update)


def foreach_novograd(
    params: Params, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Callable[[], object]:
    """NovoGrad in torch's foreach functions, with the formula of `optimizers.novograd`.

    The norms of a step stay on the device, in one tensor.
    """
    beta1, beta2 = betas
    means = [torch.zeros_like(param) for param in params]
    squares: Params = []  # one tensor, from the first step on

    def update(grads: Params, taken: int) -> None:
        current = torch.stack(private.foreach_norm(grads, dtype=torch.float32)).square_()
        if squares:
            squares[0].lerp_(current, 1 - beta2)
        else:
            squares.append(current)
        private.foreach_lerp_(means, grads, 1 - beta1)
        scales = squares[0].sqrt().div_((1 - beta2**taken) ** 0.5).add_(1e-8)
        factors = scales.reciprocal_().mul_(-lr / (1 - beta1**taken))
        private.foreach_mul_(params, 1 - lr * weight_decay)
        # As 0-dim tensors: numbers on the host, or a product of their own, took 1.1 to 1.7 times
        # as long on a CPU (3 million elements in one tensor, and 1,000 tiny ones).
        private.foreach_addcmul_(params, means, factors.unbind())

    return _stepping(params, update)
