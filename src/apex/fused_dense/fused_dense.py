"""Dense layers as modules, as functions and as autograd functions that are called by ``.apply``.

Products are PyTorch's; :mod:`apex.ops.layers.dense` says why no kernel of ours is added. Parameters
are initialised as those of ``torch.nn.Linear``, and inputs may have any rank; NVIDIA's left
parameters uninitialised and took matrices alone.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from apex.ops._function import Applied
from apex.ops.layers import dense
from apex.ops.norms._scripted import left_to_python


@left_to_python
def _fused_dense(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``input @ weight.T + bias``, with a weight of shape ``(out, in)``."""
    try:
        if dense.left_to_torch(weight, bias):
            return F.linear(input, weight, bias)
    except (AttributeError, RuntimeError, TypeError):
        pass  # below are the words for what does not fit together
    dense.check("FusedDense", input, {"weight": weight}, {"bias": bias})
    return F.linear(input, weight, bias)


@left_to_python
def _dense_no_bias(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``input @ weight.T``, with a weight of shape ``(out, in)``."""
    return _fused_dense(input, weight, None)


@left_to_python
def _fused_dense_gelu_dense(
    input: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
) -> torch.Tensor:
    """Compute ``gelu(input @ weight1.T + bias1) @ weight2.T + bias2``, GELU in its tanh form."""
    try:
        if dense.left_to_torch(weight1, bias1) and dense.left_to_torch(weight2, bias2):
            hidden = F.gelu(F.linear(input, weight1, bias1), approximate="tanh")
            return F.linear(hidden, weight2, bias2)
    except (AttributeError, RuntimeError, TypeError):
        pass  # below are the words for what does not fit together
    weights, biases = {"weight1": weight1, "weight2": weight2}, {"bias1": bias1, "bias2": bias2}
    dense.check("FusedDenseGeluDense", input, weights, biases)
    return dense.gelu_dense(input, weight1, bias1, weight2, bias2)[0]


# Their names in 2021.
fused_dense_function = _fused_dense
dense_no_bias_function = _dense_no_bias
fused_dense_gelu_dense_function = _fused_dense_gelu_dense


class FusedDenseFunc(Applied):
    """Autograd function of ``input @ weight.T + bias``; call ``FusedDenseFunc.apply``."""

    function = staticmethod(_fused_dense)
    autocasts = True


class DenseNoBiasFunc(Applied):
    """Autograd function of ``input @ weight.T``; call ``DenseNoBiasFunc.apply``."""

    function = staticmethod(_dense_no_bias)
    autocasts = True


class FusedDenseGeluDenseFunc(Applied):
    """Autograd function of two dense layers with GELU; call ``FusedDenseGeluDenseFunc.apply``."""

    function = staticmethod(_fused_dense_gelu_dense)
    autocasts = True


class FusedDense(torch.nn.Linear):
    """A dense layer: `torch.nn.Linear` with its name in Apex.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension.
        bias: Whether the layer has a bias.
        device: Device of the parameters.
        dtype: dtype of the parameters.

    Example:
        >>> FusedDense(4, 2)(torch.randn(3, 5, 4)).shape
        torch.Size([3, 5, 2])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``.

        Raises:
            ArgumentError: The input's last dimension has another size; or its dtype differs from
                the parameters', and autocast is off. It is a RuntimeError, TypeError and
                ValueError.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return F.linear(input, self.weight, self.bias)
        return _fused_dense(input, self.weight, self.bias)


class FusedDenseGeluDense(torch.nn.Module):
    """Two dense layers with GELU (in its tanh form) between them.

    The parameters are ``weight1``, ``bias1``, ``weight2`` and ``bias2``, initialised as in
    `torch.nn.Linear`.

    Args:
        in_features: Size of the input's last dimension.
        intermediate_features: Size of the last dimension of the first layer's output.
        out_features: Size of the output's last dimension.
        bias: Must be True: the layers always have biases.
        device: Device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        AssertionError: ``bias`` is False.

    Example:
        >>> FusedDenseGeluDense(4, 16, 4)(torch.randn(3, 5, 4)).shape
        torch.Size([3, 5, 4])
    """

    def __init__(
        self,
        in_features: int,
        intermediate_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not bias:
            raise AssertionError(
                f"FusedDenseGeluDense: bias is {bias!r}; allowed is True. Without biases, use "
                'torch.nn.Linear(..., bias=False) and torch.nn.GELU(approximate="tanh").'
            )
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        placed: Any = {"device": device, "dtype": dtype}
        self.weight1 = Parameter(torch.empty(intermediate_features, in_features, **placed))
        self.bias1 = Parameter(torch.empty(intermediate_features, **placed))
        self.weight2 = Parameter(torch.empty(out_features, intermediate_features, **placed))
        self.bias2 = Parameter(torch.empty(out_features, **placed))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters again."""
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0.0
            torch.nn.init.uniform_(bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``; see :meth:`FusedDense.forward`."""
        weight1, bias1, weight2, bias2 = self.weight1, self.bias1, self.weight2, self.bias2
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            hidden = F.gelu(F.linear(input, weight1, bias1), approximate="tanh")
            return F.linear(hidden, weight2, bias2)
        return _fused_dense_gelu_dense(input, weight1, bias1, weight2, bias2)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(model)``."""
        return (
            f"in_features={self.in_features}, "
            f"intermediate_features={self.intermediate_features}, out_features={self.out_features}"
        )
