"""Attention with a bias, layer norm and an optimizer, with the names that OpenFold imports.

NVIDIA tuned its kernels for one model's shapes. Here attention is PyTorch's function, and layer
norm and optimizer use apex's own kernels. They need no tuning, so the tables of tuned choices are
empty.

``AttnTri(q, k, v, mask=None, bias=None, inf=1e9, is_training=True)`` computes::

    softmax(q k^T / sqrt(size) + (mask - 1) * inf + bias) v
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from apex.contrib.openfold_triton.layer_norm import LayerNormSmallShapeOptImpl
from apex.contrib.openfold_triton.mha import AttnBiasJIT, AttnNoBiasJIT, AttnTri, CanSchTriMHA

__all__ = [
    "AttnBiasJIT", "AttnNoBiasJIT", "AttnTri", "CanSchTriMHA", "LayerNormSmallShapeOptImpl",
    "sync_triton_auto_tune_cache_across_gpus",
]  # fmt: skip

#: The kernels that tune themselves, by name: none.
_tuneable_triton_kernels: Mapping[str, Any] = MappingProxyType({})


def sync_triton_auto_tune_cache_across_gpus(strict: bool = True, verbose: bool = False) -> None:
    """Do nothing: these kernels have no tuned choices to send from rank 0 to the other ranks.

    Args:
        strict: Has no effect.
        verbose: Has no effect.
    """
