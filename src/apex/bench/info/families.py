"""Which code path runs each family of operations on a device, and why."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from apex.amp.casting import cpu_float16
from apex.ops import _runtime

__all__ = ["FAMILIES", "LivePath", "live_paths"]

PathName = Literal["Triton", "torch fused", "unavailable"]
Choice = tuple[PathName, str]


@dataclass(frozen=True)
class LivePath:
    """The path that a family takes on a device, and the reason."""

    family: str
    device: str
    path: PathName
    why: str


def live_paths(devices: Iterable[str]) -> list[LivePath]:
    """Ask every family which path it takes on each device."""
    names = list(devices)
    return [
        LivePath(family, name, *choose(torch.device(name)))
        for family, choose in FAMILIES.items()
        for name in names
    ]


def _casting(device: torch.device) -> Choice:
    if torch.amp.is_autocast_available(device.type):
        return "torch fused", "torch.autocast, plus apex's rules where its lists differ"
    return "unavailable", f"torch.autocast does not know {device.type!r} devices"


def _float16(device: torch.device) -> Choice:
    if device.type != "cpu":
        return "torch fused", "the device's own arithmetic"
    what = "matrix products, convolutions, attention and recurrent layers"
    if cpu_float16.has_float16_instructions():
        what = "gradients of convolutions, and attention"
    how = "float32, rounded once, at float16 levels of amp and under fp16_utils"
    return "torch fused", f"{what}: {how}"


def _unscaling(device: torch.device) -> Choice:
    """Try torch's list kernel on one element: whether it is built for a device is not on record."""
    try:
        one = torch.ones(1, device=device)
        found_inf = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([one], found_inf, one.clone())
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return "unavailable", f"torch's list kernel does not run here: {reason}"
    return "torch fused", "one call of torch._amp_foreach_non_finite_check_and_unscale_"


def _kernel_or(kernel: str, torchs: str) -> Callable[[torch.device], Choice]:
    """A Triton kernel where one can run, else torch's functions."""

    def choose(device: torch.device) -> Choice:
        why_not = _runtime.why_not_triton(device.type)
        return ("Triton", kernel) if why_not is None else ("torch fused", f"{torchs}; {why_not}")

    return choose


LAUNCH = "one launch for all tensors of a dtype"
FAMILIES: dict[str, Callable[[torch.device], Choice]] = {
    "casting": _casting,
    "float16 arithmetic": _float16,
    "gradient unscaling": _unscaling,
    "optimizers": _kernel_or(
        LAUNCH, "torch's fused steps where they give the same result, else plain PyTorch"
    ),
    "lists of tensors": _kernel_or(LAUNCH, "torch's check-and-unscale and foreach functions"),
    "norms, losses, attention": _kernel_or(
        "one kernel forward, one backward; small inputs: torch", "torch's functions, rounded once"
    ),
}
