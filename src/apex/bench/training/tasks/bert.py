"""BERT from random weights: guess the masked words of Python's documentation.

As in Devlin et al. (2018), 15 % of the words are asked for; of these 80 % are masked, 10 % replaced
by another word and 10 % left. There is no next-sentence task.
"""

import functools
import importlib
from typing import Any, ClassVar, cast

import torch
from torch import nn

from apex.bench.training.tasks import corpus
from apex.bench.training.tasks.batches import Batches, package
from apex.bench.training.tasks.classification import IGNORED, Classification, Split
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["BertBase", "BertTiny"]

ASKED, MASKED, REPLACED = 0.15, 0.8, 0.9  # shares; the last two are cumulative


class _Bert(nn.Module):
    """`transformers.BertForMaskedLM` with one tensor in and one out."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        config = transformers.BertConfig(pad_token_id=None, **sizes)  # there is no padding
        self.bert = transformers.BertForMaskedLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.bert(input_ids=tokens.long()).logits)


class _MaskedWords(Classification):
    """The labels are the words asked for; those of the held-out text are drawn once."""

    optimizer = "FusedAdam"
    at_once = 32
    length: ClassVar[int]
    """Words in a sequence."""
    quick: ClassVar[tuple[int, int]]
    """Sequences to train on and held out, if `TaskOptions.quick`."""
    sizes: ClassVar[dict[str, int]] = {}
    """What differs from the defaults of `transformers.BertConfig`, which are BERT-base's."""

    def __init__(self, options: TaskOptions) -> None:
        package("transformers", "bert")  # now, and not when the first model is built
        text = corpus.words()
        train, held = text.sequences(self.length, self.quick if options.quick else None)
        self.size = len(text.vocabulary)
        test = masked(held, torch.Generator().manual_seed(0), self.size)
        super().__init__(Split(train, train, *test).to(options.device))

    def model(self) -> nn.Module:
        """Build it with random weights."""
        return _Bert(self.sizes)

    def loader(self, batch_size: int, seed: int) -> Batches:
        """Give tokens and labels ``(batch_size, length)``, masked anew in each epoch."""
        rows = (self.data.train_x,)
        return Batches(rows, batch_size, seed, functools.partial(masked, size=self.size))


def masked(
    rows: torch.Tensor, random: torch.Generator, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask words, drawn on the CPU so that every device has the same.

    Returns:
        What the model reads, and the words asked for, with `IGNORED` elsewhere.
    """
    asked, how = torch.rand(2, *rows.shape, generator=random).to(rows.device)
    others = torch.randint(2, size, rows.shape, generator=random).to(rows.device)
    tokens = torch.where(how < REPLACED, torch.where(how < MASKED, corpus.MASK, others), rows)
    chosen = asked < ASKED
    return torch.where(chosen, tokens, rows), torch.where(chosen, rows, IGNORED)


class BertTiny(_MaskedWords):
    """Two layers, 128 wide: the smallest of Turc et al. (2019), with our vocabulary."""

    lr = 0.001
    epochs = 8
    length = 32
    quick = (2048, 64)
    sizes: ClassVar[dict[str, int]] = {
        "vocab_size": corpus.LARGEST,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    }


class BertBase(_MaskedWords):
    """BERT-base with its 30,522 words, so that it costs what that costs; our text has fewer."""

    lr = 0.0001
    epochs = 3
    length = 128
    quick = (64, 16)
