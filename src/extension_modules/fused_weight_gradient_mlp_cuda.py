"""Old name of NVIDIA's Apex: adds a weight's gradient to the sum of earlier ones.

A module of compiled Apex. Arguments are positional only; any device.
"""

import torch

import apex
from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops._dtypes import NARROW, wide
from apex.ops.layers import dense

__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]

__version__ = apex.__version__


def wgrad_gemm_accum_fp32(
    input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /
) -> None:
    """Add ``d_output.T @ input`` to a float32 ``d_weight``, in place.

    Products of 16-bit numbers add up in float32 and are rounded to no less. CUDA needs no temporary
    for them from torch 2.10 on; with torch 2.9 it has a float32 one of 4,096 rows of ``d_weight``.
    On a CPU and on ROCm there are float32 copies of ``input``, and of 4,096 columns of ``d_output``
    at a time.

    Args:
        input: ``(..., in)``; leading dimensions count as rows.
        d_output: ``(..., out)`` of as many rows, in the input's dtype.
        d_weight: ``(out, in)``, contiguous; float64 where the input is.
    """
    to = wide(input) if isinstance(input, torch.Tensor) else torch.float32
    _add("wgrad_gemm_accum_fp32", input, d_output, d_weight, to)


def wgrad_gemm_accum_fp16(
    input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /
) -> None:
    """The same for ``d_weight`` in the 16-bit dtype of the others; the sum is rounded once."""
    if isinstance(d_weight, torch.Tensor) and d_weight.dtype not in NARROW:
        raise ArgumentError(
            f"wgrad_gemm_accum_fp16: d_weight is {d_weight.dtype}; allowed are float16 and "
            "bfloat16. Use wgrad_gemm_accum_fp32."
        )
    to = input.dtype if isinstance(input, torch.Tensor) else None
    _add("wgrad_gemm_accum_fp16", input, d_output, d_weight, to)


def _add(
    name: str,
    input: torch.Tensor,
    d_output: torch.Tensor,
    d_weight: torch.Tensor,
    to: torch.dtype | None,
) -> None:
    with dense.alone(input):
        tensors = {"input": input, "d_output": d_output, "d_weight": d_weight}
        check_tensors(name, tensors, floating=tensors, required=tensors)
        dense.check_one_dtype(name, {"input": input, "d_output": d_output})
        x, dy = dense.rows(input), dense.rows(d_output)
        shapes = f"input has {list(input.shape)} and d_output {list(d_output.shape)}"
        if x.dim() < 2 or dy.dim() < 2 or x.shape[0] != dy.shape[0]:
            raise ArgumentError(
                f"{name}: {shapes}. Pass (..., in_features) and (..., out_features), with the same "
                "number of rows."
            )
        check_shape(name, "d_weight", d_weight, (dy.shape[1], x.shape[1]), shapes)
        if d_weight.dtype != to or not d_weight.is_contiguous():
            layout = "" if d_weight.is_contiguous() else " and not contiguous"
            raise ArgumentError(
                f"{name}: d_weight is {d_weight.dtype}{layout}. Pass a contiguous tensor of {to}, "
                f"for input of {input.dtype}."
            )
        dense.add_product(d_weight, dy, x)
