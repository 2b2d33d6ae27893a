"""What the founding tutorials have their readers type, device words aside.

Here is what ``tests/examples/test_tutorials.py`` does not assert of ``examples/tutorials``, which
have the tutorials' programs: losses, checkpoints, registrations, recurrent networks, accumulation.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp
from tests.amp.training import scaled_backward


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
            scaled_backward(loss, optimizer)
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
