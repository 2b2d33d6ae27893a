"""Words of a text: Python's own documentation, or the .txt files of a folder."""

import math
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

UNKNOWN, END = 0, 1  # numbers of "<unk>", any rare word, and "<eos>", the end of a paragraph
AT_LEAST = 3  # times that another word of the vocabulary is in the training text


class Text(NamedTuple):
    """The vocabulary, and both parts of the text as numbers of words."""

    vocabulary: list[str]
    train: torch.Tensor
    held: torch.Tensor
    checksum: int


def load(folder: str | None = None) -> Text:
    """Load the text of a folder, or of ``pydoc_data.topics``.

    The last tenth of each document's paragraphs is held out. A paragraph that was there before, in
    any document, is left out: held out, it would only test what the model knows by heart.
    """
    train, held, seen = [], [], set()
    for document in _topics() if folder is None else _files(folder):
        new = []
        for paragraph in re.split(r"\n\s*\n", document):
            words = (*re.findall(r"<unk>|\w+|[^\w\s]", paragraph), "<eos>")
            if len(words) > 1 and words not in seen:
                seen.add(words)
                new.append(words)
        kept = len(new) - len(new) // 10
        train += [word for words in new[:kept] for word in words]
        held += [word for words in new[kept:] for word in words]
    counts, first = Counter(train), ["<unk>", "<eos>"]
    vocabulary = first + sorted(w for w in counts if counts[w] >= AT_LEAST and w not in first)
    number = {word: n for n, word in enumerate(vocabulary)}
    numbers = [torch.tensor([number.get(w, UNKNOWN) for w in part]) for part in (train, held)]
    return Text(vocabulary, *numbers, checksum=zlib.crc32(repr((train, held)).encode()))


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise SystemExit("this Python has no pydoc_data.topics: pass --data FOLDER") from None
    return [topics[name] for name in sorted(topics)]


def _files(folder: str) -> list[str]:
    files = sorted(Path(folder).glob("*.txt"))
    if not files:
        raise SystemExit(f"--data {folder}: there is no file *.txt in such a folder")
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def columns(words: torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    """Cut words into ``batch`` texts of equal length, side by side: ``(length, batch)``."""
    length = len(words) // batch
    if length < 2:
        raise SystemExit(f"a text of {len(words)} words is too short to be cut into {batch}")
    return words[: length * batch].reshape(batch, length).T.contiguous().to(device)


def unigram_perplexity(text: Text) -> float:
    """The held-out perplexity if each word is as likely as it is frequent in training."""
    counts = torch.bincount(text.train, minlength=len(text.vocabulary)).double()
    return math.exp(-(counts / counts.sum()).log()[text.held].mean())
