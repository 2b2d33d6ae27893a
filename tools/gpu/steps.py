"""Training steps on a GPU: no step waits, torch's defaults change no number, nor does a watch."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import torch
from torch import nn

from apex import amp, debug
from apex.commands.selftest.gpu import waits_refused
from apex.optimizers import FusedSGD
from apex.parallel import LARC
from tools.gpu import checking
from tools.gpu.checking import (
    BF16,
    DEVICE,
    F16,
    F32,
    F64,
    LEVELS,
    check,
    copies,
    default,
    need,
    network,
    normal,
    off,
    same,
    without_waits,
)
from tools.gpu.training import FUSED, Training, adam, clip, fused

SGD = {"lr": 0.05, "momentum": 0.9}


# --- no step waits for the device -----------------------------------------------------------------


def _torch_clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(amp.master_params(training.optimizer), 1.0)


def _halve(training: Training) -> None:
    for param in amp.master_params(training.optimizer):
        if param.grad is not None:
            param.grad.mul_(0.5)


def _outcome(training: Training) -> None:
    amp.outcome(training.optimizer)


def _evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        training.model(training.x)
    training.model.train()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"between": clip},
    "fused step": {"between": clip, "fused_step": True},
    "accumulated, two losses": {"accumulate": 2, "num_losses": 2},
    "masters' gradients": {"between": _halve},
    "outcome": {"between": _outcome},
    "evaluated": {"between": _evaluate},
}


@check(*((level, way) for level in LEVELS for way in WAYS))
def no_step_waits(level: str, way: str) -> None:
    """At each level, in the ways that a step can go."""
    without_waits(Training(level, **WAYS[way]))


@check(*(name for name in FUSED if name != "FusedAdam"))
def no_step_waits_with(name: str) -> None:
    """Each optimizer of ours at O2."""
    without_waits(Training("O2", fused(name)))


@check()
def no_step_waits_with_optimizers_of_torch() -> None:
    """Where torch's own do not wait."""
    counted: Any = {"fused": checking.DRY}  # its count is on the CPU, whose reads a dry run refuses
    for level, make in (
        ("O2", lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
        ("O4", lambda p: torch.optim.SGD(p, lr=0.01)),
        ("O5", lambda p: torch.optim.AdamW(p, lr=0.01, **counted)),
        ("O4", lambda p: LARC(torch.optim.SGD(p, lr=0.01, momentum=0.9))),
    ):
        without_waits(Training(level, make))
        amp.reset()
    without_waits(Training("O2", between=_torch_clip))


@check()
def no_step_waits_with_a_schedule() -> None:
    """A learning rate that changes in each step."""
    training = Training("O2")
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda n: 1 / (n + 1))

    def step() -> None:
        training()
        schedule.step()

    without_waits(step)


@check()
def no_step_waits_with_a_grad_scaler() -> None:
    """float16 weights with apex.amp.GradScaler."""
    model, x = network(norm=False).half(), normal(8, 16, dtype=F16)
    optimizer, scaler = adam(model.parameters()), amp.GradScaler(DEVICE.type)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scaler.outcome(optimizer)

    without_waits(step)


@check()
def a_watch_waits_once_a_step() -> str:
    """It reads one flag: this says if that has changed."""
    training = Training("O0")
    with debug.watch(training.model, training.optimizer):
        for _ in range(3):
            training()
        try:
            with waits_refused():
                training()
        except RuntimeError:
            return "a watch reads a flag in each step"
    return "no wait was seen"


# --- torch's defaults change no number ------------------------------------------------------------


def _trained(level: str, which: Any) -> list[torch.Tensor]:
    """Some steps with an overflow, a checkpoint and reading in between; what is left at the end."""
    model, x = network(), normal(8, 16)
    with default(which):
        optimizer = adam(model.parameters())
        # At O1 and O2 from a scale at which only the planted overflow is one.
        scale = {"init_scale": 1024.0} if level in ("O1", "O2") else {}
        options: dict[str, Any] = {"opt_level": level, "verbosity": 0, **scale}
        model, optimizer = amp.initialize(model, optimizer, **options)
        losses = []
        for number in range(6):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            with amp.scale_loss(loss * (float("inf") if number == 2 else 1.0), optimizer) as scaled:
                scaled.backward()
            amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            losses.append(loss.detach())
        amp.load_state_dict(amp.state_dict())
        amp.outcome(optimizer).numbers()
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
    left = copies([*model.parameters(), *losses])
    amp.reset()
    return left


