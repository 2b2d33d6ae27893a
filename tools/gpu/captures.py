"""``amp.capture`` on the GPU: captured steps beside single ones, what is followed, what is refused.

The list is that of tests/amp/test_capture.py, which records graphs on a CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from apex import amp, debug
from apex.amp.graphs import probe
from apex.catalogue.optimizers import makers
from apex.optimizers import FusedAdam
from tools.gpu import checking
from tools.gpu.checking import DEVICE, F32, LEVELS, Tensor, check, copies, need, normal, same

STATIC = 64.0
STEPS, CHANGE = 14, 8
OVERFLOWS = (1, 6, 7)
ODD = 10  # a batch of another size
RATES = {5: 2**-8, 12: 2**-9}
MAKERS: dict[str, Callable[[Any], Any]] = {
    **makers(lr=2**-7, eps=1e-4),  # which float16 holds
    "FusedAdam capturable": lambda p: FusedAdam(p, lr=2**-7, capturable=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=2**-7, momentum=0.9, fused=True),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=2**-7, eps=1e-4, fused=True, capturable=True),
}


class Program:
    """A training whose step can be captured; ``busy``: clipping, two passes, dropout.

    ``buffers``: a batch norm, whose statistics a step writes. ``clears``: when a step clears the
    gradients.
    """

    def __init__(
        self,
        level: str = "O2",
        name: str = "FusedAdam",
        scale: Any = "dynamic",
        busy: bool = False,
        buffers: bool = False,
        clears: str = "first",
    ) -> None:
        torch.manual_seed(0)
        made_on: Any = {"device": "cpu", "dtype": F32}
        layers = [nn.Linear(16, 64, **made_on), nn.GELU(), nn.Dropout(0.25 * busy)]
        layers += [nn.BatchNorm1d(64, **made_on)] if buffers else []
        layers += [nn.Linear(64, 4, **made_on)]
        model = nn.Sequential(*layers).to(DEVICE)
        options: Any = {"loss_scale": scale, "growth_interval": 3, "init_scale": 256.0}
        self.busy, self.clears = busy, clears
        self.factor = torch.ones((), device=DEVICE, dtype=F32)
        self.saved: Any = None
        self.model, self.optimizer = amp.initialize(
            model, MAKERS[name](model.parameters()), opt_level=level, verbosity=0, **options
        )

    def step(self, x: Tensor) -> Tensor:
        """Take a step."""
        if self.clears == "first":
            self.optimizer.zero_grad()
        for _ in range(1 + self.busy):
            loss = self.model(x).float().square().mean() * self.factor
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        if self.busy:
            amp.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()
        if self.clears == "last":
            self.optimizer.zero_grad()
        return loss

    def save(self) -> None:
        """Copy all states."""
        states = self.optimizer.state_dict(), amp.state_dict(), self.model.state_dict()
        self.saved = copy.deepcopy(states)


def batch(number: int, *, overflows: bool) -> Tensor:
    """Draw a batch, which may overflow or be of another size."""
    x = normal(5 if number == ODD else 8, 16, seed=number + 1)
    if overflows and number in OVERFLOWS:
        x[0, 0] = float("inf")
    return x


def _trained(
    in_a_graph: bool, change: Any = None, before: Any = None, **options: Any
) -> tuple[list[Any], Any, Any]:
    program = Program(**options)
    step: Any = amp.capture(program.step) if in_a_graph else program.step
    seen: list[Any] = []
    for number in range(STEPS):
        for group in program.optimizer.param_groups if number in RATES else ():
            rate = group["lr"]
            if isinstance(rate, Tensor):
                rate.fill_(RATES[number])
            else:
                group["lr"] = RATES[number]
        if number == 4:
            program.save()
        if number == CHANGE and change is not None:
            change(program)
        if before is not None:
            before(program, number)
        loss = step(batch(number, overflows=options.get("scale") != STATIC))
        outcome = amp.outcome(program.optimizer).numbers()
        seen.append((str(loss.item()), amp.state_dict(), outcome))
    state = program.model.state_dict().values()  # weights and buffers
    left = copies([*state, *amp.master_params(program.optimizer)])
    amp.reset()
    return seen, left, step


def _captured_as_single(replays: int, change: Any = None, **options: Any) -> str:
    """Compare; ``replays``: how many there are, -1 for any number."""
    expected, exact, _ = _trained(False, change, **options)
    seen, left, step = _trained(True, change, **options)
    for number, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
        need(found == wanted, f"step {number}: {found}; without a graph: {wanted}")
    same(left, exact, "weights, buffers and masters")
    need(replays in (-1, step.replays), f"{step.replays} replays, not {replays}: {step!r}")
    return repr(step)


@check(*((level, name, busy) for level in LEVELS for name in MAKERS for busy in (False, True)))
def captured_steps_are_single_steps(level: str, name: str, busy: bool) -> str:
    """Losses, scale, counts, weights; rates change, a batch is odd."""
    if checking.DRY and (level, name) == ("O3", "torch SGD"):
        raise checking.NotDry("torch 2.13: wrong momenta of 16 bits on a CPU")
    return _captured_as_single(STEPS - 4, level=level, name=name, busy=busy)


@check(*MAKERS)
def captured_steps_at_a_static_scale_are_single_steps(name: str) -> str:
    """At O2: counts of steps are put on the device."""
    return _captured_as_single(STEPS - 4, name=name, scale=STATIC)


@check(*LEVELS)
def buffers_are_those_of_single_steps(level: str) -> str:
    """Mean, variance and count of a batch norm."""
    return _captured_as_single(STEPS - 4, level=level, buffers=True)


# --- what changes between replays -----------------------------------------------------------------


def _scaler(program: Program) -> Any:
    return program.optimizer._amp_stash.training.loss_scalers[0]


def _param() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, device=DEVICE, dtype=F32))


def _evaluated(program: Program) -> None:
    program.model.eval()
    with torch.no_grad():
        program.model(batch(1, overflows=False))
    program.model.train()


def _factor(program: Program) -> None:
    program.factor = torch.full((), 0.5, device=DEVICE, dtype=F32)


def _masters_written(program: Program) -> None:
    with torch.no_grad():
        for master in amp.master_params(program.optimizer):
            master.mul_(0.5)


# How many captures it takes.
FOLLOWED: dict[str, tuple[Callable[[Program], Any], int]] = {
    "weight decay": (lambda p: p.optimizer.param_groups[0].update(weight_decay=0.25), 1),
    "betas": (lambda p: p.optimizer.param_groups[0].update(betas=(0.5, 0.9)), 1),
    "growth_interval": (lambda p: setattr(_scaler(p), "_scale_seq_len", 1), 1),
    "loss scale": (lambda p: setattr(_scaler(p), "_loss_scale", 32.0), 0),
    "add_param_group": (lambda p: p.optimizer.add_param_group({"params": [_param()]}), 1),
    "optimizer.load_state_dict": (lambda p: p.optimizer.load_state_dict(p.saved[0]), 1),
    "amp.load_state_dict": (lambda p: amp.load_state_dict(p.saved[1]), 0),
    "model.load_state_dict": (lambda p: p.model.load_state_dict(p.saved[2]), 0),
    "a hook": (lambda p: p.model[0].register_forward_hook(lambda m, a, out: out * 2), 1),
    "evaluation": (_evaluated, 0),
    "a tensor that it reads": (_factor, 1),
    "masters": (_masters_written, 0),
    "a backward": (lambda p: p.model(batch(1, overflows=False)).float().sum().backward(), 0),
}


@check(*FOLLOWED)
def a_change_is_followed(what: str) -> str:
    """At O2."""
    change, captures = FOLLOWED[what]
    return _captured_as_single(STEPS - 4 - captures, change)


def _backward(program: Program, number: int) -> None:
    if number in (5, CHANGE):
        with amp.scale_loss(
            program.model(batch(number + 20, overflows=False)).float().sum(), program.optimizer
        ) as scaled:
            scaled.backward()


def _clear(program: Program, number: int) -> None:
    if number % 5 == 0:
        program.optimizer.zero_grad()


# What a program does before a step, when the step clears gradients, and how often it is replayed.
GRADIENTS: dict[str, tuple[Callable[[Program, int], None], str, int]] = {
    "given, cleared first": (_backward, "first", STEPS - 4),
    "given, cleared last": (_backward, "last", -1),
    "cleared outside": (_clear, "never", -1),
}


@check(*((level, what) for level in ("O1", "O2") for what in GRADIENTS))
def gradients_from_outside_are_followed(level: str, what: str) -> str:
    """A backward, or a ``zero_grad``, between two steps."""
    before, clears, replays = GRADIENTS[what]
    return _captured_as_single(replays, before=before, level=level, clears=clears)


def _replaced(program: Program) -> None:
    weight = program.model[0].weight
    weight.data = weight.data.clone()


def _written(program: Program) -> None:
    with torch.no_grad():
        program.model[0].weight.mul_(0.5)


REFUSED: dict[str, tuple[Callable[[Program], Any], str]] = {
    "weight.data": (_replaced, "the memory of a weight"),
    "optimizer.state": (lambda p: p.optimizer.state.clear(), "a state of an optimizer"),
    "a module": (lambda p: setattr(p.model, "1", nn.ReLU()), "a module"),
    "requires_grad_": (lambda p: p.model[0].weight.requires_grad_(False), "requires_grad"),
    "a 16-bit weight": (_written, "a 16-bit weight or its master"),
    "a watch": (lambda p: debug.watch(p.model, p.optimizer), "apex.debug watches"),
}


@check(*REFUSED)
def a_change_is_refused(what: str) -> str:
    """At O2."""
    change, text = REFUSED[what]
    try:
        _trained(True, change)
    except RuntimeError as error:
        need(text in str(error), f"refused by {error}")
        return str(error)[:80]
    finally:
        amp.reset()
    raise AssertionError("replays went on")


# --- what cannot be captured ----------------------------------------------------------------------

UNCAPTURED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "a mask": lambda x: x[x > 0],
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "to the CPU": lambda x: x.cpu(),
    "from the CPU": lambda x: torch.ones(2, device="cpu").to(x.device),
    "a CPU scalar": lambda x: x + torch.ones((), device="cpu", dtype=F32),
}


@check(*((name, seen) for name in UNCAPTURED for seen in (True, False)))
def what_cannot_be_captured_is_named(name: str, seen: bool) -> str:
    """By the probe, or without it by the capture; weights are those of single steps."""
    if checking.DRY and (not seen or "CPU" in name):
        raise checking.NotDry("CUDA raises, and tells a CPU from a GPU")
    found: list[Any] = []
    said: list[str] = []
    for in_a_graph in (False, True):
        program = Program("O1")

        def step(x: Tensor, program: Program = program) -> Tensor:
            UNCAPTURED[name](x)
            return program.step(x)

        work: Any = amp.capture(step) if in_a_graph else step
        looks = probe.Probe._reason
        if not seen:
            probe.Probe._reason = lambda *arguments: ""  # type: ignore[method-assign]
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(8):
                    work(batch(number, overflows=True))
        finally:
            probe.Probe._reason = looks  # type: ignore[method-assign]
        said += [str(one.message) for one in caught if "amp.capture" in str(one.message)]
        found.append(copies(program.model.parameters()))
        amp.reset()
    if name == "a CPU scalar" and not seen:
        return "captured: CUDA takes its value"
    same(found[0], found[1], "weights")
    need(len(said) == 1, f"warned {len(said)} times: {said}")
    need(__file__ in said[0], f"no line of the program: {said[0]}")
    return said[0][80:240]


@check()
def a_tensor_that_each_call_replaces_is_named() -> str:
    """A hidden state that the program keeps; weights are those of single steps."""
    found: list[Any] = []
    said: list[str] = []
    for in_a_graph in (False, True):
        program = Program("O1")

        def step(x: Tensor, program: Program = program) -> Tensor:
            loss = program.step(x)
            program.factor = (program.factor * 0.5 + loss).detach()
            return loss

        work: Any = amp.capture(step) if in_a_graph else step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(8):
                work(batch(number, overflows=False))
        said += [str(one.message) for one in caught if "amp.capture" in str(one.message)]
        found.append(copies(program.model.parameters()))
        amp.reset()
    same(found[0], found[1], "weights")
    need(len(said) == 1, f"warned {len(said)} times: {said}")
    need(__file__ in said[0], f"no line of the program: {said[0]}")
    return said[0][80:240]


@check()
def a_graph_gives_its_memory_back() -> str:
    """10 programs, one after the other."""
    sizes = []
    for _ in range(10):
        program = Program()
        step = amp.capture(program.step)
        for number in range(6):
            step(batch(number, overflows=False))
        said = repr(step)
        del program, step
        amp.reset()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    need(sizes[-1] - sizes[2] <= 4 * 2**20, f"MiB reserved: {[size >> 20 for size in sizes]}")
    return said
