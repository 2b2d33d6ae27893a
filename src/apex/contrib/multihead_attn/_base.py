"""What both layers are: options, checks, masks, projections, attention, norm and residual.

    x      = layer_norm(query) if include_norm_add else query
    out    = linear(attention(q, k, v of x and key, masks), out_proj_weight, out_proj_bias)
    output = query + dropout(out) if include_norm_add else out

Attention is ``torch.nn.functional.scaled_dot_product_attention``, which chooses among the fused
kernels of a device: it is the very function, and a kernel of our own would move no fewer bytes. The
two values of ``impl`` compute the same; they differ in the names of the norm's parameters, so that
checkpoints of both load.

What follows from this function:

* Gradients of gradients: its fused kernels raise "derivative ... is not implemented". They are
  right in a block ``with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):``.
* ``torch.vmap`` is right; on a CPU torch warns that it takes one element after the other.
* On CUDA, two backward passes are bitwise equal under ``torch.use_deterministic_algorithms(True)``.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter, init

from apex.contrib.multihead_attn._masks import check_mask, join_masks
from apex.normalization import FusedLayerNorm
from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops.layers import dense
from apex.ops.layers.attention import attention
from apex.ops.norms import row_norms
from apex.ops.norms._scripted import left_to_python

EPS = 1e-5  # of the layer norm

# A matrix of several projections is initialized as these would be one by one: xavier_uniform_ has
# the limit sqrt(6 / (rows + columns)), for E columns and 3 E or 2 E rows instead of E.
GAINS = {"in_proj_weight": (4 / 2) ** 0.5, "in_proj_weight_kv": (3 / 2) ** 0.5}

# Of queries, keys and values: the names of weight and bias, with ``{}`` for these words, and how
# many of the three it computes. A layer knows its own by the name of the first weight: whole layers
# are pickled, here and by Apex, which did not keep more.
PROJECTIONS = {
    "in_proj_weight": [("in_proj_{}", 3)],
    "q_weight": [("q_{}", 1), ("k_{}", 1), ("v_{}", 1)],
    "in_proj_weight_q": [("in_proj_{}_q", 1), ("in_proj_{}_kv", 2)],
}


class MultiheadAttnBase(torch.nn.Module):
    """Multi-head attention; what is projected from what is up to its subclasses."""

    out_proj_weight: torch.Tensor
    out_proj_bias: torch.Tensor | None
    lyr_nrm_gamma_weights: torch.Tensor | None
    lyr_nrm_beta_weights: torch.Tensor | None
    lyr_nrm: FusedLayerNorm | None
    # What modules that an older Apex pickled whole may lack.
    dropout, bias, include_norm_add, impl, mask_additive = 0.0, False, False, "fast", False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        include_norm_add: bool,
        impl: str,
        first_weight: str,
        mask_additive: bool = False,
    ) -> None:
        """Check the options and make the parameters, those of ``PROJECTIONS[first_weight]``."""
        super().__init__()
        name = type(self).__name__
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ArgumentError(
                f"{name}: embed_dim is {embed_dim} and num_heads {num_heads}. Pass an embed_dim "
                "that is divisible by num_heads."
            )
        if not 0.0 <= dropout <= 1.0:
            raise ArgumentError(f"{name}: dropout is {dropout}; pass a number from 0 to 1.")
        if impl not in ("fast", "default"):
            raise ArgumentError(f"{name}: impl is {impl!r}; allowed are 'fast' and 'default'.")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.bias = bias
        self.include_norm_add = include_norm_add
        self.impl = impl
        self.scaling = self.head_dim**-0.5
        self.mask_additive = mask_additive
        projections = [*PROJECTIONS[first_weight], ("out_proj_{}", 1)]
        rows = {name: parts * embed_dim for name, parts in projections}
        placed: Any = {"device": None, "dtype": None}  # torch's defaults, as in torch.nn
        for name, size in rows.items():  # all weights first, as there: optimizers number them
            weight = Parameter(torch.empty(size, embed_dim, **placed))
            self.register_parameter(name.format("weight"), weight)
        for name, size in rows.items():
            empty = Parameter(torch.empty(size, **placed)) if bias else None
            self.register_parameter(name.format("bias"), empty)
        if include_norm_add:
            fast = impl == "fast"
            for name in ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"):
                empty = Parameter(torch.empty(embed_dim, **placed)) if fast else None
                self.register_parameter(name, empty)
            self.lyr_nrm = None if fast else FusedLayerNorm(embed_dim, EPS)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise matrices with Xavier's method, biases with 0 and the norm's weight with 1."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() == 2:
                init.xavier_uniform_(parameter, gain=GAINS.get(name, 1.0))
            else:
                init.constant_(parameter, float(name == "lyr_nrm_gamma_weights"))
        if self.include_norm_add and self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()

    @left_to_python
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Compute the attention. It is 0 for rows that the masks hide completely.

        Args:
            query: ``(target, batch, embed_dim)``.
            key: ``(source, batch, embed_dim)``. Self-attention does not use it, as in the original;
                pass a tensor of the query's shape, or None.
            value: Not used, as in the original: keys and values are projections of the same tensor.
                Pass a tensor of the key's shape, or None.
            key_padding_mask: ``(batch, source)`` in bool or uint8, 1 where masked; or floating
                numbers with ``mask_additive``.
            need_weights: Ignored, as in the original: the second result is ``None``.
            attn_mask: ``(target, source)`` in bool or uint8, 1 where masked. If you pass both
                masks, both apply; the original did not support this.
            is_training: Whether to apply dropout. After ``eval()`` it is never applied.

        Returns:
            ``(target, batch, embed_dim)`` and ``None``. The dtype is that of ``query``. Under
            ``torch.autocast`` it is autocast's, or a wider one if a wider ``query`` is added as the
            residual.

        Raises:
            ArgumentError: An argument has an unsupported shape, dtype or device.
        """
        return _attend(self, query, key, value, key_padding_mask, attn_mask, is_training), None

    def extra_repr(self) -> str:
        """Show the options in ``print(model)``."""
        options = ("dropout", "bias", "include_norm_add", "impl")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in options)
        return f"{self.embed_dim}, {self.num_heads}, {shown}"


