"""How the numbers of a report were measured and computed, in words for its readers."""

import torch

from apex.bench import memory
from apex.bench.training.trainer import FEW_STEPS
from apex.bench.training.turns import BLOCK
from apex.bench.training.verdict import LOSS_MARGIN, NOISY

__all__ = ["how_measured"]


def how_measured(device: torch.device) -> dict[str, str]:
    """Say how the numbers of a `Run` and a `Verdict` are measured and computed."""
    clock = "CUDA events" if device.type == "cuda" else "the host's clock"
    return {
        "time of a step": "milliseconds from zero_grad to the end of step (forward, loss, "
        f"backward, optimizer) by {clock}, without the time for data",
        "turns": "the levels of a seed train by turns in one process, "
        f"{BLOCK} steps or more each, in an order drawn from the seed and then its reverse; the "
        "first round and the first step of each turn do not count",
        "speed": "of each seed the median over pairs of rounds of O0's median step time over the "
        "level's; the interval over the seeds is Student's t, each with 95 %. There is no "
        "verdict where one step in ten takes twice the median, or the interval spans a factor of "
        f"{NOISY:g}",
        "accuracy": "after the last epoch, on data that were not trained on. Differences are "
        "paired by seed, with Student's t. The interval is corrected for the number of levels "
        "(Bonferroni): all differences from O0 on a page hold together with 95 %. "
        "Their standard deviation is not taken below one sample of the test set divided by the "
        "root of 2. A level is within the margin if its interval is",
        "loss": "mean loss on the same data, finer than an accuracy, by the same rule with a 95 % "
        f"of its own and a margin of {100 * LOSS_MARGIN:g} %; the training loss of the last epoch "
        "where there is none",
        "memory": f"peak bytes of tensors in a separate training of {FEW_STEPS} steps, above what "
        "was in use before it: weights, masters, gradients, optimizer state, activations, batch "
        f"(from {memory.source(device)}; scratch space of libraries is not in it)",
        "operators": "by torch's profiler, one step apart, each without the operators it calls",
        "inference": "forward and loss of a training batch in evaluation mode, by turns as well",
    }