@check(*((which, level) for which in ("device", "type", F64, F16, BF16) for level in LEVELS))
def a_default_changes_no_training(which: Any, level: str) -> None:
    """A default device or dtype that a program has set for its models."""
    same(_trained(level, which), _trained(level, "none"), "weights and losses")


def _stepped(name: str, which: Any) -> list[torch.Tensor]:
    shapes = [(8, 16), (16, 4)] if name == "FusedMuon" else [(8, 16), (7,), (3000,)]
    params = [nn.Parameter(normal(*shape, seed=n)) for n, shape in enumerate(shapes)]
    with default(which):
        optimizer = fused(name)(params)
        scaler = amp.GradScaler(DEVICE.type, init_scale=8.0)
        for number in range(3):
            for n, param in enumerate(params):
                param.grad = normal(*param.shape, seed=number + 10 * n) * 8
            scaler.scale(torch.zeros((), device=DEVICE, dtype=F32))
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        scaler.outcome(optimizer).numbers()
        optimizer.load_state_dict(optimizer.state_dict())
    return copies(params)


@check("device", "type")
def a_default_device_changes_no_optimizer(which: str) -> None:
    """Each optimizer with apex.amp.GradScaler."""
    for name in FUSED:
        same(_stepped(name, which), _stepped(name, "none"), name)


