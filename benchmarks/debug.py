"""What a watch of apex.debug costs on healthy steps: with and without it, in turns.

``tiny`` has two linear layers, where the difference counts; ``list`` has 300 small tensors;
``blocks`` are two transformer layers of width 256 on 8 x 128 tokens, a step of tens of
milliseconds. CPU, one thread, CPU time of the thread. ``plain`` is a loop of torch alone, where the
watch looks at the gradients; GradScaler and amp look at them anyway. Ratio and difference are
medians over rounds of neighbouring turns.

    python -m benchmarks.debug [--rounds 15] [--networks tiny]
"""

import argparse
import contextlib
import statistics
from typing import Any

import torch
from torch import nn

from apex import amp, debug
from benchmarks.turns import ratio, spread, take_turns, timed
from tools import quiet_without_reader

Made = tuple[nn.Module, torch.Tensor, int]  # network, input, steps of a turn


def tiny() -> Made:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8), 200


def many() -> Made:
    """150 linear layers of width 32."""
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(150)]), torch.randn(4, 32), 20


def blocks() -> Made:
    """Two transformer layers."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(8, 128, 256), 3


NETWORKS = {"tiny": tiny, "list": many, "blocks": blocks}
WAYS = ("plain", "GradScaler", "O1", "O4")


class Training:
    """One training, with or without a watch."""

    def __init__(self, network: str, way: str, *, watched: bool) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.steps = NETWORKS[network]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5)
        self.scaler = torch.amp.GradScaler("cpu") if way == "GradScaler" else None
        self.uses_amp = way.startswith("O")
        if self.uses_amp:
            amp.initialize(self.model, self.optimizer, opt_level=way, verbosity=0)
        self.watch: Any = contextlib.nullcontext()
        if watched:
            self.watch = debug.watch(self.model, self.optimizer, scaler=self.scaler)

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.scaler is not None):
            loss = self.model(self.x).float().square().mean()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.uses_amp:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            self.optimizer.step()
        else:
            loss.backward()
            self.optimizer.step()

    def turn(self) -> float:
        """Train some steps; return the microseconds of one."""
        return 1e6 * timed(self.step, self.steps)


def compare(network: str, way: str, rounds: int) -> None:
    """Print one row: microseconds of a step, ratio and difference."""
    sides = [Training(network, way, watched=watched) for watched in (False, True)]
    times = take_turns({"alone": sides[0].turn, "watched": sides[1].turn}, rounds, warm_up=2)
    alone, watched = times.values()
    more = spread(w - a for a, w in zip(alone, watched, strict=True)).median
    print(
        f"{network:8} {way:12} {statistics.median(alone):10.0f} us a step, watched "
        f"{statistics.median(watched):10.0f}: ratio {ratio(watched, alone).median:.3f}, "
        f"difference {more:7.1f} us"
    )
    sides[1].watch.close()


def main() -> None:
    """Print a row for each network and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for network in args.networks:
        for way in WAYS:
            compare(network, way, args.rounds)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
