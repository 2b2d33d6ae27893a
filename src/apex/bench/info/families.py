"""Which code path runs each family of operations on a device, and why.

To add a family, add a row to ``FAMILIES``. A family is reported only if its module exists.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from apex.amp.casting import cpu_float16
from apex.ops import _runtime

__all__ = ["FAMILIES", "Choice", "Family", "LivePath", "live_paths"]

PathName = Literal["Triton", "torch fused", "reference", "unavailable"]


@dataclass(frozen=True)
class Choice:
    """The path that a family takes on a device, and the reason."""

    path: PathName
    why: str


@dataclass(frozen=True)
class Family:
    """A family of operations: its name for people, where it lives, and how it chooses."""

    name: str
    module: str
    choose: Callable[[torch.device], Choice]


@dataclass(frozen=True)
class LivePath:
    """One line of the report."""

    family: str
    device: str
    path: PathName
    why: str


def live_paths(devices: Iterable[str], families: Iterable[Family] | None = None) -> list[LivePath]:
    """Ask every family that exists which path it takes on each device."""
    present = [f for f in (FAMILIES if families is None else families) if _exists(f.module)]
    names = list(devices)
    return [_live_path(family, name) for family in present for name in names]


def _live_path(family: Family, device: str) -> LivePath:
    choice = family.choose(torch.device(device))
    return LivePath(family.name, device, choice.path, choice.why)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _casting(device: torch.device) -> Choice:
    if torch.amp.is_autocast_available(device.type):
        return Choice("torch fused", "torch.autocast, plus apex's rules where its lists differ")
    return Choice("unavailable", f"torch.autocast does not know {device.type!r} devices")


def _float16(device: torch.device) -> Choice:
    if device.type != "cpu":
        return Choice("torch fused", "the device's own arithmetic")
    how = "float32, rounded once, at float16 levels of amp and under fp16_utils"
    if cpu_float16.has_float16_instructions():
        return Choice("torch fused", f"gradients of convolutions, and attention: {how}")
    what = "matrix products, convolutions, attention and recurrent layers"
    return Choice("torch fused", f"{what}: {how}")


def _unscaling(device: torch.device) -> Choice:
    """Try torch's list kernel on one element: whether it is built for a device is not on record."""
    try:
        one = torch.ones(1, device=device)
        found_inf = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([one], found_inf, one.clone())
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Choice("unavailable", f"torch's list kernel does not run here: {reason}")
    return Choice("torch fused", "one call of torch._amp_foreach_non_finite_check_and_unscale_")


def _norms(device: torch.device) -> Choice:
    return _kernel_or_torch(device, "layer, RMS and group norm: ")


def _losses(device: torch.device) -> Choice:
    return _kernel_or_torch(device, "cross-entropy, also of a linear layer: ")


def _attention(device: torch.device) -> Choice:
    return _kernel_or_torch(device, "softmaxes and rotary embedding: ")


def _kernel_or_torch(device: torch.device, what: str) -> Choice:
    why_not = _runtime.why_not_triton(device.type)
    if why_not is None:
        return Choice("Triton", f"{what}one kernel forward, one backward; small inputs: torch")
    return Choice("torch fused", f"{what}torch's functions, rounded once; {why_not}")


def _optimizers(device: torch.device) -> Choice:
    return _lists(device, "torch's fused steps where they give the same result, else plain PyTorch")


def _multi_tensor(device: torch.device) -> Choice:
    return _lists(device, "torch's check-and-unscale and foreach functions")


def _lists(device: torch.device, otherwise: str) -> Choice:
    why_not = _runtime.why_not_triton(device.type)
    if why_not is None:
        return Choice("Triton", "one launch for all tensors of a dtype")
    return Choice("torch fused", f"{otherwise}; {why_not}")


FAMILIES: tuple[Family, ...] = (
    Family("casting", "apex.amp", _casting),
    Family("float16 arithmetic", "apex.amp", _float16),
    Family("gradient unscaling", "apex.amp", _unscaling),
    Family("optimizers", "apex.optimizers", _optimizers),
    Family("lists of tensors", "apex.multi_tensor_apply", _multi_tensor),
    Family("norms", "apex.normalization", _norms),
    Family("losses", "apex.contrib.xentropy", _losses),
    Family("attention functions", "apex.transformer.functional", _attention),
)
