"""``fast_encdec_attn_func``: the function inside of ``EncdecMultiheadAttn``."""

from apex.contrib.multihead_attn._functions import Tensor, attend


def fast_encdec_attn_func(
    use_time_mask: bool, is_training: bool, heads: int, inputs_q: Tensor, inputs_kv: Tensor,
    input_weights_q: Tensor, input_weights_kv: Tensor, output_weights: Tensor,
    pad_mask: Tensor | None, dropout_prob: float,
) -> Tensor:  # fmt: skip
    """Attend from ``inputs_q`` ``(target, batch, embed_dim)`` to ``inputs_kv``."""
    return attend(
        "fast_encdec_attn_func", inputs_q, inputs_kv,
        (use_time_mask, is_training, heads, dropout_prob), (output_weights, None), pad_mask,
        in_proj_weight_q=input_weights_q, in_proj_bias_q=None, in_proj_weight_kv=input_weights_kv,
        in_proj_bias_kv=None,
    )  # fmt: skip
