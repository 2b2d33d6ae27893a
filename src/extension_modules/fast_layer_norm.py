"""``fast_layer_norm``: layer norm over the last dimension without autograd, on any device.

The name that compiled Apex had at the top level. Arguments are positional only, as there; unlike
there, rows may have any size.
"""

from __future__ import annotations

import torch

from apex.ops import _rows

__all__ = ["ln_bwd", "ln_fwd"]

Tensor = torch.Tensor


@torch.no_grad()
def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, /) -> list[Tensor]:
    """Layer norm of ``(rows, hidden)``: ``[z, mu, rsigma]``; ``z`` has the weight's dtype."""
    _rows.check("ln_fwd", x, gamma, beta, gamma.shape)
    _rows.refuse_wider_weight(x, gamma, "fused_layer_norm_cuda.forward_affine_mixed_dtypes")
    z, mu, rsigma = _rows.forward(x, gamma, beta, gamma.shape, epsilon, gamma.dtype, True)
    assert mu is not None
    return [z, mu, rsigma]


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

    With ``memory_efficient`` from the output, where a weight smaller than 1e-5 counts as 1e-5. The
    partial sums of the original, scratch memory of its kernels, are here the gradients in float32.
    """
    bias = torch.zeros_like(gamma) if beta is None else beta
    dx, dgamma, dbeta = _rows.backward(
        dz, x_or_z, mu, rsigma, gamma, bias, gamma.shape, 1e-5, x_or_z.dtype, True,
        memory_efficient,
    )  # fmt: skip
    assert dgamma is not None
    assert dbeta is not None
    return [dx, dgamma, dbeta, dgamma.float().unsqueeze(0), dbeta.float().unsqueeze(0)]
