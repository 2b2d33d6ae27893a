"""An encoder and a decoder that write text backwards, and a loss scale that moves.

The loss is that of a whole sequence, the sum over its characters, as in translation. Its gradients
are large enough that 65536, the first loss scale, overflows in float16: the scale falls, and is
doubled whenever `GROWTH_INTERVAL` steps went well. With the usual 2,000 this would take minutes.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks import corpus
from apex.bench.training.tasks.batches import Batches
from apex.bench.training.tasks.task import Task, TaskOptions

__all__ = ["GROWTH_INTERVAL", "Seq2Seq"]

LENGTH = 16  # characters of a source, and of its target
WIDTH = 96
GROWTH_INTERVAL = 100
QUICK, QUICK_HELD = 8192, 512  # sequences
AT_ONCE = 512  # sequences in a forward pass of the evaluation


class _Network(nn.Module):
    """GRUs with dot-product attention (Luong et al., 2015), taught with the right characters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attended = nn.Linear(2 * WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``(n, 2 * LENGTH)``, a source and what the decoder reads, to logits of the target."""
        source, read = self.embedding(tokens.long()).split(LENGTH, dim=1)
        encoded, last = self.encoder(source)
        decoded = self.decoder(read, last.transpose(0, 1).flatten(1)[None])[0]
        weights = F.softmax(decoded @ encoded.transpose(1, 2), dim=-1)
        both = torch.cat([decoded, weights.to(encoded.dtype) @ encoded], dim=-1)
        return cast(torch.Tensor, self.output(torch.tanh(self.attended(both))))


class Seq2Seq(Task):
    """Sixteen letters and spaces, backwards; the accuracy is the share of characters right."""

    optimizer = "FusedAdam"
    lr = 0.003
    epochs = 3
    unit = "sequences"
    growth_interval = GROWTH_INTERVAL

    def __init__(self, options: TaskOptions) -> None:
        text = corpus.letters()
        self.train, self.held = (
            corpus.sequences(part, LENGTH, options.device) for part in (text.train, text.held)
        )
        if options.quick:
            self.train, self.held = self.train[:QUICK], self.held[:QUICK_HELD]
        self.size = len(text.vocabulary)

    def model(self) -> nn.Module:
        """Build it."""
        return _Network(self.size)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        """Sum over the characters of a sequence, mean over the sequences."""
        (source,) = batch
        logits = model(_with_read(source)).float()
        total = F.cross_entropy(logits.flatten(0, 1), source.flip(1).flatten(), reduction="sum")
        return total / len(source)

    def loader(self, batch_size: int, seed: int) -> Batches:
        """Give sources ``(batch_size, LENGTH)``."""
        return Batches((self.train,), batch_size, seed)

    def accuracy(self, model: nn.Module) -> float:
        """Write held-out text backwards, told after each character what it should have been."""
        guesses = [model(_with_read(rows)).argmax(-1) for rows in torch.split(self.held, AT_ONCE)]
        return 100 * (torch.cat(guesses) == self.held.flip(1)).double().mean().item()


def _with_read(source: torch.Tensor) -> torch.Tensor:
    """Append what the decoder reads: a mark, and the target but for its last character."""
    start = torch.full_like(source[:, :1], corpus.MASK)
    return torch.cat([source, start, source.flip(1)[:, :-1]], dim=1)
