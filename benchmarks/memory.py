"""Peak memory of three training steps at each level, divided by O0's.

``linear`` are four linear layers of 1024 with ReLU and 16 rows, whose memory is its parameters;
``transformer`` two layers of width 128 (512 inside) on 16 sequences of 128, whose memory is its
activations; ``digits-cnn`` is the task of ``apex bench`` with 128 images. With ``FusedAdam``, on
this machine's GPU or CPU. Bytes vary with how a CPU multiplies 16-bit matrices, not between runs.

    python -m benchmarks.memory
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.commands.bench.memory import peak_bytes, source
from apex.commands.bench.training.tasks.digits import cnn
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.optimizers import FusedAdam
from tools import quiet_without_reader

LEVELS: dict[str, dict[str, Any]] = {
    level: {"opt_level": level} for level in ("O0", "O1", "O2", "O4", "O5")
} | {"O5, fused_step": {"opt_level": "O5", "fused_step": True}}
STEPS = 3


def linear() -> nn.Module:
    """Build four layers whose memory is their parameters."""
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.ReLU())))


def transformer() -> nn.Module:
    """Build two layers whose memory is their activations."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def networks() -> dict[str, tuple[Callable[[], Any], tuple[int, ...], int]]:
    """Name builders, with the shape of an input and the number of classes."""
    digits = cnn(TaskOptions(device=torch.device("cpu"), quick=True))
    return {
        "linear": (linear, (16, 1024), 1024),
        "transformer": (transformer, (16, 128, 128), 128),
        "digits-cnn": (digits.model, (128, 1, 16, 16), 10),
    }


def peak(build: Callable[[], Any], x: torch.Tensor, labels: torch.Tensor, **arguments: Any) -> int:
    """Measure the model, its optimizer and the steps, without the data."""

    def train() -> None:
        torch.manual_seed(0)
        model = build().to(x.device)
        optimizer = FusedAdam(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, verbosity=0, **arguments)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, -2).float(), labels)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    try:
        return peak_bytes(train, x.device) or 0
    finally:
        amp.reset()


def main() -> None:
    """Print a line for each network."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device}: {source(device)}")
    print(f"{'network':12} {'O0, MiB':>8}", *(f"{level:>14}" for level in [*LEVELS][1:]))
    for name, (build, shape, classes) in networks().items():
        x = torch.rand(shape, device=device)
        rows = x[..., 0].numel() if len(shape) < 4 else len(x)
        labels = torch.randint(classes, (rows,), device=device)
        first, *others = (peak(build, x, labels, **arguments) for arguments in LEVELS.values())
        ratios = (f"{number / first:14.2f}" for number in others)
        print(f"{name:12} {first / 2**20:8.1f}", *ratios, flush=True)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
