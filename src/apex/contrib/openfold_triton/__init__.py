"""Attention with a bias, layer norm and an optimizer, by the names that OpenFold's programs import.

NVIDIA's kernels were tuned for one model's shapes. Attention here is PyTorch's function, layer norm
and optimizer are those of :mod:`apex.ops`, so there is nothing to tune: the tables of tuned choices
are empty, and ranks have none to exchange.
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
    """Give rank 0's tuned choices to all ranks: of the kernels here, which have none, nothing.

    Args:
        strict: Whether ranks must have the same kernels; they do.
        verbose: Whether to say what was sent.
    """
