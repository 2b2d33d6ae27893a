"""The ``FP16_Optimizer`` of :mod:`apex.optimizers`, where it was moved in October 2019."""

from apex.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
