"""``encdec_attn_func``: the function inside of ``EncdecMultiheadAttn(impl="default")``."""

from apex.contrib.multihead_attn._functions import Tensor, attend


def encdec_attn_func(  # noqa: PLR0913  # the original's
    use_time_mask: bool, is_training: bool, heads: int, scale: float, inputs_q: Tensor,
    inputs_kv: Tensor, input_weights_q: Tensor, input_weights_kv: Tensor, output_weights: Tensor,
    input_biases_q: Tensor | None, input_biases_kv: Tensor | None, output_biases: Tensor | None,
    mask: Tensor | None, dropout_prob: float,
) -> Tensor:  # fmt: skip
    """Attend from ``inputs_q`` ``(target, batch, embed_dim)`` to ``inputs_kv``."""
    return attend(
        "encdec_attn_func", inputs_q, inputs_kv, (use_time_mask, is_training, heads, dropout_prob),
        (output_weights, output_biases), mask, scale=scale, in_proj_weight_q=input_weights_q,
        in_proj_bias_q=input_biases_q, in_proj_weight_kv=input_weights_kv,
        in_proj_bias_kv=input_biases_kv,
    )  # fmt: skip
