"""T5: amp.initialize and amp.autocast with torch's GradScaler; and the same with torch alone."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(64, 16, device=device), torch.randint(0, 4, (64,), device=device)

ends = []
for use_apex in (True, False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler(
        device, init_scale=2**10, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    )
    if use_apex:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with amp.autocast() if use_apex else torch.autocast(device, torch.float16):
            # float() because torch's autocast of a CPU leaves cross_entropy in 16 bits
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    ends.append([param.detach().clone() for param in model.parameters()])
    amp.reset()  # so that the second run is torch's alone
    name = "apex's casts " if use_apex else "torch's casts"
    print(f"{name}  loss {losses[0]:.4f} -> {losses[-1]:.4f}, scale {scaler.get_scale():.0f}")

largest = max((a - b).abs().max().item() for a, b in zip(*ends, strict=True))
print(f"largest difference of weights: {largest:.1e}")
