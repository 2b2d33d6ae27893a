"""What apex uses where a torch lacks a private name: by public functions, right and slower."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]

ABSENT = (
    object()
)  #: ``apex._compat.private`` has ``None``: whoever uses the name knows another way.


# -- answers ---------------------------------------------------------------------------------------


def yes(*_: Any) -> bool:
    """Answer a question that cannot be asked: perhaps, so the careful way is taken."""
    return True


def no(*_: Any) -> bool:
    """Say that the processor cannot do it."""
    return False


def nothing(*_: Any) -> None:
    """Know nothing."""


def is_any_autocast_enabled() -> bool:
    """Whether autocast is on for the CPU or for the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cuda" if accelerator is None else accelerator.type}
    known = filter(torch.amp.is_autocast_available, kinds)
    return any(map(torch.is_autocast_enabled, known))


def any_requires_grad(*args: Any) -> bool:
    """Whether a tensor among the arguments requires a gradient."""
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def get_tracing_state() -> Any:
    """Something if ``torch.jit.trace`` runs, else ``None``."""
    is_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]
    return True if is_tracing() else None


class ForwardAD:
    """Stands for ``torch.autograd.forward_ad``: as if forward-mode derivatives were always on."""

    _current_level = 0


class _Compiler:
    """Stands for ``torch.compiler`` where it has no flag."""

    is_dynamo_compiling = staticmethod(torch.compiler.is_dynamo_compiling)

    @property
    def _is_compiling_flag(self) -> bool:
        return torch.compiler.is_compiling()


COMPILER = _Compiler()


def some_hooks(_: bool) -> tuple[Any, ...]:
    """Hooks for saved tensors, of nobody knows whom."""
    return (some_hooks,)


def disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable``, which imports the compiler, at the first call."""

    @functools.cache
    def disabled() -> Callable[..., Any]:
        return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return disabled()(*args, **kwargs)

    return called


class Nothing:
    """A class that has no objects."""


# -- arithmetic ------------------------------------------------------------------------------------


def each(method: str) -> Callable[..., Any]:
    """A function of lists of tensors: ``method`` of each tensor of the first list.

    Of other arguments that are lists too, it gets the element at the same position.
    """
    function = getattr(torch.Tensor, method)

    def called(tensors: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        found = []
        for place, tensor in enumerate(tensors):
            own = [arg[place] if isinstance(arg, (list, tuple)) else arg for arg in args]
            found.append(function(tensor, *own, **kwargs))
        return None if method.endswith("_") else tuple(found)

    return called


def cross_entropy_loss(
    x: torch.Tensor, labels: torch.Tensor, _: None, reduction: int, ignored: int, smoothing: float
) -> torch.Tensor:
    """``F.cross_entropy`` of each row."""
    assert reduction == 0
    return torch.nn.functional.cross_entropy(
        x, labels, ignore_index=ignored, reduction="none", label_smoothing=smoothing
    )


def flatten_dense_tensors(tensors: Tensors) -> torch.Tensor:
    """Copy tensors one after the other into a 1-dimensional one; view one alone."""
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unflatten_dense_tensors(flat: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    """View a 1-dimensional tensor as tensors of the shapes of ``tensors``."""
    found, start = [], 0
    for tensor in tensors:
        found.append(flat.narrow(0, start, tensor.numel()).view(tensor.shape))
        start += tensor.numel()
    return found


def softmax_backward_data(
    dy: torch.Tensor, y: torch.Tensor, dim: int, _: torch.dtype
) -> torch.Tensor:
    """The gradient of what a softmax was given."""
    return y * (dy - (dy * y).sum(dim, keepdim=True))


def assert_async(valid: torch.Tensor, message: str) -> None:
    """Raise if ``valid`` is false; waits for its device."""
    if not valid:
        raise RuntimeError(message)


def check_and_unscale_(grads: Tensors, found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place; write 1 to ``found_inf`` if an element is not finite."""
    for grad in grads:
        found_inf.masked_fill_(~grad.isfinite().all(), 1.0)
        grad.copy_(_wide(grad) * factor)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def fused_adam_(  # noqa: PLR0913  # torch's arguments
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, _: Tensors,
    steps: Tensors, *, lr: float, beta1: float, beta2: float, weight_decay: float, eps: float,
    amsgrad: bool, maximize: bool, decoupled: bool = False,
) -> None:  # fmt: skip
    """Take a step of Adam."""
    assert (amsgrad, maximize) == (False, False)
    for param, grad, exp_avg, exp_avg_sq, step in zip(
        params, grads, exp_avgs, exp_avg_sqs, steps, strict=True
    ):
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad = grad.add(param, alpha=weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = exp_avg_sq.sqrt().div_((1 - beta2 ** float(step)) ** 0.5).add_(eps)
        param.addcdiv_(exp_avg, root, value=-lr / (1 - beta1 ** float(step)))


fused_adamw_ = functools.partial(fused_adam_, decoupled=True)


def fused_sgd_(
    params: Tensors, grads: Tensors, buffers: Tensors, *, weight_decay: float, momentum: float,
    lr: float, dampening: float, nesterov: bool, maximize: bool, is_first_step: bool,
) -> None:  # fmt: skip
    """Take a step of SGD."""
    assert (maximize, is_first_step) == (False, False)
    for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
        change = grad.add(param, alpha=weight_decay) if weight_decay else grad
        if momentum:
            buffer = buffers[place].mul_(momentum).add_(change, alpha=1 - dampening)
            change = change.add(buffer, alpha=momentum) if nesterov else buffer
        param.add_(change, alpha=-lr)


def fused_adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, steps: Tensors, *, lr: float, lr_decay: float,
    weight_decay: float, eps: float, maximize: bool,
) -> None:  # fmt: skip
    """Take a step of Adagrad, rounded once; ``steps`` matter with ``lr_decay`` alone."""
    assert (lr_decay, maximize) == (0.0, False)
    for param, grad, total in zip(params, grads, sums, strict=True):
        weight, change = _wide(param), _wide(grad)
        if weight_decay:
            change = change.add(weight, alpha=weight_decay)
        squares = _wide(total).addcmul(change, change)
        param.copy_(weight.addcdiv(change, squares.sqrt().add_(eps), value=-lr))
        total.copy_(squares)
