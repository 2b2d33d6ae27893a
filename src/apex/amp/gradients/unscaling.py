"""Unscaling gradients: in place, and from 16-bit weights into their float32 masters' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from apex.amp.gradients.masters import Pairs, Sharers
from apex.ops import _runtime
from apex.ops.columns import local_parts

# apex.ops.unscale is imported where it is used: `import apex` costs a fifth less so.


def refuse_graph(weights: Iterable[torch.Tensor]) -> None:
    """Raise if backward has left a graph on the gradients of ``weights``."""
    if any(weight.grad is not None and weight.grad.requires_grad for weight in weights):
        raise RuntimeError(
            "amp.scale_loss: backward(create_graph=True) was called in the block. Unscaling "
            "gradients does not unscale their graph, so a penalty on p.grad would be scaled. "
            "Use torch.autograd.grad(loss, params, create_graph=True) outside of the block, on "
            "the unscaled loss, and add the penalty to the loss that is scaled."
        )


def inverse(scale: torch.Tensor | float) -> torch.Tensor | float:
    """``1 / scale``, a float32 tensor where the scale is one."""
    return scale.reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale


_Kind = tuple[torch.device, torch.dtype, torch.layout]


def _groups(grads: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Real dense tensors that share memory with ``grads``, in lists of one device and dtype.

    That is what the foreach kernels want. Sparse gradients must be coalesced, unless they are only
    multiplied. Of a DTensor it is the part on this rank: torch's own kernel would reduce the flag
    as the first DTensor of a list asks for, and refuse a list with other tensors.
    """
    grads = local_parts(grads)
    kinds: list[_Kind] = [(grad.device, grad.dtype, grad.layout) for grad in grads]
    groups: dict[_Kind, list[torch.Tensor]] = {kind: [] for kind in set(kinds)}
    if len(groups) == 1:
        groups = {kinds[0]: list(grads)}
    else:
        for kind, grad in zip(kinds, grads, strict=True):
            groups[kind].append(grad)
    for (_, dtype, layout), group in groups.items():
        values = group if layout == torch.strided else [grad._values() for grad in group]
        yield [torch.view_as_real(value) for value in values] if dtype.is_complex else values


@torch.no_grad()
def multiply_(grads: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply ``grads``, floating tensors on any devices and of any dtypes, in place.

    The bits are those of ``mul_`` on dense tensors.
    """
    # torch 2.13 rounds a float to the tensors' 16 bits on the CPU: 2**20 would be inf in float16.
    exact = torch.tensor(factor, dtype=torch.float64, device="cpu")
    for group in _groups(grads):
        torch._foreach_mul_(group, exact if group[0].device.type == "cpu" else factor)


@torch.no_grad()
def unscale_(grads: Sequence[torch.Tensor], scale: torch.Tensor | float) -> torch.Tensor | None:
    """Divide ``grads`` by ``scale`` in place and say whether any element is not finite.

    Args:
        grads: Floating tensors on any devices, of any dtypes; sparse ones coalesced.
        scale: A 0-dim float32 tensor, or a float, for which nothing is checked.

    Returns:
        0-dim float32 tensor on ``scale``'s device, 1 if an element on this rank was inf or nan,
        else 0; ``None`` when ``scale`` is a float.
    """
    if not isinstance(scale, torch.Tensor):
        if scale != 1.0:
            multiply_(grads, 1.0 / scale)
        return None
    inverse = scale.reciprocal()
    found: dict[torch.device, torch.Tensor] = {}
    for group in _groups(grads):
        device = group[0].device
        if device not in found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            group, found[device], inverse.to(device, non_blocking=True)
        )
    flags = [flag.to(scale.device, non_blocking=True) for flag in found.values()]
    if len(flags) == 1:
        return flags[0]
    return torch.stack(flags).amax() if flags else torch.zeros_like(scale)


def unscale_into(
    grads: Sequence[torch.Tensor], pairs: Pairs, sharers: Sharers, scale: torch.Tensor | float
) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Unscale ``grads`` in place, and the gradients of 16-bit weights into float32 copies.

    Where a kernel can run it writes the copies in the same pass over memory: 6 bytes for each
    16-bit gradient instead of 14.

    Args:
        grads: Gradients of weights that the optimizer steps themselves; sparse ones coalesced.
        pairs: Weights with masters.
        sharers: See :class:`apex.amp.training.Training`.
        scale: What the loss was multiplied by.

    Returns:
        The flag that :func:`unscale_` returns, and the copies that are still to be added to a
        master's gradient, with its tensor.
    """
    if pairs and _runtime.can_fuse(pairs.weights[0].device):
        from apex.ops import unscale

        halves = [weight.grad for weight in pairs.weights if weight.grad is not None]
        if unscale.takes([*grads, *halves]):
            wide, more = pairs.widen(sharers, empty=True)
            first = scale if isinstance(scale, torch.Tensor) else (*grads, *halves)[0]
            found_inf = torch.zeros((), dtype=torch.float32, device=first.device)
            unscale.unscale_into([*grads, *halves], [*grads, *wide], inverse(scale), found_inf)
            return (found_inf if isinstance(scale, torch.Tensor) else None), more
    wide, more = pairs.widen(sharers, empty=False)
    return unscale_([*grads, *wide], scale), more
