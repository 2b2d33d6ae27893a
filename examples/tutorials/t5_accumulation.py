"""T5: gradients of four batches are added up, then one step; it is that of the large batch."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = torch.randn(192, 16, device=device), torch.randint(0, 4, (192,), device=device)

ends = []
for accumulation_steps, batch in ((4, 16), (1, 64)):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.zero_grad()
    loader = list(zip(x.split(batch), y.split(batch), strict=True))
    for i, (data, target) in enumerate(loader):
        loss = F.cross_entropy(model(data), target) / accumulation_steps
        with amp.scale_loss(loss, optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    ends.append([param.detach() for param in model.parameters()])
    steps = amp.state_dict()["loss_scaler0"]["unskipped"]
    print(f"{len(loader)} batches of {batch}, {accumulation_steps} for each step: {steps} steps")

largest = max((a - b).abs().max().item() for a, b in zip(*ends, strict=True))
print(f"largest difference of weights: {largest:.1e}")
