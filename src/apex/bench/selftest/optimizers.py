"""Every optimizer, step by step, compared with its formula in float64.

Gradients are scaled by 1024 and the step gets the scale, as from `torch.amp.GradScaler`. There are
two groups with their own learning rate and weight decay. Each step is compared with the formula of
what was stored before it, so that errors do not add up. Then a step with ``found_inf`` has to leave
every bit as it is, and a second run has to end with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apex import optimizers
from apex.bench import tolerance
from apex.bench.selftest import formulas
from apex.bench.selftest.check import (
    DTYPES,
    Check,
    Measured,
    Setting,
    differing,
    one_rounding,
    same_again,
)
from apex.bench.selftest.formulas import Formula, Step
from apex.bench.selftest.list_ops import tensors
from apex.contrib import optimizers as contrib
from apex.ops.lists.storage import join
from apex.parallel import LARC

__all__ = [
    "VARIANTS",
    "Params",
    "Variant",
    "checks",
    "give_grads",
    "gradients",
    "parameters",
    "tell",
]

AREA = "optimizers"
STEPS = 3
SCALE = 1024.0  # of the gradients; a power of two, so that taking it out is exact
TRUST = 0.02  # LARC's coefficient

Params = list[torch.nn.Parameter]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A way to make an optimizer.

    Attributes:
        name: For people.
        make: Makes it from groups.
        formula: Its step.
        dtypes: Of the weights, names of `DTYPES`.
        options: Of the constructor.
        max_norm: To which all gradients together are clipped; 0 for not at all.
        larc: Whether it is wrapped by `apex.parallel.LARC`.
    """

    name: str
    make: Callable[..., Any]
    formula: Formula
    dtypes: tuple[str, ...] = ("fp32",)
    options: dict[str, Any] = field(default_factory=dict)
    max_norm: float = 0.0
    larc: bool = False

    def optimizer(self, params: Params) -> Any:
        """Make the optimizer: two groups, the second with half the learning rate and more decay."""
        options = {"lr": 0.02, "weight_decay": 0.01, **self.options}
        second = {"lr": options["lr"] / 2, "weight_decay": 0.1}
        groups = [{"params": params[::2]}, {"params": params[1::2], **second}]
        made = self.make(groups, **options)
        return LARC(made, trust_coefficient=TRUST) if self.larc else made


EVERY = tuple(DTYPES)
MOMENTUM = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
VARIANTS = (
    Variant("FusedAdam (AdamW)", optimizers.FusedAdam, formulas.adam(decoupled=True), EVERY),
    Variant(
        "FusedAdam with an L2 penalty", optimizers.FusedAdam, formulas.adam(decoupled=False),
        options={"adam_w_mode": False},
    ),
    Variant(
        "FusedAdam, clipped", optimizers.FusedAdam, formulas.adam(decoupled=True),
        options={"max_grad_norm": 1.0}, max_norm=1.0,
    ),
    Variant(
        "FusedAdam, capturable", optimizers.FusedAdam, formulas.adam(decoupled=True),
        ("fp32", "bf16"), {"capturable": True},
    ),
    Variant(
        "FusedAdam, fp32 masters", optimizers.FusedAdam, formulas.adam(decoupled=True),
        ("fp16", "bf16"), {"capturable": True, "master_weights": True},
    ),
    *(
        Variant(
            f"FusedAdam, storage={storage}", optimizers.FusedAdam, formulas.adam(decoupled=True),
            ("bf16",), {"storage": storage},
        )
        for storage in ("low_bits", "kahan", "stochastic")
    ),
    Variant(
        "FusedAdam of apex.contrib, eps inside the root", contrib.FusedAdam,
        formulas.adam_eps_inside, options={"eps_inside_sqrt": True},
    ),
    Variant(
        "FusedSGD", optimizers.FusedSGD, formulas.sgd,
        options={**MOMENTUM, "momentum": 0.0},
    ),
    Variant("FusedSGD with momentum", optimizers.FusedSGD, formulas.sgd, EVERY, MOMENTUM),
    Variant(
        "FusedSGD with dampening", optimizers.FusedSGD, formulas.sgd,
        options={**MOMENTUM, "dampening": 0.3},
    ),
    Variant(
        "FusedSGD, Nesterov", optimizers.FusedSGD, formulas.sgd,
        options={**MOMENTUM, "nesterov": True},
    ),
    Variant(
        "FusedSGD with LARC", optimizers.FusedSGD, formulas.sgd, options=MOMENTUM, larc=True
    ),
    Variant("FusedAdagrad", optimizers.FusedAdagrad, formulas.adagrad, EVERY),
    Variant("FusedLion", optimizers.FusedLion, formulas.lion, EVERY),
    Variant("FusedNovoGrad", optimizers.FusedNovoGrad, formulas.novograd, EVERY),
    Variant("FusedLAMB", optimizers.FusedLAMB, formulas.lamb, EVERY, max_norm=1.0),
    Variant(
        "FusedMixedPrecisionLamb", optimizers.FusedMixedPrecisionLamb, formulas.lamb, ("fp16",),
        {"reduced_precision_dtype": torch.float16}, max_norm=1.0,
    ),
)  # fmt: skip


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for variant in VARIANTS:
        for dtype in variant.dtypes:
            yield Check(AREA, f"{variant.name}, {dtype}", _compared(variant, DTYPES[dtype]))
    yield Check(AREA, "FusedAdam, lost updates, bf16", _lost_updates)


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


