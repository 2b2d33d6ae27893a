"""Dense layers under the names of NVIDIA's Apex: with bias, and two with GELU in between."""

from apex._missing import explain_attributes
from apex.fused_dense.fused_dense import (
    DenseNoBiasFunc,
    FusedDense,
    FusedDenseFunc,
    FusedDenseGeluDense,
    FusedDenseGeluDenseFunc,
)

__all__ = [
    "DenseNoBiasFunc",
    "FusedDense",
    "FusedDenseFunc",
    "FusedDenseGeluDense",
    "FusedDenseGeluDenseFunc",
]

explain_attributes(__name__)
