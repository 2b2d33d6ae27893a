"""Optimizers with the signatures of 2019: gradients, outputs and scale as arguments of ``step``.

New programs want :mod:`apex.optimizers`.
"""

from apex._missing import explain_attributes
from apex.contrib.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_lamb import FusedLAMB

__all__ = ["FusedAdam", "FusedLAMB"]

explain_attributes(__name__)
