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
from apex.bench.training.tasks.classification import Classification, Split
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["GROWTH_INTERVAL", "Seq2Seq"]

LENGTH = 16  # characters of a source, and of its target
WIDTH = 96
GROWTH_INTERVAL = 100
QUICK = (8192, 512)  # sequences to train on and held out


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


class Seq2Seq(Classification):
    """Sixteen letters and spaces, backwards, told after each what it should have been."""

    optimizer = "FusedAdam"
    lr = 0.003
    epochs = 3
    growth_interval = GROWTH_INTERVAL

    def __init__(self, options: TaskOptions) -> None:
        text = corpus.letters()
        train, test = text.sequences(LENGTH, QUICK if options.quick else None)
        data = Split(_with_read(train), train.flip(1), _with_read(test), test.flip(1))
        super().__init__(data.to(options.device))
        self.size = len(text.vocabulary)

    def model(self) -> nn.Module:
        """Build it."""
        return _Network(self.size)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Sum over the characters of a sequence, mean over the sequences."""
        return LENGTH * super().loss(model, batch)


def _with_read(source: torch.Tensor) -> torch.Tensor:
    """Append what the decoder reads: a mark, and the target but for its last character."""
    start = torch.full_like(source[:, :1], corpus.MASK)
    return torch.cat([source, start, source.flip(1)[:, :-1]], dim=1)
