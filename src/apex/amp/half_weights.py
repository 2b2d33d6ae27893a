"""Float16 weights under a scaler of torch's, which trainers make themselves.

Torch's scaler refuses float16 gradients: to divide them in memory would make small ones 0. With
``param.grad_dtype`` they can be float32 while they are divided, clipped and stepped. Only then:
in a backward pass DistributedDataParallel expects gradients of the weights' dtype.

    scaler.unscale_(optimizer)      float16 gradients become float32, then torch divides them
    clip_grad_norm_(...)            of float32 gradients
    scaler.step(optimizer)          the fused step; then they are float16 again
    scaler.update()                 the same, if the program drops a batch without ``step``

Nothing of an optimizer is called at ``unscale_``. So from the first call of
:func:`float16_weights` on these three methods of ``torch.amp.GradScaler`` are ours in the whole
process; for other optimizers they do what they did.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

import torch

from apex._compat import HAS_GRAD_DTYPE

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

# By scaler: the optimizers that it unscaled since its last update.
_unscaled: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def float16_weights(optimizer: _Optimizer) -> _Optimizer:
    """Let ``torch.amp.GradScaler``, and so any trainer, train an optimizer's float16 weights.

    Call it once, before the first step. You need not change the training loop: it still calls
    ``unscale_``, torch's ``clip_grad_norm_`` and ``step``. DistributedDataParallel and FSDP2 work;
    FSDP1's ``ShardedGradScaler`` does not, because it has its own ``unscale_``.

    Gradients accumulate in float16. From ``unscale_`` to the end of ``step`` they are float32,
    which takes 4 more bytes for each float16 weight. No float32 copies of weights are made. The
    function replaces three methods of torch's scaler, which ``amp.reset()`` does not restore.

    Args:
        optimizer: One of ``apex.optimizers``. Only its float16 parameters are treated differently.

    Returns:
        ``optimizer``.

    Raises:
        RuntimeError: torch is older than 2.13.
        TypeError: The optimizer cannot step float16 weights with float32 gradients.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        >>> optimizer = float16_weights(apex.optimizers.FusedAdam([weight]))
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> scaler.scale(weight.float().mean()).backward()
        >>> scaler.unscale_(optimizer)
        >>> torch.nn.utils.clip_grad_norm_([weight], 1.0)
        tensor(0.5772)
        >>> scaler.step(optimizer)
    """
    if not HAS_GRAD_DTYPE:
        raise RuntimeError(
            f"amp.float16_weights needs torch 2.13 (Tensor.grad_dtype); this is "
            f"{torch.__version__}. Use apex.amp.GradScaler, or keep the weights in float32 and "
            "compute under torch.autocast."
        )
    if not callable(getattr(optimizer, "step_scaled", None)):
        name = type(optimizer).__name__
        raise TypeError(
            f"amp.float16_weights: {name} cannot update float16 weights with float32 gradients; "
            "pass an optimizer of apex.optimizers: "
            "amp.float16_weights(apex.optimizers.FusedAdam(model.parameters(), lr=1e-3))"
        )
    vars(optimizer).setdefault("_widened", [])
    _follow_scalers()
    return optimizer


@functools.cache
def _follow_scalers() -> None:
    """Replace three methods of torch's scaler, once."""
    kind = torch.amp.GradScaler
    unscale, step, update = kind.unscale_, kind.step, kind.update

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        if self.is_enabled() and hasattr(optimizer, "_widened"):
            _widen(optimizer)
            _unscaled.setdefault(self, weakref.WeakSet()).add(optimizer)
        unscale(self, optimizer)

    @functools.wraps(step)
    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, optimizer, *args, **kwargs)
        finally:  # a skipped step has no hooks
            _narrow(optimizer)

    @functools.wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> None:
        for optimizer in _unscaled.pop(self, ()):
            _narrow(optimizer)
        update(self, *args, **kwargs)

    kind.unscale_ = unscale_  # type: ignore[method-assign]
    kind.step = stepped  # type: ignore[method-assign]
    kind.update = updated  # type: ignore[method-assign]


def _widen(optimizer: Any) -> None:
    """Make float16 gradients float32."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype == torch.float16:
                _set(param, torch.float32)
                optimizer._widened.append(param)


def _narrow(optimizer: Any) -> None:
    """Make them float16 again."""
    widened: list[Any] = getattr(optimizer, "_widened", None) or []
    while widened:
        _set(widened.pop(), torch.float16)


def _set(param: Any, dtype: torch.dtype) -> None:
    """Change the dtype of a gradient: torch allows it while there is none."""
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    param.grad = None if grad is None else grad.detach().to(dtype)
