"""Tasks on the text of Python's documentation: next characters, masked words, words backwards.

Every Python brings the text. The last tenth is held out, and the vocabulary is that of the rest. It
has at most 2,048 entries: the numbers stay exact when a model's input is rounded to float16, as
`network_to_half` does.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from apex.commands.bench.training.tasks.classification import (
    IGNORED,
    Batches,
    Classification,
    Split,
)
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.commands.command_line import UsageError

__all__ = ["LARGEST", "MASK", "UNKNOWN", "Text", "bert_base", "bert_tiny", "characters", "letters"]
__all__ += ["lstm", "masked", "seq2seq", "transformer", "words"]

LARGEST = 2048  # float16 has every whole number up to here
UNKNOWN, MASK = 0, 1  # in every vocabulary


class Text(NamedTuple):
    """Both parts as numbers, and what they stand for."""

    train: torch.Tensor
    held: torch.Tensor
    vocabulary: list[str]

    def sequences(
        self, length: int, at_most: tuple[int, int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut both parts into rows of ``length``, without what is left over.

        Args:
            length: Of a row.
            at_most: How many of each part, if not all.
        """
        train, held = (
            part[: len(part) // length * length].reshape(-1, length)
            for part in (self.train, self.held)
        )
        return (train, held) if at_most is None else (train[: at_most[0]], held[: at_most[1]])


def characters() -> Text:
    """Give the text as characters; of a mark or space, more than three in a row are three."""
    return _numbered(re.sub(r"([\W_])\1{3,}", r"\1\1\1", _topics()))


def words() -> Text:
    """Give it as words in lower case and marks; of a mark, many in a row are one."""
    found = re.finditer(r"[^\W_]+|([^\w\s]|_)\1*", _topics().lower())
    return _numbered([token[0] for token in found])


def letters() -> Text:
    """Give its words as letters in lower case with single spaces between them."""
    return _numbered(" ".join(re.findall("[a-z]+", _topics().lower())))


def _topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise UsageError(
            "this Python has no pydoc_data.topics, the text that this task learns; use another "
            "--task or another Python"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def _numbered(tokens: Sequence[str]) -> Text:
    kept = len(tokens) - len(tokens) // 10
    counts = Counter(tokens[:kept])
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    vocabulary = ["<unknown>", "<mask>", *frequent][:LARGEST]
    number = {token: n for n, token in enumerate(vocabulary)}
    numbers = torch.tensor(
        [number.get(token, UNKNOWN) for token in tokens], device="cpu", dtype=torch.int64
    )
    return Text(numbers[:kept], numbers[kept:], vocabulary)


# --- the next character ---------------------------------------------------------------------------

LENGTH = 64  # characters that a model reads at once
QUICK = (2048, 128)  # sequences to train on and held out
WIDTH = 128


def lstm(options: TaskOptions) -> Classification:
    """An LSTM of one layer."""
    return _next_character(options, _Lstm, lr=0.01)


def transformer(options: TaskOptions) -> Classification:
    """A transformer of two layers with four heads."""
    return _next_character(options, _Transformer, lr=0.003)


def _next_character(
    options: TaskOptions, network: Callable[[int], nn.Module], lr: float
) -> Classification:
    """The label of each character is the next."""
    text = characters()
    train, test = text.sequences(LENGTH + 1, QUICK if options.quick else None)
    data = Split(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]).to(options.device)
    return Classification(
        data, model=partial(network, len(text.vocabulary)), optimizer="FusedAdam", lr=lr, epochs=2,
        at_once=64,
    )  # fmt: skip


class _Lstm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.output(self.recurrent(self.embedding(tokens.long()))[0]))


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
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH, device=None, dtype=None))
        self.layers = nn.Sequential(*(_Layer(WIDTH, heads=4) for _ in range(2)))
        self.output = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.long()) + self.positions[: tokens.shape[1]]
        return cast(torch.Tensor, self.output(self.layers(x)))


# --- words backwards ------------------------------------------------------------------------------

LETTERS = 16  # of a source, and of its target
ATTENDING = 96  # width


def seq2seq(options: TaskOptions) -> Classification:
    """Write sixteen letters and spaces backwards, told after each what it should have been.

    The loss is the sum over a sequence, as in translation. Its gradients are so large that 65536,
    the first loss scale, overflows in float16: the scale falls, and is doubled after each 100 good
    steps. With the usual 2,000 this would take minutes.
    """
    text = letters()
    train, test = text.sequences(LETTERS, (8192, 512) if options.quick else None)
    data = Split(_with_read(train), train.flip(1), _with_read(test), test.flip(1))
    return Classification(
        data.to(options.device), model=partial(_Attending, len(text.vocabulary)), times=LETTERS,
        optimizer="FusedAdam", lr=0.003, epochs=3, growth_interval=100,
    )  # fmt: skip


