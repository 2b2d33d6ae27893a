"""Parts of multilayer perceptrons."""

from apex._upstream.missing import explain_attributes
from apex.mlp.mlp import MLP, MlpFunction, mlp_function
from apex.ops.layers.swiglu import swiglu

__all__ = ["MLP", "MlpFunction", "mlp_function", "swiglu"]

explain_attributes(__name__)
