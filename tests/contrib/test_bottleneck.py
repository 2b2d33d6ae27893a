"""``apex.contrib.bottleneck`` against a block composed in float64."""

import pytest
import torch
import torch.nn.functional as F

from apex.contrib import bottleneck as package
from apex.contrib.bottleneck import Bottleneck
from apex.contrib.bottleneck import bottleneck as module
from tests.tolerance import TORCH_IN_FLOAT64, assert_close_to_largest, each

SHAPES = [(4, 8, 4, 1), (4, 8, 6, 1), (4, 8, 4, 2)]  # with and without a convolution aside


def block(shape, **options):
    """A block in float64 whose norms are not the identity."""
    torch.manual_seed(0)
    layer = Bottleneck(*shape, **options).double()
    for name, buffer in layer.named_buffers():
        torch.nn.init.uniform_(buffer, 0.5, 2.0) if "var" in name else torch.nn.init.normal_(buffer)
    return layer


def composed(layer, x, weights):
    """Torch's batch norms with eps 0."""

    def step(y, weight, norm, stride=1, padding=0):
        y = F.conv2d(y, weight, None, stride, padding)
        own = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return F.batch_norm(y, *own, False, 0.0, 0.0)

    y = step(x, weights[0], layer.bn1, layer.stride).relu()
    y = step(step(y, weights[1], layer.bn2, 1, 1).relu(), weights[2], layer.bn3)
    aside = x if len(weights) == 3 else step(x, weights[3], layer.downsample[1], layer.stride)
    return (y + aside).relu()


@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block(shape, nhwc):
    layer, x = block(shape, explicit_nhwc=nhwc, use_cudnn=True), torch.randn(2, 4, 6, 5).double()
    first = (lambda t: t.permute(0, 3, 1, 2)) if nhwc else lambda t: t
    last = (lambda t: t.permute(0, 2, 3, 1)) if nhwc else lambda t: t
    own = [layer.conv1.weight, layer.conv2.weight, layer.conv3.weight]
    own += [] if layer.downsample is None else [layer.downsample[0].weight]
    given = last(x).clone().requires_grad_()
    y = layer(given)
    wanted = composed(layer, first(given), [first(w) for w in own])
    dy = torch.randn_like(wanted)
    found = torch.autograd.grad(y, [given, *own], last(dy))
    exact = torch.autograd.grad(wanted, [given, *own], dy)
    each(assert_close_to_largest, (first(y), *found), (wanted, *exact), TORCH_IN_FLOAT64)
    layer.get_scale_bias_callable()
    assert torch.equal(layer(given), y)
    scale, bias = zip(*(norm.get_scale_bias(nhwc) for _, norm in layer._pairs()), strict=True)
    again = module.bottleneck_function(nhwc, layer.stride, scale, bias, given, *own)
    assert torch.equal(again, y)


def test_parameters_have_the_order_and_shapes_of_the_original():
    """The convolution aside is first, as optimizers number them; norms have no parameters."""
    names = [name for name, _ in Bottleneck(4, 2, 6).named_parameters()]
    assert names == ["downsample.0.weight", "conv1.weight", "conv2.weight", "conv3.weight"]
    assert Bottleneck(4, 2, 6, explicit_nhwc=True).conv2.weight.shape == (2, 3, 3, 2)
    buffers = [name for name, _ in package.bottleneck.FrozenBatchNorm2d(3).named_buffers()]
    assert buffers == ["weight", "bias", "running_mean", "running_var"]


def test_kept_scales_are_computed_again_on_demand():
    layer, x = block(SHAPES[1]), torch.randn(1, 4, 3, 3).double()
    compute = layer.get_scale_bias_callable()
    before = layer(x)
    layer.bn3.weight.mul_(2.0)
    assert torch.equal(layer(x), before)
    compute()
    assert not torch.equal(layer(x), before)
    layer.w_scale = layer.w_bias = None
    found, compute = layer(x), layer.get_scale_bias_callable()
    assert torch.equal(layer(x), found)


def test_parts():
    torch.manual_seed(0)
    norm, x = module.FrozenBatchNorm2d(3).double(), torch.randn(2, 3, 4, 4).double()
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0), norm.weight.normal_()
    own = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert_close_to_largest(norm(x), F.batch_norm(x, *own, False, 0.0, 0.0), TORCH_IN_FLOAT64)
    grad, output, one, two = torch.randn(4, 5)
    masked = torch.where(output > 0, grad, 0.0)
    for found, wanted in ((module.drelu_dscale1(grad, output, one), (masked * one, masked)),
                          (module.drelu_dscale2(grad, output, one, two),
                           (masked * one, masked * two))):  # fmt: skip
        assert all(map(torch.equal, found, wanted))
    weight = torch.empty(2, 3)
    module.kaiming_uniform_(weight, a=1)
    assert weight.abs().max() <= 1
    assert module.conv3x3(4, 2, 2, 2, 2)(torch.randn(1, 4, 8, 8)).shape == (1, 2, 4, 4)


def test_what_is_refused():
    for options in ({"groups": 2}, {"dilation": 2}, {"norm_func": torch.nn.BatchNorm2d}):
        with pytest.raises(RuntimeError, match="Only 1, 1 and None are supported"):
            Bottleneck(4, 2, 4, **options)
    with pytest.raises(ValueError, match="use_cudnn is 'yes'"):
        Bottleneck(4, 2, 4, use_cudnn="yes")
    for name in module.REFUSED:
        with pytest.raises(
            NotImplementedError,
            match=f"apex does not have apex.contrib.bottleneck.{name}.*batch_isend_irecv",
        ):
            getattr(module, name)(1, 2, 3)
    assert set(module.REFUSED) - {"spatial_bottleneck_function"} <= set(package.__all__)