def _with_read(source: torch.Tensor) -> torch.Tensor:
    """Append what the decoder reads: a mark, and the target but for its last character."""
    start = torch.full_like(source[:, :1], MASK)
    return torch.cat([source, start, source.flip(1)[:, :-1]], dim=1)


class _Attending(nn.Module):
    """GRUs with dot-product attention (Luong et al., 2015), taught with the right characters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, ATTENDING)
        self.encoder = nn.GRU(ATTENDING, ATTENDING // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(ATTENDING, ATTENDING, batch_first=True)
        self.attended = nn.Linear(2 * ATTENDING, ATTENDING)
        self.output = nn.Linear(ATTENDING, size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``(n, 2 * LETTERS)``, a source and what the decoder reads, to target logits."""
        source, read = self.embedding(tokens.long()).split(LETTERS, dim=1)
        encoded, last = self.encoder(source)
        decoded = self.decoder(read, last.transpose(0, 1).flatten(1)[None])[0]
        weights = F.softmax(decoded @ encoded.transpose(1, 2), dim=-1)
        both = torch.cat([decoded, weights.to(encoded.dtype) @ encoded], dim=-1)
        return cast(torch.Tensor, self.output(torch.tanh(self.attended(both))))


# --- masked words ---------------------------------------------------------------------------------

ASKED, MASKED, REPLACED = 0.15, 0.8, 0.9  # shares; the last two are cumulative


def bert_tiny(options: TaskOptions) -> Classification:
    """Two layers, 128 wide: the smallest BERT of Turc et al. (2019), with our vocabulary."""
    sizes = {"vocab_size": LARGEST, "hidden_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "intermediate_size": 512}  # fmt: skip
    return _masked_words(options, sizes, 32, (2048, 64), lr=0.001, epochs=8)


def bert_base(options: TaskOptions) -> Classification:
    """BERT-base with its 30,522 words, so that it costs what that costs; our text has fewer."""
    return _masked_words(options, {}, 128, (64, 16), lr=0.0001, epochs=3)


def _masked_words(
    options: TaskOptions, sizes: dict[str, int], length: int, quick: tuple[int, int], **numbers: Any
) -> Classification:
    """BERT from random weights. The labels are the words asked for; the held-out's are drawn once.

    ``sizes`` is what differs from BERT-base, ``length`` that of a sequence, ``quick`` the number of
    sequences to train on and held out.
    """
    import transformers

    text = words()
    train, held = text.sequences(length, quick if options.quick else None)
    finish = partial(masked, size=len(text.vocabulary))
    test = finish(held, torch.Generator("cpu").manual_seed(0))
    data = Split(train, train, *test).to(options.device)
    return Classification(
        data, model=lambda: _Bert(transformers, sizes), optimizer="FusedAdam", at_once=32,
        loader=lambda batch_size, seed: Batches((data.train_x,), batch_size, seed, finish),
        **numbers,
    )  # fmt: skip


class _Bert(nn.Module):
    """`transformers.BertForMaskedLM` with one tensor in and one out."""

    def __init__(self, transformers: Any, sizes: dict[str, int]) -> None:
        super().__init__()
        config = transformers.BertConfig(pad_token_id=None, **sizes)  # there is no padding
        self.bert = transformers.BertForMaskedLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.bert(input_ids=tokens.long()).logits)


def masked(
    rows: torch.Tensor, random: torch.Generator, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask words, drawn on the CPU so that every device has the same.

    As in Devlin et al. (2018), 15 % of the words are asked for; of these 80 % are masked, 10 %
    replaced by another of ``size`` words and 10 % left.

    Returns:
        What the model reads, and the words asked for, with `IGNORED` elsewhere.
    """
    shape = 2, *rows.shape
    drawn = torch.rand(shape, generator=random, device="cpu", dtype=torch.float32)
    others = torch.randint(2, size, rows.shape, generator=random, device="cpu").to(rows.device)
    asked, how = drawn.to(rows.device)
    tokens = torch.where(how < REPLACED, torch.where(how < MASKED, MASK, others), rows)
    chosen = asked < ASKED
    return torch.where(chosen, tokens, rows), torch.where(chosen, rows, IGNORED)
