"""Registration of operations with torch, so that ``torch.compile`` sees one node for each.

An operation has a schema, a kernel for every device, a kernel for shapes alone, and its gradient.
``torch.library.Library`` and not ``torch.library.custom_op``: a call costs 14 us on the host with
the former and 24 us with the latter when gradients are recorded, 5 and 12 us when they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None))

_LIBRARY = torch.library.Library("apex", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define an operation in the namespace ``apex``.

    Args:
        schema: ``name(Tensor x, float factor) -> Tensor``, as in torch's own list of functions.
        run: Computes it, on any device.
        fake: Makes outputs of the right shapes, dtypes and strides without computing anything.
        keep: ``keep(ctx, inputs, output)`` saves what ``backward`` needs.
        backward: ``backward(ctx, *grads)`` returns a gradient for each input.

    Returns:
        The operation, to be called with tensors.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"apex::{name}", fake, lib=_LIBRARY)
    operation = getattr(torch.ops.apex, name).default
    torch.library.register_vmap(f"apex::{name}", partial(_one_by_one, operation), lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"apex::{name}", backward, setup_context=keep, lib=_LIBRARY)
    return operation


def _one_by_one(
    operation: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[Any, Any]:
    """Rule for vmap, which meets an operation only where it goes over a backward pass."""
    batched = [
        argument.unbind(dim) if isinstance(dim, int) else [argument] * info.batch_size
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]
    found = [operation(*each) for each in zip(*batched, strict=True)]
    if isinstance(found[0], torch.Tensor):
        return torch.stack(found), 0
    outputs = tuple(torch.stack(each) for each in zip(*found, strict=True))
    return outputs, (0,) * len(outputs)


def wants_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether gradients will be wanted."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def ordinary(*tensors: torch.Tensor | None) -> bool:
    """Whether this is an eager call on plain tensors, with nothing watching or transforming it.

    Otherwise torch's own functions are to be called: vmap, the other transforms of ``torch.func``,
    forward-mode derivatives, ``torch.jit.trace`` and subclasses of tensors know those.
    """
    return (
        all(type(tensor) in _ORDINARY for tensor in tensors)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not tracing()
    )


def batched(gradient: torch.Tensor) -> bool:
    """Whether a backward pass runs under vmap, as with ``torch.autograd.grad(is_grads_batched)``.

    Custom operations know what to do then; functions with ``out`` and in-place ones do not.
    """
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(gradient) or functorch.is_batchedtensor(gradient)


def tracing() -> bool:
    """Whether ``torch.jit.trace`` is at work, which takes sizes for tensors: ask nothing then."""
    return not torch.compiler.is_compiling() and bool(torch._C._get_tracing_state())
