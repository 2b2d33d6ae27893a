"""``SelfMultiheadAttn``: queries, keys and values of one sequence."""

import torch

from apex.contrib.multihead_attn._base import MultiheadAttnBase


class SelfMultiheadAttn(MultiheadAttnBase):
    """Multi-head self-attention of ``(time, batch, embed_dim)``, on any device, in any dtype.

    Parameters, by the original's names, for ``embed_dim`` E and ``num_heads`` heads:

    * ``in_proj_weight`` ``(3 E, E)``, ``in_proj_bias`` ``(3 E,)``: rows ordered (heads, 3,
      head_dim), so that query, key and value of a head are neighbours, unlike in
      ``torch.nn.MultiheadAttention``. Or ``q_weight``, ``k_weight``, ``v_weight`` ``(E, E)``,
      ``q_bias``, ``k_bias``, ``v_bias`` ``(E,)`` with ``separate_qkv_params``.
    * ``out_proj_weight`` ``(E, E)``, ``out_proj_bias`` ``(E,)``.
    * ``lyr_nrm_gamma_weights``, ``lyr_nrm_beta_weights`` ``(E,)`` with ``include_norm_add``; a
      module ``lyr_nrm`` instead with ``impl="default"``.

    All options may be combined; the original had no kernels for some.

    Args:
        embed_dim: Size of the last dimension.
        num_heads: Divides ``embed_dim``.
        dropout: The share of attention weights that is dropped, and of the output's elements before
            the residual is added, if there is one.
        bias: Whether projections have biases.
        include_norm_add: Layer norm of the query before, and the query as it was added after.
        impl: ``"fast"`` or ``"default"``: names of the norm's parameters, nothing else.
        separate_qkv_params: Whether the projections' weights are three matrices.
        mask_additive: Whether ``key_padding_mask`` holds numbers to add to the scores.

    Raises:
        ArgumentError: An option is not what it should be.

    Example:
        >>> layer = SelfMultiheadAttn(8, 2, bias=True)
        >>> x = torch.randn(5, 3, 8)
        >>> layer(x, x, x, key_padding_mask=torch.zeros(3, 5, dtype=torch.bool))[0].shape
        torch.Size([5, 3, 8])
    """

    in_proj_weight: torch.Tensor
    in_proj_bias: torch.Tensor | None
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    separate_qkv_params = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        first_weight = "q_weight" if separate_qkv_params else "in_proj_weight"
        options = (embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        super().__init__(*options, first_weight, mask_additive)
        self.separate_qkv_params = separate_qkv_params
