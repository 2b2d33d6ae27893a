"""Number formats, and products in them, on float32 tensors.

A format says what each tensor of a product is rounded to: what goes in, what comes out, and the
gradients of both. The rounding is torch's own cast there and back; sums are in float32, as in the
units that multiply 16-bit and 8-bit numbers. The 8-bit types have a scale for each tensor, by which
its largest magnitude becomes theirs; loss scales exist for float16 alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Format(NamedTuple):
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
    others: str = "float32"


FORMATS = {
    "float16": Format("float16", *(torch.float16, torch.float16, torch.float16), 0.999, 0.99),
    "bfloat16": Format("bfloat16", *(torch.bfloat16, torch.bfloat16, torch.bfloat16), 0.999, 0.99),
    "e4m3": Format("e4m3", E4M3, torch.bfloat16, E5M2, 0.98, 0.93, "bfloat16"),
}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, in float32. e4m3 saturates at 448; the others overflow to inf."""
    x = x.clamp(-448.0, 448.0) if dtype == E4M3 else x  # older releases of torch give NaN beyond
    return x.to(dtype).float()


def _round_by_size(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, 8-bit ones with a scale for the tensor."""
    if dtype not in (E4M3, E5M2) or x.numel() == 0:
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
        gradient = gradient.to_dense()  # an embedding's may be sparse
        if ctx.back == torch.float16:
            return rounded(gradient * ctx.scale, ctx.back) / ctx.scale, None, None, None
        return _round_by_size(gradient, ctx.back), None, None, None


_round: Any = _Rounded.apply  # torch has no types for it

_ATTENTION = "scaled_dot_product_attention"
_PRODUCTS = {
    *("__rmatmul__", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "dot"),
    *("einsum", "embedding", "embedding_bag", "gru", "gru_cell", "inner"),
    *("linalg_matmul", "linalg_multi_dot", "linear", "lstm", "lstm_cell", "matmul", "mm"),
    *("multi_head_attention_forward", "mv"),
    *("rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "tensordot", "vdot", _ATTENTION),
}


def is_product(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch multiplies and adds; recurrent layers and attention are one."""
    return getattr(function, "__name__", "") in _PRODUCTS and kwargs.get("out") is None


def floating(tree: Any) -> list[torch.Tensor]:
    """The float32 tensors in nested containers."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else tree_flatten(tree)[0]
    return [leaf for leaf in leaves if _is_floating(leaf)]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32


def is_bias(leaf: Any) -> bool:
    """Whether a leaf is a parameter that is added."""
    return isinstance(leaf, torch.nn.Parameter) and leaf.dim() <= 1


def operands(function: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The ids of float32 tensors that are multiplied or added; masks, with their infs, are not."""
    masks = [kwargs.get("attn_mask"), kwargs.get("key_padding_mask")]
    masks += args[3:4] if getattr(function, "__name__", "") == _ATTENTION else ()
    return {id(one) for one in floating((args, kwargs))} - {id(one) for one in masks}


def product(form: Format, scale: float, function: Any, leaves: Any, spec: Any, given: Any) -> Any:
    """Call a product of torch on float32 tensors as if it computed in a format.

    Args:
        form: The format.
        scale: The loss scale that gradients would come with; they come and go without.
        function: One for which :func:`is_product` holds.
        leaves: Its arguments and those by name, flat.
        spec: How they are nested.
        given: Of each leaf whether it is among :func:`operands`.
    """
    places = [
        (form.result if is_bias(one) else form.operand) if is_in else None
        for one, is_in in zip(leaves, given, strict=True)
    ]
    both = zip(leaves, places, strict=True)
    leaves = [one if to is None else _round(one, to, form.result, scale) for one, to in both]
    args, kwargs = tree_unflatten(leaves, spec)

    def result(leaf: Any) -> Any:
        return _round(leaf, form.result, form.gradient, scale) if _is_floating(leaf) else leaf

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Round what goes in and comes out of the products that are chosen."""
        kwargs = kwargs or {}
        number, is_one = self.count, is_product(func, kwargs)
        self.count += is_one
        if is_one and (self.chosen is None or number in self.chosen):
            leaves, spec = tree_flatten((args, kwargs))
            ids = operands(func, args, kwargs)
            given = [id(leaf) in ids for leaf in leaves]
            return product(self.form, self.scale, func, leaves, spec, given)
        return func(*args, **kwargs)
