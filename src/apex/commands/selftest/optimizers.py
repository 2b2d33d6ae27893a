"""Every optimizer, step by step, compared with its formula in float64.

Gradients are scaled by 1024 and the step gets the scale, as from `torch.amp.GradScaler`. There are
two groups with their own learning rate and weight decay. Each step is compared with the formula of
what was stored before it, so that errors do not add up. Then a step with ``found_inf`` has to leave
every bit as it is, and a second run has to end with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from apex.catalogue import tolerance
from apex.catalogue.entry import DTYPES, random
from apex.catalogue.optimizers import (
    OPTIMIZERS,
    TRUST,
    Optimizer,
    State,
    Step,
    Variant,
    larc,
)
from apex.commands.selftest.check import Check, Measured, Pair, Setting, joined, one_rounding, same
from apex.commands.selftest.ops import rarely, tensors
from apex.ops.lists.quantized import quantize
from apex.ops.lists.storage import join_bits
from apex.optimizers._eight_bit import CODES, absmax_of, codes_of, is_code, widened
from apex.parallel import LARC

__all__ = ["EVERY", "checks", "give", "gradients", "made", "parameters", "special", "tell"]

AREA = "optimizers"
STEPS = 3
HELD = (17, 250)  # large enough for a state in 8 bits
STORED = {"capturable", "master_weights", "state", "storage"}  # options: what is kept, and how
SCALE = 1024.0  # of the gradients; a power of two, so that taking it out is exact
EVERY = [(optimizer, variant) for optimizer in OPTIMIZERS for variant in optimizer.variants]

Params = list[torch.nn.Parameter]


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for optimizer, variant in EVERY:
        for dtype in variant.dtypes:
            run = partial(_compared, optimizer, variant, DTYPES[dtype])
            rare = special(optimizer, variant) or rarely(dtype, variant.dtypes)
            yield Check(AREA, f"{optimizer.called(variant)}, {dtype}", run, rare=rare)


def special(optimizer: Optimizer, variant: Variant) -> bool:
    """Whether a variant is left to ``--all``: one that stores nothing in another way."""
    return variant is not optimizer.variants[0] and not STORED & variant.options.keys()


def made(optimizer: Optimizer, variant: Variant, params: Params) -> Any:
    """Make it with two groups, the second with half the learning rate and more decay."""
    options = {"lr": 0.02, "weight_decay": 0.01, **optimizer.options, **variant.options}
    second = {"lr": options["lr"] / 2, "weight_decay": 0.1}
    groups = [{"params": params[::2]}, {"params": params[1::2], **second}]
    made = optimizer.make(groups, **options)
    return LARC(made, trust_coefficient=TRUST) if variant.larc else made


def parameters(setting: Setting, dtype: torch.dtype, variant: Variant) -> Params:
    """Make parameters of awkward sizes."""
    found = tensors(setting, dtype, 20)
    if "state" in variant.options:
        found.append(random(HELD, dtype, setting.device))
    return [*map(torch.nn.Parameter, found)]


def gradients(params: Params, setting: Setting, number: int) -> list[torch.Tensor]:
    """The gradients of a step."""
    return [
        random(param.shape, param.dtype, setting.device, seed=100 * (20 + number) + n) * SCALE
        for n, param in enumerate(params)
    ]


def give(params: Params, grads: list[torch.Tensor]) -> None:
    """Give parameters their gradients."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def tell(optimizer: Any, found_inf: float, setting: Setting) -> None:
    """Tell an optimizer what `torch.amp.GradScaler` tells it before a step."""
    optimizer.grad_scale = torch.full((), SCALE, device=setting.device, dtype=torch.float32)
    optimizer.found_inf = torch.full_like(optimizer.grad_scale, found_inf)


def _compared(
    entry: Optimizer, variant: Variant, dtype: torch.dtype, setting: Setting
) -> Iterator[Measured]:
    ends = []
    for _ in range(2):
        torch.manual_seed(0)  # stochastic rounding draws
        params = parameters(setting, dtype, variant)
        optimizer = made(entry, variant, params)
        found = [*_steps(entry, variant, optimizer, params, setting)]
        ends.append(copy.deepcopy(_kept(optimizer)))
    yield from found
    yield same("second run", *ends)
    if not variant.larc:
        give(params, gradients(params, setting, STEPS + 1))
        tell(optimizer, 1.0, setting)
        optimizer.step()
        yield same("skipped step", ends[1], _kept(optimizer))


def _steps(
    entry: Optimizer, variant: Variant, optimizer: Any, params: Params, setting: Setting
) -> Iterator[Measured]:
    norms: dict[torch.Tensor, State] = {}  # NovoGrad's, which no tensor's state holds
    max_norm = variant.options.get("max_grad_norm", entry.max_norm)
    for number in range(1, STEPS + 1):
        scaled = gradients(params, setting, number)
        grads = [grad.double() / SCALE for grad in scaled]
        if variant.larc:  # it compares the norms of gradient and weight: GradScaler unscales before
            give(params, [grad / SCALE for grad in scaled])
        else:
            give(params, scaled)
            tell(optimizer, 0.0, setting)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        clip = max_norm / norm if max_norm and norm > max_norm else 1.0
        of = {param: grad * clip for param, grad in zip(params, grads, strict=True)}
        wanted = []
        for group in optimizer.param_groups:
            options = {**entry.options, **variant.options, **group}
            for param in group["params"]:
                state = widened(_state(optimizer, param))
                kept = {slot: x.double() for slot, x in state.items()}
                kept.update(norms.get(param, {}))
                step = Step(number, options, of[param], _weight(optimizer, param).double(), kept)
                exact, after = (larc if variant.larc else entry.formula)(step)
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
        if variant.options.get("state") == "bfloat16":
            of_slots = _moments
        for slot in dict.fromkeys(slot for *_, after in wanted for slot in after):
            states = [(optimizer.state[p], after[slot]) for p, _, after in wanted if slot in after]
            pairs = [(state[slot], exact) for state, exact in states if not is_code(state, slot)]
            yield from of_slots(f"{slot}, step {number}", pairs, setting)
            for state, exact in states:
                if is_code(state, slot):
                    yield from _coded(f"{slot}, step {number}", slot, state, exact)


