"""Why an operation gave an inf or NaN, and a remedy: a clause for a report.

Each is read from the arguments that the operation had: at all places where its result is not
finite they must be what the clause says. So most operations have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from apex._compat.private import tree_map
from apex.debug.tensors import HALVES, is_bad, largest, local, tensors_of

_POSITIVE = (0.0, math.inf, "clamp the argument above 0")
_UNIT = (-1.0, 1.0, "clamp the argument between -1 and 1")
_EXP = (-math.inf, None, "subtract the largest, or clamp the argument")
_LIMITS: dict[str, tuple[float, float | None, str]] = {
    # operation -> below and above which arguments it is not finite, and what to do; None: that
    # depends on the dtype
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), _POSITIVE),
    "log1p": (-1.0, math.inf, "clamp the argument above -1"),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), _UNIT),
    "logit": (0.0, 1.0, "pass eps="),
    **dict.fromkeys(("exp", "expm1"), _EXP),
}
_DERIVATIVES = {  # autograd's node -> what has no finite derivative there, and what to do
    "Sqrt": ("a root at 0", "add a small number inside the root"),
    "Pow": ("a power below 1 at 0", "add a small number to its base"),
    **dict.fromkeys(("Log", "Log2", "Log10"), ("a logarithm at 0", "clamp the argument above 0")),
    **dict.fromkeys(
        ("Acos", "Asin"), ("acos and asin at 1 and -1", "clamp the argument closer to 0")
    ),
}
_EXPONENT = (
    "the derivative with respect to the exponent needs the logarithm of the base; clamp the base "
    "above 0"
)
_BY_ZERO = "the divisor is 0; add a small number to it"
_SMALL = "the divisor is as small as"
_SOFTMAXES = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
_LARGE = 1e9  # squares, cubes and sums of smaller numbers are finite in float32


def reason(name: str, node: str, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> str:
    """Why the operation ``name`` gave ``result``; empty if its arguments do not say."""
    try:
        args, kwargs = tree_map(_local, (args, kwargs))
        return _reason(name.rstrip("_"), node, args, kwargs, local(result.detach()))
    except Exception:  # noqa: BLE001  # an operation of the program may have any arguments
        return ""


def _reason(name: str, node: str, args: Any, kwargs: Any, result: torch.Tensor) -> str:
    bad = ~result.isfinite()
    if name in ("mul", "sub") and bool(result.isnan().any()):
        bad = result.isnan()  # infinities are those of the arguments

    def everywhere(places: Any) -> bool:
        return bool(_tensor(places, bad).expand(bad.shape)[bad].all())

    found = ""
    if name in _LIMITS:
        found = _beyond(name, args[0].expand(bad.shape)[bad])
    elif name in ("div", "reciprocal"):
        found = _quotient(_tensor(args[-1], result.new_empty((), dtype=torch.float64)), everywhere)
    elif name == "pow":
        found = _power(_tensor(args[0], result), _tensor(args[1], result), everywhere)
    elif name in ("mul", "sub"):
        found = _of_infinities(name, _tensor(args[0], result), _tensor(args[1], result), everywhere)
    elif name in _OTHERS:
        return _OTHERS[name](args, kwargs, result)
    found = _of_backward(name, node, found, has_nan=bool(result.isnan().any()))
    return found or _of_large(args, result)


def _of_backward(name: str, node: str, found: str, *, has_nan: bool) -> str:
    """The same for the node of autograd that the operation is in."""
    kind = node.rstrip("0123456789").removesuffix("Backward")
    if found == _BY_ZERO and kind not in ("", "Div", "Reciprocal", *_DERIVATIVES):
        return "the divisor is 0"  # one of autograd's own
    if not found or found.startswith(_SMALL) or kind not in _DERIVATIVES:
        return found
    if (kind, name) == ("Pow", "log"):
        return _EXPONENT
    what, remedy = _DERIVATIVES[kind]
    also = ", and infinity times a gradient of 0 is NaN" if has_nan else ""
    return f"the derivative of {what} is infinite{also}; {remedy}"


def _tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(like.device)
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _local(leaf: Any) -> Any:
    return local(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf


def _beyond(name: str, x: torch.Tensor) -> str:
    low, high, remedy = _LIMITS[name]
    high = math.log(torch.finfo(x.dtype).max) if high is None else high
    if not bool(((x <= low) | (x >= high)).all()):
        return ""
    ends = [_shown(float(one) + 0.0, (low, high)) for one in (x.min(), x.max())]
    if ends[0] == ends[1]:
        return f"its argument is {ends[0]}; {remedy}"
    return f"its arguments range from {ends[0]} to {ends[1]}; {remedy}"


def _shown(value: float, limits: tuple[float, float]) -> str:
    """A number with 7 digits, or with all where these would show it as a limit beside it."""
    short = f"{value:.7g}"
    return repr(value) if float(short) in limits and value not in limits else short


def _quotient(divisor: torch.Tensor, everywhere: Callable[[Any], bool]) -> str:
    if everywhere(divisor == 0):
        return _BY_ZERO
    if everywhere((divisor != 0) & (divisor.abs() < 1 / _LARGE)):
        return f"{_SMALL} {float(divisor.abs()[divisor != 0].min()):.3g}"
    return ""


def _power(base: torch.Tensor, exponent: torch.Tensor, everywhere: Callable[[Any], bool]) -> str:
    if everywhere((base == 0) & (exponent < 0)):
        return "the base is 0 and the exponent negative; add a small number to the base"
    if everywhere((base < 0) & (exponent != exponent.round())):
        return "the base is negative and the exponent a fraction; clamp the base"
    return ""


def _of_infinities(
    name: str, x: torch.Tensor, y: torch.Tensor, everywhere: Callable[[Any], bool]
) -> str:
    if name == "sub":
        return "inf - inf" if everywhere(x.isinf() & y.isinf()) else ""
    is_zero = ((x == 0) & y.isinf()) | ((y == 0) & x.isinf())
    return "0 times inf; use torch.where instead of a product" if everywhere(is_zero) else ""


def _of_large(args: Any, result: torch.Tensor) -> str:
    """An overflow of float32 or float64; other reports say what is beyond float16."""
    inputs = [one for one in tensors_of(args) if one.is_floating_point()]
    if result.dtype in HALVES or not inputs or any(map(is_bad, inputs)) or result.isnan().any():
        return ""
    size = max(float(largest(one)) for one in inputs)
    return f"its inputs reach {size:.3g}" if size >= _LARGE else ""


def _mean(args: Any, _: Any, result: torch.Tensor) -> str:
    return "" if args[0].numel() else "the mean of no elements; skip such a batch"


def _spread(args: Any, kwargs: Any, result: torch.Tensor) -> str:
    correction = kwargs.get("correction")
    correction = 1 if correction is None else correction
    count = args[0].numel() // max(result.numel(), 1)
    if count > correction:
        return ""
    values = "1 value" if count == 1 else f"{count} values"
    return f"with correction={correction:g} it needs more than {values}"


def _labels(args: Any, _: Any, result: torch.Tensor) -> str:
    labels, ignored = args[1], args[4]
    is_empty = labels.numel() and bool((labels == ignored).all())
    said = f"all {labels.numel()} labels are {ignored}, which it ignores; skip such a batch"
    return said if is_empty else ""


def _row(args: Any, _: Any, result: torch.Tensor) -> str:
    x, dim = args[:2]
    if not x.dim() or not bool((x == -math.inf).all(dim).any()):
        return ""
    row = f"each of the {x.shape[dim]} inputs of the row is -inf, so a mask leaves it empty"
    return f"{row}; leave the row out"


_OTHERS: dict[str, Callable[[Any, Any, torch.Tensor], str]] = {
    "mean": _mean,
    **dict.fromkeys(("std", "var"), _spread),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _labels),
    **dict.fromkeys(_SOFTMAXES, _row),
}
