"""Group batch norms: four processes against torch's batch norm on each group's images."""

import copy
import functools
import pickle

import pytest
import torch

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.cudnn_gbn.batch_norm import REFUSED
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.groupbn.batch_norm import bn_addrelu_NHWC_impl, bn_NHWC_impl
from tests.contrib import groupbn_ranks as program
from tests.tolerance import TORCH_IN_FLOAT64, assert_close_to_largest, assert_one_rounding

KINDS = ["plain", "relu", "sum", "cudnn_gbn"]


def exact(kind, x, z, dy):
    """Torch's layer on images of a group, in float64, with the results of ``train``."""
    ours = program.make(kind, 1, torch.float64)
    layer = torch.nn.BatchNorm2d(program.CHANNELS).double()
    layer.load_state_dict(ours.state_dict())
    leaves = [x.double().requires_grad_(), z.double().requires_grad_(), *layer.parameters()]

    def norm(x, z):
        y = layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        y = y + z if kind == "sum" else y
        return y.relu() if kind in ("relu", "sum") else y

    norm(*leaves[:2])
    y = norm(*leaves[:2])
    grads = torch.autograd.grad(y, leaves, dy.double(), allow_unused=True)
    images = x.double()
    mean = images.mean((0, 1, 2))
    inverse = (images.var((0, 1, 2), correction=0) + layer.eps).rsqrt()
    buffers = [*(buffer.clone() for buffer in layer.buffers()), mean, inverse]
    layer.eval()
    return y.detach(), grads, buffers, norm(*leaves[:2]).detach()


def joined(answers, kind):
    """Results of a group: parts put together, sums of weight gradients, buffers of the first."""
    ys, grads, buffers, evaluated = zip(*answers, strict=True)
    for other in buffers[1:]:
        assert all(map(torch.equal, buffers[0], other))
    last = (lambda x: x.permute(0, 2, 3, 1)) if kind == "cudnn_gbn" else lambda x: x
    dx, dz, *weights = zip(*grads, strict=True)
    dz = None if kind != "sum" else torch.cat(dz)
    grads = [last(torch.cat(dx)), dz, *(sum(parts) for parts in weights)]
    return last(torch.cat(ys)), grads, buffers[0], last(torch.cat(evaluated))


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_group_is_one_batch(kind, size, four):
    job = functools.partial(program.of_groups, kind=kind, size=size, dtype=torch.float64)
    answers, images = four.run(job), program.batches(torch.float64)
    for first in range(0, 4, size):
        members = slice(first, first + size)
        start, stop = sum(program.SIZES[:first]), sum(program.SIZES[: first + size])
        found = joined(answers[members], kind)
        wanted = exact(kind, *(tensor[start:stop] for tensor in images))
        flat = [[x[0], *x[1], *x[2], x[3]] for x in (found, wanted)]
        for actual, other in zip(*flat, strict=True):
            if other is not None:
                assert_close_to_largest(actual, other, TORCH_IN_FLOAT64)


