"""T3: reparameterization: weights as a length times a direction, then as weights again."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.reparameterization import apply_weight_norm, remove_weight_norm

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(64, 8, device=device)
y = x[:, :1] * x[:, 1:2]

model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
plain = model(x)
apply_weight_norm(model)  # before the optimizer, because the parameters are new
print("parameters:", ", ".join(name for name, _ in model.named_parameters()))
print(f"largest difference of outputs: {(model(x) - plain).abs().max().item():.1e}")

optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
losses = []
for _ in range(100):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())

with torch.no_grad():
    trained = model(x)
    remove_weight_norm(model)
    difference = (model(x) - trained).abs().max().item()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print("removed:   ", ", ".join(name for name, _ in model.named_parameters()), end="; ")
print(f"largest difference of outputs: {difference:.1e}")
