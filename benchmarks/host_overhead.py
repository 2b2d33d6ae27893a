"""What amp costs on the host: a training step with apex beside the best loop written by hand.

``linear`` has 300 small tensors, ``transformer`` 12 blocks of width 64, ``cnn`` three convolutions;
for ``tiny``, two linear layers, a ratio says nothing, so the difference counts. CPU, one thread.
The loop by hand has the same network, loss, optimizer and dtypes, in the fastest form torch offers:

* O0: float32, nothing else.
* O1, O4: ``torch.autocast`` around forward and loss; O1 has ``torch.amp.GradScaler``.
* O2, O5: a 16-bit model with float32 batchnorm; float32 masters whose gradients stay allocated;
  one ``torch._foreach_copy_`` widens the gradients, one rounds the masters into the weights. O2 has
  ``torch.amp.GradScaler``, which unscales with one foreach kernel.
* O2+FusedAdam: the same with ``torch.optim.AdamW(fused=True)``. ``unscale_`` is called before
  ``step``: else GradScaler reads all gradients once more (300 tensors: 5.2 instead of 3.6 ms).

The two sides are two processes on one core, and take turns. Two, as amp's autocast kernels serve
the whole process: a loop with ``torch.autocast`` beside amp pays 35 to 46 us more for each layer
norm and gelu. In float16 the loop by hand has amp's CPU kernels, too.
What is timed is the CPU time of the thread, so that other programs count less. The ratio is the
median of the ratios of neighbouring turns, with its 95 % interval (order statistics) and the
quartiles of the ratios; the difference is such a median, too. The first steps of the two must have
the same losses. The last column is how often a step reads a tensor on the host, apex and by hand,
with apex's scale treated as if it were on a device: each would wait for a GPU. Linux only.

    python -m benchmarks.host_overhead [--levels O2 O5] [--networks tiny] [--rounds 9] [--json FILE]
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.scale import Scale
from apex.optimizers import FusedAdam
from benchmarks.turns import one_core, ratio, spread, take_turns, timed
from tools import quiet_without_reader

Step = Callable[[], torch.Tensor]  # returns the loss

LEVELS = ("O0", "O1", "O2", "O4", "O5", "O2+FusedAdam")
HALF = dict.fromkeys(("O1", "O2", "O2+FusedAdam"), torch.float16)
HALF |= dict.fromkeys(("O4", "O5"), torch.bfloat16)
WARM_UP = 10  # turns that are not counted


class Chain(nn.Module):
    """150 small linear layers: 300 parameter tensors. Near the identity: the signal survives."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(16, 16) for _ in range(150)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02).data.diagonal().add_(1.0)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 16)`` to ``(batch, 16)``."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def transformer() -> nn.Module:
    """A model of 12 pre-norm blocks of width 64 over 64 tokens."""
    options: dict[str, Any] = {"dropout": 0.0, "activation": F.gelu, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, **options) for _ in range(12)]
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 64))


def cnn() -> nn.Module:
    """Three convolutions with batchnorm and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 16)):
        layers.append(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Network(NamedTuple):
    """A network, its batch, its loss, and how many steps a turn has."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.mse_loss
    steps: int = 1


NETWORKS = {
    "linear": Network(Chain, lambda: (torch.randn(8, 16), torch.rand(8, 16))),
    "transformer": Network(
        transformer,
        lambda: torch.randint(64, (2, 16, 2)).unbind(),
        lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
    ),
    "cnn": Network(cnn, lambda: (torch.randn(4, 3, 16, 16), torch.arange(4)), F.cross_entropy),
    "tiny": Network(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
        lambda: (torch.randn(4, 8), torch.randn(4, 2)),
        steps=10,
    ),
}


def optimizer_of(params: Any, level: str, *, ours: bool) -> torch.optim.Optimizer:
    """The optimizer of a side: SGD as torch makes it by default, or fused AdamW."""
    if level != "O2+FusedAdam":
        return torch.optim.SGD(params, lr=0.02)
    if ours:
        return FusedAdam(params, lr=1e-3, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)


def with_apex(level: str, network: Network, x: torch.Tensor, y: torch.Tensor) -> Step:
    """A step written with apex."""
    model = network.make()
    optimizer = optimizer_of(model.parameters(), level, ours=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level[:2], verbosity=0)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = network.loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.detach()

    return step


