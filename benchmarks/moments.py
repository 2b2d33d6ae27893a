"""Losses with moments in float32, bfloat16 and 8 bits, of a small language model and of a CNN.

Weights are float32 and FusedAdam steps them, at each seed with each kind of moments on the same
batches. ``nearest`` is bfloat16 rounded to the nearest, which no option does. Printed is the mean
loss of the last tenth of the steps, for each seed, and the mean difference from float32 with its
standard error.

    python -m benchmarks.moments [--seeds 5] [--steps 400] [--models CNN]
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from apex.commands.bench.training.tasks import digits
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.ops.lists import multi_tensor
from apex.optimizers import FusedAdam
from tools import quiet_without_reader

Loss = Callable[[], torch.Tensor]
STATES = {"float32": "plain", "bfloat16": "bfloat16", "nearest": "bfloat16", "8bit": "8bit"}
WORDS = 64


def language_model(seed: int) -> tuple[nn.Module, Loss]:
    """A transformer of one layer, and text of which a word has four successors."""
    model = nn.Sequential(
        nn.Embedding(WORDS, 64),
        nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True),
        nn.Linear(64, WORDS),
    )
    random = torch.Generator().manual_seed(100 + seed)
    follows = torch.randint(WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(100))

    def loss() -> torch.Tensor:
        words = [torch.randint(WORDS, (8,), generator=random)]
        for choice in torch.randint(4, (12, 8), generator=random):
            words.append(follows[words[-1], choice])
        text = torch.stack(words, 1)
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return model, loss


def cnn(seed: int) -> tuple[nn.Module, Loss]:
    """The CNN of ``apex bench --task digits-cnn``."""
    task = digits.cnn(TaskOptions(torch.device("cpu")))
    model = cast(nn.Module, task.model())
    batches = chain.from_iterable(task.loader(16, 1000 * seed + epoch) for epoch in count())
    return model, lambda: task.loss(model, next(batches))


def trained(
    make: Callable[[int], tuple[nn.Module, Loss]], kind: str, seed: int, steps: int
) -> float:
    """The mean loss of the last tenth of the steps."""
    torch.manual_seed(seed)
    model, loss_of = make(seed)
    optimizer = FusedAdam(model.parameters(), lr=3e-3, state=STATES[kind])
    losses = []
    with _to_the_nearest() if kind == "nearest" else contextlib.nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return statistics.mean(losses[-steps // 10 :])


MODELS = {"language-model": language_model, "CNN": cnn}


@contextlib.contextmanager
def _to_the_nearest() -> Iterator[None]:
    module: Any = multi_tensor
    stochastically = module.dithered
    module.dithered = lambda value, seed: value
    try:
        yield
    finally:
        module.dithered = stochastically


def main() -> None:
    """Print a row for each model and kind of moments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        exact: list[float] = []
        for kind in STATES:
            found = [trained(MODELS[name], kind, seed, args.steps) for seed in range(args.seeds)]
            exact = exact or found
            apart = [one - other for one, other in zip(found, exact, strict=True)]
            error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
            losses = " ".join(f"{loss:.4f}" for loss in found)
            print(
                f"{name:<14} {kind:<9} {losses}   mean {statistics.mean(found):.4f}, "
                f"from float32 {statistics.mean(apart):+.4f} +- {error:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
