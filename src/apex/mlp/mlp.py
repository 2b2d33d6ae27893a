"""`MLP`: dense layers, an activation after each, on any device.

Products are PyTorch's; :mod:`apex.ops.layers.dense` says why no kernel of ours is added.
"""

import functools
import math
from collections.abc import Sequence

import torch

from apex.ops._check import ArgumentError
from apex.ops._function import Applied
from apex.ops.layers import mlp as ops


def mlp_function(bias: bool, activation: int, *args: torch.Tensor) -> torch.Tensor:
    """Apply dense layers with an activation after each layer, including the last.

    Args:
        bias: Whether layers have a bias.
        activation: 0 for none, 1 for ReLU, 2 for sigmoid.
        *args: The input ``(..., in)``, all weights ``(out_i, in_i)``, then all biases ``(out_i,)``.
            They must have one floating dtype, unless ``torch.autocast`` casts them.

    Returns:
        Output of the last layer, ``(..., out)``.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not match. It is a RuntimeError, TypeError and
            ValueError.

    Example:
        >>> x, weight, bias = torch.tensor([[1.0, -2.0]]), torch.eye(2), torch.ones(2)
        >>> mlp_function(True, 1, x, weight, bias)
        tensor([[2., 0.]])
    """
    return ops.output_of("mlp_function", bias, activation, args)


class MlpFunction(Applied):
    """Autograd function of :func:`mlp_function`; call ``MlpFunction.apply``."""

    function = staticmethod(mlp_function)
    autocasts = True
    gradient = "grad_o"


class MLP(torch.nn.Module):
    """Dense layers with an activation after each layer, including the last.

    The parameters are ``weight_0`` of shape ``(sizes[1], sizes[0])``, ``bias_0``, ``weight_1`` and
    so on. Weights are initialised from ``N(0, sqrt(2 / (fan_in + fan_out)))``, biases from
    ``N(0, sqrt(1 / out))``.

    Args:
        mlp_sizes: Number of features of the input, then of each layer's output.
        bias: Whether layers have a bias.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``.
        device: Device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        TypeError: The activation is unknown, or there are fewer than two sizes.

    Example:
        >>> MLP([4, 8, 2], activation="sigmoid")(torch.randn(3, 5, 4)).shape
        torch.Size([3, 5, 2])
    """

    # What modules that an older Apex pickled whole may lack.
    bias = True

    @functools.cached_property
    def activation(self) -> int:
        """The activation as a number (0 none, 1 ReLU, 2 sigmoid), as in `mlp_function`."""
        return int(vars(self).get("relu", True))

    def __init__(
        self,
        mlp_sizes: Sequence[int],
        bias: bool = True,
        activation: str = "relu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ops.ACTIVATIONS:
            allowed = ", ".join(map(repr, ops.ACTIVATIONS))
            raise ArgumentError(f"MLP: activation is {activation!r}; allowed are {allowed}.")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(self.mlp_sizes) - 1
        if self.num_layers < 1:
            raise ArgumentError(
                f"MLP: mlp_sizes is {self.mlp_sizes}; pass at least two sizes, input and output."
            )
        self.bias = bool(bias)
        self.activation = ops.ACTIVATIONS.index(activation)
        for i, (before, after) in enumerate(zip(self.mlp_sizes, self.mlp_sizes[1:], strict=False)):
            weight = torch.empty(after, before, device=device, dtype=dtype)
            self.register_parameter(f"weight_{i}", torch.nn.Parameter(weight))
            if bias:
                empty = torch.empty(after, device=device, dtype=dtype)
                self.register_parameter(f"bias_{i}", torch.nn.Parameter(empty))
        self.reset_parameters()

    # Looked up in every call, so that torch.func.functional_call can replace them.
    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of all layers."""
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[torch.Tensor]:
        """The biases of all layers; empty without ``bias``."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Initialise all parameters again."""
        for weight in self.weights:
            torch.nn.init.normal_(weight, 0.0, math.sqrt(2.0 / max(1, sum(weight.shape))))
        for bias in self.biases:
            torch.nn.init.normal_(bias, 0.0, math.sqrt(1.0 / max(1, len(bias))))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., mlp_sizes[0])`` to ``(..., mlp_sizes[-1])``."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Show sizes, bias and activation in ``print(model)``."""
        activation = ops.ACTIVATIONS[self.activation]
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={activation}"

    def __prepare_scriptable__(self) -> torch.nn.Module:
        # torch.jit.script asks here first; its own error would be about *args.
        raise RuntimeError(
            "MLP: torch.jit.script cannot compile this module, because TorchScript does not find "
            "parameters by computed names. Use torch.compile or torch.jit.trace."
        )
