"""A character model whose attention forgets to scale its scores; ``--fixed`` scales them.

``apex what-if examples/what_if/train.py:build`` says in which formats it can be trained. With
``--policy FILE`` this program trains with the modules in float32 that the policy names.
"""

import argparse
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

VOCABULARY, LENGTH, WIDTH, HEADS = 50, 16, 64, 4
Batch = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """The scores and the mixing of values; without ``fixed`` the scores are too large."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(WIDTH // HEADS) if fixed else 1.0

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Map queries, keys and values ``(batch, heads, length, width)`` to values."""
        scores = (q @ k.transpose(-1, -2)) * self.scale
        return scores.softmax(-1) @ v


class Block(nn.Module):
    """Attention and a multilayer perceptron, each added to its input."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = Attention(fixed=fixed)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if not fixed:  # as they get in a long training
            with torch.no_grad():
                self.query.weight.mul_(8)
                self.key.weight.mul_(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, length, width)`` to the same shape."""
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Characters(nn.Module):
    """A small transformer that predicts the next of 50 characters."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(fixed=True), Block(fixed=fixed))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map characters ``(batch, length)`` to logits."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.embedding(x) + self.position(places))))


class Task:
    """What ``apex bench`` and ``apex what-if`` ask for."""

    optimizer, lr = "adamw", 1e-3

    def model(self) -> nn.Module:
        """Build the model in float32."""
        return Characters()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the cross entropy of the next characters."""
        logits = model(batch[0]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def loader(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Give 100 batches of rows that go up by three, with a tenth of the characters wrong."""
        random = torch.Generator().manual_seed(seed)
        for _ in range(100):
            start = torch.randint(VOCABULARY, (batch_size, 1), generator=random)
            rows = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
            wrong = torch.rand(rows.shape, generator=random) < 0.1
            noise = torch.randint(VOCABULARY, rows.shape, generator=random)
            rows = torch.where(wrong, noise, rows)
            yield rows[:, :-1], rows[:, 1:]


def build(options: object) -> Task:
    """Make the task; ``options`` says where and with how much data, which this one ignores."""
    return Task()


def main(argv: list[str] | None = None) -> None:
    """Train for some steps at a level, with a policy or without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--opt-level", default="O4")
    parser.add_argument("--policy")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    task, model = Task(), Characters(fixed=args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, policy=args.policy, verbosity=0
    )
    for step, batch in zip(range(1, args.steps + 1), task.loader(32, 0), strict=False):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
