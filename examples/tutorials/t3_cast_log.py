"""T3: amp.init with verbose=True shows each cast of the MNIST network, in every iteration."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


class Net(nn.Module):
    """Two convolutions, two linear layers and a log_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``(n, 1, 28, 28)`` to logarithms of ten probabilities each."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
data, target = torch.rand(8, 1, 28, 28, device=device), torch.arange(8, device=device)

amp_handle = amp.init(enabled=True, enable_caching=True, verbose=True)
for iteration in range(2):
    print(f"iteration {iteration}")
    optimizer.zero_grad()
    loss = F.nll_loss(model(data), target)
    with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

amp_handle = amp.init(enabled=False, verbose=True)  # the same program in float32
print("disabled")
with amp_handle.scale_loss(F.nll_loss(model(data), target), optimizer) as scaled_loss:
    scaled_loss.backward()
