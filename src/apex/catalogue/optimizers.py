"""All optimizers, and the ways to make them that differ in what a kernel computes.

Each has a step as a formula in float64, for one tensor. These are separate from the library's
definitions on purpose. `Step` holds what a formula may use; the formula returns the new weight and
the new state by the names of `optimizer.state`. Tests compare Adam, SGD and Adagrad with
`torch.optim` in float64, bit for bit but for a few roundings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from apex import optimizers
from apex.catalogue.entry import DTYPES
from apex.catalogue.peers import Peer, foreach_lamb, foreach_novograd, of_torch
from apex.contrib import optimizers as contrib
from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA

__all__ = [
    "BY_NAME", "OPTIMIZERS", "WITH_8_BITS", "Formula", "Optimizer", "State", "Step", "TimedStep",
    "Variant", "beside_torch", "makers",
    "TRUST", "adagrad", "adam", "adam_eps_inside", "lamb", "larc", "lion", "muon", "novograd",
    "sgd",
]  # fmt: skip

TRUST = 0.02  # LARC's coefficient

State = dict[str, torch.Tensor]


class Step(NamedTuple):
    """What a step starts from.

    Attributes:
        number: Which step it is, from 1.
        group: Options of the constructor and of the group: ``lr``, ``weight_decay``, ...
        grad: The gradient, unscaled and clipped.
        param: The weight.
        state: State before the step; empty at the first.
    """

    number: int
    group: Mapping[str, Any]
    grad: torch.Tensor
    param: torch.Tensor
    state: State


Formula = Callable[[Step], tuple[torch.Tensor, State]]


# --- formulas -------------------------------------------------------------------------------------


def _moments(step: Step, grad: torch.Tensor) -> tuple[State, torch.Tensor, torch.Tensor]:
    """Adam's moments: as they are kept, and corrected for their start at 0."""
    (beta1, beta2), zero = step.group["betas"], torch.zeros_like(grad)
    exp_avg = beta1 * step.state.get("exp_avg", zero) + _share(step) * grad
    exp_avg_sq = beta2 * step.state.get("exp_avg_sq", zero) + (1 - beta2) * grad**2
    bias1, bias2 = _biases(step)
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, exp_avg / bias1, exp_avg_sq / bias2


def _share(step: Step) -> float:
    """What a gradient enters the first moment by."""
    # Without the argument, or with FusedAdam's None, as with True.
    return 1.0 if step.group.get("grad_averaging") is False else 1 - step.group["betas"][0]


def _biases(step: Step) -> tuple[float, float]:
    """What moments are divided by for their start at 0."""
    corrects = step.group.get("bias_correction", True)
    bias1, bias2 = (1 - beta**step.number if corrects else 1.0 for beta in step.group["betas"])
    return bias1, bias2


def adam(step: Step) -> tuple[torch.Tensor, State]:
    """AdamW, or Adam with an L2 penalty."""
    group, param = step.group, step.param
    decay, decoupled = group["weight_decay"] * param, group.get("adam_w_mode", True)
    state, mean, square = _moments(step, step.grad if decoupled else step.grad + decay)
    update = mean / (square.sqrt() + group["eps"])
    return param - group["lr"] * (update + decay if decoupled else update), state


def adam_eps_inside(step: Step) -> tuple[torch.Tensor, State]:
    """The Adam of 2019: corrections in the learning rate, ``eps`` below the root or beside it."""
    group, param = step.group, step.param
    state, _, _ = _moments(step, step.grad)
    bias1, bias2 = _biases(step)
    rate = group["lr"] * bias2**0.5 / bias1
    below, beside = (1, 0) if group.get("eps_inside_sqrt", True) else (0, 1)
    root = (state["exp_avg_sq"] + below * group["eps"]).sqrt() + beside * group["eps"]
    update = state["exp_avg"] / root
    return param - rate * (update + group["weight_decay"] * param), state