@check("device", "type")
def a_default_device_stops_no_other_part(which: str) -> None:
    """FP16_Optimizer, LARC, a watch, functions of amp_C, ASP, and a model on the CPU."""
    from apex.contrib.sparsity import ASP
    from apex.fp16_utils import FP16_Optimizer

    x = normal(8, 16)
    half, wrapped, pruned = network(norm=False).half(), network(), network(norm=False)
    on_the_cpu, x_on_the_cpu = network("cpu"), normal(8, 16, device="cpu")
    with default(which):
        sgd = torch.optim.SGD(half.parameters(), lr=0.1)
        old = FP16_Optimizer(sgd, dynamic_loss_scale=True, verbose=False)
        old.backward(half(x.half()).float().square().mean())
        old.clip_master_grads(1.0)
        old.step()
        larc = LARC(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        with debug.watch(wrapped, larc.optim):
            wrapped(x).sum().backward()
            larc.step()
        asp = adam(pruned.parameters())
        ASP.init_model_for_pruning(
            pruned, "m4n2_1d", verbosity=0, whitelist=[nn.Linear], allow_recompute_mask=False
        )
        ASP.init_optimizer_for_pruning(asp)
        ASP.compute_sparse_masks()
        pruned(x).sum().backward()
        asp.step()
        ASP.reset()
        model, optimizer = amp.initialize(
            on_the_cpu, adam(on_the_cpu.parameters()), opt_level="O2", verbosity=0
        )
        with amp.scale_loss(model(x_on_the_cpu).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        need(all(p.device.type == "cpu" for p in model.parameters()), "a weight left the CPU")


# --- watches, recurrent layers, checkpoints -------------------------------------------------------


@check(*LEVELS)
def a_watch_changes_no_number(level: str) -> None:
    """With dropout: the random state of the GPU stays what it would be."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 4)).to(DEVICE)
        model, optimizer = amp.initialize(
            model, adam(model.parameters()), opt_level=level, verbosity=0
        )
        with debug.watch(model, optimizer) if watched else contextlib.nullcontext():
            for number in range(4):
                optimizer.zero_grad()
                loss = model(normal(8, 16, seed=number)).float().square().mean()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        ends.append(copies(model.parameters()))
        amp.reset()
    first, second = ends
    same(first, second, "weights")


@check()
def a_watch_names_the_operation() -> None:
    """That made the first fault: what dropout zeroes has an infinite logarithm and gradient."""

    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(16, 4), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(self.dropout(self.linear(x)))

    model, said = Logarithm().to(DEVICE), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with debug.watch(model, optimizer, on_fault=said.append):
        model(normal(8, 16)).sum().backward()
        optimizer.step()
    need(bool(said) and "log" in said[0].text(), f"it said {[one.text() for one in said]}")


class Recurrent(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(32, 48, num_layers=2, dropout=0.1, bidirectional=True)
        self.out = nn.Linear(96, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all times."""
        return self.out(self.rnn(x)[0])


@check(*((kind, level) for kind in ("LSTM", "GRU", "RNN") for level in LEVELS))
def weights_of_a_recurrent_layer_stay_in_one_chunk(kind: str, level: str) -> None:
    """Otherwise cuDNN copies them in each forward, and warns."""
    model, x = Recurrent(kind).to(DEVICE), normal(7, 5, 32)
    model, optimizer = amp.initialize(model, adam(model.parameters()), opt_level=level, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*contiguous chunk")
        step()
        step()
        model.load_state_dict(model.state_dict())
        step()
        amp.reset()
        model(x)
    need(all(bool(p.isfinite().all()) for p in model.parameters()), "a weight is not finite")


@check()
def a_packed_sequence_is_trained() -> None:
    """At O2, through cuDNN's layer."""
    from torch.nn.utils.rnn import pack_padded_sequence

    rnn = nn.LSTM(8, 8, device="cpu", dtype=F32).to(DEVICE)
    before = copies(rnn.parameters())
    rnn, optimizer = amp.initialize(rnn, adam(rnn.parameters()), opt_level="O2", verbosity=0)
    for _ in range(20):  # until a step is not skipped
        optimizer.zero_grad()
        found = rnn(pack_padded_sequence(normal(6, 3, 8), [6, 4, 2]))[0].data
        with amp.scale_loss(found.float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    pairs = zip(before, amp.master_params(optimizer), strict=True)
    need(all(not torch.equal(*pair) for pair in pairs), "a weight did not move")


# --- numbers --------------------------------------------------------------------------------------


def _of_the_original(weight: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Apex's FusedSGD: float32 until the update, which is rounded before it is added."""
    momentum = torch.zeros_like(weight)
    for n, grad in enumerate(grads):
        update = grad.float() if n == 0 else 0.9 * momentum.float() + grad.float()
        momentum = update.half()
        weight = weight + (-SGD["lr"] * update).half()
    return weight


@check()
def sgd_in_float16_is_as_near_to_float64_as_torch_and_the_original() -> str:
    """After 50 steps of 50,000 weights."""
    start, *grads = normal(51, 50_000, dtype=F16)

    def stepped(make: Any, dtype: torch.dtype) -> torch.Tensor:
        param = nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([param], **SGD)
        for grad in grads:
            param.grad = grad.to(dtype)
            optimizer.step()
        return param.detach()

    exact = stepped(torch.optim.SGD, F64)
    found = {
        "ours": stepped(FusedSGD, F16),
        "torch's": stepped(torch.optim.SGD, F16),
        "the original's": _of_the_original(start, grads),
    }
    errors = {name: off(one, exact) for name, one in found.items()}
    said = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    need(errors["ours"] <= min(errors.values()), f"off by: {said}")
    return f"off by: {said}"


@check(*FUSED)
def a_checkpoint_resumes_exactly(name: str) -> None:
    """Loaded to the CPU or where it was."""

    def step(params: Any, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            for n, param in enumerate(params):
                param.grad = normal(50, 40, seed=100 * number + n)
            optimizer.step()

    for where in ("cpu", None):
        params = [nn.Parameter(normal(50, 40, seed=n)) for n in range(3)]
        optimizer = fused(name)(params)
        step(params, optimizer, range(3))
        file = io.BytesIO()
        torch.save((optimizer.state_dict(), copies(params)), file)
        file.seek(0)
        state, weights = torch.load(file, map_location=where, weights_only=True)
        resumed = [nn.Parameter(weight.to(DEVICE)) for weight in weights]
        second = fused(name)(resumed)
        second.load_state_dict(state)
        step(params, optimizer, range(3, 6))
        step(resumed, second, range(3, 6))
        same(resumed, params, f"resumed from {where or 'its device'}")


@check()
def deterministic_algorithms_give_the_same_bits() -> None:
    """With torch's memory filled, where nothing may be read before it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        same(_trained("O2", "none"), _trained("O2", "none"), "second run")
    finally:
        torch.use_deterministic_algorithms(False)
