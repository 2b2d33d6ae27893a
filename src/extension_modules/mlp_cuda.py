"""Old name of NVIDIA's Apex: dense layers with an activation after each, forward and backward.

A module of compiled Apex. Arguments are positional only; any device, every floating dtype, inputs
of any rank. Without autograd and autocast. ``inputs`` are the input, all weights, then all biases
where ``use_bias`` is not 0; ``activation`` is 0 for none, 1 for ReLU, 2 for sigmoid.
"""

from collections.abc import Sequence

import torch

import apex
from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops.layers import dense
from apex.ops.layers import mlp as ops

__all__ = ["backward", "forward"]

__version__ = apex.__version__


def forward(
    use_bias: int, activation: int, inputs: Sequence[torch.Tensor], /
) -> list[torch.Tensor]:
    """Compute ``[output, reserved]``; ``reserved`` is for ``backward`` alone."""
    with dense.alone(inputs[0] if inputs else None):
        x, weights, biases = ops.parts("mlp_cuda.forward", bool(use_bias), activation, inputs)
        *hidden, y = ops.outputs_of(dense.rows(x), weights, biases, activation)
        reserved = torch.cat([each.flatten() for each in hidden]) if hidden else x.new_empty(0)
        return [y.reshape(*x.shape[:-1], y.shape[1]), reserved]


def backward(
    use_bias: int,
    activation: int,
    grad_o: torch.Tensor,
    fprop_outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    /,
) -> list[torch.Tensor | None]:
    """Compute the gradients of ``inputs``, in their order, from what ``forward`` returned."""
    name = "mlp_cuda.backward"
    with dense.alone(inputs[0] if inputs else None):
        x, weights, biases = ops.parts(name, bool(use_bias), activation, inputs)
        if len(fprop_outputs) != 2:
            raise ArgumentError(
                f"{name}: there are {len(fprop_outputs)} outputs; pass the two outputs of "
                "mlp_cuda.forward."
            )
        y, reserved = fprop_outputs
        tensors = {"input": x, "grad_o": grad_o, "output": y, "reserved": reserved}
        check_tensors(name, tensors, floating=tensors, required=tensors)
        dense.check_one_dtype(name, tensors)
        rows = dense.rows(x)
        sizes = [len(rows) * len(weight) for weight in weights[:-1]]
        shapes = f"input has {list(x.shape)}"
        for key in ("grad_o", "output"):
            check_shape(name, key, tensors[key], (*x.shape[:-1], len(weights[-1])), shapes)
        check_shape(name, "reserved", reserved, (sum(sizes),), shapes)
        hidden = [
            each.view(len(rows), len(weight))
            for each, weight in zip(torch.split(reserved, sizes), weights[:-1], strict=True)
        ]
        outputs = [*hidden, dense.rows(y)]
        dx, d_weights, d_biases = ops.backward(
            dense.rows(grad_o), rows, weights, outputs, activation
        )
        return [dx.view(x.shape), *d_weights, *(d_biases if use_bias else ())]
