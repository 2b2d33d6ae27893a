"""T5: what may be done to gradients between backward and step, here at O2 with its masters."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

Parameters = Sequence[torch.Tensor]


def each_parameter(parameters: Parameters) -> None:
    """Clip the norm of each gradient by itself."""
    for param in parameters:
        torch.nn.utils.clip_grad_norm_(param, max_norm=0.1)


def normalization(parameters: Parameters) -> None:
    """Divide each gradient by its norm."""
    for param in parameters:
        param.grad.div_(param.grad.norm() + 1e-6)


ways: dict[str, Callable[[Parameters], object]] = {
    "norm 2": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
    "norm 1": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, norm_type=1),
    "norm inf": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "each parameter": each_parameter,
    "value": lambda p: torch.nn.utils.clip_grad_value_(p, 0.01),
    "normalization": normalization,
}
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x, y = 4 * torch.randn(64, 16, device=device), torch.randint(0, 4, (64,), device=device)

for name, way in ways.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    masters = list(amp.master_params(optimizer))  # what the optimizer steps, float32
    before = torch.nn.utils.get_total_norm([param.grad for param in masters])
    way(masters)
    after = torch.nn.utils.get_total_norm([param.grad for param in masters])
    optimizer.step()
    print(f"{name:14}  norm of all gradients {before.item():.4f} -> {after.item():.4f}")
