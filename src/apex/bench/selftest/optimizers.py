"""Every optimizer, step by step, compared with its formula in float64.

Gradients are scaled by 1024 and the step gets the scale, as from `torch.amp.GradScaler`. There are
two groups with their own learning rate and weight decay. Each step is compared with the formula of
what was stored before it, so that errors do not add up. Then a step with ``found_inf`` has to leave
every bit as it is, and a second run has to end with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from apex.bench import tolerance
from apex.bench.catalogue.entry import DTYPES
from apex.bench.catalogue.optimizers import OPTIMIZERS, Optimizer, State, Step, Variant
from apex.bench.selftest.check import (
    Check,
    Measured,
    Pair,
    Setting,
    differing,
    joined,
    one_rounding,
    same,
)  # fmt: skip
from apex.bench.selftest.lists import tensors
from apex.ops.lists.storage import join
from apex.optimizers import FusedAdam
from apex.parallel import LARC

__all__ = ["EVERY", "checks", "give_grads", "gradients", "made", "parameters", "tell"]

AREA = "optimizers"
STEPS = 3
SCALE = 1024.0  # of the gradients; a power of two, so that taking it out is exact
TRUST = 0.02  # LARC's coefficient
EVERY = [(optimizer, variant) for optimizer in OPTIMIZERS for variant in optimizer.variants]

Params = list[torch.nn.Parameter]


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for optimizer, variant in EVERY:
        for dtype in variant.dtypes:
            run = partial(_compared, optimizer, variant, DTYPES[dtype])
            yield Check(AREA, f"{optimizer.called(variant)}, {dtype}", run)
    yield Check(AREA, "FusedAdam, lost updates, bf16", _lost_updates)


def made(optimizer: Optimizer, variant: Variant, params: Params) -> Any:
    """Make it with two groups, the second with half the learning rate and more decay."""
    options = {"lr": 0.02, "weight_decay": 0.01, **optimizer.options, **variant.options}
    second = {"lr": options["lr"] / 2, "weight_decay": 0.1}
    groups = [{"params": params[::2]}, {"params": params[1::2], **second}]
    found = optimizer.make(groups, **options)
    return LARC(found, trust_coefficient=TRUST) if variant.larc else found


def parameters(setting: Setting, dtype: torch.dtype) -> Params:
    """Parameters of awkward sizes."""
    return [torch.nn.Parameter(x) for x in tensors(setting, dtype, 20)]


def gradients(
    params: Params, setting: Setting, number: int, scale: float = SCALE
) -> list[torch.Tensor]:
    """The gradients of a step."""
    found = tensors(setting, params[0].dtype, 20 + number, [tuple(p.shape) for p in params])
    return [grad * scale for grad in found]


def give_grads(params: Params, setting: Setting, number: int, scale: float = SCALE) -> None:
    """Give parameters the gradients of a step."""
    for param, grad in zip(params, gradients(params, setting, number, scale), strict=True):
        param.grad = grad


def tell(optimizer: Any, found_inf: float, setting: Setting) -> None:
    """Tell an optimizer what `torch.amp.GradScaler` tells it before a step."""
    optimizer.grad_scale = torch.full((), SCALE, device=setting.device)
    optimizer.found_inf = torch.full((), found_inf, device=setting.device)


def _compared(
    entry: Optimizer, variant: Variant, dtype: torch.dtype, setting: Setting
) -> Iterator[Measured]:
    ends = []
    for first in (True, False):
        torch.manual_seed(0)  # stochastic rounding draws
        params = parameters(setting, dtype)
        optimizer = made(entry, variant, params)
        found = [*_steps(entry, variant, optimizer, params, setting)]
        if first:
            yield from found
        if first and not variant.larc:
            give_grads(params, setting, STEPS + 1)
            tell(optimizer, 1.0, setting)
            before = copy.deepcopy(_kept(optimizer))
            optimizer.step()
            yield same("skipped step", before, _kept(optimizer))
        ends.append(_kept(optimizer))
    yield same("second run", *ends)


def _steps(
    entry: Optimizer, variant: Variant, optimizer: Any, params: Params, setting: Setting
) -> Iterator[Measured]:
    norms: dict[torch.Tensor, State] = {}  # NovoGrad's, which no tensor's state holds
    max_norm = variant.options.get("max_grad_norm", entry.max_norm)
    # LARC compares the norms of gradient and weight: GradScaler unscales before it.
    scale = 1.0 if variant.larc else SCALE
    for number in range(1, STEPS + 1):
        give_grads(params, setting, number, scale)
        if not variant.larc:
            tell(optimizer, 0.0, setting)
        grads = [p.grad.double() / scale for p in params if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        clip = max_norm / norm if max_norm and norm > max_norm else 1.0
        of = {param: grad * clip for param, grad in zip(params, grads, strict=True)}
        wanted = []
        for group in optimizer.param_groups:
            options = {**entry.options, **variant.options, **group}
            for param in group["params"]:
                state = {**_state(optimizer, param), **norms.get(param, {})}
                step = Step(number, options, of[param], _weight(optimizer, param).double(), state)
                exact, after = entry.formula(_with_local_rate(step) if variant.larc else step)
                norms[param] = {k: after.pop(k) for k in ("norm",) if k in after}
                wanted.append((param, exact, after))
        optimizer.step()
        rule = _STORAGES.get(variant.options.get("storage", "plain"), one_rounding)
        weights = [(_weight(optimizer, param), exact) for param, exact, _ in wanted]
        yield from rule(f"weights, step {number}", weights, setting)
        masters = [(p.detach(), optimizer.state[p].get("master_param")) for p, _, _ in wanted]
        pairs = [(p, master.double()) for p, master in masters if master is not None]
        yield from one_rounding(f"weights from masters, step {number}", pairs, setting)
        of_slots = _normed if max_norm or variant.larc else one_rounding
        for slot in wanted[0][2]:
            pairs = [(optimizer.state[param][slot], after[slot]) for param, _, after in wanted]
            yield from of_slots(f"{slot}, step {number}", pairs, setting)


def _kept(optimizer: Any) -> list[torch.Tensor]:
    """The weights and the state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [*(p.detach() for p in params), *(x for p in params for x in _of(optimizer, p).values())]


