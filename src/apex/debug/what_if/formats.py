"""Number formats, and products in them, on float32 tensors.

A format says what each tensor of a product is rounded to: what goes in, what comes out, and the
gradients of both. The rounding is torch's own cast there and back; sums are in float32, as in the
units that multiply 16-bit and 8-bit numbers. The 8-bit types have a scale for each tensor, by which
its largest magnitude becomes theirs; loss scales exist for float16 alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from apex._compat.private import tree_flatten, tree_unflatten
from apex.debug.calls import is_transformed, random_states, set_random_states
from apex.debug.tensors import largest

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
State = Literal["safe", "look", "not safe", "not decided"]


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

    @property
    def result_name(self) -> str:
        """The type of results, for a sentence."""
        return str(self.result).removeprefix("torch.")

    def state(self, cosine: float) -> State:
        """What a worst cosine means."""
        return "safe" if cosine >= self.safe else "look" if cosine >= self.look else "not safe"


FLOAT32 = Format("float32", *(torch.float32, torch.float32, torch.float32), 1.0, 1.0)
FORMATS = {
    "float16": Format("float16", *(torch.float16, torch.float16, torch.float16), 0.999, 0.99),
    "bfloat16": Format("bfloat16", *(torch.bfloat16, torch.bfloat16, torch.bfloat16), 0.999, 0.99),
    "e4m3": Format("e4m3", E4M3, torch.bfloat16, E5M2, 0.98, 0.93, "bfloat16"),
}


def nonzero(x: torch.Tensor) -> int:
    """How many are not zero. On a CPU 2**16 floats take 38 us to count, by way of bool 25."""
    return int(torch.count_nonzero(x.bool()))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype``, in float32. e4m3 saturates at 448; the others overflow to inf."""
    if dtype != E4M3:
        return x.to(dtype).float()
    codes = x.clamp(-448.0, 448.0).to(dtype).view(torch.uint8)  # older torch gives NaN beyond
    # CPU: to cast 2**16 numbers of e4m3 to float32 takes 317 us; all there are, and to pick, 57
    every = torch.arange(256, dtype=torch.uint8, device=x.device).view(dtype).float()
    return every.index_select(0, codes.flatten().int()).view(x.shape)


def rounded_(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a tensor that nobody else has to a 16-bit type: in place, where its memory is its own.

    On a CPU memory costs more than the numbers: 2**16 are rounded in 24 us, or in up to 130.
    """
    return x.copy_(x.to(dtype)) if x.is_contiguous() else rounded(x, dtype)


class Rounding:
    """What a format does to the tensors of a product: 8-bit ones have a scale each.

    Args:
        form: The format.
        scale: The loss scale of float16: whoever starts a backward multiplies by it.
    """

    def __init__(self, form: Format, scale: float = 1.0) -> None:
        self.form, self.scale = form, scale if form.result == torch.float16 else 1.0
        self._weights: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """Round what is multiplied; a bias is added to results and has their type."""
        if is_bias(x):
            return rounded(x, self.form.result)
        if not isinstance(x, torch.nn.Parameter):
            return self._scaled(x, self.form.operand)
        # CPU: e4m3 takes 250 us for 2**16 weights; the sum, 4 us, tells if the program wrote .data
        state, known = (x._version, float(x.detach().sum())), self._weights.get(id(x))
        if known is None or known[0] != state:
            known = self._weights[id(x)] = (state, x, self._scaled(x.detach(), self.form.operand))
        return known[2]

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Round what a product gives, or the gradient that it gives to what it multiplies."""
        return rounded(x.to_dense(), self.form.result)  # an embedding's gradient is sparse

    def result_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Round the gradient that reaches a product."""
        return self._scaled(x, self.form.gradient)

    def zeroed(self, gradient: torch.Tensor) -> int:
        """How many numbers of a gradient become zero in float16, at the loss scale."""
        # half of float16's smallest number, 2**-24, is rounded to the even neighbour: zero
        return nonzero(gradient) - nonzero(torch.hardshrink(gradient, 2.0**-25 / self.scale))

    @staticmethod
    def _scaled(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in (E4M3, E5M2):
            return rounded(x, dtype)
        scale = torch.finfo(dtype).max / largest(x).clamp(min=1e-30)
        return rounded(x * scale, dtype).div_(scale)


class _Mapped(torch.autograd.Function):
    """Gives on what ``there`` makes of a tensor, and what ``back`` makes of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Callable[..., Any], back: Any) -> Any:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None


mapped: Any = _Mapped.apply  # torch has no types for it

