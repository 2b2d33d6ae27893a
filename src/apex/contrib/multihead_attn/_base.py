"""What both layers share: options, checks, masks, attention, output projection, norm and residual.

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

import torch
import torch.nn.functional as F
from torch.nn import Parameter, init

from apex.contrib.multihead_attn._masks import check_mask, join_masks
from apex.normalization import FusedLayerNorm
from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops.layers import dense
from apex.ops.norms import row_norms

EPS = 1e-5  # of the layer norm

# A matrix of several projections is initialized as these would be one by one: xavier_uniform_ has
# the limit sqrt(6 / (rows + columns)), for E columns and 3 E or 2 E rows instead of E.
GAINS = {"in_proj_weight": (4 / 2) ** 0.5, "in_proj_weight_kv": (3 / 2) ** 0.5}


class MultiheadAttnBase(torch.nn.Module):
    """Multi-head attention but for the projections of queries, keys and values."""

    out_proj_weight: torch.Tensor
    out_proj_bias: torch.Tensor | None
    lyr_nrm_gamma_weights: torch.Tensor | None
    lyr_nrm_beta_weights: torch.Tensor | None
    lyr_nrm: FusedLayerNorm | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        include_norm_add: bool,
        impl: str,
        mask_additive: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ArgumentError(
                f"{name}: embed_dim is {embed_dim} and num_heads {num_heads}. Pass an embed_dim "
                "that num_heads divides evenly."
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

    def _make_parameters(self, weights: dict[str, int], biases: dict[str, int]) -> None:
        """Make and initialize all parameters, in the original's order: optimizers number them.

        Args:
            weights: Rows of each matrix of the projections.
            biases: Size of each of their biases.
        """
        size = self.embed_dim
        for name, rows in {**weights, "out_proj_weight": size}.items():
            self.register_parameter(name, Parameter(torch.empty(rows, size)))
        for name, rows in {**biases, "out_proj_bias": size}.items():
            self.register_parameter(name, Parameter(torch.empty(rows)) if self.bias else None)
        if self.include_norm_add:
            fast = self.impl == "fast"
            for name in ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"):
                self.register_parameter(name, Parameter(torch.empty(size)) if fast else None)
            self.lyr_nrm = None if fast else FusedLayerNorm(size, EPS)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-initialize the matrices; biases become 0, the norm's weight 1."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() == 2:
                init.xavier_uniform_(parameter, gain=GAINS.get(name, 1.0))
            else:
                init.constant_(parameter, float(name == "lyr_nrm_gamma_weights"))
        if self.include_norm_add and self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()

    def extra_repr(self) -> str:
        """Show the options in ``print(model)``."""
        options = ("dropout", "bias", "include_norm_add", "impl")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in options)
        return f"{self.embed_dim}, {self.num_heads}, {shown}"


def start(
    layer: MultiheadAttnBase,
    query: torch.Tensor,
    key: torch.Tensor,
    unused: dict[str, torch.Tensor | None],
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Check the arguments of a forward; return what queries are projected from.

    ``key`` is what keys and values are projected from, ``unused`` are the arguments that are not.
    A function, as are those below: in TorchScript a method that is left to Python finds no others.

    Raises:
        ArgumentError: An argument is not what it should be.
    """
    if not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        _check(layer, query, key, unused, key_padding_mask, attn_mask)
    if not layer.include_norm_add:
        return query
    weight, bias = layer.lyr_nrm_gamma_weights, layer.lyr_nrm_beta_weights
    if layer.lyr_nrm is not None:
        weight, bias = layer.lyr_nrm.weight, layer.lyr_nrm.bias
    return row_norms.norm(query, weight, bias, (layer.embed_dim,), EPS, False, True, "float32", "")


def heads(x: torch.Tensor, num_heads: int, parts: int = 1) -> tuple[torch.Tensor, ...]:
    """Split ``(time, batch, num_heads * parts * head_dim)`` into its parts.

    Returns:
        As many as there are parts, ``(batch, num_heads, time, head_dim)``.
    """
    time, batch, size = x.shape
    x = x.view(time, batch, num_heads, parts, size // (num_heads * parts))
    return x.permute(3, 1, 2, 0, 4).unbind(0)


def finish(
    layer: MultiheadAttnBase,
    query: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    is_training: bool,
) -> torch.Tensor:
    """Attend with these heads, project, and add ``query`` if the layer does."""
    drops = is_training and layer.training
    mask, empty = join_masks(key_padding_mask, attn_mask, layer.mask_additive, q.dtype)
    dropout = layer.dropout if drops else 0.0
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=layer.scaling)
    if empty is not None:
        y = y.masked_fill(empty, 0.0)
    out = F.linear(y.permute(2, 0, 1, 3).flatten(2), layer.out_proj_weight, layer.out_proj_bias)
    return query + F.dropout(out, layer.dropout, drops) if layer.include_norm_add else out


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
        reason = f"keys and values are made of one tensor, of shape {list(key.shape)}"
        check_shape(name, word, tensor, tuple(key.shape), reason)
    for word, mask, additive, rows in (
        ("key_padding_mask", key_padding_mask, layer.mask_additive, batch),
        ("attn_mask", attn_mask, False, target),
    ):
        check_mask(name, word, mask, additive, (rows, source), sizes)
