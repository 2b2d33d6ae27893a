"""``fast_self_attn_norm_add_func``: that of ``SelfMultiheadAttn(include_norm_add=True)``."""

from apex.contrib.multihead_attn._functions import Tensor, attend


def fast_self_attn_norm_add_func(
    use_time_mask: bool, is_training: bool, heads: int, inputs: Tensor,
    lyr_nrm_gamma_weights: Tensor, lyr_nrm_beta_weights: Tensor, input_weights: Tensor,
    output_weights: Tensor, pad_mask: Tensor | None, dropout_prob: float,
) -> Tensor:  # fmt: skip
    """Attend to the norm of ``inputs`` ``(time, batch, embed_dim)``, and add ``inputs``."""
    return attend(
        "fast_self_attn_norm_add_func", inputs, inputs,
        (use_time_mask, is_training, heads, dropout_prob), (output_weights, None), pad_mask,
        norm=(lyr_nrm_gamma_weights, lyr_nrm_beta_weights), in_proj_weight=input_weights,
        in_proj_bias=None,
    )  # fmt: skip
