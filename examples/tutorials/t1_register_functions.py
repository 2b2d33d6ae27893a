"""T1: have a function computed in float32, in 16 bits, or in the widest type of its arguments."""

import torch
from torch import nn

from apex import amp


class Segmenter(nn.Module):
    """Scores each pixel. It registers functions in ``__init__``, so before ``initialize``."""

    def __init__(self, register: bool) -> None:
        super().__init__()
        if register:
            amp.register_float_function(torch, "sigmoid")
            amp.register_half_function(torch, "cosh")
            amp.register_promote_function(torch, "lerp")
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map pictures to the probability of each pixel, whose dtype is that of the sigmoid."""
        return torch.sigmoid(self.conv(x))


device = "cuda" if torch.cuda.is_available() else "cpu"
half, single = torch.ones(2, device=device).half(), torch.ones(2, device=device)
for register in (False, True):
    torch.manual_seed(0)
    model = Segmenter(register).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    nn.init.constant_(model.conv.bias, 9.0)  # a network that is sure of itself
    probability = model(torch.randn(1, 1, 8, 8, device=device))
    # In float16 the sigmoid of 9 is exactly 1, and the logarithm of 1 - 1 is -inf.
    loss = -torch.log(1 - probability).mean()
    try:
        lerp = torch.lerp(half, single, 0.5).dtype
    except RuntimeError as error:  # torch wants arguments of one dtype
        lerp = f"RuntimeError: {error}"
    print("registered" if register else "not registered")
    print(f"  sigmoid: {probability.dtype}, loss {loss.item():.3f}")
    print(f"  cosh of float32: {torch.cosh(single).dtype}")
    print(f"  lerp of float16 and float32: {lerp}")
