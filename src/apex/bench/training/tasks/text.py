"""Language models of characters: guess the next one in Python's documentation."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks import corpus
from apex.bench.training.tasks.classification import Classification, Split
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["TextLstm", "TextTransformer"]

LENGTH = 64  # characters that a model reads at once
QUICK = (2048, 128)  # sequences to train on and held out


class _NextCharacter(Classification):
    """The label of each character is the next."""

    optimizer = "FusedAdam"
    lr = 0.003
    epochs = 2
    at_once = 64

    def __init__(self, options: TaskOptions) -> None:
        text = corpus.characters()
        train, test = text.sequences(LENGTH + 1, QUICK if options.quick else None)
        data = Split(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])
        super().__init__(data.to(options.device))
        self.size = len(text.vocabulary)


class _Lstm(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.output(self.recurrent(self.embedding(tokens.long()))[0]))


class TextLstm(_NextCharacter):
    """An LSTM of one layer."""

    lr = 0.01

    def model(self) -> nn.Module:
        """Build it, 128 wide."""
        return _Lstm(self.size, 128)


class _Layer(nn.Module):
    """Causal self-attention and two linear layers, each with layernorm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.linear = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(-2))
        return cast(torch.Tensor, x + self.linear(self.before_linear(x)))


class _Transformer(nn.Module):
    def __init__(self, size: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.long()) + self.positions[: tokens.shape[1]]
        return cast(torch.Tensor, self.output(self.layers(x)))


class TextTransformer(_NextCharacter):
    """A transformer of two layers."""

    def model(self) -> nn.Module:
        """Build it, 128 wide, with four heads."""
        return _Transformer(self.size, 128, layers=2, heads=4)
