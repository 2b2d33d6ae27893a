"""SwiGLU, forward and backward: each program computes one block of elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from apex.kernels._plans import Family
from apex.kernels._settings import kept, setting

BLOCK = 1024  # 4 warps of 32 lanes, 128 bits of a 16-bit tensor each
WARPS = 4


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # at most 1: exp(-x) overflows below -88
    return tl.div_rn(tl.where(x >= 0, 1.0, small), 1 + small)


@triton.jit
def _forward_block(gate_ptr, up_ptr, y_ptr, offsets, mask):
    gate = tl.load(gate_ptr + offsets, mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask).to(tl.float32)
    y = gate * _sigmoid(gate) * up
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, size, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # so that accesses without a mask are 128 bits wide
        _forward_block(gate_ptr, up_ptr, y_ptr, offsets, None)
    else:
        _forward_block(gate_ptr, up_ptr, y_ptr, offsets, offsets < size)


@triton.jit
def _backward_block(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, offsets, mask):
    dy = tl.load(dy_ptr + offsets, mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask).to(tl.float32)
    sigmoid = _sigmoid(gate)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + offsets, mask).to(tl.float32)
        dgate = dy * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask)
    if dup_ptr is not None:
        dup = dy * (gate * sigmoid)
        tl.store(dup_ptr + offsets, dup.to(dup_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, size, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _backward_block(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, offsets, None)
    else:
        _backward_block(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, offsets, offsets < size)


@kept
def _of_forward(gate: torch.dtype, up: torch.dtype) -> tuple[int, Family]:
    """Elements of a program, and its launches."""
    block, warps = setting("swiglu_forward", gate, (), elements=BLOCK, warps=WARPS)
    return block, Family(_forward, (block,), warps, fuse=False)


@kept
def _of_backward(
    gate: torch.dtype, up: torch.dtype, dy: torch.dtype, *needs: bool
) -> tuple[int, Family]:
    block, warps = setting("swiglu_backward", gate, (), elements=BLOCK, warps=WARPS)
    return block, Family(_backward, (block,), warps, fuse=False)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute the result."""
    y = torch.empty_like(gate)
    size = y.numel()
    block, family = _of_forward(gate.dtype, up.dtype)
    family.launch((-(-size // block), 1, 1), (gate, up, y), (size,), size)
    return y


def backward(
    dy: torch.Tensor, needs: list[bool], *, gate: torch.Tensor, up: torch.Tensor
) -> list[torch.Tensor | None]:
    """Compute the gradients of ``gate`` and ``up`` that are needed."""
    size = dy.numel()
    dgate = torch.empty_like(gate) if needs[0] else None
    dup = torch.empty_like(up) if needs[1] else None
    block, family = _of_backward(gate.dtype, up.dtype, dy.dtype, *needs)
    family.launch((-(-size // block), 1, 1), (dy, gate, up, dgate, dup), (size,), size)
    return [dgate, dup]
