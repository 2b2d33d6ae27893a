"""The text that every Python brings: its documentation, in characters or in words, as numbers.

The last tenth is held out, and the vocabulary is that of the rest. It has at most 2,048 entries:
the numbers stay exact when a model's input is rounded to float16, as `network_to_half` does.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from apex.bench.cli import UsageError

__all__ = ["LARGEST", "MASK", "UNKNOWN", "Text", "characters", "letters", "words"]

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
            "this Python has no pydoc_data.topics, the text that this task learns; take another "
            "--task or another Python"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def _numbered(tokens: Sequence[str]) -> Text:
    kept = len(tokens) - len(tokens) // 10
    counts = Counter(tokens[:kept])
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    vocabulary = ["<unknown>", "<mask>", *frequent][:LARGEST]
    number = {token: n for n, token in enumerate(vocabulary)}
    numbers = torch.tensor([number.get(token, UNKNOWN) for token in tokens])
    return Text(numbers[:kept], numbers[kept:], vocabulary)
