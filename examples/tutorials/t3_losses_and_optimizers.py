"""T3: several losses, and several optimizers, on one handle of amp.init."""

import torch
from torch import nn

from apex import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
amp_handle = amp.init()

# Two models that learn against each other. The discriminator has two losses, the generator one.
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3)
optimizer_g = amp_handle.wrap_optimizer(optimizer_g)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
optimizer_d = amp_handle.wrap_optimizer(optimizer_d, num_loss=2)

criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)
center = torch.tensor([3.0, -2.0], device=device)  # what is real lies round this point
for step in range(300):
    real = center + 0.3 * torch.randn(64, 2, device=device)
    fake = generator(torch.randn(64, 4, device=device))
    if step in (0, 299):
        away = (fake.float().mean(0) - center).norm().item()
        print(f"step {step}: the middle of the fakes is {away:.2f} from the middle of the real")

    optimizer_d.zero_grad()
    loss1 = criterion(discriminator(real), ones)
    loss2 = criterion(discriminator(fake.detach()), zeros)
    with optimizer_d.scale_loss(loss1) as scaled_loss:
        scaled_loss.backward()
    with optimizer_d.scale_loss(loss2) as scaled_loss:
        scaled_loss.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    with optimizer_g.scale_loss(criterion(discriminator(fake), ones)) as scaled_loss:
        scaled_loss.backward()
    optimizer_g.step()

scales = {name: entry["loss_scale"] for name, entry in amp.state_dict().items()}
print(f"a scale for each of the three losses: {scales}")
