"""Convolution, bias and ReLU as one function.

The arguments of these functions:

* ``x``: ``(N, C, H, W)``, in any memory format and floating dtype.
* ``weight``: ``(K, C, h, w)``.
* ``bias`` and ``scale``: tensors of K elements. Another size raises ``ArgumentError``.
* ``padding`` and ``stride``: one number each.

Under autocast the convolution, and the operations after it, compute in autocast's dtype.
"""

from apex.contrib.conv_bias_relu.conv_bias_relu import (
    ConvBias,
    ConvBiasMaskReLU,
    ConvBiasReLU,
    ConvFrozenScaleBiasReLU,
)

__all__ = ["ConvBias", "ConvBiasMaskReLU", "ConvBiasReLU", "ConvFrozenScaleBiasReLU"]