def _compared(variant: Variant, dtype: torch.dtype) -> Callable[[Setting], Iterator[Measured]]:
    def run(setting: Setting) -> Iterator[Measured]:
        ends = []
        for first in (True, False):
            torch.manual_seed(0)  # stochastic rounding draws
            params = parameters(setting, dtype)
            optimizer = variant.optimizer(params)
            found = [*_steps(variant, optimizer, params, setting)]
            if first:
                yield from found
            if first and not variant.larc:
                yield _skipped(optimizer, params, setting)
            ends.append([*map(_stored, params), *_kept(optimizer)])
        yield same_again("second run", *ends)

    return run


def _steps(
    variant: Variant, optimizer: Any, params: Params, setting: Setting
) -> Iterator[Measured]:
    norms: dict[torch.Tensor, formulas.State] = {}  # NovoGrad's, which no tensor's state holds
    for number in range(1, STEPS + 1):
        # LARC compares the norms of gradient and weight: GradScaler unscales before it.
        scale = 1.0 if variant.larc else SCALE
        give_grads(params, setting, number, scale)
        if not variant.larc:
            tell(optimizer, 0.0, setting)
        grads = _clipped([_stored(p.grad).double() / scale for p in params], variant.max_norm)
        wanted = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = next(g for p, g in zip(params, grads, strict=True) if p is param)
                state = {**_state(optimizer, param), **norms.get(param, {})}
                step = Step(number, group, grad, _weight(optimizer, param).double(), state)
                exact, after = variant.formula(_with_local_rate(step) if variant.larc else step)
                norms[param] = {k: after.pop(k) for k in ("norm",) if k in after}
                wanted.append((param, exact, after))
        optimizer.step()
        yield from _judged(variant, optimizer, wanted, number, setting)


def _judged(
    variant: Variant, optimizer: Any, wanted: Sequence[Any], number: int, setting: Setting
) -> Iterator[Measured]:
    weights = [(_weight(optimizer, param), exact) for param, exact, _ in wanted]
    rule = _STORAGES.get(variant.options.get("storage", "plain"), one_rounding)
    yield from rule(f"weights, step {number}", weights, setting)
    masters = [
        (_stored(p), optimizer.state[p]["master_param"].double())
        for p, _, _ in wanted
        if "master_param" in optimizer.state[p]
    ]
    yield from one_rounding(f"weights from masters, step {number}", masters, setting)
    of_slots = _normed if variant.max_norm or variant.larc else one_rounding
    for slot in wanted[0][2]:
        pairs = [(optimizer.state[param][slot], after[slot]) for param, _, after in wanted]
        yield from of_slots(f"{slot}, step {number}", pairs, setting)


