"""T3: the fused functions, beside torch's: the same training, the same numbers but roundings."""

import torch
from torch import nn

from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(64, 16, device=device), torch.randn(64, 4, device=device)


def train(norm: type[nn.Module], optimizer: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Train 50 steps from the same weights, show the loss, and return the weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), norm(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    stepped = optimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(50):
        stepped.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        stepped.step()
    print(f"{norm.__name__:14} {optimizer.__name__:9} loss {loss.item():.6f}")
    return [param.detach() for param in model.parameters()]


ours, theirs = train(FusedLayerNorm, FusedAdam), train(nn.LayerNorm, torch.optim.AdamW)
largest = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
print(f"largest difference of weights after 50 steps: {largest:.1e}")