_ATTENTION = "scaled_dot_product_attention"
# Recurrent layers and attention are one product. addmm and its like are also written with a "_".
_PRODUCTS = {
    *("__rmatmul__", "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "convolution", "dot", "einsum", "embedding", "embedding_bag", "gru"),
    *("gru_cell", "inner", "linalg_matmul", "linalg_multi_dot", "linear", "lstm", "lstm_cell"),
    *("matmul", "mm", "multi_head_attention_forward", "mv", "rnn_relu", "rnn_relu_cell"),
    *("rnn_tanh", "rnn_tanh_cell", "tensordot", "vdot", _ATTENTION),
}
_NOT_JUDGED = {
    *("_sparse_mm", "cdist", "linalg_matrix_power", "linalg_vecdot", "matrix_power", "smm"),
    "sspaddmm",
}


def name_of(function: Any) -> str:
    """The name of a function of torch's."""
    return str(getattr(function, "__name__", "")).partition(".")[0]  # "mm.default" of torch.ops


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


def channel_of(function: Any, leaves: Sequence[Any]) -> int:
    """Which dimension of a product's result has the channels, from the end."""
    dims = max([one.dim() for one in leaves if isinstance(one, torch.nn.Parameter)], default=0)
    is_convolution = name_of(function).startswith("conv") and dims > 2
    return 1 - dims if is_convolution and name_of(function) != "conv_tbc" else -1


_PLAIN = (torch.Tensor, int, float, str, type(None))


def flat(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The leaves of arguments, and what :func:`built` makes them arguments again by."""
    if kwargs or not all(isinstance(one, _PLAIN) for one in args):
        leaves, spec = tree_flatten((args, kwargs))
        return leaves, spec
    return [*args], None  # usual, and ten times faster: 1 of 10 us


def built(leaves: Sequence[Any], spec: Any) -> Any:
    """Arguments, ``(args, kwargs)``, from what :func:`flat` gave."""
    return (leaves, {}) if spec is None else tree_unflatten(leaves, spec)


def operands(function: Any, leaves: Sequence[Any], spec: Any) -> list[int]:
    """The places of what is multiplied or added among the leaves of arguments.

    Masks, which have infs, are neither.
    """
    args, kwargs = built(range(len(leaves)), spec)
    masks = [kwargs.get("attn_mask"), kwargs.get("key_padding_mask")] if kwargs else []
    masks += args[3:4] if name_of(function) == _ATTENTION else ()
    return [n for n, one in enumerate(leaves) if is_floating(one) and n not in masks]


class Products(TorchFunctionMode):
    """Context that gives :meth:`product` what multiplies and adds.

    Attributes:
        count: How many products were called.
        others: How often products were called that are not judged, by name.
        loss: Of the pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.others, self.loss = 0, Counter[str](), 0.0

    def product(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a product, the one with number ``count``."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, by :meth:`product` if it is one that writes none of its arguments."""
        kwargs, name = kwargs or {}, name_of(func)
        plain = name if name in _PRODUCTS else name.removesuffix("_")
        is_one = plain in _PRODUCTS
        if is_one and is_transformed():  # vmap's tensors cannot be kept, or given to autograd
            self.others[f"{name} under torch.func"] += 1
            return func(*args, **kwargs)
        if is_one and kwargs.get("out") is None:
            product = func if plain == name else getattr(torch, plain)
            output = self.product(product, args, kwargs)
            self.count += 1
            return output if product is func else args[0].copy_(output)
        if is_one or name in _NOT_JUDGED:
            self.others[f"{name}(out=)" if is_one else name] += 1
        return func(*args, **kwargs)


class InFormat(Products):
    """Context in which products compute in a format.

    Args:
        rounding: The format.
        chosen: Which products, by their number in the context; ``None`` for all.
        is_centred: Whether only the results are rounded, and keep the mean that each channel has in
            float32: an error that is the same in every row is a bias, and hides what becomes of the
            spread.

    Attributes:
        gradients: Those that reached the results of products, not rounded, by the numbers of
            product and result; with the loss scale.
        results: Of products whose results alone are rounded, before that.
    """

    def __init__(
        self, rounding: Rounding, chosen: set[int] | None = None, *, is_centred: bool = False
    ) -> None:
        super().__init__()
        self.rounding, self.chosen, self.is_centred = rounding, chosen, is_centred
        self.gradients = dict[tuple[int, int], torch.Tensor]()
        self.results: list[torch.Tensor] = []

    def product(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Round what goes in and comes out, if it is chosen."""
        if self.chosen is not None and self.count not in self.chosen:
            return function(*args, **kwargs)
        to, (leaves, spec) = self.rounding, flat(args, kwargs)
        if self.is_centred:
            return self._shifted(function, leaves, spec)
        for place in operands(function, leaves, spec):
            leaves[place] = mapped(leaves[place], to.operand, to.result)
        args, kwargs = built(leaves, spec)
        found, spec = tree_flatten(function(*args, **kwargs))
        results = [place for place, one in enumerate(found) if is_floating(one)]
        for number, place in enumerate(results):
            back = partial(self._see, (self.count, number))
            found[place] = mapped(found[place], to.result, back)
        return tree_unflatten(found, spec)

    def _shifted(self, function: Any, leaves: list[Any], spec: Any) -> Any:
        """The product, and added to its results what rounding changes, less the mean of it."""
        args, kwargs = built(leaves, spec)
        found, tree = tree_flatten(function(*args, **kwargs))
        channel, random = channel_of(function, leaves), random_states()
        with torch.no_grad():
            leaves = [*leaves]
            for place in operands(function, leaves, spec):
                leaves[place] = self.rounding.operand(leaves[place])
            args, kwargs = built(leaves, spec)
            again = [self.rounding.result(one) for one in floating(function(*args, **kwargs))]
        set_random_states(random)
        results = [place for place, one in enumerate(found) if is_floating(one)]
        for number, place in enumerate(results):
            error = again[number] - found[place].detach()
            others = [n for n in range(error.dim()) if n != error.dim() + channel]
            error = error - error.mean(others, keepdim=True) if others else error
            self.results += [found[place]] if found[place].requires_grad else []
            back = partial(self._see, (self.count, number))
            found[place] = mapped(found[place], error.add, back)
        return tree_unflatten(found, tree)

    def _see(self, key: tuple[int, int], gradient: torch.Tensor) -> torch.Tensor:
        self.gradients[key] = gradient.detach()
        return gradient if self.is_centred else self.rounding.result_gradient(gradient)
