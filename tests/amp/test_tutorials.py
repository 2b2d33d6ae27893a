"""What the founding tutorials have their readers type, device words aside."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp
from tests.tolerance import O1_REGRESSION, assert_close_to_largest

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


class Segmenter(nn.Module):
    """T1: registrations made in ``__init__``, before initialize."""

    def __init__(self):
        super().__init__()
        amp.register_float_function(torch, "sigmoid")
        amp.register_float_function(torch, "softmax")
        amp.register_half_function(torch, "einsum")
        amp.register_promote_function(torch, "minimum")
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 1)
        self.seen = None

    def forward(self, x):
        x = self.conv(x)
        gate = torch.sigmoid(x.sum((2, 3), keepdim=True))
        self.seen = gate.dtype
        return self.head(x * gate.to(x.dtype))


def two_groups(net):
    return torch.optim.Adam(
        [
            {"params": net.conv.parameters(), "lr": 1e-3},
            {"params": net.head.parameters(), "lr": 1e-2},
        ],
        weight_decay=1e-4,
        eps=1e-4,  # O3 steps in float16, where 1e-8 is 0
    )


def step(net, opt, images, labels):
    loss = F.cross_entropy(net(images), labels)
    if not torch.isnan(loss):
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
    return loss.item()


@pytest.mark.parametrize("level", LEVELS)
def test_t1_training_saving_and_restoring(level, tmp_path):
    net = Segmenter()
    opt = two_groups(net)
    net, opt = amp.initialize(net, opt, opt_level=level, verbosity=0)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4, 8, 8))
    losses = [step(net, opt, images, labels) for _ in range(8)]
    assert losses[-1] < losses[0]
    if level in ("O1", "O4"):
        assert net.seen == torch.float32  # the registration
    torch.save(
        {"model": net.state_dict(), "optimizer": opt.state_dict(), "amp": amp.state_dict()},
        tmp_path / "amp_checkpoint.pt",
    )
    going_on = [step(net, opt, images, labels) for _ in range(3)]

    net = Segmenter()
    opt = two_groups(net)
    checkpoint = torch.load(tmp_path / "amp_checkpoint.pt")
    net, opt = amp.initialize(net, opt, opt_level=level, verbosity=0)
    net.load_state_dict(checkpoint["model"])
    opt.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    assert [step(net, opt, images, labels) for _ in range(3)] == going_on


@pytest.mark.slow
def test_t2_regression_with_and_without():
    x, y = torch.randn(64, 1024), torch.randn(64, 512)
    ends = []
    for use_amp in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(1024, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if use_amp:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for _ in range(500):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            if use_amp:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert_close_to_largest(torch.tensor(ends[1]), torch.tensor(ends[0]), O1_REGRESSION)


def classifier():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def loader(count=6):
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(8, 3, 2, 2, generator=generator)
    target = torch.randint(0, 3, (8,), generator=generator)
    return [(data, target)] * count


def test_t5_autocast_clipping_and_scale_loss():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    losses = []
    for data, target in loader(20):
        optimizer.zero_grad()
        with amp.autocast():
            output = model(data)
            loss = F.cross_entropy(output, target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_t5_accumulation():
    accumulation_steps = 4
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.zero_grad()
    batches = loader(10)
    for i, (data, target) in enumerate(batches):
        loss = F.cross_entropy(model(data), target) / accumulation_steps
        with amp.scale_loss(loss, optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 3


def test_t5_torchs_own_scaler_at_o1():
    ends = []
    for use_amp in (True, False):
        torch.manual_seed(2)
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2**10, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
        )
        if use_amp:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for data, target in loader():
            optimizer.zero_grad()
            with amp.autocast() if use_amp else torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(data).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in model.parameters()])
        amp.reset()
    assert all(map(torch.equal, *ends))


def test_t5_forward_in_the_head_of_the_with_statement():
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters())
    loss_function = nn.CrossEntropyLoss()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for data, target in loader():
        optimizer.zero_grad()
        with amp.scale_loss(loss_function(model(data), target), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 6
