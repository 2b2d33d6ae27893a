"""What each of four processes does for test_groupbn.py; see tests/ranks.py."""

import torch

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC
from tests.ranks import error_of

CHANNELS, SIZES = 3, (2, 1, 3, 2)  # images of each rank


def make(kind, size, dtype):
    """The layer, with weights that are neither 1 nor 0, in the wide dtype."""
    torch.manual_seed(1)
    if kind == "cudnn_gbn":
        layer = GroupBatchNorm2d(CHANNELS, size)
    else:
        layer = BatchNorm2d_NHWC(CHANNELS, kind != "plain", size)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.double() if dtype == torch.float64 else layer


def batches(dtype):
    """Images, z and output gradients of all ranks together, channels last."""
    generator = torch.Generator().manual_seed(2)
    shape = (sum(SIZES), 4, 5, CHANNELS)
    x, z, dy = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return (3 * x + 2).to(dtype), z.to(dtype), dy.to(dtype)


def train(kind, layer, x, z, dy):
    """Two forwards, of which the last has a backward; then one in evaluation mode."""
    if kind == "cudnn_gbn":
        x, z, dy = (tensor.permute(0, 3, 1, 2) for tensor in (x, z, dy))
    leaves = [x.clone().requires_grad_(), z.clone().requires_grad_(), *layer.parameters()]
    given = leaves[:2] if kind == "sum" else leaves[:1]
    layer(*given)
    y = layer(*given)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    buffers = [buffer.clone() for buffer in layer.buffers()]
    inverse = layer.minibatch_inv_var if kind == "cudnn_gbn" else layer.minibatch_riv
    return y.detach(), grads, [*buffers, layer.minibatch_mean, inverse], layer.eval()(*given)


def of_groups(rank, *, kind, size, dtype):
    """What a rank computes from its own images."""
    parts = [tensor.split(SIZES)[rank] for tensor in batches(dtype)]
    y, grads, buffers, evaluated = train(kind, make(kind, size, dtype), *parts)
    return y, grads, buffers, evaluated.detach()


def refusals(rank):
    """What is said about groups that there cannot be."""
    said = [error_of(BatchNorm2d_NHWC, CHANNELS, bn_group=3)]
    said.append(error_of(GroupBatchNorm2d, CHANNELS, 8))
    layer = GroupBatchNorm2d(CHANNELS, 2)
    return said, (layer.group_size, layer.group_id, layer.group_rank)
