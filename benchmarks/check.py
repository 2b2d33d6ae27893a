"""What a check costs: a plain step, a measured one, and one after the measured ones.

The network is a small language model: an embedding, two transformer layers and an output layer for
1,000 words, on 8 x 64 tokens, under autocast, with AdamW. CPU, one thread, CPU time of the thread,
in turns; the differences and ratios are medians over the rounds. Peak memory is that of a process
of its own for each way. Where a processor has no 16-bit products a step of width 256 takes seconds:
``--width 32`` shows what is added.

    python -m benchmarks.check [--rounds 9] [--width 256] [--dtypes bfloat16]
"""

import argparse
import resource
import subprocess
import sys

import torch
from torch import nn

from apex.debug.check.run import CheckRun
from benchmarks.turns import ratio, spread, take_turns, timed
from tools import quiet_without_reader

WORDS, STEPS = 1000, 2


class Training:
    """A training of the small language model."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(WORDS, width), blocks, nn.Linear(width, WORDS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        self.x, self.y = torch.randint(0, WORDS, (2, 8, 64))
        self.dtype = dtype

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype):
            out = self.model(self.x)
        loss = nn.functional.cross_entropy(out.flatten(0, 1).float(), self.y.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def plain(self) -> float:
        """Milliseconds of a step without a check."""
        return 1e3 * timed(self.step, STEPS)

    def measured(self) -> float:
        """The same while it is measured."""
        return self._checked(STEPS, 0)

    def afterwards(self) -> float:
        """The same after the measured steps."""
        return self._checked(1, 1)

    def _checked(self, limit: int, before: int) -> float:
        run = CheckRun(limit)
        run.add(self.optimizer)
        for _ in range(before):
            self.step()
        milliseconds = 1e3 * timed(self.step, STEPS)
        found = run.finish()
        if found or run.failed:
            raise RuntimeError(f"a healthy training: {found}, {run.failed}")
        return milliseconds


def peak(way: str, dtype: str, width: int) -> float:
    """The peak memory of a process that trains some steps, in MiB."""
    words = [sys.executable, "-m", "benchmarks.check", "--alone", way]
    words += ["--dtypes", dtype, "--width", str(width)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print a row for each type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.alone:
        getattr(Training(getattr(torch, args.dtypes[0]), args.width), args.alone)()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    for dtype in args.dtypes:
        one = Training(getattr(torch, dtype), args.width)
        ways = {"plain": one.plain, "measured": one.measured, "afterwards": one.afterwards}
        times = take_turns(ways, args.rounds, warm_up=2)
        plain = times["plain"]
        for way, took in times.items():
            more = spread(a - b for a, b in zip(took, plain, strict=True)).median
            print(
                f"{dtype:9} {way:10} {spread(took).median:7.1f} ms a step, {more:5.1f} more, ratio "
                f"{ratio(took, plain).median:.3f}; peak {peak(way, dtype, args.width):.0f} MiB"
            )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
