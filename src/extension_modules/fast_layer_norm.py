"""Old name of NVIDIA's Apex: layer norm over the last dimension without autograd, on any device.

A module of compiled Apex. Arguments are positional only; unlike there, rows may have any size.
"""

import torch
from fused_layer_norm_cuda import norm_backward

from apex.ops.norms import row_norms
from apex.ops.norms.row_norms import check_norm, refuse_other_dtype

__all__ = ["ln_bwd", "ln_fwd"]

Tensor = torch.Tensor


@torch.no_grad()
def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, /) -> list[Tensor]:
    """Layer norm of ``(rows, hidden)``: ``[z, mu, rsigma]``; ``z`` has the weight's dtype."""
    check_norm("ln_fwd", x, gamma, beta, gamma.shape)
    refuse_other_dtype(x, gamma, "fused_layer_norm_cuda.forward_affine_mixed_dtypes", "half")
    return list(row_norms.OP.operator(x, gamma, beta, gamma.shape, epsilon, True, gamma.dtype))


@torch.no_grad()
def ln_bwd(
    dz: Tensor,
    x_or_z: Tensor,
    mu: Tensor | None,
    rsigma: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    memory_efficient: bool,
    /,
) -> list[Tensor]:
    """Gradients: ``[dx, dgamma, dbeta, dgamma_part, dbeta_part]``.

    With ``memory_efficient`` from the output, which is divided by the weight; where a weight is 0
    nothing is left of the input, and it counts as 0. The partial sums of the original, scratch
    memory of its kernels, are here the gradients in float32.
    """
    bias = torch.zeros_like(gamma) if beta is None else beta
    smallest = torch.finfo(torch.float32).tiny
    dx, dgamma, dbeta = norm_backward(
        dz, mu, rsigma, x_or_z, gamma.shape, gamma, bias, smallest, memory_efficient
    )
    return [dx, dgamma, dbeta, dgamma.float().unsqueeze(0), dbeta.float().unsqueeze(0)]