@pytest.mark.dist
def test_groups_that_there_cannot_be(four):
    for rank, (said, place) in enumerate(four.run(program.refusals)):
        assert ": BatchNorm2d_NHWC: bn_group is 3 and there are 4 processes." in said[0]
        assert ": GroupBatchNorm2d: group_size is 8 and there are 4 processes." in said[1]
        assert place == (2, rank // 2, rank % 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_in_every_dtype(kind, dtype):
    """Weights and statistics are float32. A sum is rounded twice, which no float64 is."""
    images = program.batches(dtype)
    y, grads, buffers, evaluated = joined(
        [program.train(kind, program.make(kind, 1, dtype), *images)], kind
    )
    wanted = exact(kind, *images)
    assert (y.dtype, grads[0].dtype, evaluated.dtype) == (dtype,) * 3
    if kind != "sum" or dtype == torch.float32:
        assert_one_rounding(y, wanted[0])
        assert_one_rounding(evaluated.detach(), wanted[3])
    if kind == "plain":
        for actual, other in zip((*grads, *buffers), (*wanted[1], *wanted[2]), strict=True):
            if other is not None and other.is_floating_point():
                assert_one_rounding(actual, other, added=images[0].numel())


def test_the_autograd_functions_by_themselves():
    """``apply``, and ``forward`` and ``backward`` of a subclass, which compute statistics once."""
    x, z, dy = program.batches(torch.float64)
    for function, kind, more in ((bn_NHWC_impl, "relu", ()), (bn_addrelu_NHWC_impl, "sum", (z,))):

        class Own(function):
            forward = staticmethod(function.forward)

        layer = program.make(kind, 1, torch.float64)
        wanted, _, buffers, _ = program.train(kind, copy.deepcopy(layer), x, z, dy)
        for one in (function, Own):
            own = [torch.zeros(3).double(), torch.ones(3).double(), *torch.empty(2, 3).double()]
            given = [t.clone().requires_grad_() for t in (x, *more)]
            rest = (None, 0.1, 1e-5) if kind == "relu" else (None, None, 0.1, 1e-5)
            last = (True, True, 1) if kind == "relu" else (True, 1)
            unused = (None,) * 9 + (True,)
            args = (*given, layer.weight, layer.bias, *own, *rest, *last, *unused)
            y = one.apply(*args)
            assert torch.equal(y.detach(), wanted)
            found = torch.autograd.grad(y, [*given, layer.weight, layer.bias], dy)
            again = torch.autograd.grad(function.apply(*args), given, dy)
            assert all(map(torch.equal, found, again))
            assert_close_to_largest(own[2], buffers[3], TORCH_IN_FLOAT64)
            assert_close_to_largest(own[0], buffers[0], TORCH_IN_FLOAT64)  # both after two batches


def test_state_copies_and_pickles():
    for layer in (BatchNorm2d_NHWC(3, True), GroupBatchNorm2d(3, 1, momentum=None)):
        assert list(layer.state_dict()) == list(torch.nn.BatchNorm2d(3).state_dict())
        image = torch.randn(2, 3, 3, 3)
        layer(image)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(image), copy.deepcopy(layer)(image))


def test_a_mean_of_all_batches():
    """``momentum=None``, as torch.optim.swa_utils.update_bn sets it."""
    for layer in (BatchNorm2d_NHWC(3), GroupBatchNorm2d(3, 1)):
        layer.momentum, batches = None, torch.randn(3, 4, 3, 3, 3)
        for batch in batches:
            layer(batch)
        channels = 3 if isinstance(layer, BatchNorm2d_NHWC) else 1
        means = batches.movedim(channels + 1, 1).flatten(2).mean(2)
        torch.testing.assert_close(layer.running_mean, means.mean(0))
        assert layer.num_batches_tracked == 3


def test_autocast_casts_the_input_of_the_group_norm_alone():
    image = torch.randn(2, 3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert GroupBatchNorm2d(3, 1)(image).dtype == torch.bfloat16
        assert GroupBatchNorm2d(3, 1).eval()(image).dtype == torch.bfloat16
        assert BatchNorm2d_NHWC(3)(image).dtype == torch.float32


def test_what_is_refused():
    image = torch.randn(2, 4, 5, 3)
    for call, said in (
        (lambda: BatchNorm2d_NHWC(3)(image.permute(0, 3, 1, 2)), r"Pass \(N, H, W, 3\)"),
        (lambda: BatchNorm2d_NHWC(3)(image, image), "Pass fuse_relu=True"),
        (lambda: BatchNorm2d_NHWC(3, True)(image, image[1:]), r"z has shape \[1, 4, 5, 3\]"),
        (lambda: BatchNorm2d_NHWC(3)(image.long()), "x is torch.int64"),
        (lambda: BatchNorm2d_NHWC(3)(image[:1, :1, :1]), "more than 1 value per channel"),
        (lambda: BatchNorm2d_NHWC(3, bn_group=2), "bn_group is 2 and there are 1 processes"),
        (lambda: BatchNorm2d_NHWC(3, multi_stream=None), "multi_stream is None; pass an integer"),
        (lambda: GroupBatchNorm2d(3, 0), "group_size is 0 and there are 1 processes"),
        (lambda: GroupBatchNorm2d(3, 1)(image), r"of shape \[2, 4, 5, 3\]. Pass \(N, 3, H, W\)"),
        (lambda: GroupBatchNorm2d(3, 1)(image[0]), "expected 4D input"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(NotImplementedError, match="process group of torch.distributed"):
        GroupBatchNorm2d(3, 1).get_peer_buffers(3)
    assert list(REFUSED) == ["GroupBatchNorm2d.get_peer_buffers"]
