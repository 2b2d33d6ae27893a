"""T2: the three methods of its benchmark on a VGG-like network: FP32, FP16 and amp.

FP16 is the way of 2018: network_to_half, and an FP16_Optimizer with float32 masters. The benchmark
itself, with time, memory, accuracy and pictures, is examples/benchmark.
"""

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.fp16_utils import FP16_Optimizer, network_to_half

device = "cuda" if torch.cuda.is_available() else "cpu"


def vgg(*widths: int) -> nn.Sequential:
    """Make blocks of convolution, batchnorm, ReLU and pooling for pictures of 32x32."""
    layers, channels = [], 3
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


generator = torch.Generator().manual_seed(0)
labels = torch.randint(0, 10, (32,), generator=generator)
patterns = torch.randn(10, 3, 32, 32, generator=generator)
images = patterns[labels] + torch.randn(32, 3, 32, 32, generator=generator)
images, labels = images.to(device), labels.to(device)

for method in ("FP32", "FP16", "amp"):
    torch.manual_seed(0)
    model = vgg(4, 8, 8, 16, 16).to(device)
    if method == "FP16":
        model = network_to_half(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    if method == "FP16":
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=128)
    elif method == "amp":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    losses = []
    for _ in range(15):
        outputs = model(images)
        loss = F.cross_entropy(outputs.float(), labels)
        optimizer.zero_grad()
        if method == "FP16":
            optimizer.backward(loss)
        elif method == "amp":
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = next(model.parameters()).dtype
    print(f"{method}  weights {weights}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