def adam_swa(step: Step) -> tuple[torch.Tensor, State]:
    """The Adam of FusedAdamSWA; of its average there is nothing in the state."""
    decoupled = step.group["adam_math_mode"] is AdamMathType.ApexAdamW
    return adam(step._replace(group={**step.group, "adam_w_mode": decoupled}))


def averaged(params: Any, **options: Any) -> FusedAdamSWA:
    """Make FusedAdamSWA of weights that the model computes with, too."""
    groups = [group["params"] if isinstance(group, dict) else [group] for group in params]
    weights = [weight for group in groups for weight in group]
    return FusedAdamSWA(params, weights, [x.detach().clone() for x in weights], 0.9, **options)


def lamb(step: Step) -> tuple[torch.Tensor, State]:
    """LAMB: Adam's step, times the ratio of the norms of weight and step."""
    group, param = step.group, step.param
    decay, decoupled = group["weight_decay"] * param, group.get("adam_w_mode", True)
    state, mean, square = _moments(step, step.grad if decoupled else step.grad + decay)
    update = mean / (square.sqrt() + group["eps"])
    update = update + decay if decoupled else update
    adapts = group["weight_decay"] or group.get("use_nvlamb", False)
    ratio = param.norm() / update.norm() if adapts and update.any() else 1.0
    return param - group["lr"] * (ratio or 1.0) * update, state


def sgd(step: Step) -> tuple[torch.Tensor, State]:
    """SGD with momentum, dampening and Nesterov's variant; weight decay before or after them."""
    group, momentum = step.group, step.group["momentum"]
    decay, after = group["weight_decay"] * step.param, group.get("wd_after_momentum", False)
    grad, state = (step.grad if after else step.grad + decay), {}
    if momentum:
        before = step.state.get("momentum_buffer")
        buffer = grad if before is None else momentum * before + (1 - group["dampening"]) * grad
        grad = grad + momentum * buffer if group["nesterov"] else buffer
        state = {"momentum_buffer": buffer}
    return step.param - group["lr"] * (grad + decay if after else grad), state


def larc(step: Step) -> tuple[torch.Tensor, State]:
    """SGD in LARC: gradient and weight decay are multiplied by a local rate before it."""
    group, decay = {**step.group, "weight_decay": 0.0}, step.group["weight_decay"]
    grad, size, weight = step.grad, step.grad.norm(), step.param.norm()
    if size * weight:
        rate = TRUST * weight / (size + decay * weight + 1e-8) / group["lr"]
        grad = (grad + decay * step.param) * rate.clamp(max=1.0)
    return sgd(step._replace(grad=grad, group=group))


def adagrad(step: Step) -> tuple[torch.Tensor, State]:
    """Adagrad with an L2 penalty, or with decoupled decay."""
    group = step.group
    decay, decoupled = group["weight_decay"] * step.param, group.get("adagrad_w_mode", False)
    grad = step.grad if decoupled else step.grad + decay
    total = step.state.get("sum", torch.zeros_like(grad)) + grad**2
    update = grad / (total.sqrt() + group["eps"])
    return step.param - group["lr"] * (update + decay if decoupled else update), {"sum": total}


def lion(step: Step) -> tuple[torch.Tensor, State]:
    """Lion."""
    group, before = step.group, step.state.get("exp_avg", torch.zeros_like(step.grad))
    beta1, beta2 = group["betas"]
    update = (beta1 * before + (1 - beta1) * step.grad).sign() + group["weight_decay"] * step.param
    exp_avg = beta2 * before + (1 - beta2) * step.grad
    return step.param - group["lr"] * update, {"exp_avg": exp_avg}


