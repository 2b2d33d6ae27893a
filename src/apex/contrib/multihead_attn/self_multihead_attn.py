"""``SelfMultiheadAttn``: queries, keys and values of one sequence."""

import torch

from apex.contrib.multihead_attn._base import MultiheadAttnBase


class SelfMultiheadAttn(MultiheadAttnBase):
    """Multi-head self-attention of ``(time, batch, embed_dim)``, on any device, in any dtype.

    The parameters have the original's names. With ``embed_dim`` E they are:

    * ``in_proj_weight`` ``(3 E, E)``, ``in_proj_bias`` ``(3 E,)``. Rows are ordered (heads, 3,
      head_dim), so the query, key and value of a head are adjacent, unlike in
      ``torch.nn.MultiheadAttention``. With ``separate_qkv_params`` instead ``q_weight``,
      ``k_weight``, ``v_weight`` ``(E, E)`` and ``q_bias``, ``k_bias``, ``v_bias`` ``(E,)``.
    * ``out_proj_weight`` ``(E, E)``, ``out_proj_bias`` ``(E,)``.
    * ``lyr_nrm_gamma_weights``, ``lyr_nrm_beta_weights`` ``(E,)`` with ``include_norm_add``. With
      ``impl="default"`` instead a module ``lyr_nrm``.

    You can combine all options, including those for which the original had no kernel.

    Args:
        embed_dim: Size of the last dimension.
        num_heads: Number of heads. It must divide ``embed_dim``.
        dropout: Share of attention weights to drop. With ``include_norm_add`` the same share of the
            output's elements is dropped before the residual is added.
        bias: Whether projections have biases.
        include_norm_add: Apply layer norm to the query first, and add the original query at the
            end.
        impl: ``"fast"`` or ``"default"``. It decides only the names of the norm's parameters.
        separate_qkv_params: Use three matrices for the projections of query, key and value.
        mask_additive: Whether ``key_padding_mask`` holds numbers to add to the scores.

    Raises:
        ArgumentError: An option has an unsupported value.

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
