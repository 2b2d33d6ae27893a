"""A classifier with attention on numbers of 0 to 255, whose scores float16 cannot hold.

``apex what-if examples/what_if/train.py:build`` says in which formats it can be trained.
``python examples/what_if/train.py --policy FILE`` trains it with the modules in float32 that the
policy names.
"""

import argparse
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

WIDTH, WORDS = 64, 8
Batch = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """One head of self-attention, which divides its scores after the product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words ``(batch, words, width)`` to the values that they attend to."""
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return torch.softmax(scores / math.sqrt(WIDTH), -1) @ self.value(x)


class Classifier(nn.Module):
    """Attention, a norm, and two linear layers on the mean of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map words ``(batch, words, width)`` to two scores."""
        mean = self.norm(self.attention(x)).mean(1)
        return self.head(F.relu(self.hidden(mean)))


class Task:
    """What ``apex bench`` and ``apex what-if`` ask for."""

    optimizer, lr = "adam", 1e-3

    def model(self) -> nn.Module:
        """Build the model in float32."""
        return Classifier()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the cross entropy."""
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    def loader(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Give 100 batches of features of 0 to 255, larger in one half of the words' widths."""
        random = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x = 195 * torch.rand(batch_size, WORDS, WIDTH, generator=random)
            y = torch.randint(2, (batch_size,), generator=random)
            half = torch.arange(WIDTH) < WIDTH // 2
            yield x + 60 * (half == y[:, None])[:, None], y


def build(options: object) -> Task:
    """Make the task; ``options`` says where and with how much data, which this one ignores."""
    return Task()


def main(argv: list[str] | None = None) -> None:
    """Train for some steps at a level, with a policy or without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--policy")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    task, model = Task(), Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=task.lr)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, policy=args.policy, verbosity=0
    )
    for step, batch in zip(range(1, args.steps + 1), task.loader(64, 0), strict=False):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
