"""Old name of NVIDIA's Apex: dense layers with bias, and two with GELU between.

A module of compiled Apex. Arguments are positional only; any device, every floating dtype, inputs
of any rank. Without autograd and autocast.
"""

import torch
import torch.nn.functional as F

import apex
from apex.ops._check import check_shape, check_tensors
from apex.ops.layers import dense

__all__ = [
    "linear_bias_backward",
    "linear_bias_forward",
    "linear_gelu_linear_backward",
    "linear_gelu_linear_forward",
]

__version__ = apex.__version__


def linear_bias_forward(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, /
) -> torch.Tensor:
    """Compute ``input @ weight.T + bias``."""
    with dense.alone(input):
        dense.check("linear_bias_forward", input, {"weight": weight}, {"bias": bias})
        return F.linear(input, weight, bias)


def linear_bias_backward(
    input: torch.Tensor, weight: torch.Tensor, d_output: torch.Tensor, /
) -> list[torch.Tensor | None]:
    """Compute the gradients of input, weight and bias."""
    with dense.alone(input):
        name = "linear_bias_backward"
        dense.check(name, input, {"weight": weight}, {"bias": None})
        _check_like_output(name, input, {"d_output": d_output}, weight)
        return list(dense.linear_backward(d_output, input, weight))


def linear_gelu_linear_forward(
    input: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
    /,
) -> list[torch.Tensor]:
    """Compute ``[output1, output2, gelu_in]``: ``gelu(gelu_in)``, the result, the first product."""
    with dense.alone(input):
        weights, biases = {"weight1": weight1, "weight2": weight2}, {"bias1": bias1, "bias2": bias2}
        dense.check("linear_gelu_linear_forward", input, weights, biases)
        output2, gelu_in, output1 = dense.gelu_dense(input, weight1, bias1, weight2, bias2)
        return [output1, output2, gelu_in]


def linear_gelu_linear_backward(
    input: torch.Tensor,
    gelu_in: torch.Tensor,
    output1: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    d_output2: torch.Tensor,
    /,
) -> list[torch.Tensor | None]:
    """Compute the gradients of input, weight1, bias1, weight2 and bias2."""
    with dense.alone(input):
        name = "linear_gelu_linear_backward"
        weights = {"weight1": weight1, "weight2": weight2}
        dense.check(name, input, weights, {"bias1": None, "bias2": None})
        _check_like_output(name, input, {"gelu_in": gelu_in, "output1": output1}, weight1)
        _check_like_output(name, input, {"d_output2": d_output2}, weight2)
        return [*dense.gelu_dense_backward(d_output2, input, weight1, weight2, gelu_in, output1)]


def _check_like_output(
    name: str, input: torch.Tensor, tensors: dict[str, torch.Tensor], weight: torch.Tensor
) -> None:
    every = {"input": input, **tensors}
    check_tensors(name, every, floating=every, required=every)
    dense.check_one_dtype(name, every)
    for key, tensor in tensors.items():
        shapes = f"input has {list(input.shape)} and the weight {list(weight.shape)}"
        check_shape(name, key, tensor, (*input.shape[:-1], len(weight)), shapes)
