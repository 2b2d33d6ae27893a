"""Programs of 2018 and 2019 as their readers typed them, on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.fp16_utils import *  # noqa: F403  # as the ImageNet and word-language examples did
from tests.tolerance import HALF_CONVOLUTIONS

N, D_IN, D_OUT = 64, 128, 16


@pytest.fixture
def regression():
    torch.manual_seed(0)
    x = torch.randn(N, D_IN, dtype=torch.float16)
    return x, torch.randn(N, D_OUT, dtype=torch.float16), nn.Linear(D_IN, D_OUT).half()


@pytest.mark.parametrize(
    "options",
    [
        {"static_loss_scale": 128.0},
        {"dynamic_loss_scale": True},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 2}},
    ],
)
def test_minimal(regression, options):
    x, y, model = regression
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    optimizer = FP16_Optimizer(optimizer, **options)  # noqa: F405
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y.float())
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_closure(regression):
    x, y, model = regression
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters()), 128.0)  # noqa: F405
    losses = []
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), y.float())
            optimizer.backward(loss)
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses[-1] < 0.1 * losses[0]


def test_save_and_load(regression, tmp_path):
    x, y, model = regression
    file = str(tmp_path / "saved.pth")

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            optimizer.backward(F.mse_loss(model(x).float(), y.float()))
            optimizer.step()
        return [p.clone() for p in model.parameters()]

    def make(model):
        sgd = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
        return FP16_Optimizer(sgd, dynamic_loss_scale=True)  # noqa: F405

    optimizer = make(model)
    train(model, optimizer, 5)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, file)
    want = train(model, optimizer, 5)

    model = nn.Linear(D_IN, D_OUT).half()
    optimizer = make(model)
    checkpoint = torch.load(file, map_location=lambda storage, loc: storage)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    for one, other in zip(train(model, optimizer, 5), want, strict=True):
        assert torch.equal(one, other)


class VGG(nn.Module):
    """T2's network family at 32x32, thin."""

    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for width in (4, "M", 8, "M", 8, 8, "M", 16, "M", 16, "M"):
            if width == "M":
                layers += [nn.MaxPool2d(2)]
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
                layers += [nn.ReLU(inplace=True)]
                channels = width
        self.features, self.classifier = nn.Sequential(*layers), nn.Linear(16, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def test_t2_the_half_precision_way():
    """``FP16`` in T2's benchmark: ``network_to_half``, and masters at a static scale of 128."""
    torch.manual_seed(0)
    plain = VGG()
    model = VGG()
    model.load_state_dict(plain.state_dict())
    model = network_to_half(model)  # noqa: F405
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = FP16_Optimizer(optimizer, static_loss_scale=128)  # noqa: F405
    baseline = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    for number in range(8):
        loss = F.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        exact = F.cross_entropy(plain(images), labels)
        baseline.zero_grad()
        exact.backward()
        baseline.step()
        if number < 2:  # later losses of 16 images depend on each rounding: up to 12 % apart
            assert loss.item() == pytest.approx(exact.item(), rel=HALF_CONVOLUTIONS)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["1.features.0.weight"] == torch.float16
    assert dtypes["1.features.1.weight"] == torch.float32
    assert max(loss, exact) < 1.0


def test_masters_by_hand_with_a_static_scale():
    """The ImageNet example of 2018."""
    torch.manual_seed(0)
    model = network_to_half(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))  # noqa: F405
    model_params, master_params = prep_param_lists(model)  # noqa: F405
    optimizer = torch.optim.SGD(master_params, 0.1, momentum=0.9, weight_decay=1e-4)
    x, target = torch.randn(16, 8), torch.randint(0, 4, (16,))
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(x).float(), target)
        losses.append(to_python_float(loss.data))  # noqa: F405
        loss = loss * 128.0
        model.zero_grad()
        loss.backward()
        model_grads_to_master_grads(model_params, master_params)  # noqa: F405
        for param in master_params:
            param.grad.data = param.grad.data / 128.0
        optimizer.step()
        master_params_to_model_params(model_params, master_params)  # noqa: F405
    assert losses[-1] < 0.8 * losses[0]


def test_word_language_model():
    """It clears gradients with ``model.zero_grad()`` and clips the masters'."""
    torch.manual_seed(0)
    embedding, rnn, decoder = nn.Embedding(12, 8), nn.LSTM(8, 8, 2), nn.Linear(8, 12)
    model = nn.ModuleList([embedding, rnn, decoder]).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)  # noqa: F405
    data = torch.randint(0, 12, (6, 4))
    hidden, losses = None, []
    for _ in range(10):
        if hidden is not None:
            hidden = tuple(state.detach() for state in hidden)
        model.zero_grad()
        output, hidden = rnn(embedding(data), hidden)
        loss = F.cross_entropy(decoder(output).float().view(-1, 12), data.view(-1))
        optimizer.backward(loss)
        norm = optimizer.clip_master_grads(0.25)
        assert norm == -1 if optimizer.overflow else norm > 0
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_several_losses_and_one_update():
    torch.manual_seed(0)
    model = nn.Linear(8, 4).half()
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    optimizer = FP16_Optimizer(sgd, static_loss_scale=64.0)  # noqa: F405
    x = torch.ones(2, 8, dtype=torch.float16)
    before = model.bias.detach().clone()
    optimizer.zero_grad()
    optimizer.backward(model(x).float().mean(), update_master_grads=False)
    optimizer.backward(model(x).float().sum(), update_master_grads=False)
    optimizer.update_master_grads()
    optimizer.step()
    assert torch.equal(model.bias, before - 0.25 * (0.25 + 2.0))
