"""T1: save model, optimizer and amp; the restored training is the one that goes on.

A file that survives a kill in the middle of a save: examples/resume.
"""

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(64, 20, device=device), torch.randint(0, 5, (64,), device=device)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model and its optimizer, as a program does when it starts."""
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)).to(device)
    return amp.initialize(net, torch.optim.Adam(net.parameters(), lr=1e-2), verbosity=0)


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train on and return the losses."""
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "amp_checkpoint.pt")
    net, opt = build()
    train(net, opt, 10)
    checkpoint = {
        "model": net.state_dict(),
        "optimizer": opt.state_dict(),
        "amp": amp.state_dict(),
    }
    torch.save(checkpoint, file)
    going_on = train(net, opt, 5)

    net, opt = build()
    checkpoint = torch.load(file)
    net.load_state_dict(checkpoint["model"])
    opt.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    restored = train(net, opt, 5)

print("went on: ", *(f"{loss:.7f}" for loss in going_on))
print("restored:", *(f"{loss:.7f}" for loss in restored), "- equal:", going_on == restored)
