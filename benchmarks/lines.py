"""What ``apex debug`` takes of a program's step, with and without the lines of the loss.

Each runs as a program of its own, in turns: alone, under ``apex debug --no-lines``, and under
``apex debug``. ``gan`` has two networks of convolutions and two optimizers, 16 images, O1;
``words`` an LSTM and its loss, O4. CPU time of a step on one thread: the least of the means of 5
steps; printed are the median over the turns, and least and most.

    python -m benchmarks.lines [--turns 5]
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from benchmarks.turns import timed
from tools import quiet_without_reader

MEANS, OF = 60, 5
WAYS: dict[str, list[str]] = {
    "alone": [],
    "--no-lines": ["-m", "apex", "debug", "--no-lines"],
    "apex debug": ["-m", "apex", "debug"],
}

# --- programs ------------------------------------------------------------------------------------


def gan() -> Callable[[], None]:
    """A step of both networks: 14 functions outside of them."""
    width = 8
    made = nn.Sequential(
        nn.ConvTranspose2d(16, 2 * width, 4), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4),
    )  # fmt: skip
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4) for net in (made, judge)]
    amp.initialize([made, judge], optimizers, opt_level="O1", num_losses=2, verbosity=0)
    images = torch.rand(16, 1, 16, 16)

    def step() -> None:
        real = (images - 0.5) / 0.5
        judge.zero_grad()
        fake = made(torch.randn(16, 16, 1, 1))
        yes, no = judge(real).flatten().float(), judge(fake.detach()).flatten().float()
        loss = F.softplus(-yes).mean() + F.softplus(no).mean()
        with amp.scale_loss(loss, optimizers[1], loss_id=0) as scaled:
            scaled.backward()
        optimizers[1].step()
        made.zero_grad()
        loss = F.softplus(-judge(fake).flatten().float()).mean()
        with amp.scale_loss(loss, optimizers[0], loss_id=1) as scaled:
            scaled.backward()
        optimizers[0].step()

    return step


class Words(nn.Module):
    """An embedding, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(200, 64), nn.LSTM(64, 64)
        self.output = nn.Linear(64, 200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``(time, batch)`` to logits of the next words."""
        return self.output(self.lstm(self.embedding(tokens))[0])


def words() -> Callable[[], None]:
    """A step of the language model: 6 functions outside of it."""
    model = Words()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    tokens = torch.randint(200, (21, 16))

    def step() -> None:
        optimizer.zero_grad()
        x, y = tokens[:-1], tokens[1:].flatten()
        logits = model(x).flatten(0, 1).float()
        loss = F.cross_entropy(logits, y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return step


PROGRAMS = {"gan": gan, "words": words}


def run(name: str) -> None:
    """Be the program; print milliseconds of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = PROGRAMS[name]()
    timed(step, 20)
    print(f"step {1e3 * min(timed(step, OF) for _ in range(MEANS)):.4f}", flush=True)


# --- turns ---------------------------------------------------------------------------------------


def measured(way: str, name: str) -> float:
    """Milliseconds of a step of the program, in a process of its own."""
    command = [sys.executable, *WAYS[way], "-m", "benchmarks.lines", "--program", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return float(line.split()[1])


def main() -> None:
    """Print a row for each program and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        run(args.program)
        return
    for name in PROGRAMS:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.turns):
            for way, found in times.items():
                found.append(measured(way, name))
        for way, found in times.items():
            middle, low, high = statistics.median(found), min(found), max(found)
            print(f"{name:8}{way:12}{middle:8.3f} ms [{low:.3f} {high:.3f}]", flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
