"""``EncdecMultiheadAttn``: queries of one sequence, keys and values of another."""

import torch
import torch.nn.functional as F

from apex.contrib.multihead_attn._base import MultiheadAttnBase, finish, heads, start
from apex.ops.norms._scripted import left_to_python

__all__ = ["EncdecMultiheadAttn"]


class EncdecMultiheadAttn(MultiheadAttnBase):
    """Multi-head attention of a decoder to an encoder's output, on any device, in any dtype.

    Parameters, by the original's names, for ``embed_dim`` E:

    * ``in_proj_weight_q`` ``(E, E)``, ``in_proj_bias_q`` ``(E,)``.
    * ``in_proj_weight_kv`` ``(2 E, E)``, ``in_proj_bias_kv`` ``(2 E,)``: rows ordered (heads, 2,
      head_dim), so that key and value of a head are neighbours.
    * The others as in :class:`~apex.contrib.multihead_attn.SelfMultiheadAttn`.

    Options, all of which may be combined, are those of that class.

    Raises:
        ArgumentError: An option is not what it should be.

    Example:
        >>> layer = EncdecMultiheadAttn(8, 2)
        >>> decoder, encoder = torch.randn(5, 3, 8), torch.randn(7, 3, 8)
        >>> layer(decoder, encoder, encoder)[0].shape
        torch.Size([5, 3, 8])
    """

    in_proj_weight_q: torch.Tensor
    in_proj_weight_kv: torch.Tensor
    in_proj_bias_q: torch.Tensor | None
    in_proj_bias_kv: torch.Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        sizes = {"q": embed_dim, "kv": 2 * embed_dim}
        self._make_parameters(
            {f"in_proj_weight_{name}": size for name, size in sizes.items()},
            {f"in_proj_bias_{name}": size for name, size in sizes.items()},
        )

    @left_to_python
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Attend; rows that the masks hide as a whole get 0 from the attention.

        Args:
            query: ``(target, batch, embed_dim)``.
            key: ``(source, batch, embed_dim)``.
            value: Not used, as in the original: values are made of ``key``. Of its shape, or None.
            key_padding_mask: ``(batch, source)``, bool or uint8, 1 where masked.
            need_weights: Ignored, as in the original: the second result is ``None``.
            attn_mask: ``(target, source)``, bool or uint8, 1 where masked. Joined with the other
                mask if both are given, which the original refused.
            is_training: Whether to drop anything. After ``eval()`` nothing is dropped either.

        Returns:
            ``(target, batch, embed_dim)`` and ``None``; dtype as for ``SelfMultiheadAttn``.

        Raises:
            ArgumentError: A shape, dtype or device is not what it should be.
        """
        unused = {"value": value}
        x = start(self, query, key, unused, key_padding_mask, attn_mask)
        (q,) = heads(F.linear(x, self.in_proj_weight_q, self.in_proj_bias_q), self.num_heads)
        x = F.linear(key, self.in_proj_weight_kv, self.in_proj_bias_kv)
        k, v = heads(x, self.num_heads, 2)
        return finish(self, query, q, k, v, key_padding_mask, attn_mask, is_training), None
