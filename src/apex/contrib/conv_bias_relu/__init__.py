"""Convolution, bias and ReLU as one function.

``x`` is ``(N, C, H, W)`` in any memory format and floating dtype, ``weight`` ``(K, C, h, w)``,
``bias`` and ``scale`` have K elements (else ``ArgumentError``), ``padding`` and ``stride`` are one
number each. Under autocast the convolution is cast as everywhere, and what follows it with it.
"""

from apex.contrib.conv_bias_relu.conv_bias_relu import (
    ConvBias,
    ConvBiasMaskReLU,
    ConvBiasReLU,
    ConvFrozenScaleBiasReLU,
)

__all__ = ["ConvBias", "ConvBiasMaskReLU", "ConvBiasReLU", "ConvFrozenScaleBiasReLU"]
