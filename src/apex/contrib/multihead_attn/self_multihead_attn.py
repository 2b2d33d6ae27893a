"""``SelfMultiheadAttn``: queries, keys and values of one sequence."""

import torch
import torch.nn.functional as F

from apex.contrib.multihead_attn._base import MultiheadAttnBase, finish, heads, start
from apex.ops.norms._scripted import left_to_python

__all__ = ["SelfMultiheadAttn"]


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
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl, mask_additive)
        self.separate_qkv_params = separate_qkv_params
        sizes = (
            dict.fromkeys("qkv", embed_dim) if separate_qkv_params else {"in_proj": 3 * embed_dim}
        )
        self._make_parameters(
            {f"{name}_weight": size for name, size in sizes.items()},
            {f"{name}_bias": size for name, size in sizes.items()},
        )

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
        """Attend; rows that the masks hide as a whole get 0 from the attention.

        Args:
            query: ``(time, batch, embed_dim)``.
            key: Not used, as in the original: keys are made of ``query``. Of its shape, or None.
            value: The same.
            key_padding_mask: ``(batch, time)``: bool or uint8, 1 where masked, or floating numbers
                with ``mask_additive``.
            need_weights: Ignored, as in the original: the second result is ``None``.
            attn_mask: ``(time, time)``, bool or uint8, 1 where masked. Joined with the other mask
                if both are given, which the original refused.
            is_training: Whether to drop anything. After ``eval()`` nothing is dropped either.

        Returns:
            ``(time, batch, embed_dim)`` and ``None``. The dtype is that of ``query``, or autocast's
            under ``torch.autocast``, where a wider ``query`` as residual makes it wider.

        Raises:
            ArgumentError: A shape, dtype or device is not what it should be.
        """
        unused = {"key": key, "value": value}
        x = start(self, query, query, unused, key_padding_mask, attn_mask)
        if self.separate_qkv_params:
            (q,) = heads(F.linear(x, self.q_weight, self.q_bias), self.num_heads)
            (k,) = heads(F.linear(x, self.k_weight, self.k_bias), self.num_heads)
            (v,) = heads(F.linear(x, self.v_weight, self.v_bias), self.num_heads)
        else:
            x = F.linear(x, self.in_proj_weight, self.in_proj_bias)
            q, k, v = heads(x, self.num_heads, 3)
        return finish(self, query, q, k, v, key_padding_mask, attn_mask, is_training), None
