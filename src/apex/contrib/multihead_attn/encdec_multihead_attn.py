"""``EncdecMultiheadAttn``: queries of one sequence, keys and values of another."""

import torch

from apex.contrib.multihead_attn._base import MultiheadAttnBase


class EncdecMultiheadAttn(MultiheadAttnBase):
    """Multi-head attention of a decoder to an encoder's output, on any device, in any dtype.

    The parameters have the original's names. With ``embed_dim`` E they are:

    * ``in_proj_weight_q`` ``(E, E)``, ``in_proj_bias_q`` ``(E,)``.
    * ``in_proj_weight_kv`` ``(2 E, E)``, ``in_proj_bias_kv`` ``(2 E,)``. Rows are ordered (heads,
      2, head_dim), so the key and value of a head are adjacent.
    * The others as in :class:`~apex.contrib.multihead_attn.SelfMultiheadAttn`.

    See that class for the arguments. You can combine all options.

    Raises:
        ArgumentError: An option has an unsupported value.

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
        options = (embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        super().__init__(*options, "in_proj_weight_q")
