"""Mixed precision by hand: 16-bit models, float32 masters, loss scaling.

New programs want :func:`apex.amp.initialize`.
"""

from apex._missing import explain_attributes
from apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, to_python_float

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler", "to_python_float"]

explain_attributes(__name__)
