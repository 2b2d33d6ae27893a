"""T1: three added lines turn a float32 training into one in mixed precision."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp  # the first line

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
images = torch.rand(64, 1, 8, 8, device=device)
labels = F.avg_pool2d(images, 4).flatten(1).argmax(1)  # which quarter is the brightest

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 4)
).to(device)
opt = torch.optim.Adam(
    [
        {"params": net[0].parameters(), "lr": 1e-3},
        {"params": net[3].parameters(), "lr": 1e-2},
    ],
    weight_decay=1e-4,
)
net, opt = amp.initialize(net, opt, opt_level="O1", verbosity=0)  # the second line

losses = []
for _ in range(60):
    outputs = net(images)
    loss = F.cross_entropy(outputs, labels)
    opt.zero_grad()
    if not torch.isnan(loss):
        with amp.scale_loss(loss, opt) as scaled_loss:  # the third line
            scaled_loss.backward()
        opt.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} at O1 on {device}")
print(f"weights {net[0].weight.dtype}, outputs {outputs.dtype}, loss {loss.dtype}")
