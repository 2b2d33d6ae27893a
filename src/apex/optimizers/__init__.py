"""Fused optimizers: drop-in for ``torch.optim``, one kernel launch for all parameters.

They run on every device. On a GPU they use Triton. On a CPU they use torch's own fused kernels
where these compute the same, and plain PyTorch otherwise.
"""

from apex._upstream.missing import explain_attributes
from apex.optimizers.fp16_optimizer import FP16_Optimizer
from apex.optimizers.fused_adagrad import FusedAdagrad
from apex.optimizers.fused_adam import FusedAdam
from apex.optimizers.fused_lamb import FusedLAMB
from apex.optimizers.fused_lion import FusedLion
from apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from apex.optimizers.fused_muon import FusedMuon
from apex.optimizers.fused_novograd import FusedNovoGrad
from apex.optimizers.fused_sgd import FusedSGD
from apex.optimizers.qk_clip import max_attention_logits, qk_clip_

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "FusedLAMB",
    "FusedLion",
    "FusedMuon",
    "FusedNovoGrad",
    "FusedAdagrad",
    "FusedMixedPrecisionLamb",
    "max_attention_logits",
    "qk_clip_",
    "FP16_Optimizer",
]

explain_attributes(__name__)
