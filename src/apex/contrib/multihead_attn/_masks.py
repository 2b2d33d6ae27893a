"""Masks of attention: checked, joined, and made such that no row is masked as a whole.

A row without a position to attend to has no softmax. PyTorch's functions return nan or 0 for it,
depending on their version and on which kernel is chosen. Here such a row attends to all positions,
so that every kernel computes finite numbers, and the caller replaces its result by 0.
"""

import torch

from apex.ops._check import ArgumentError, check_shape


def check_mask(
    name: str,
    key: str,
    mask: torch.Tensor | None,
    additive: bool,
    shape: tuple[int, ...],
    reason: str,
) -> None:
    """Refuse a mask, if there is one, of another dtype, or of a shape other than ``shape``.

    ``name`` is the layer's, ``key`` the argument's; ``additive`` masks hold numbers to add;
    ``reason`` says where the shape comes from.
    """
    if mask is None:
        return
    if additive and not mask.is_floating_point():
        raise ArgumentError(
            f"{name}: {key} is {mask.dtype} and mask_additive is True. Pass floating numbers to "
            "add to the scores, -inf where masked, or set mask_additive=False."
        )
    if not additive and mask.dtype not in (torch.bool, torch.uint8):
        raise ArgumentError(
            f"{name}: {key} is {mask.dtype}; pass torch.bool or torch.uint8, 1 where masked. Only "
            "a key padding mask may contain numbers to add, with mask_additive=True."
        )
    check_shape(name, key, mask, shape, reason)


def join_masks(
    padding: torch.Tensor | None, time: torch.Tensor | None, additive: bool, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Make the mask for ``scaled_dot_product_attention``.

    ``padding`` is ``(batch, source)``, numbers to add if ``additive``, and ``time`` is ``(target,
    source)``.

    Returns:
        The mask: True where a position takes part, or numbers to add, of ``dtype``. And True for
        rows that are masked as a whole: of these the mask hides nothing. Both have four dimensions
        or two, and can be expanded to ``(batch, heads, target, source)`` and ``(batch, heads,
        target, 1)``.
    """
    hidden, numbers = None if time is None else time.bool(), None
    if padding is not None:
        padding = padding[:, None, None, :]
        numbers = padding.to(dtype) if additive else None
        padded = padding.bool() if numbers is None else numbers == -torch.inf
        hidden = padded if hidden is None else padded | hidden
    if hidden is None:
        return None, None
    empty = hidden.all(-1, keepdim=True)
    if numbers is None:
        return ~hidden | empty, empty
    return numbers.masked_fill(hidden, -torch.inf).masked_fill(empty, 0.0), empty
