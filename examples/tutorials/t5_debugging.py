"""T5: look at weights, outputs and gradients in each step, and at the loss scale beside them."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


def state(tensors: Iterable[torch.Tensor]) -> str:
    """Return the largest value of some tensors, or how many are inf or nan."""
    flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    bad = int((~torch.isfinite(flat)).sum())
    return f"{bad} inf or nan" if bad else f"{flat.abs().max().item():.3f}"


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(64, 16, device=device), torch.randint(0, 4, (64,), device=device)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

for step in range(4):
    outputs = model(x)
    loss = F.cross_entropy(outputs, y)
    if step == 2:
        loss = loss * 100_000.0  # a loss that is wrong once: gradients overflow in float16
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    gradients = state(param.grad for param in amp.master_params(optimizer))
    optimizer.step()
    print(
        f"step {step}: outputs {state([outputs])}, gradients {gradients}, "
        f"weights {state(model.parameters())}, "
        f"skipped: {not amp.stepped(optimizer)}, "
        f"next scale {amp.state_dict()['loss_scaler0']['loss_scale']:.0f}"
    )
