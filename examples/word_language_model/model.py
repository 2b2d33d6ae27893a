"""An embedding, a recurrent network of apex.RNN, and a linear layer to scores of words."""

from typing import Any

import torch
from torch import nn

from apex import RNN

KINDS = ["LSTM", "mLSTM", "GRU", "ReLU", "Tanh"]


class Model(nn.Module):
    """A language model. It keeps the recurrent states, so a text goes on in the next forward.

    Args:
        kind: One of ``KINDS``.
        words: Size of the vocabulary. The model's is the next multiple of 8, for tensor cores.
        emsize: Features of a word.
        nhid: Features of a recurrent layer.
        nlayers: Recurrent layers.
        dropout: Of words, between recurrent layers and of the last one's output.
        tied: Whether the last layer has the embedding's weights; ``emsize`` is ``nhid`` then.
    """

    def __init__(
        self,
        kind: str,
        words: int,
        emsize: int,
        nhid: int,
        nlayers: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        padded = -(-words // 8) * 8
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(padded, emsize)
        self.rnn = getattr(RNN, kind)(emsize, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, padded)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Map words ``(steps, batch)`` to float32 scores of the next, ``(steps, batch, n)``."""
        output, _ = self.rnn(self.drop(self.encoder(words)))
        return self.decoder(self.drop(output)).float()


def with_options(options: dict[str, Any], words: int) -> Model:
    """Build the model that the options of ``main.py`` describe."""
    names = ("emsize", "nhid", "nlayers", "dropout", "tied")
    return Model(options["model"], words, *(options[name] for name in names))
