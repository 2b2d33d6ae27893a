"""What a data-parallel step costs, against torch's wrapper with mixed precision by hand.

Two processes on this machine, gloo. Ours is ``apex.amp`` at a level and
``apex.parallel.DistributedDataParallel``; theirs is ``torch.nn.parallel.DistributedDataParallel``
with ``torch.autocast`` and torch's scaler (O1, O4), with float32 masters written by hand (O2, O5),
in 16 bits (O3) or plain (O0). Both train the same model in the same processes, step by step in
turn; the ratio is the median of the ratios of neighbouring steps, on rank 0.

    python -m benchmarks.parallel [--levels O0 O2 ...] [--models convnet many mlp] [--steps 60]

The level ``shards`` is another pair: a model of ``fully_shard`` with ``FusedAdam``, stepped with
``apex.amp.GradScaler`` and its ``clip_grad_norm_``, and with torch's scaler and function and the
MAX over ranks by hand. Both compute in float32: on a CPU float16 would hide what the scaler costs.

Models: ``convnet`` is the tutorial's (two convolutions, batch of 100 28x28 images), ``many`` has
300 tensors of 16x16, ``mlp`` four layers of 1024x1024.

The level ``buckets`` is O0 with ``message_size=2**20``, of which a layer of ``mlp`` is a bucket.

The level ``zero`` is ``DistributedFusedAdam`` (ZeRO stage 2: parameters are whole on every rank)
against ``fully_shard`` with ``torch.optim.AdamW(fused=True)``, both in float32.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apex import amp, parallel
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.optimizers import FusedAdam
from benchmarks.turns import ratio, take_turns, timed
from tools import quiet_without_reader

Step = Callable[[], None]
Make = Callable[[str, Any, torch.Tensor], Step]  # of a level, a model and its input

RANKS = 2
BUCKET, DEFAULT = 2**20, 10_000_000  # elements; the second is message_size's default
LARGE = 2**16  # elements of a layer that fully_shard gathers by itself
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "buckets", "shards", "zero")
HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O0": torch.float32}


def convnet() -> tuple[nn.Module, torch.Tensor]:
    """Return the tutorial's network and a batch."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        norm = nn.BatchNorm2d(outputs)
        return [nn.Conv2d(inputs, outputs, 5, padding=2), norm, nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(7 * 7 * 32, 10)]
    return nn.Sequential(*layers), torch.randn(100, 1, 28, 28)


def many() -> tuple[nn.Module, torch.Tensor]:
    """Return 150 small layers and a batch."""
    layers = [layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(8, 16)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return four wide layers and a batch."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, 1024)


MODELS = {"convnet": convnet, "many": many, "mlp": mlp}


def ours(level: str, model: nn.Module, x: torch.Tensor) -> Step:
    """Return a step written with apex."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    in_buckets = level == "buckets"
    opt_level = "O0" if in_buckets else level
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    size = BUCKET if in_buckets else DEFAULT
    wrapper = parallel.DistributedDataParallel(model, message_size=size)

    def step() -> None:
        optimizer.zero_grad()
        loss = wrapper(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def by_hand(level: str, model: nn.Module, x: torch.Tensor) -> Step:
    """Return a step written with torch's wrapper."""
    dtype = HALF.get(level, torch.bfloat16)
    weights: list[Any] = list(model.parameters())
    stepped = weights
    if level in ("O2", "O5"):
        stepped = [p.detach().clone().requires_grad_() for p in weights]
    if level in ("O2", "O3", "O5"):
        model.to(dtype)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d) and level != "O3":
                module.float()
        x = x.to(dtype)
    optimizer = torch.optim.SGD(stepped, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=level in ("O1", "O2"))
    wrapper = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=level in ("O1", "O4")):
            loss = wrapper(x).float().square().mean()
        scaler.scale(loss).backward()
        if stepped is not weights:
            for weight, master in zip(weights, stepped, strict=True):
                master.grad = weight.grad.float()
        scaler.step(optimizer)
        scaler.update()
        if stepped is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, stepped)

    return step


def sharded_optimizer(level: str, model: nn.Module, x: torch.Tensor) -> Step:
    """Return a step of Apex's sharded optimizer; a bucket is as large as a layer of ``mlp``."""
    optimizer = DistributedFusedAdam(
        model.parameters(), lr=1e-3, weight_decay=0.01, bucket_cap_mb=4.0
    )

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def sharded_adamw(level: str, model: nn.Sequential, x: torch.Tensor) -> Step:
    """Return a step of ``fully_shard`` with torch's optimizer; each layer is gathered by itself."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def sharded(level: str, model: nn.Sequential, x: torch.Tensor, *, by_hand: bool) -> Step:
    """Return a step of a sharded model with our scaler, or with torch's."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in model:
        if sum(param.numel() for param in module.parameters()) >= LARGE:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    scaler: Any = (torch.amp.GradScaler if by_hand else amp.GradScaler)("cpu", init_scale=1024.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if by_hand:
            scaler.unscale_(optimizer)
            for flag in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def pair(level: str) -> tuple[Make, Make]:
    """Return what makes our step at a level, and what makes the one by hand."""
    if level == "shards":
        ours_sharded, sharded_by_hand = (partial(sharded, by_hand=hand) for hand in (False, True))
        return ours_sharded, sharded_by_hand
    if level == "zero":
        return sharded_optimizer, sharded_adamw
    return ours, by_hand


def milliseconds(step: Step, casts: bool) -> float:
    """Time one step, with the thread's casts as its side has them."""
    torch.set_autocast_enabled("cpu", casts)
    dist.barrier()
    return 1e3 * timed(step, clock=time.perf_counter)  # part of it is gloo's, in other threads


def measure(rank: int, name: str, level: str, steps: int) -> None:
    """Time a model at a level; rank 0 prints. What was made is freed before the group is."""
    torch.manual_seed(0)
    make, make_by_hand = pair(level)
    left = make(level, *MODELS[name]())
    casts = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    right = make_by_hand(level, *MODELS[name]())
    sides = {
        "apex": partial(milliseconds, left, casts),
        "torch": partial(milliseconds, right, False),
    }
    times = take_turns(sides, steps, warm_up=5)
    if rank == 0:
        middle = [f"{side} {statistics.median(found):7.2f} ms" for side, found in times.items()]
        of_steps = ratio(times["apex"], times["torch"]).median
        print(f"{name:8} {level:6}  {'  '.join(middle)}  ratio {of_steps:.3f}", flush=True)


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """Time every model and level; rank 0 prints."""
    torch.set_num_threads(1)
    shared = dist.FileStore(store, RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS)
    for name in options.models:
        for level in options.levels:
            measure(rank, name, level, options.steps)
            amp.reset()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=60)
    with tempfile.TemporaryDirectory() as folder:
        options = parser.parse_args()
        arguments = (os.path.join(folder, "store"), options)
        torch.multiprocessing.spawn(work, args=arguments, nprocs=RANKS)  # type: ignore[attr-defined]


if __name__ == "__main__":
    with quiet_without_reader():
        main()
