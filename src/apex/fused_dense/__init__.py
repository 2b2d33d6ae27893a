"""Dense layers with the names of NVIDIA's Apex: a single one, and two with GELU between them."""

from apex._upstream.missing import explain_attributes
from apex.fused_dense.fused_dense import (
    DenseNoBiasFunc,
    FusedDense,
    FusedDenseFunc,
    FusedDenseGeluDense,
    FusedDenseGeluDenseFunc,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)

__all__ = [
    "FusedDense",
    "FusedDenseGeluDense",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
    "dense_no_bias_function",
    "FusedDenseFunc",
    "FusedDenseGeluDenseFunc",
    "DenseNoBiasFunc",
]

explain_attributes(__name__)
