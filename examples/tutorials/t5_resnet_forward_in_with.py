"""T5: a residual network with Adam; the forward is inside the head of the with statement."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


class ResNet(nn.Module):
    """A residual block between a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map pictures ``(n, 3, h, w)`` to ten scores each."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
# Noise over ten colours, in the shape of CIFAR-10.
colours, targets = torch.randn(10, 3, 1, 1), torch.randint(0, 10, (256,))
pictures = (colours[targets] + 0.5 * torch.randn(256, 3, 32, 32)).to(device)
targets = targets.to(device)

model = ResNet().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loss_function = nn.CrossEntropyLoss()
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for epoch in range(6):
    for data, target in zip(pictures.split(16), targets.split(16), strict=True):
        optimizer.zero_grad()
        with amp.scale_loss(loss_function(model(data), target), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(pictures).argmax(1) == targets).float().mean().item()
    model.train()
    print(f"epoch {epoch + 1}: {100 * right:.1f} % of the training pictures are right")
