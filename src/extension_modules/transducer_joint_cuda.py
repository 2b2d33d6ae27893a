"""Old name of NVIDIA's Apex: the sums of an RNN transducer's joint network, without autograd.

A module of compiled Apex. Arguments are positional only; what they mean is said at
:class:`apex.contrib.transducer.TransducerJoint`. ``opt`` and ``tileSize`` have no effect.
"""

import torch

from apex.ops.losses import transducer as ops

__all__ = ["backward", "forward"]

Tensor = torch.Tensor


@torch.no_grad()
def forward(
    f: Tensor, g: Tensor, fLen: Tensor, gLen: Tensor, batchOffset: Tensor, packedBatch: int,
    opt: int, packOutput: bool, relu: bool, dropout: bool, dropoutProb: float, tileSize: int, /,
) -> list[Tensor]:  # fmt: skip
    """Compute ``[h]``, and with ReLU or dropout ``[h, mask]``."""
    packed = (batchOffset, int(packedBatch)) if packOutput else None
    cells = ops.joint_cells("transducer_joint_cuda.forward", f, g, fLen, gLen, packed)
    found = ops.joint(f, g, cells, packOutput, relu, dropoutProb if dropout else None)
    shape = (-1, f.shape[2]) if packOutput else (*cells.row.shape, f.shape[2])
    return [x.view(shape) for x in found if x is not None]


@torch.no_grad()
def backward(
    inputs: list[Tensor], fLen: Tensor, gLen: Tensor, batchOffset: Tensor, maxFLen: int,
    maxGLen: int, packOutput: bool, scale: float, /,
) -> list[Tensor]:  # fmt: skip
    """Compute the gradients ``[df, dg]`` of ``inputs``: that of h, and the mask if there is one."""
    dh, *mask = (x.reshape(-1, x.shape[-1]) for x in inputs)
    lengths, sizes = {"fLen": fLen, "gLen": gLen}, (len(fLen), maxFLen, maxGLen)
    packed = (batchOffset, len(dh)) if packOutput else None
    cells = ops.grid("transducer_joint_cuda.backward", sizes, lengths, 0, packed)
    return list(ops.joint_gradients(dh, mask[0] if mask else None, cells, scale))
