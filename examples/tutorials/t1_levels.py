"""T1: which dtypes each level keeps and computes in."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


class Net(nn.Module):
    """A convolution, a batchnorm, a linear layer and a softmax; it notes what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map pictures ``(n, 1, h, w)`` to logarithms of four probabilities each."""
        convolved = self.conv(x)
        features = F.relu(self.norm(convolved)).amax((2, 3))
        result = F.log_softmax(self.fc(features), dim=1)
        self.seen = {"convolution": convolved.dtype, "softmax": result.dtype}
        return result


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
images = torch.rand(32, 1, 8, 8, device=device)
labels = F.avg_pool2d(images, 4).flatten(1).argmax(1)

print("level  weights   batchnorm  convolution  softmax   loss of the first and last step")
for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
    torch.manual_seed(1)
    net = Net().to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net, opt = amp.initialize(net, opt, opt_level=level, verbosity=0)
    losses = []
    for _ in range(20):
        loss = F.nll_loss(net(images), labels)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        losses.append(loss.item())
    dtypes = [net.conv.weight.dtype, net.norm.weight.dtype, *net.seen.values()]
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    print(
        f"{level}     {names[0]:9} {names[1]:10} {names[2]:12} {names[3]:9} "
        f"{losses[0]:.4f} {losses[-1]:.4f}"
    )
