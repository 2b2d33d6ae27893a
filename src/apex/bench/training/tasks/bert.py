"""BERT from random weights: guess the masked words of Python's documentation.

As in Devlin et al. (2018), 15 % of the words are asked for; of these 80 % are masked, 10 % replaced
by another word and 10 % left. There is no next-sentence task.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks import corpus
from apex.bench.training.tasks.batches import Batches, package
from apex.bench.training.tasks.task import Task, TaskOptions

__all__ = ["BertBase", "BertTiny"]

ASKED, MASKED, REPLACED = 0.15, 0.8, 0.9  # shares; the last two are cumulative
IGNORED = -100  # the label of words that are not asked for
HELD_AT_ONCE = 32  # sequences in a forward pass of the evaluation


class _Bert(nn.Module):
    """`transformers.BertForMaskedLM` with one tensor in and one out."""

    def __init__(self, config: Any, task: str) -> None:
        super().__init__()
        self.bert = package("transformers", task).BertForMaskedLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.bert(input_ids=tokens.long()).logits)


class _MaskedWords(Task):
    """Cross-entropy of the words asked for; the accuracy is the share of held-out ones guessed."""

    optimizer = "FusedAdam"
    epochs = 8
    unit = "sequences"
    name: str
    length: int
    """Words in a sequence."""
    quick: tuple[int, int]
    """Sequences to train on and held out, if `TaskOptions.quick`."""

    def __init__(self, options: TaskOptions) -> None:
        package("transformers", self.name)  # now, and not when the first model is built
        text = corpus.words()
        self.train, self.held = (
            corpus.sequences(part, self.length, options.device) for part in (text.train, text.held)
        )
        if options.quick:
            self.train, self.held = self.train[: self.quick[0]], self.held[: self.quick[1]]
        self.size = len(text.vocabulary)

    def config(self) -> dict[str, Any]:
        """Say in which numbers the network differs from BERT-base."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Build it with random weights."""
        transformers = package("transformers", self.name)
        config = transformers.BertConfig(pad_token_id=None, **self.config())  # there is no padding
        return _Bert(config, self.name)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Take the mean over the words asked for."""
        tokens, labels = batch
        return F.cross_entropy(
            model(tokens).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )

    def loader(self, batch_size: int, seed: int) -> "_MaskedBatches":
        """Give tokens and labels ``(batch_size, length)``, masked anew in each epoch."""
        return _MaskedBatches(Batches((self.train,), batch_size, seed), seed, self.size)

    def accuracy(self, model: nn.Module) -> float:
        """Guess held-out words, each time the same."""
        right = asked = 0
        random = torch.Generator().manual_seed(0)
        for rows in torch.split(self.held, HELD_AT_ONCE):
            tokens, labels = masked(rows, random, self.size)
            right += int((model(tokens).argmax(-1) == labels).sum())
            asked += int((labels != IGNORED).sum())
        return 100 * right / asked


class _MaskedBatches:
    """Batches with some of their words masked."""

    def __init__(self, batches: Batches, seed: int, size: int) -> None:
        self._batches = batches
        self._seed = seed
        self._size = size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(self._seed)
        for (rows,) in self._batches:
            yield masked(rows, random, self._size)


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

    name = "bert-tiny"
    lr = 0.001
    length = 32
    quick = (2048, 64)

    def config(self) -> dict[str, Any]:
        """Give the sizes."""
        return {
            "vocab_size": self.size,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 512,
        }


class BertBase(_MaskedWords):
    """BERT-base with its 30,522 words, so that it costs what that costs; our text has fewer."""

    name = "bert-base"
    lr = 0.0001
    epochs = 3
    length = 128
    quick = (64, 16)

    def config(self) -> dict[str, Any]:
        """Give the sizes: those of `transformers.BertConfig`."""
        return {}
