"""Old name of NVIDIA's Apex: rotary embedding without autograd, on any device.

A module of compiled Apex. Arguments are positional only.
"""

import torch

import apex
from apex.ops._check import ArgumentError
from apex.ops.layers import rotary as ops

__all__ = [
    "backward",
    "backward_2d",
    "backward_cached",
    "backward_thd",
    "forward",
    "forward_2d",
    "forward_cached",
    "forward_thd",
]

__version__ = apex.__version__

Tensor = torch.Tensor


@torch.no_grad()
def forward(input: Tensor, freqs: Tensor, transpose_output: bool, /) -> Tensor:
    """Rotate ``(s, b, h, d)``; with ``transpose_output`` it lies in memory as ``(b, s, h, d)``."""
    return ops.rotate_by_angles(input, freqs, transpose_output)


@torch.no_grad()
def backward(output_grads: Tensor, freqs: Tensor, transpose_output: bool, /) -> Tensor:
    """Gradient of :func:`forward`."""
    return ops.by_angles(output_grads, freqs, transpose_output).back(output_grads)


@torch.no_grad()
def forward_cached(input: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool, /) -> Tensor:
    """Rotate by ``cos`` and ``sin``."""
    return ops.rotate_by_tables(input, cos, sin, transpose_output)


@torch.no_grad()
def backward_cached(
    output_grads: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool, /
) -> Tensor:
    """Gradient of :func:`forward_cached`."""
    return ops.by_tables(output_grads, cos, sin, transpose_output).back(output_grads)


@torch.no_grad()
def forward_thd(input: Tensor, cu_seqlens: Tensor, freqs: Tensor, /) -> Tensor:
    """Rotate packed sequences ``(tokens, h, d)``."""
    return ops.by_sequences(input, cu_seqlens, freqs).rotate(input)


@torch.no_grad()
def backward_thd(output_grads: Tensor, cu_seqlens: Tensor, freqs: Tensor, /) -> Tensor:
    """Gradient of :func:`forward_thd`."""
    return ops.by_sequences(output_grads, cu_seqlens, freqs).back(output_grads)


@torch.no_grad()
def forward_2d(
    input: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor, /
) -> Tensor:
    """Rotate images ``(b, ih, iw, h, d)``; the result is ``(b, ih * iw, h, d)``."""
    images, rows, columns = _flat(input)
    return ops.by_places(images, rows, columns, cos_h, sin_h, cos_w, sin_w).rotate(images)


@torch.no_grad()
def backward_2d(
    output_grads: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor, /
) -> Tensor:
    """Gradient of :func:`forward_2d`, from ``(b, ih, iw, h, d)`` to ``(b, ih * iw, h, d)``."""
    images, rows, columns = _flat(output_grads)
    return ops.by_places(images, rows, columns, cos_h, sin_h, cos_w, sin_w).back(images)


def _flat(images: Tensor) -> tuple[Tensor, int, int]:
    if not isinstance(images, Tensor) or images.dim() != 5:
        found = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ArgumentError(f"rotary: the images are {found}. Pass [b, ih, iw, h, d].")
    return images.flatten(1, 2), images.shape[1], images.shape[2]