def _of(optimizer: Any, param: torch.Tensor) -> State:
    found = optimizer.state.get(param, {}).items()
    return {slot: x for slot, x in found if isinstance(x, torch.Tensor)}


def _state(optimizer: Any, param: torch.Tensor) -> State:
    return {slot: x.double() for slot, x in _of(optimizer, param).items()}


def _weight(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    """The weight with all the bits that are kept of it."""
    state = _of(optimizer, param)
    if "low_bits" in state:
        return join(param.detach(), state["low_bits"])
    if "error" in state:
        return param.detach().double() + state["error"].double()
    return state.get("master_param", param).detach()


def _with_local_rate(step: Step) -> Step:
    """LARC: the gradient and the decay are multiplied by a local rate, then SGD has no decay."""
    group, decay = step.group, step.group["weight_decay"]
    size, weight = step.grad.norm(), step.param.norm()
    if not size * weight:
        return step._replace(group={**group, "weight_decay": 0.0})
    rate = (TRUST * weight / (size + decay * weight + 1e-8) / group["lr"]).clamp(max=1.0)
    grad = (step.grad + decay * step.param) * rate
    return step._replace(grad=grad, group={**group, "weight_decay": 0.0})


def _lost_updates(setting: Setting) -> Iterator[Measured]:
    """The meter counts the weights that a step leaves as they were."""
    params = parameters(setting, torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-3)
    meter = optimizer.count_lost_updates()
    assert meter is not None  # asked for
    before = [param.detach().clone() for param in params]
    give_grads(params, setting, 1)
    optimizer.step()
    moved = sum(differing(old, p.detach()) for old, p in zip(before, params, strict=True))
    total = sum(param.numel() for param in params)
    off = abs(round(meter.share * total) - (total - moved))
    yield Measured("lost updates counted and expected", off, 0, "off")
    yield Measured("fraction of updates lost", meter.share, None, "")


def _normed(what: str, pairs: list[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare what a norm was multiplied into, which shows in float32 only."""
    wide = [pair for pair in pairs if pair[0].dtype == torch.float32]
    yield from one_rounding(what, [p for p in pairs if p[0].dtype != torch.float32], setting)
    if wide:
        yield Measured(what, tolerance.errors_in_eps(*joined(wide)), tolerance.NORMED, "eps")


def _kahan(what: str, pairs: list[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare the sums of weights and rounding errors."""
    error = tolerance.errors_in_eps(*joined(pairs), torch.bfloat16)
    yield Measured(what, error, tolerance.KAHAN, "eps")


def _stochastic(what: str, pairs: list[Pair], setting: Setting) -> Iterator[Measured]:
    """Each weight is a neighbour of the exact one, and together they are off by nothing."""
    actual, exact = joined(pairs)
    off = (actual.double() - exact) / tolerance.ulps(exact, actual.dtype)
    far = int((off.abs() > 1 + tolerance.BEYOND_A_NEIGHBOUR).sum())
    yield Measured(f"{what}, not a neighbour", far, 0, "elements")
    deviation = (6 * len(off)) ** -0.5  # of the mean; 1/6 is the mean of p * (1 - p)
    mean = off.mean().abs().item() / deviation
    yield Measured(f"{what}, mean error", mean, tolerance.DEVIATIONS, "deviations")


_STORAGES: dict[str, Callable[..., Iterator[Measured]]] = {
    "kahan": _kahan, "stochastic": _stochastic,
}  # fmt: skip
