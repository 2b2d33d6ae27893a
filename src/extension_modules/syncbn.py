"""Old name of NVIDIA's Apex: parts of a batch norm over several processes, without autograd.

A module of compiled Apex. Arguments are positional only. Inputs are ``(N, C, *)``, and ``(*, C)``
for functions whose name ends in ``_c_last``. Statistics and sums have one number for each channel:
float32, or float64 for a float64 input. ``weight`` and ``shift`` may be None; else they have the
input's dtype or that of the statistics.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops._dtypes import to_dtype, wide
from apex.ops.norms import batch_norm

__all__ = [
    "batchnorm_backward",
    "batchnorm_backward_c_last",
    "batchnorm_forward",
    "batchnorm_forward_c_last",
    "reduce_bn",
    "reduce_bn_c_last",
    "relu_bw_c_last",
    "welford_mean_var",
    "welford_mean_var_c_last",
    "welford_parallel",
]

Tensor = torch.Tensor
_Results = TypeVar("_Results")


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x


def _c_last(function: Callable[..., _Results], tensors: int) -> Callable[..., _Results]:
    """``function`` for channels that are last in its first ``tensors`` arguments."""

    @functools.wraps(function)
    def c_last(*args: Any) -> Any:
        y: Any = function(*map(_rows, args[:tensors]), *args[tensors:])
        return y.view(args[0].shape) if isinstance(y, Tensor) else y

    c_last.__name__ = c_last.__qualname__ = f"{function.__name__}_c_last"
    return c_last


@torch.no_grad()
def welford_mean_var(input: Tensor, /) -> list[Tensor]:
    """``[mean, biased variance]`` of each channel."""
    _check("welford_mean_var", input)
    return list(batch_norm.moments(input))


@torch.no_grad()
def welford_parallel(
    mean_feature_nodes: Tensor, var_biased_feature_nodes: Tensor, numel: Tensor, eps: float, /
) -> list[Tensor]:
    """Merge statistics of processes: ``[mean, biased variance, 1 / sqrt(variance + eps)]``.

    Means and variances are ``(processes, C)``; ``numel``, one integer for each process, says how
    many elements a channel has there, and may be 0.
    """
    name, means, variances = "syncbn.welford_parallel", mean_feature_nodes, var_biased_feature_nodes
    tensors = {"mean_feature_nodes": means, "var_biased_feature_nodes": variances, "numel": numel}
    check_tensors(name, tensors, floating=list(tensors)[:2], integers=["numel"], required=tensors)
    found = f"mean_feature_nodes has shape {list(means.shape)}"
    check_shape(name, "var_biased_feature_nodes", variances, tuple(means.shape), found)
    check_shape(name, "numel", numel, tuple(means.shape[:1]), found)
    mean, variance, _ = batch_norm.merge(means, variances, numel.to(means.dtype).unsqueeze(1))
    return [mean, variance, (variance + eps).rsqrt()]


@torch.no_grad()
def batchnorm_forward(
    input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None, /
) -> Tensor:
    """``(input - mean) * inv_std * weight + shift`` in the input's dtype."""
    _check("batchnorm_forward", input, mean=mean, inv_std=inv_std, weight=weight, shift=shift)
    return batch_norm.normalize(input, mean, inv_std, weight, shift)


@torch.no_grad()
def batchnorm_forward_c_last(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    fuse_relu: bool,
    /,
) -> Tensor:
    """As :func:`batchnorm_forward`, plus ``z``; with ``fuse_relu`` ReLU of that. Rounds once."""
    y = _before_relu("batchnorm_forward_c_last", input, z, mean, inv_std, weight, shift)
    return (y.relu() if fuse_relu else y).to(input.dtype)


@torch.no_grad()
def relu_bw_c_last(
    grad_output: Tensor,
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    /,
) -> Tensor:
    """``grad_output``, but 0 where the ReLU of :func:`batchnorm_forward_c_last` gave 0."""
    _check("relu_bw_c_last", input, grad_output=grad_output)
    y = _before_relu("relu_bw_c_last", input, z, mean, inv_std, weight, shift)
    return grad_output.masked_fill(y <= 0, 0)


@torch.no_grad()
def reduce_bn(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    /,
) -> list[Tensor]:
    """``[sum_dy, sum_dy_xmu, grad_weight, grad_bias]``, sums over this process's elements.

    ``sum_dy_xmu`` is the sum of ``grad_output * (input - mean)``. The gradients have the dtype of
    ``weight``; without it they are empty.
    """
    dy = grad_output
    _check("reduce_bn", input, grad_output=dy, mean=mean, inv_std=inv_std, weight=weight)
    sum_dy, sum_dy_xmu = batch_norm.gradient_sums(dy, input, mean, inv_std)
    if weight is None:
        return [sum_dy, sum_dy_xmu, sum_dy.new_empty(0), sum_dy.new_empty(0)]
    grad_weight = (sum_dy_xmu * inv_std).to(weight.dtype)
    return [sum_dy, sum_dy_xmu, grad_weight, sum_dy.to(weight.dtype, copy=True)]


@torch.no_grad()
def batchnorm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
    /,
) -> Tensor:
    """Gradient of the input, from sums over all processes; ``count`` has their element numbers."""
    name, dy = "batchnorm_backward", grad_output
    sums = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu}
    _check(name, input, grad_output=dy, mean=mean, inv_std=inv_std, weight=weight, **sums)
    check_tensors(f"syncbn.{name}", {"count": count}, floating=(), integers=["count"])
    return batch_norm.input_gradient(dy, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count)


welford_mean_var_c_last = _c_last(welford_mean_var, 1)
reduce_bn_c_last = _c_last(reduce_bn, 2)
batchnorm_backward_c_last = _c_last(batchnorm_backward, 2)


def _before_relu(
    name: str,
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    _check(name, input, z=z)
    x = _rows(input)
    _check(name, x, mean=mean, inv_std=inv_std, weight=weight, shift=shift)
    to = wide(input)
    gain, offset = to_dtype(weight, to), to_dtype(shift, to)
    y = batch_norm.normalize(x.to(to), mean, inv_std, gain, offset).view(input.shape)
    return y if z is None else y + z


def _check(name: str, input: Tensor, **others: Tensor | None) -> None:
    """Check types, dtypes, devices and shapes.

    Args:
        name: Of the function.
        input: With channels in dimension 1, if a tensor has one number for each channel.
        others: Arguments by name.
    """
    name, tensors = f"syncbn.{name}", {"input": input, **others}
    required = set(others) - {"weight", "shift", "z"}
    check_tensors(name, tensors, floating=tensors, required=required)
    if input.dim() < 2:
        raise ArgumentError(
            f"{name}: input has shape {list(input.shape)}. Pass at least 2 dimensions."
        )
    shape = tuple(input.shape)
    for key, tensor in others.items():
        expected = shape if key in ("grad_output", "z") else shape[1:2]
        check_shape(name, key, tensor, expected, f"input {list(shape)}")
