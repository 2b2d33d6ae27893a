"""Old names of NVIDIA's Apex: mixed precision by hand, with 16-bit models and float32 masters.

Use :func:`apex.amp.initialize` in new programs.
"""

from apex._upstream.missing import explain_attributes
from apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from apex.fp16_utils.fp16util import (
    BN_convert_float,
    FP16_Module,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    fp16_to_fp32,
    fp32_to_fp16,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from apex.fp16_utils.fused_weight_norm import Fused_Weight_Norm
from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Module",
    "FP16_Optimizer",
    "Fused_Weight_Norm",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "fp16_to_fp32",
    "fp32_to_fp16",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

explain_attributes(__name__)
