"""Steps of other packages, and of torch's foreach functions, that optimizers are timed beside."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Peer", "foreach_novograd", "of_torch", "timms_lamb"]

Params = list[torch.Tensor]
Peer = Callable[..., Callable[[], object]]  # from parameters and numbers to what takes a step


def of_torch(name: str) -> dict[str, Peer]:
    """An optimizer of torch's: its fused kernel, and foreach functions."""

    def peer(**implementation: Any) -> Peer:
        def make(params: Params, **numbers: Any) -> Callable[[], object]:
            step: Callable[[], object] = getattr(torch.optim, name)(
                params, **numbers, **implementation
            ).step
            return step

        return make

    return {"torch fused": peer(fused=True), "torch foreach": peer(foreach=True)}


def foreach_novograd(
    params: Params, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Callable[[], object]:
    """NovoGrad in torch's foreach functions, with the formula of `optimizers.novograd`.

    The norms of a step stay on the device, in one tensor.
    """
    beta1, beta2 = betas
    means = [torch.zeros_like(param) for param in params]
    squares: list[torch.Tensor] = []  # one tensor, from the first step on
    taken = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal taken
        taken += 1
        grads = [param.grad for param in params if param.grad is not None]
        current = torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).square_()
        if squares:
            squares[0].lerp_(current, 1 - beta2)
        else:
            squares.append(current)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        scales = squares[0].sqrt().div_((1 - beta2**taken) ** 0.5).add_(1e-8)
        factors = scales.reciprocal_().mul_(-lr / (1 - beta1**taken))
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        # As 0-dim tensors: numbers on the host, or a product of their own, took 1.1 to 1.7 times
        # as long on a CPU (3 million elements in one tensor, and 1,000 tiny ones).
        torch._foreach_addcmul_(params, means, factors.unbind())

    return step


def timms_lamb(params: Params, foreach: bool, **numbers: Any) -> Callable[[], object]:
    """LAMB of timm, by foreach functions or by a loop."""
    lamb = _timm("lamb").Lamb
    if "foreach" in inspect.signature(lamb).parameters:
        numbers["foreach"] = foreach
    elif foreach:
        raise ModuleNotFoundError("this timm has no LAMB by foreach functions", name="timm")
    step: Callable[[], object] = lamb(params, **numbers).step
    return step


@functools.cache
def _timm(module: str) -> Any:
    """Import a module of ``timm.optim`` alone.

    ``import timm`` wants torchvision and a client of a model hub; the optimizers need neither.
    """
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'timm'", name="timm")
    package = types.ModuleType("_timm_optim")
    package.__path__ = [os.path.join(path, "optim") for path in found.submodule_search_locations]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{module}")