def with_float32_weights(level: str, network: Network, x: torch.Tensor, y: torch.Tensor) -> Step:
    """O0, O1 and O4 by hand: nothing or torch.autocast, and in float16 torch's scaler."""
    model = network.make()
    optimizer = optimizer_of(model.parameters(), level, ours=False)
    scaler = torch.amp.GradScaler("cpu") if level == "O1" else None
    casts: Any = contextlib.nullcontext()
    if level in HALF:  # no weight is used twice, so keeping its cast would only cost
        casts = torch.autocast("cpu", HALF[level], cache_enabled=False)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with casts:
            loss = network.loss(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


def with_masters(level: str, network: Network, x: torch.Tensor, y: torch.Tensor) -> Step:
    """O2 and O5 by hand: a 16-bit model, float32 masters, and in float16 torch's scaler."""
    model, dtype = network.make(), HALF[level]
    stepped = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for module in model.to(dtype).modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    params: list[Any] = list(model.parameters())
    halves = [p for p in params if p.dtype == dtype]
    masters = [m for p, m in zip(params, stepped, strict=True) if p.dtype == dtype]
    for master in masters:
        master.grad = torch.zeros_like(master)
    wide: list[Any] = [master.grad for master in masters]
    optimizer = optimizer_of(masters + [p for p in params if p.dtype != dtype], level, ours=False)
    scaler = torch.amp.GradScaler("cpu") if dtype == torch.float16 else None
    narrow = x.is_floating_point()

    def step() -> torch.Tensor:
        for parameter in params:
            parameter.grad = None
        loss = network.loss(model(x.to(dtype) if narrow else x).float(), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        torch._foreach_copy_(wide, [half.grad for half in halves])
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)
        return loss.detach()

    return step


def by_hand(level: str, network: Network, x: torch.Tensor, y: torch.Tensor) -> Step:
    """The best step without apex."""
    if HALF.get(level) == torch.float16:
        # From now on amp's kernels for float16 on a CPU. O3 sets no autocast, LayerNorm no seed.
        amp.initialize(nn.LayerNorm(1), opt_level="O3", verbosity=0)
    build = with_float32_weights if level in ("O0", "O1", "O4") else with_masters
    return build(level, network, x, y)


def host_reads(step: Step) -> int:
    """Count the reads of tensors on the host in one step, as on a device."""
    reads = 0

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return read(*args)

        return call

    Scale._waits_for_nothing = False  # type: ignore[assignment,method-assign]
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "nonzero"):
        setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    step()
    return reads


def serve(pipe: Any, build: Callable[..., Step], level: str, network: Network) -> None:
    """Run turns in a process of its own: from a number of steps to us a step and the loss."""
    torch.manual_seed(0)
    x, y = network.batch()
    step = build(level, network, x, y)
    loss = torch.zeros(())

    def run() -> None:
        nonlocal loss
        loss = step()

    while steps := pipe.recv():
        pipe.send((1e6 * timed(run, steps), float(loss)))
    pipe.send(host_reads(step))


def both(level: str, network: Network, rounds: int) -> tuple[dict[str, list[float]], list[int]]:
    """The times of both sides, turn by turn, and their host reads."""
    context = multiprocessing.get_context("fork")
    pipes = []
    for build in (with_apex, by_hand):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, build, level, network), daemon=True).start()
        theirs.close()  # else recv would wait for a process that has failed
        pipes.append(ours)

    def turn(pipe: Any, steps: int) -> tuple[float, float]:
        pipe.send(steps)
        us, loss = pipe.recv()
        return us, loss

    def us(pipe: Any) -> float:
        return turn(pipe, network.steps)[0]

    check([(turn(pipes[0], 1)[1], turn(pipes[1], 1)[1]) for _ in range(WARM_UP)], level)
    sides = {side: partial(us, pipe) for side, pipe in zip(("apex", "hand"), pipes, strict=True)}
    times = take_turns(sides, rounds)
    for pipe in pipes:
        pipe.send(0)
    return times, [pipe.recv() for pipe in pipes]


def check(losses: list[tuple[float, float]], level: str) -> None:
    """Exit unless both sides have the same losses, up to rounding (O1: apex's float32 list)."""
    dtype = HALF.get(level)
    allowed = 0.0 if dtype is None else 4 * torch.finfo(dtype).eps
    worst = max(abs(a - b) / abs(b) for a, b in losses)
    fall = 1 - losses[-1][1] / losses[0][1]
    if not worst <= allowed < fall:
        sys.exit(
            f"{level}: apex and the loop by hand do not do the same work. Their losses differ by "
            f"{worst:.2g} (allowed {allowed:.2g}) while they fall by {fall:.2g}: {losses}"
        )


def main() -> None:
    """Print a line for each network and level."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=tuple(NETWORKS))
    parser.add_argument("--rounds", type=int, default=200, help="turns of each side")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    args = parser.parse_args()
    one_core()  # of both sides
    rows = []
    print(
        "network     level        apex us  by hand   ratio  95 % interval  quartiles     "
        "difference us  95 % interval  goal         reads"
    )
    for name, level in itertools.product(args.networks, args.levels):
        rows.append(measure(name, level, args.rounds))
        print(line(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


def measure(name: str, level: str, rounds: int) -> dict[str, Any]:
    """One row: a network at a level."""
    times, reads = both(level, NETWORKS[name], rounds)
    apex, hand = times["apex"], times["hand"]
    row: dict[str, Any] = {"network": name, "level": level, "host_reads": reads}
    row["apex_us"], row["hand_us"] = statistics.median(apex), statistics.median(hand)
    row["ratio"] = ratio(apex, hand)._asdict()
    row["difference_us"] = spread(a - b for a, b in zip(apex, hand, strict=True))._asdict()
    if name == "tiny":
        row["goal"] = 60.0 if level in ("O0", "O4") else 120.0
    elif name != "cnn":
        row["goal"] = 1.05 if level in ("O0", "O1", "O4") else 1.08
    return row


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    times, extra, limit = row["ratio"], row["difference_us"], row.get("goal")
    found = (extra if row["network"] == "tiny" else times)["median"]
    verdict = f"{limit:g} {'met' if found <= limit else 'missed'}" if limit else "none"
    return (
        f"{row['network']:11} {row['level']:12} {row['apex_us']:7.0f} {row['hand_us']:8.0f}   "
        f"{times['median']:.3f}  [{times['low']:.3f} {times['high']:.3f}]  "
        f"{times['q1']:.3f} {times['q3']:.3f}  {extra['median']:12.0f}  "
        f"[{extra['low']:5.0f} {extra['high']:5.0f}]  {verdict:11}  {row['host_reads']}"
    )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
