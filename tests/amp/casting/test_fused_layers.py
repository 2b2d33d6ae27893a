"""Our layers and losses at every level, beside the same model with torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.contrib.group_norm import GroupNorm
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from tests.amp.training import scaled_backward, started
from tests.tolerance import assert_same_training

LEVELS = {
    "O0": torch.float32, "O1": torch.float16, "O2": torch.float16, "O3": torch.float16,
    "O4": torch.bfloat16, "O5": torch.bfloat16,
}  # fmt: skip
LAYERS = {
    FusedLayerNorm: nn.LayerNorm,
    MixedFusedLayerNorm: nn.LayerNorm,
    FastLayerNorm: nn.LayerNorm,
    FusedRMSNorm: lambda size: nn.RMSNorm(size, 1e-5),
    MixedFusedRMSNorm: lambda size: nn.RMSNorm(size, 1e-5),
    GroupNorm: lambda size: nn.GroupNorm(4, size),
}


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), norm, nn.Linear(32, 10)

    def forward(self, x):
        normed = self.norm(self.first(x))
        self.dtypes = normed.dtype, self.norm.weight.dtype
        return self.last(torch.relu(normed))


class Head(nn.Module):
    """The last layer and its loss in one: the model's output is the loss."""

    def __init__(self, loss):
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(16, 32), nn.Linear(32, 10, bias=False), loss

    def forward(self, x, targets):
        return self.loss(torch.relu(self.first(x)), self.last.weight, targets)


def _train(model, level, loss):
    """Losses of some steps of SGD."""
    scale = 128.0 if level in ("O1", "O2") else None  # none is skipped for an overflow
    model, optimizer = started(level, model, loss_scale=scale)
    data = torch.Generator().manual_seed(1)
    x, targets = torch.randn(64, 16, generator=data), torch.randint(10, (64,), generator=data)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss(model, x, targets)
        assert value.dtype == torch.float32
        losses.append(value.item())
        scaled_backward(value, optimizer)
        for parameter in model.parameters():
            assert parameter.grad.dtype == parameter.dtype
        optimizer.step()
    amp.reset()
    return losses


def _same(make, theirs, level, loss, their_loss):
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    wanted = _train(theirs(), level, their_loss)
    found = _train(model, level, loss)
    assert found[-1] < found[0] - 0.05
    assert_same_training(found, wanted, LEVELS[level])
    return model


def _cross_entropy(model, x, targets):
    return F.cross_entropy(model(x), targets)


def _fused_cross_entropy(model, x, targets):
    return SoftmaxCrossEntropyLoss.apply(model(x), targets, 0.0, -1).mean()


# torch's own layer, at O4 as under torch.autocast
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_layers(level, layer):
    def ours():
        return Net(GroupNorm(4, 32) if layer is GroupNorm else layer(32))

    def theirs():
        return Net(LAYERS[layer](32))

    model = _same(ours, theirs, level, _fused_cross_entropy, _cross_entropy)
    weights = torch.float32 if level in ("O1", "O4") else LEVELS[level]
    assert model.dtypes == (LEVELS[level], weights)  # torch's own output is float32 at O1


@pytest.mark.parametrize("level", LEVELS)
def test_linear_cross_entropy(level):
    def ours(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, chunk_size=20)

    def theirs(hidden, weight, targets):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def loss(model, x, targets):
        return model(x, targets).float()  # amp casts what a 16-bit model returns

    _same(lambda: Head(ours), lambda: Head(theirs), level, loss, loss)
