"""``fast_self_attn_func``: the function inside of ``SelfMultiheadAttn``."""

from apex.contrib.multihead_attn._functions import Tensor, attend


def fast_self_attn_func(
    use_time_mask: bool, is_training: bool, heads: int, inputs: Tensor, input_weights: Tensor,
    output_weights: Tensor, input_biases: Tensor | None, output_biases: Tensor | None,
    pad_mask: Tensor | None, mask_additive: bool, dropout_prob: float,
) -> Tensor:  # fmt: skip
    """Attend to ``inputs`` ``(time, batch, embed_dim)``; the result has their shape."""
    return attend(
        "fast_self_attn_func", inputs, inputs, (use_time_mask, is_training, heads, dropout_prob),
        (output_weights, output_biases), pad_mask, additive=mask_additive,
        in_proj_weight=input_weights, in_proj_bias=input_biases,
    )  # fmt: skip
