"""Number formats, and products in them, on float32 tensors.

A format says what each tensor of a product is rounded to: what goes in, what comes out, and the
gradients of both. The rounding is torch's own cast there and back; sums are in float32, as in the
units that multiply 16-bit and 8-bit numbers. The 8-bit types have a scale for each tensor, by which
its largest magnitude becomes theirs; loss scales exist for float16 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Format:
    """What products are rounded to, and how near their results have to be.

    Attributes:
        operand: Type of the tensors that are multiplied.
        result: Type of the products, of biases, and of the gradients that are results.
        gradient: Type of the gradient of a product, which is an operand of its backward.
        safe: The worst cosine, to the results in float32, from which on a layer is safe.
        look: The worst cosine below which it is not safe; between the two it is to be looked at.
        others: The format of what a policy keeps out of this one.
    """

    name: str
    operand: torch.dtype
    result: torch.dtype
    gradient: torch.dtype
    safe: float
    look: float
    others: str

    @property
    def largest(self) -> float:
        """The largest number of the results."""
        return torch.finfo(self.result).max

    @property
    def needs_scale(self) -> bool:
        """Whether a training in it scales the loss."""
        return self.name == "float16"


_16 = {"safe": 0.999, "look": 0.99, "others": "float32"}
_HALF, _BRAIN = torch.float16, torch.bfloat16
FORMATS = {
    "float16": Format("float16", _HALF, _HALF, _HALF, **_16),  # type: ignore[arg-type]
    "bfloat16": Format("bfloat16", _BRAIN, _BRAIN, _BRAIN, **_16),  # type: ignore[arg-type]
    "e4m3": Format("e4m3", *(_8_BITS[0], _BRAIN, _8_BITS[1]), 0.98, 0.93, "bfloat16"),
}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, in float32. e4m3 saturates at 448; the others overflow to inf."""
    if dtype == torch.float8_e4m3fn:  # older releases of torch give NaN beyond 448
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype).float()


def _round_by_size(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, 8-bit ones with a scale for the tensor."""
    if dtype not in _8_BITS or x.numel() == 0:
        return rounded(x, dtype)
    scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-30)
    return rounded(x * scale, dtype) / scale


class _Rounded(torch.autograd.Function):
    """Rounds a tensor in the forward, and its gradient, times the loss scale, in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: torch.dtype, back: torch.dtype, scale: float
    ) -> torch.Tensor:
        ctx.back, ctx.scale = back, scale
        return _round_by_size(x, there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if gradient.layout != torch.strided:  # of an embedding with sparse=True
            gradient = gradient.to_dense()
        if ctx.scale == 1.0:
            return _round_by_size(gradient, ctx.back), None, None, None
        return _round_by_size(gradient * ctx.scale, ctx.back) / ctx.scale, None, None, None


_rounds: Any = _Rounded.apply  # torch has no types for it

_PRODUCTS = {
    *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "conv1d", "conv2d"),
    *("conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "dot"),
    *("einsum", "embedding", "embedding_bag", "gru", "gru_cell", "inner", "linalg_multi_dot"),
    *("linear", "lstm", "lstm_cell", "matmul", "mm", "multi_head_attention_forward", "mv"),
    *("rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "scaled_dot_product_attention"),
    *("tensordot", "vdot", "__matmul__", "__rmatmul__"),
}


def is_product(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch multiplies and adds; recurrent layers and attention are one."""
    return getattr(function, "__name__", "") in _PRODUCTS and kwargs.get("out") is None


def is_floating(leaf: Any) -> bool:
    """Whether a leaf of the arguments of a product is a float32 tensor."""
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32


def is_bias(leaf: Any) -> bool:
    """Whether a leaf is a parameter that is added."""
    return isinstance(leaf, torch.nn.Parameter) and leaf.dim() <= 1


def masks_of(function: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The ids of the masks of an attention, which may be infinite and are not multiplied."""
    found = [kwargs.get("attn_mask"), kwargs.get("key_padding_mask")]
    if getattr(function, "__name__", "") == "scaled_dot_product_attention":
        found += args[3:4]
    return {id(one) for one in found if one is not None}


def product(
    form: Format, scale: float, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call a product of torch on float32 tensors as if it computed in a format.

    Args:
        form: The format.
        scale: The loss scale that gradients would come with; they come and go without.
        function: One for which :func:`is_product` holds.
        args: Its arguments.
        kwargs: Those by name.
    """
    scale, masks = scale if form.needs_scale else 1.0, masks_of(function, args, kwargs)

    def operand(leaf: Any) -> Any:
        if not is_floating(leaf) or id(leaf) in masks:
            return leaf
        return _rounds(leaf, form.result if is_bias(leaf) else form.operand, form.result, scale)

    def result(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        return _rounds(leaf, form.result, form.gradient, scale)

    leaves, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten([operand(leaf) for leaf in leaves], spec)
    return tree_map(result, function(*args, **kwargs))


class InFormat(TorchFunctionMode):
    """Context in which products compute in a format.

    Args:
        form: The format.
        scale: See :func:`product`.
        chosen: Which products, by their number in the context; ``None`` for all.
    """

    def __init__(self, form: Format, scale: float = 1.0, chosen: set[int] | None = None) -> None:
        super().__init__()
        self.form, self.scale, self.chosen, self.count = form, scale, chosen, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round what goes in and comes out of the products that are chosen."""
        kwargs = kwargs or {}
        if not is_product(func, kwargs):
            return func(*args, **kwargs)
        self.count += 1
        if self.chosen is not None and self.count - 1 not in self.chosen:
            return func(*args, **kwargs)
        return product(self.form, self.scale, func, args, kwargs)
