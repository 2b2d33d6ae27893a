"""Number formats, and products in them, on float32 tensors.

A format says what each tensor of a product is rounded to: what goes in, what comes out, and the
gradients of both. The rounding is torch's own cast there and back; sums are in float32, as in the
units that multiply 16-bit and 8-bit numbers. The 8-bit types have a scale for each tensor, by which
its largest magnitude becomes theirs; loss scales exist for float16 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

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


FLOAT32 = Format("float32", *(torch.float32, torch.float32, torch.float32), 1.0, 1.0)
FORMATS = {
    "float16": Format("float16", *(torch.float16, torch.float16, torch.float16), 0.999, 0.99),
    "bfloat16": Format("bfloat16", *(torch.bfloat16, torch.bfloat16, torch.bfloat16), 0.999, 0.99),
    "e4m3": Format("e4m3", E4M3, torch.bfloat16, E5M2, 0.98, 0.93, "bfloat16"),
}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, in float32. e4m3 saturates at 448; the others overflow to inf."""
    if dtype != E4M3:
        return x.to(dtype).float()
    codes = x.clamp(-448.0, 448.0).to(dtype).view(torch.uint8)  # older torch gives NaN beyond
    # CPU: to cast 2**16 numbers of e4m3 to float32 takes 317 us; all there are, and to pick, 57
    every = torch.arange(256, dtype=torch.uint8, device=x.device).view(dtype).float()
    return every.index_select(0, codes.flatten().int()).view(x.shape)


class Rounding:
    """What a format does to the tensors of a product: 8-bit ones have a scale each.

    Args:
        form: The format.
        scale: The loss scale, a power of two, of float16. Gradients come and go without it.
    """

    def __init__(self, form: Format, scale: float = 1.0) -> None:
        self.form, self.scale = form, scale if form.result == torch.float16 else 1.0
        self._weights: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """Round what is multiplied; a bias is added to results and has their type."""
        if is_bias(x):
            return self._rounded(x, self.form.result)
        if self.form.operand != E4M3 or not isinstance(x, torch.nn.Parameter):
            return self._rounded(x, self.form.operand)
        # CPU: e4m3 takes 250 us for 2**16 weights; the sum, 4 us, tells if the program wrote .data
        state, known = (x._version, float(x.sum())), self._weights.get(id(x))
        if known is None or known[0] != state:
            known = self._weights[id(x)] = (state, x, self._rounded(x.detach(), E4M3))
        return known[2]

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Round what a product gives."""
        return self._rounded(x, self.form.result)

    def result_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Round the gradient that reaches a product."""
        return self._rounded(x, self.form.gradient, self.scale)

    def operand_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Round the gradient that a product gives to an operand."""
        return self._rounded(x.to_dense(), self.form.result, self.scale)  # an embedding's is sparse

    @staticmethod
    def _rounded(x: torch.Tensor, dtype: torch.dtype, scale: Any = 1.0) -> torch.Tensor:
        if dtype in (E4M3, E5M2) and x.numel():
            scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-30)
        elif scale == 1.0:
            return rounded(x, dtype)
        return rounded(x * scale, dtype).div_(scale)


class _Rounded(torch.autograd.Function):
    """Rounds a tensor in the forward, and its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Callable[..., Any], back: Any) -> Any:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None


_round: Any = _Rounded.apply  # torch has no types for it

_ATTENTION = "scaled_dot_product_attention"
_IN_PLACE = {"addbmm_", "addmm_", "addmv_", "baddbmm_"}
_PRODUCTS = {
    *("__rmatmul__", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "dot"),
    *("einsum", "embedding", "embedding_bag", "gru", "gru_cell", "inner"),
    *("linalg_matmul", "linalg_multi_dot", "linear", "lstm", "lstm_cell", "matmul", "mm"),
    *("multi_head_attention_forward", "mv"),
    *("rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "tensordot", "vdot", _ATTENTION),
}
_NOT_JUDGED = {
    *("_sparse_mm", "cdist", "linalg_matrix_power", "linalg_vecdot", "matrix_power", "smm"),
    "sspaddmm",
}


def _name_of(function: Any) -> str:
    name: str = getattr(function, "__name__", "")
    return name.partition(".")[0]  # "mm.default" of torch.ops.aten


def product_of(function: Any, kwargs: dict[str, Any]) -> Any:
    """What multiplies and adds as a function of torch does, and writes no argument; else None.

    Recurrent layers and attention are one product. What has ``out=`` is none.
    """
    name = _name_of(function)
    if name in _IN_PLACE:
        return getattr(torch, name[:-1])
    return function if name in _PRODUCTS and kwargs.get("out") is None else None


def not_judged(function: Any, kwargs: dict[str, Any]) -> str:
    """The name of a function that multiplies and adds and is not judged; empty of any other."""
    name = _name_of(function)
    if name in _PRODUCTS and kwargs.get("out") is not None:
        return f"{name}(out=)"
    return name if name in _NOT_JUDGED else ""


def is_floating(leaf: Any) -> bool:
    """Whether it is a float32 tensor."""
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32


def floating(tree: Any) -> list[torch.Tensor]:
    """The float32 tensors in nested containers."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else tree_flatten(tree)[0]
    return [leaf for leaf in leaves if is_floating(leaf)]


def is_bias(leaf: Any) -> bool:
    """Whether a leaf is a parameter that is added."""
    return isinstance(leaf, torch.nn.Parameter) and leaf.dim() <= 1


def operands(function: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> list[int]:
    """The places of what is multiplied or added among the leaves of the arguments; masks are not.

    They have infs.
    """
    masks = [kwargs.get("attn_mask"), kwargs.get("key_padding_mask")]
    masks += args[3:4] if _name_of(function) == _ATTENTION else ()
    known = {id(mask) for mask in masks}
    return [n for n, one in enumerate(leaves) if is_floating(one) and id(one) not in known]


class InFormat(TorchFunctionMode):
    """Context in which products compute in a format.

    Args:
        rounding: The format.
        chosen: Which products, by their number in the context; ``None`` for all.
    """

    def __init__(self, rounding: Rounding, chosen: set[int] | None = None) -> None:
        super().__init__()
        self.rounding, self.chosen, self.count = rounding, chosen, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Round what goes in and comes out of the products that are chosen."""
        kwargs, number, to = kwargs or {}, self.count, self.rounding
        product = product_of(func, kwargs)
        self.count += product is not None
        if product is None or not (self.chosen is None or number in self.chosen):
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        for place in operands(func, args, kwargs, leaves):
            leaves[place] = _round(leaves[place], to.operand, to.operand_gradient)
        given, named = tree_unflatten(leaves, spec)
        found, spec = tree_flatten(product(*given, **named))
        for place in operands(None, (), {}, found):
            found[place] = _round(found[place], to.result, to.result_gradient)
        output = tree_unflatten(found, spec)
        return output if product is func else args[0].copy_(output)