def muon(step: Step) -> tuple[torch.Tensor, State]:
    """Muon for matrices and stacks of them; AdamW for what has other dimensions."""
    group, grad, momentum = step.group, step.grad, step.group["momentum"]
    if grad.dim() not in (2, 3):
        return adam(step)
    buffer = step.state.get("momentum_buffer", torch.zeros_like(grad)) * momentum
    buffer += (1 - momentum) * grad
    x = momentum * buffer + (1 - momentum) * grad if group["nesterov"] else buffer
    (a, b, c), identity = (
        group["ns_coefficients"],
        torch.eye(grad.size(-1), device=grad.device, dtype=grad.dtype),
    )
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x.mT @ x
        x = x @ (a * identity + b * gram + c * gram @ gram)
    rows, columns = grad.shape[-2:]
    rate = max(1, rows / max(1, columns)) ** 0.5
    if group["adjust_lr_fn"] == "match_rms_adamw":
        rate = 0.2 * max(rows, columns) ** 0.5
    moved = group["weight_decay"] * step.param + rate * x
    return step.param - group["lr"] * moved, {"momentum_buffer": buffer}


def novograd(step: Step) -> tuple[torch.Tensor, State]:
    """NovoGrad; ``state["norm"]`` is the tensor's second moment, a norm."""
    group, param, (bias1, bias2) = step.group, step.param, _biases(step)
    beta1, beta2 = group["betas"]
    largest = group.get("norm_type") == 0
    entries = torch.cat([step.grad.flatten(), step.grad.new_zeros(1)])  # there may be none
    current = entries.norm(torch.inf if largest else 2)
    norm = step.state.get("norm", 0 * current if group.get("init_zero") else current)
    if largest:
        norm = beta2 * norm + (1 - beta2) * current
    else:
        norm = (beta2 * norm**2 + (1 - beta2) * current**2).sqrt()
    scale = norm / bias2**0.5 + group["eps"]
    decay, inside = group["weight_decay"] * param, group.get("reg_inside_moment", False)
    grad = step.grad / scale + decay if inside else step.grad
    exp_avg = beta1 * step.state.get("exp_avg", torch.zeros_like(param)) + _share(step) * grad
    update = exp_avg / bias1
    update = update if inside else update / scale + decay
    return param - group["lr"] * update, {"exp_avg": exp_avg, "norm": norm}


# --- entries --------------------------------------------------------------------------------------

EVERY = tuple(DTYPES)


@dataclass(frozen=True)
class Variant:
    """A way to make an optimizer.

    Attributes:
        title: What is special, for people; the first of an optimizer has none.
        options: Of the constructor.
        dtypes: Of the weights, names of `DTYPES`.
        every_test: Whether the tests that hold for all optimizers run it. It has state, and the
            variants that do have weight decay in both of its modes.
        larc: Whether it is wrapped by `apex.parallel.LARC`, with `TRUST` as its coefficient.
    """

    title: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32",)
    every_test: bool = False
    larc: bool = False


