"""Optimizers with the signatures of 2019: gradients, outputs and scale as arguments of ``step``.

In new programs use :mod:`apex.optimizers`.
"""

from apex._upstream.missing import explain_attributes
from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
from apex.contrib.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_lamb import FusedLAMB

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB"]

explain_attributes(__name__)
