"""What ``amp.initialize`` costs for 1,200 tensors, beside the same by hand; and 200 calls in a row.

By hand is the cast of the model, and at O2 and O5 the float32 masters and an optimizer that steps
them. The two alternate; the times are medians of CPU time, in ms. In the second table one process
calls ``initialize`` 200 times with new small models and no ``amp.reset()``, keeping all of them;
each call should cost the same.

    python -m benchmarks.initialize [ROUNDS]
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from apex import amp
from benchmarks.turns import take_turns, timed
from tools import quiet_without_reader

DTYPES = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def make(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of ``2 * layers`` tensors, and its optimizer."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_apex(level: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Initialize with apex."""
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def by_hand(level: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Cast, and put masters into the optimizer's group."""
    if level in ("O2", "O5"):
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        optimizer.param_groups[0]["params"] = masters
    return (model.to(DTYPES[level]) if level in DTYPES else model), optimizer


def milliseconds(call: Callable[..., Any], level: str, layers: int, kept: list[Any]) -> float:
    """Time one call on a new model."""
    model, optimizer = make(layers)
    return 1e3 * timed(lambda: kept.append(call(level, model, optimizer)))


def of_one(call: Callable[..., Any], level: str) -> float:
    """Milliseconds of a call for 1,200 tensors, after which amp forgets them."""
    kept: list[Any] = []
    found = milliseconds(call, level, 600, kept)
    amp.reset()
    return found


def main(rounds: int) -> None:
    """Print a line for each level."""
    torch.set_num_threads(1)
    print("1,200 tensors: ms of apex, by hand | 200 calls: ms of calls 1-20 and 181-200")
    for level in LEVELS:
        ways = {call.__name__: partial(of_one, call, level) for call in (with_apex, by_hand)}
        apex, hand = map(statistics.median, take_turns(ways, rounds).values())
        kept: list[Any] = []
        calls = [milliseconds(with_apex, level, 2, kept) for _ in range(200)]
        amp.reset()
        first, last = statistics.median(calls[:20]), statistics.median(calls[-20:])
        print(f"{level} {apex:8.1f} {hand:8.1f}  | {first:6.2f} {last:6.2f}", flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
