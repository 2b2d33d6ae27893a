"""FusedMuon beside FusedAdam on a small transformer, and beside torch's Muon, on one CPU thread.

``losses``: the transformer of ``apex bench --task text-transformer``, 300 steps of 16 x 64
characters, the learning rate up over 20 steps and then linearly down to 0. Hidden matrices are
those of ``FusedMuon.groups_for``. Printed are the loss of held-out text of each seed, their mean
and standard deviation, and CPU seconds of the training and of its steps, on the average of a seed.
``steps``: a step of ours and of ``torch.optim.Muon``, in turns; the ratio is the median of those of
neighbours, with quartiles.

    python -m benchmarks.muon [losses] [steps] [--seeds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from apex.commands.bench.training.tasks import text
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.optimizers import FusedAdam, FusedMuon
from benchmarks.turns import ratio, take_turns, timed
from tools import quiet_without_reader

STEPS, WARM_UP, BATCH = 300, 20, 16
Make = Callable[[nn.Module], torch.optim.Optimizer]


def _muon(lr: float, adam_lr: float, split: int, model: nn.Module) -> torch.optim.Optimizer:
    groups = FusedMuon.groups_for(model, outputs=["output"])
    if split > 1:
        hidden = groups[0]["params"]
        fused = [(name, param) for name, param in hidden if "qkv" in name]
        others = [(name, param) for name, param in hidden if "qkv" not in name]
        groups[:1] = [
            {"params": fused, "algorithm": "muon", "split": split},
            {"params": others, "algorithm": "muon"},
        ]
    return FusedMuon(groups, lr=lr, adam_lr=adam_lr, weight_decay=0.01)


def _adam(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return FusedAdam(model.parameters(), lr=lr, weight_decay=0.01)


TRAINED: dict[str, Make] = {
    **{f"FusedAdam, {lr}": partial(_adam, lr) for lr in (0.001, 0.003, 0.01, 0.02)},
    **{
        f"FusedMuon, {lr}, Adam's part {rest}": partial(_muon, lr, rest, 1)
        for lr, rest in ((0.02, 0.003), (0.02, 0.01), (0.05, 0.01))
    },
    "FusedMuon, 0.05, Adam's part 0.01, split=3": partial(_muon, 0.05, 0.01, 3),
}

# --- losses --------------------------------------------------------------------------------------


def trained(make: Make, seed: int) -> tuple[float, float, float]:
    """Loss of held-out text, and CPU seconds of the training and of the optimizer's steps."""
    torch.manual_seed(seed)
    task = text.transformer(TaskOptions(torch.device("cpu")))
    model = cast(nn.Module, task.model())
    optimizer = make(model)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, _share)
    batches = iter(task.loader(BATCH, seed))
    began, steps = time.thread_time(), 0.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        steps += timed(optimizer.step)
        rates.step()
    seconds = time.thread_time() - began
    with torch.no_grad():
        return task.test_loss(model.eval()), seconds, steps


def _share(step: int) -> float:
    return min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))


# --- steps ---------------------------------------------------------------------------------------


def _layers(number: int, width: int) -> list[tuple[int, int]]:
    of_one = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return of_one * number


STEPPED = {
    "48 of 64x64": [(64, 64)] * 48,
    "256 of 16x16": [(16, 16)] * 256,
    "4 layers of width 128": _layers(4, 128),
    "2 layers of width 384": _layers(2, 384),
}


def stepped(kind: Any, shapes: list[tuple[int, int]]) -> Callable[[], object]:
    """The step of an optimizer of such matrices."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer: torch.optim.Optimizer = kind(params, lr=0.02)
    optimizer.step()
    return optimizer.step


def main() -> None:
    """Print a row for each training, and for each set of matrices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["losses", "steps", []], metavar="PART")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.parts or "steps" in args.parts:
        for name, shapes in STEPPED.items():
            ways = {kind: stepped(kind, shapes) for kind in (FusedMuon, torch.optim.Muon)}
            turns = take_turns({k.__name__: partial(timed, w) for k, w in ways.items()}, 15)
            print(f"step, {name:24} ours / torch's {ratio(*turns.values())}", flush=True)
    if not args.parts or "losses" in args.parts:
        for name, make in TRAINED.items():
            found = [trained(make, seed) for seed in range(args.seeds)]
            losses = [loss for loss, *_ in found]
            _, seconds, steps = map(statistics.mean, zip(*found, strict=True))
            apart = statistics.stdev(losses) if args.seeds > 1 else 0.0
            print(
                f"{name:42} {' '.join(f'{loss:.3f}' for loss in losses)}   "
                f"mean {statistics.mean(losses):.3f} +- {apart:.3f}, "
                f"{seconds:5.1f} s, of which {steps:4.1f} s steps",
                flush=True,
            )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
