"""For ``torch.jit.script``: layer norm and RMS norm that it compiles, of torch's functions alone.

So that scripted modules can be saved, and loaded where there is no Python. Annotations are no
strings here: TorchScript would not find their names.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    Shape = Sequence[int]
else:  # what TorchScript understands
    Shape = list[int]

Function = TypeVar("Function", bound=Callable[..., Any])


def left_to_python(function: Function) -> Function:
    """Let TorchScript call a function rather than compile it; it wants every argument then."""
    torch.jit.ignore(function)  # type: ignore[no-untyped-call]
    return function


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Shape,
    eps: float,
    mixed: bool,
) -> torch.Tensor:
    """Layer norm; the output has the weight's dtype if ``mixed``, else the input's."""
    if weight is None or bias is None:
        return F.layer_norm(x, list(shape), weight, bias, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    y = F.layer_norm(x.to(wide), list(shape), weight.to(wide), bias.to(wide), eps)
    return y.to(weight.dtype if mixed else x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, shape: Shape, eps: float
) -> torch.Tensor:
    """RMS norm; the output has the weight's dtype."""
    if weight is None:
        return F.rms_norm(x, list(shape), None, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), list(shape), weight.to(wide), eps).to(weight.dtype)
