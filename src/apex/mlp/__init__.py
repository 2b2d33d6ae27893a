"""Multilayer perceptrons, and the SwiGLU activation."""

from apex._upstream.missing import explain_attributes
from apex.mlp.mlp import MLP, MlpFunction, mlp_function
from apex.ops.layers.swiglu import swiglu

__all__ = [
    "MLP",
    "swiglu",
    "MlpFunction",
    "mlp_function",
]

explain_attributes(__name__)
