"""Lists for ``torch.nn.functional``."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
""".split()

FP32_FUNCS = """
    interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm
    local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
    cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss
    multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
    binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss
    ctc_loss
""".split()

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss`. "
        "Its input must be float32, but it is 16-bit.\n\nWhat to do, best first:\n  1. use "
        "`binary_cross_entropy_with_logits` / `nn.BCEWithLogitsLoss` on the values before the "
        "sigmoid: it is safe and faster;\n  2. `amp.register_float_function(torch, 'sigmoid')` "
        "before `amp.initialize` or `amp.init`, or pass `input.float()`;\n  3. "
        "`amp.init(allow_banned=True)`, which casts the inputs to float32.",
    )
]