@dataclass(frozen=True)
class TimedStep:
    """How `python -m benchmarks.kernels` times a step.

    Attributes:
        peers: Others who take the same step, by name, from parameters and ``numbers``.
        numbers: Options of ours and theirs.
        states: How many numbers are kept for each weight.
        float32_states: Whether ours are float32 for 16-bit weights too.
        more_reads: Bytes of further passes, from the bytes of a weight.
    """

    peers: Mapping[str, Peer]
    numbers: Mapping[str, Any]
    states: int
    float32_states: bool = False
    more_reads: Callable[[int], int] = lambda size: 0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        make: The class.
        formula: A step for one tensor, in float64.
        variants: The ways to make it.
        name: For people, where the class's is not enough.
        options: Of the constructor, in all variants.
        max_norm: To which all gradients together are clipped by default; 0 for not at all.
        training: Numbers by which `apex bench` trains with it, if it does.
        launches: Kernels of a step, for one group and one dtype.
        shared_launches: How many of these are there once for all groups.
        timed: How it is timed, if it is.
        beside: The fused optimizer of torch that its host time is compared with.
    """

    make: Callable[..., Any]
    formula: Formula
    variants: tuple[Variant, ...]
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float = 0.0
    training: Mapping[str, float] = field(default_factory=dict)
    launches: int = 1
    shared_launches: int = 0
    timed: TimedStep | None = None
    beside: str = "AdamW"

    @property
    def title(self) -> str:
        """Its name for people."""
        return self.name or str(getattr(self.make, "__name__", self.make))

    def called(self, variant: Variant) -> str:
        """The name of a variant for people."""
        return f"{self.title}, {variant.title}" if variant.title else self.title


MOMENTUM = {"momentum": 0.9}
EIGHT_BIT = Variant("state=8bit", {"state": "8bit"}, ("fp32", "bf16"))
BFLOAT16 = Variant("state=bfloat16", {"state": "bfloat16"}, ("fp32", "bf16"))
AUTO = Variant("storage=auto", {"storage": "auto"}, ("fp32", "bf16"))
OPTIMIZERS: tuple[Optimizer, ...] = (
    Optimizer(
        optimizers.FusedAdam, adam,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("L2", {"adam_w_mode": False}, every_test=True),
            Variant("clipped", {"max_grad_norm": 1.0}),
            Variant("capturable", {"capturable": True}, ("fp32", "bf16")),
            Variant(
                "fp32 masters", {"capturable": True, "master_weights": True}, ("fp16", "bf16")
            ),
            *(
                Variant(f"storage={storage}", {"storage": storage}, ("bf16",))
                for storage in ("low_bits", "kahan", "stochastic")
            ),
            AUTO,
            EIGHT_BIT,
            BFLOAT16,
        ),
        training={"lr": 0.005, "weight_decay": 0.01},
        timed=TimedStep(of_torch("AdamW"), {"weight_decay": 0.01}, 2, float32_states=True),
    ),
    Optimizer(
        contrib.FusedAdam, adam_eps_inside,
        (Variant("eps inside the root", {"eps_inside_sqrt": True}),),
        name="FusedAdam of apex.contrib",
    ),
    Optimizer(
        averaged, adam_swa,
        (Variant(), Variant("decoupled", {"adam_math_mode": AdamMathType.ApexAdamW})),
        name="FusedAdamSWA of apex.contrib",
        options={"adam_math_mode": AdamMathType.PyTorchAdam},
    ),
    Optimizer(
        optimizers.FusedSGD, sgd,
        (
            Variant("", {**MOMENTUM, "dampening": 0.5}, EVERY, every_test=True),
            Variant("decay after momentum", {**MOMENTUM, "wd_after_momentum": True},
                    every_test=True),
            Variant("no momentum"),
            Variant("no dampening", MOMENTUM),
            Variant("Nesterov", {**MOMENTUM, "nesterov": True}),
            Variant("LARC", MOMENTUM, larc=True),
            Variant("state=8bit", {**MOMENTUM, "state": "8bit"}, EIGHT_BIT.dtypes),
            Variant("state=bfloat16", {**MOMENTUM, "state": "bfloat16"}, BFLOAT16.dtypes),
        ),
        options={"lr": 0.05}, training={"lr": 0.05, "momentum": 0.9}, beside="SGD",
        timed=TimedStep(of_torch("SGD"), {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}, 1),
    ),
    Optimizer(
        optimizers.FusedAdagrad, adagrad,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("decoupled decay", {"adagrad_w_mode": True}, every_test=True),
            EIGHT_BIT,
            BFLOAT16,
        ),
        options={"lr": 0.05}, training={"lr": 0.05},
        timed=TimedStep(of_torch("Adagrad"), {"lr": 1e-2}, 1),
    ),
    Optimizer(
        optimizers.FusedLAMB, lamb,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("L2", {"adam_w_mode": False}, every_test=True),
            Variant("storage=low_bits", {"storage": "low_bits"}, ("bf16",)),
            EIGHT_BIT,
            BFLOAT16,
        ),
        max_norm=1.0, training={"lr": 0.005, "weight_decay": 0.01},
        launches=5, shared_launches=2,  # the norm of all gradients
        timed=TimedStep(
            {"torch foreach": foreach_lamb}, {"lr": 1e-3, "weight_decay": 0.01}, 2,
            # The gradients once for their norm, then weight and update for the step.
            more_reads=lambda size: size + (2 * size + 4),
        ),
    ),
    Optimizer(
        optimizers.FusedMixedPrecisionLamb, lamb,
        (Variant("", {"reduced_precision_dtype": torch.float16}, ("fp16",)),),
        max_norm=1.0, launches=5, shared_launches=2,
    ),
    Optimizer(
        optimizers.FusedNovoGrad, novograd,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("decay inside", {"reg_inside_moment": True}, every_test=True),
            Variant("largest", {"norm_type": 0}),
            EIGHT_BIT,
            BFLOAT16,
        ),
        training={"lr": 0.3}, launches=3,
        timed=TimedStep(
            {"torch foreach": foreach_novograd},
            {"lr": 1e-3, "betas": (0.95, 0.98), "weight_decay": 0.01}, 1,
            more_reads=lambda size: size,  # the norms'
        ),
    ),
    Optimizer(
        optimizers.FusedLion, lion,
        (Variant(dtypes=EVERY, every_test=True), EIGHT_BIT, BFLOAT16),
        training={"lr": 0.0005, "weight_decay": 0.01},
    ),
    Optimizer(
        optimizers.FusedMuon, muon,
        (
            Variant(dtypes=EVERY, every_test=True),
            Variant("match_rms_adamw", {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
            Variant("gram_newton_schulz", {"ns_algorithm": "gram_newton_schulz"}),
            *(
                Variant(f"storage={storage}", {"storage": storage}, ("bf16",))
                for storage in ("low_bits", "kahan", "stochastic")
            ),
            AUTO,
            EIGHT_BIT,
            BFLOAT16,
        ),
        options={"iteration_dtype": torch.float32},
        training={"lr": 0.02, "adam_lr": 0.005, "weight_decay": 0.01},
        launches=3,
    ),
)  # fmt: skip

Maker = Callable[..., Any]
# Those of `apex.optimizers` that step float32 weights, by name, each with its first variant.
BY_NAME = {
    optimizer.title: optimizer for optimizer in OPTIMIZERS if optimizer.variants[0].every_test
}
WITH_8_BITS = [  # and moments in 8 bits
    name
    for name, optimizer in BY_NAME.items()
    if any(variant.options.get("state") == "8bit" for variant in optimizer.variants)
]


def makers(lr: float | None = None, **options: Any) -> dict[str, Maker]:
    """What makes each optimizer of `BY_NAME` from parameters, with these options where it has them.

    Args:
        lr: The learning rate of all; without it each has its own.
        options: Others of constructors.
    """
    return {name: _maker(optimizer, lr, options) for name, optimizer in BY_NAME.items()}


def beside_torch() -> dict[str, tuple[Maker, str, Maker]]:
    """What makes each optimizer of `BY_NAME`; name and maker of torch's fused one beside it."""
    found: dict[str, tuple[Maker, str, Maker]] = {}
    for name, optimizer in BY_NAME.items():
        other = next(one for one in OPTIMIZERS if one.timed and one.beside == optimizer.beside)
        theirs = getattr(torch.optim, optimizer.beside)
        ours, numbers = (one.timed.numbers if one.timed else {} for one in (optimizer, other))
        make = functools.partial(optimizer.make, **ours)
        found[name] = make, optimizer.beside, functools.partial(theirs, fused=True, **numbers)
    return found


def _maker(optimizer: Optimizer, lr: float | None, options: Mapping[str, Any]) -> Maker:
    known = inspect.signature(optimizer.make).parameters
    own = {**optimizer.options, **optimizer.variants[0].options}
    own |= {name: value for name, value in options.items() if name in known}
    return functools.partial(optimizer.make, **own | ({} if lr is None else {"lr": lr}))