def _skipped(optimizer: Any, params: Params, setting: Setting) -> Measured:
    give_grads(params, setting, STEPS + 1)
    tell(optimizer, 1.0, setting)
    before = copy.deepcopy([*map(_stored, params), *_kept(optimizer)])
    optimizer.step()
    tell(optimizer, 0.0, setting)
    return same_again("skipped step", before, [*map(_stored, params), *_kept(optimizer)])


def tell(optimizer: Any, found_inf: float, setting: Setting) -> None:
    """Tell an optimizer what `torch.amp.GradScaler` tells it before a step."""
    optimizer.grad_scale = torch.full((), SCALE, device=setting.device)
    optimizer.found_inf = torch.full((), found_inf, device=setting.device)


def _stored(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x.detach()


def _kept(optimizer: Any) -> list[torch.Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


def _state(optimizer: Any, param: torch.Tensor) -> formulas.State:
    found = optimizer.state.get(param, {}).items()
    return {slot: x.double() for slot, x in found if isinstance(x, torch.Tensor)}


def _weight(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    """The weight with all the bits that are kept of it."""
    state = optimizer.state.get(param, {})
    if "low_bits" in state:
        return join(param.detach(), state["low_bits"])
    if "error" in state:
        error: torch.Tensor = state["error"]
        return param.detach().double() + error.double()
    kept: torch.Tensor = state.get("master_param", param)
    return kept.detach()


def _clipped(grads: list[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    factor = max_norm / norm if max_norm and norm > max_norm else 1.0
    return [grad * factor for grad in grads]


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
    optimizer = optimizers.FusedAdam(params, lr=1e-3)
    meter = optimizer.count_lost_updates()
    assert meter is not None  # asked for
    before = [param.detach().clone() for param in params]
    give_grads(params, setting, 1)
    optimizer.step()
    pairs = zip(before, params, strict=True)
    moved = sum(differing(old, param.detach()) for old, param in pairs)
    total = sum(param.numel() for param in params)
    off = abs(round(meter.share * total) - (total - moved))
    yield Measured("lost updates counted and expected", off, 0, "off")
    yield Measured("fraction of updates lost", meter.share, None, "")


def _normed(what: str, pairs: Iterable[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare what a norm was multiplied into, which shows in float32 only."""
    listed = [*pairs]
    wide = [pair for pair in listed if pair[0].dtype == torch.float32]
    yield from one_rounding(what, [p for p in listed if p[0].dtype != torch.float32], setting)
    if wide:
        error = tolerance.errors_in_eps(*_joined(wide))
        yield Measured(what, error, tolerance.NORMED, "eps")


def _kahan(what: str, pairs: Iterable[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare the sums of weights and rounding errors."""
    error = tolerance.errors_in_eps(*_joined(pairs), torch.bfloat16)
    yield Measured(what, error, tolerance.KAHAN, "eps")


def _stochastic(what: str, pairs: Iterable[Pair], setting: Setting) -> Iterator[Measured]:
    """Each weight is a neighbour of the exact one, and together they are off by nothing."""
    actual, exact = _joined(pairs)
    off = (actual.double() - exact) / tolerance.ulps(exact, actual.dtype)
    far = int((off.abs() > 1 + tolerance.BEYOND_A_NEIGHBOUR).sum())
    yield Measured(f"{what}, not a neighbour", far, 0, "elements")
    deviation = (6 * len(off)) ** -0.5  # of the mean; 1/6 is the mean of p * (1 - p)
    mean = off.mean().abs().item() / deviation
    yield Measured(f"{what}, mean error", mean, tolerance.DEVIATIONS, "deviations")


def _joined(pairs: Iterable[Pair]) -> Pair:
    actual, exact = zip(*pairs, strict=True)
    return torch.cat([x.flatten() for x in actual]), torch.cat([x.flatten() for x in exact])


_STORAGES: dict[str, Callable[..., Iterator[Measured]]] = {
    "kahan": _kahan,
    "stochastic": _stochastic,
}
