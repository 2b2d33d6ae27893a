"""Parts of multilayer perceptrons."""

import torch

from apex._upstream.missing import explain_attributes
from apex.mlp.mlp import MLP, MlpFunction, mlp_function
from apex.ops.layers import swiglu as _swiglu

__all__ = ["MLP", "MlpFunction", "mlp_function", "swiglu"]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU, ``silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``, in one kernel each way.

    Shazeer, arXiv:2002.05202, equation 5: ``gate`` is ``x @ W`` and ``up`` is ``x @ V`` there.
    Computed in float32 (float64 if a tensor is) and rounded once. Under ``torch.autocast`` both
    tensors are cast to its dtype.

    Args:
        gate: Of any shape; float16, bfloat16, float32 or float64.
        up: Of the same shape and device, and of any of these dtypes.

    Returns:
        Of the shape of ``gate``, in the dtype that torch promotes both to.

    Raises:
        ArgumentError: One is no tensor, on another device, of another shape or not floating; it is
            a RuntimeError, TypeError and ValueError.

    Example:
        >>> gate, up = torch.nn.Linear(64, 2 * 128)(torch.randn(3, 64)).chunk(2, dim=-1)
        >>> apex.mlp.swiglu(gate, up).shape
        torch.Size([3, 128])
    """
    return _swiglu.swiglu(gate, up)


explain_attributes(__name__)
