"""What the founding tutorials have their readers type, device words aside.

Here is what ``tests/examples/test_tutorials.py`` does not assert of ``examples/tutorials``, which
have the tutorials' programs: losses, checkpoints, registrations, recurrent networks, accumulation.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp
from tests.amp.training import same


@pytest.mark.filterwarnings("ignore:.*in 16 bits already")
@pytest.mark.parametrize("level", ["none", "O0", "O1", "bfloat16 model", "float16 model at O2"])
def test_t5_autocast_with_a_scheduler(level):
    """With torch's scaler, or amp's where the model is float16, of which torch's takes none."""
    makes = {"bfloat16 model": nn.Module.bfloat16, "float16 model at O2": nn.Module.half}
    model = makes.get(level, lambda model: model)(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 100)
    if level[-2:] in ("O0", "O1", "O2"):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level[-2:], verbosity=0)
    scaler = amp.GradScaler("cpu", init_scale=2**10)
    losses = []
    for data, target in loader(12):
        optimizer.zero_grad()
        with amp.autocast(dtype=torch.bfloat16 if level == "bfloat16 model" else None):
            loss = F.cross_entropy(model(data).float(), target)
        if level == "float16 model at O2":
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == 0.1 * (1 - 12 / 100)


def classifier():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def loader(count=6):
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(8, 3, 2, 2, generator=generator)
    target = torch.randint(0, 3, (8,), generator=generator)
    return [(data, target)] * count


def each_by_norm(parameters):
    for param in parameters:
        torch.nn.utils.clip_grad_norm_(param, max_norm=0.1)


def normalized(parameters):
    for param in parameters:
        param.grad.data = param.grad.data / (param.grad.data.norm() + 1e-6)


def by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, clip_value=0.01)


@pytest.mark.parametrize("treat", [each_by_norm, normalized, by_value])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_t5_what_is_done_to_gradients_before_a_step(level, treat):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for data, target in loader(3):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(data), target), optimizer) as scaled_loss:
            scaled_loss.backward()
        params = list(amp.master_params(optimizer))
        copies = [p.detach().clone().requires_grad_() for p in params]
        for copied, param in zip(copies, params, strict=True):
            copied.grad = param.grad.clone()
        treat(params)
        optimizer.step()
        treat(copies)
        torch.optim.SGD(copies, lr=0.1).step()
        assert same(params, copies)
