"""``fast_encdec_attn_norm_add_func``: that of ``EncdecMultiheadAttn(include_norm_add=True)``."""

from apex.contrib.multihead_attn._functions import Tensor, attend


def fast_encdec_attn_norm_add_func(
    use_time_mask: bool, is_training: bool, heads: int, inputs_q: Tensor, inputs_kv: Tensor,
    lyr_nrm_gamma_weights: Tensor, lyr_nrm_beta_weights: Tensor, input_weights_q: Tensor,
    input_weights_kv: Tensor, output_weights: Tensor, pad_mask: Tensor | None, dropout_prob: float,
) -> Tensor:  # fmt: skip
    """Attend from the norm of ``inputs_q`` to ``inputs_kv``, and add ``inputs_q``."""
    return attend(
        "fast_encdec_attn_norm_add_func", inputs_q, inputs_kv,
        (use_time_mask, is_training, heads, dropout_prob), (output_weights, None), pad_mask,
        norm=(lyr_nrm_gamma_weights, lyr_nrm_beta_weights), in_proj_weight_q=input_weights_q,
        in_proj_bias_q=None, in_proj_weight_kv=input_weights_kv, in_proj_bias_kv=None,
    )  # fmt: skip