# Functions: in TorchScript a method that is left to Python finds no others.


def _attend(
    layer: MultiheadAttnBase,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    is_training: bool,
) -> torch.Tensor:
    unused, attends_to_itself = {"value": value}, not hasattr(layer, "in_proj_weight_q")
    if attends_to_itself:
        unused, key = {"key": key, "value": value}, query
    if not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        _check(layer, query, key, unused, key_padding_mask, attn_mask)
    x = query
    if layer.include_norm_add:
        weight, bias = layer.lyr_nrm_gamma_weights, layer.lyr_nrm_beta_weights
        module = getattr(layer, "lyr_nrm", None)
        if module is not None:
            weight, bias = module.weight, module.bias
        shape = (layer.embed_dim,)
        x = row_norms.norm(query, weight, bias, shape, EPS, False, True, "float32", "")
    q, k, v = _project(layer, x, x if attends_to_itself else key)
    drops = is_training and layer.training
    mask, empty = join_masks(key_padding_mask, attn_mask, layer.mask_additive, q.dtype)
    dropout = layer.dropout if drops else 0.0
    y = attention(q, k, v, mask, dropout, layer.scaling)
    if empty is not None:
        y = y.masked_fill(empty, 0.0)
    out = F.linear(y.permute(2, 0, 1, 3).flatten(2), layer.out_proj_weight, layer.out_proj_bias)
    return query + F.dropout(out, layer.dropout, drops) if layer.include_norm_add else out


def _project(layer: MultiheadAttnBase, x: torch.Tensor, memory: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value of all heads, ``(batch, num_heads, time, head_dim)`` each."""
    found: list[torch.Tensor] = []
    first = next(filter(partial(hasattr, layer), PROJECTIONS))
    for name, parts in PROJECTIONS[first]:
        weight, bias = getattr(layer, name.format("weight")), getattr(layer, name.format("bias"))
        y = F.linear(memory if found else x, weight, bias)
        y = y.view(*y.shape[:2], layer.num_heads, parts, layer.head_dim)
        found += y.permute(3, 1, 2, 0, 4).unbind(0)
    return found


def _check(
    layer: MultiheadAttnBase,
    query: torch.Tensor,
    key: torch.Tensor,
    unused: dict[str, torch.Tensor | None],
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
) -> None:
    name, weight = type(layer).__name__, layer.out_proj_weight
    tensors = {"query": query, "key": key, "out_proj_weight": weight}
    masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    check_tensors(name, {**tensors, **masks}, floating=tensors, required=tensors)
    for word, x in (("query", query), ("key", key)):
        if x.dim() != 3 or x.shape[2] != layer.embed_dim:
            raise ArgumentError(
                f"{name}: {word} has shape {list(x.shape)}; pass (time, batch, embed_dim) "
                f"with embed_dim {layer.embed_dim}."
            )
    dense.check_one_dtype(name, tensors)
    (target, batch, _), source = query.shape, key.shape[0]
    sizes = f"query has {target} steps of {batch} sequences and key {source} steps"
    check_shape(name, "key", key, (source, batch, layer.embed_dim), sizes)
    for word, tensor in unused.items():
        reason = f"the layer computes keys and values from one tensor, of shape {list(key.shape)}"
        check_shape(name, word, tensor, tuple(key.shape), reason)
    for word, mask, additive, rows in (
        ("key_padding_mask", key_padding_mask, layer.mask_additive, batch),
        ("attn_mask", attn_mask, False, target),
    ):
        check_mask(name, word, mask, additive, (rows, source), sizes)
