"""T3: a function of one's own gets 16-bit arguments: by a decorator, or by registering it."""

import types

import torch
from torch import nn

from apex import amp


class FRU(torch.autograd.Function):
    """The backend: it multiplies elements, and works on float16 only."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply two float16 tensors of one shape."""
        if not x.dtype == weight.dtype == torch.float16:
            raise TypeError(f"the backend was given {x.dtype} and {weight.dtype}")
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both gradients, in float16."""
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


@amp.half_function
def fru(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Call the backend; amp casts the arguments of this function."""
    return FRU.apply(x, weight)


device = "cuda" if torch.cuda.is_available() else "cpu"
x, weight = torch.ones(4, device=device), nn.Parameter(torch.ones(4, device=device))
optimizer = torch.optim.SGD([weight], lr=0.5)
backend = types.SimpleNamespace(FRUBackend=lambda x, weight: FRU.apply(x, weight))
try:
    fru(x, weight)
except TypeError as error:
    print(f"without amp: {error}")

amp.register_half_function(backend, "FRUBackend")  # before amp.init
amp_handle = amp.init()
for name, function in {"@amp.half_function": fru, "registered": backend.FRUBackend}.items():
    optimizer.zero_grad()
    out = function(x, weight)
    with amp_handle.scale_loss(out.float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"{name}: out {out.dtype}, gradient {weight.grad.dtype} {weight.grad.tolist()}")