def _kept(optimizer: Any) -> list[torch.Tensor]:
    """The weights and the state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [x for p in params for x in (p.detach(), *_state(optimizer, p).values())]


def _state(optimizer: Any, param: torch.Tensor) -> State:
    found = optimizer.state.get(param, {}).items()
    return {slot: x for slot, x in found if isinstance(x, torch.Tensor)}


def _weight(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    """The weight with all the bits that are kept of it."""
    state = _state(optimizer, param)
    if "low_bits" in state:
        return join_bits(param.detach(), state["low_bits"])
    if "error" in state:
        return param.detach().double() + state["error"].double()
    return state.get("master_param", param).detach()


def _normed(what: str, pairs: list[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare what a norm was multiplied into, which shows in float32 only."""
    wide = [pair for pair in pairs if pair[0].dtype == torch.float32]
    yield from one_rounding(what, [p for p in pairs if p[0].dtype != torch.float32], setting)
    if wide:
        yield Measured(what, tolerance.errors_in_eps(*joined(wide)), tolerance.NORMED, "eps")


def _moments(what: str, pairs: list[Pair], setting: Setting) -> Iterator[Measured]:
    """Moments in bfloat16 are rounded stochastically; beside them there may be float32 ones.

    Equal values are rounded alike, so that each is taken once.
    """
    narrow = [pair for pair in pairs if pair[0].dtype == torch.bfloat16]
    yield from _normed(what, [pair for pair in pairs if pair[0].dtype != torch.bfloat16], setting)
    if narrow:
        actual, exact = joined(narrow)
        order = exact.argsort()
        first = order[exact[order].diff(prepend=exact.new_full((1,), float("-inf"))) > 0]
        largest = exact.abs().max().item() * torch.finfo(torch.float32).eps
        yield from _stochastic(what, [(actual[first], exact[first])], setting, cancelled=largest)


def _coded(what: str, slot: str, state: State, exact: torch.Tensor) -> Iterator[Measured]:
    """Compare codes with those of the exact moment: few differ, and by one."""
    code = CODES[slot]
    pair = []
    for number in (codes := quantize(exact.float(), code))[0], state[codes_of(slot)]:
        size = number.int() & 0x7F if code.signed else number.int()
        pair.append(torch.where((number >= 0x80) & code.signed, -size, size))
    steps = (pair[0] - pair[1]).abs()
    yield Measured(f"{what}, codes beyond the next one", int((steps > 1).sum()), 0, "elements")
    share = (steps > 0).double().mean().item()
    yield Measured(f"{what}, codes", share, tolerance.OTHER_CODES, "of all differ")
    largest = tolerance.errors_in_eps(state[absmax_of(slot)], codes[1].double())
    yield Measured(f"{what}, largest of the blocks", largest, tolerance.NORMED, "eps")


def _kahan(what: str, pairs: list[Pair], setting: Setting) -> Iterator[Measured]:
    """Compare the sums of weights and rounding errors."""
    error = tolerance.errors_in_eps(*joined(pairs), torch.bfloat16)
    yield Measured(what, error, tolerance.KAHAN, "eps")


def _stochastic(
    what: str, pairs: list[Pair], setting: Setting, cancelled: float = tolerance.CANCELLED
) -> Iterator[Measured]:
    """Each number is a neighbour of the exact one, and together they are off by nothing.

    Where a step almost cancels a number, the difference in float32 is off by ``cancelled``.
    """
    actual, exact = joined(pairs)
    spacing = tolerance.ulps(exact, actual.dtype)
    off = (actual.double() - exact) / spacing
    beyond = tolerance.BEYOND_A_NEIGHBOUR + cancelled / spacing
    far = int((off.abs() > 1 + beyond).sum())
    yield Measured(f"{what}, not a neighbour", far, 0, "elements")
    deviation = (6 * len(off)) ** -0.5  # of the mean; 1/6 is the mean of p * (1 - p)
    mean = off.clamp(-1, 1).mean().abs().item() / deviation
    yield Measured(f"{what}, mean error", mean, tolerance.DEVIATIONS, "deviations")
    up = exact / spacing % 1  # the probability of the upper neighbour
    wanted = (up * (1 - up)).mean().item()
    lost = 1 - off.clamp(-1, 1).square().mean().item() / wanted if wanted else 0.0
    yield Measured(f"{what}, spread lost", lost, tolerance.SPREAD_LOST, "of the variance")


_STORAGES = {"kahan": _kahan, "stochastic": _stochastic}
