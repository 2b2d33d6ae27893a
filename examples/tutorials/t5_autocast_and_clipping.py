"""T5: amp.autocast round forward and loss, and clipping: before the backward, then after it."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = 4 * torch.randn(64, 16, device=device), torch.randint(0, 4, (64,), device=device)

for place in ("before", "after"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    norms, losses = [], []
    for _ in range(30):
        optimizer.zero_grad()
        with amp.autocast():  # on at O1 in any case; a block casts each weight only once
            loss = F.cross_entropy(model(x), y)
        if place == "before":  # as the tutorial has it; there are no gradients yet
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if place == "after":  # gradients are unscaled here
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0))
        optimizer.step()
        losses.append(loss.item())
    clipped = sum(norm.item() > 1 for norm in norms)
    print(
        f"clipped {place:6} the backward: norms up to {max(norms).item():.2f}, so {clipped} of 30 "
        f"steps clipped; loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    )
