"""transducer, fmha and groupbn on a GPU, beside float64 on a CPU."""

import pytest
import torch

from apex.commands.selftest.gpu import waits_refused
from apex.contrib.fmha.fmha import attention
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.transducer import TransducerJoint, TransducerLoss
from tests.tolerance import ATTENTION_GRADIENTS, assert_close_in_rms, assert_one_rounding

DEVICE = "cuda"
pytestmark = pytest.mark.gpu
LENGTHS = torch.tensor([9, 4, 1]), torch.tensor([5, 1, 3])
OFFSET = (LENGTHS[0] * LENGTHS[1]).cumsum(0)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def both(program, tensors, dtype):
    """Results and gradients of ``program`` on the device, and in float64 on a CPU."""
    found = []
    for device, to in ((DEVICE, dtype), ("cpu", torch.float64)):
        given = [x.to(dtype).to(device, to).requires_grad_() for x in tensors]
        y = program(*given)
        grads = torch.autograd.grad(y.sum(), given)
        found.append([x.detach().cpu() for x in (y, *grads)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_transducer(dtype, packed):
    labels = torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1], [5, 6, 0, 0]])

    def loss(x):
        args = [t.to(x.device) for t in (labels, LENGTHS[0], LENGTHS[1] - 1, OFFSET)]
        return TransducerLoss(packed_input=packed)(x, *args[:3], 7, args[3], 9)

    def joint(f, g):
        lengths = [t.to(f.device) for t in LENGTHS]
        return TransducerJoint(packed, relu=True)(f, g, *lengths, ends[f.device.type], total)

    ends, total = {"cpu": OFFSET, DEVICE: OFFSET.to(DEVICE)}, int(OFFSET[-1])
    x = normal(total, 8) if packed else normal(3, 9, 5, 8)
    pairs = (*both(loss, [x], dtype), *both(joint, [normal(3, 9, 16), normal(3, 5, 16)], dtype))
    for actual, exact in pairs:
        assert_one_rounding(actual, exact)


def test_transducer_does_not_wait_and_bad_lengths_give_nan():
    x, labels = normal(3, 9, 5, 8).to(DEVICE), torch.ones(3, 4, dtype=torch.int64, device=DEVICE)
    times, count = torch.tensor([9, 10, 1], device=DEVICE), torch.tensor([4, 0, 5], device=DEVICE)
    layer = TransducerLoss()
    layer(x, labels, times, count, 0)
    with waits_refused():
        losses = layer(x.requires_grad_(), labels, times, count, 0)
        (dx,) = torch.autograd.grad(losses.sum(), x)
    assert losses.isnan().tolist() == [False, True, True]
    assert dx[0].isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fmha(dtype, dropout):
    """16 bits without dropout are one call for all sequences, where torch has it."""

    def attend(qkv):
        return attention(qkv, torch.tensor([0, 33, 33, 60]).to(qkv.device), dropout, 40, True)

    for actual, exact in both(attend, [normal(64, 3, 2, 64)], dtype):
        if dropout:
            assert not actual.any()
        else:
            assert_close_in_rms(actual, exact, ATTENTION_GRADIENTS[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_groupbn(dtype):
    def norm(x):
        layer = BatchNorm2d_NHWC(16).to(x.device)
        return (layer.double() if x.dtype == torch.float64 else layer)(x)

    (y, exact), _ = both(norm, [normal(3, 8, 8, 16)], dtype)
    assert_one_rounding(y, exact)
