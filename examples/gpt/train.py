"""Train a small GPT on the characters of Python's documentation, each step one CUDA graph."""

import argparse
import time
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

HEADS, EVERY = 4, 100


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a norm and added to its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = FusedLayerNorm(width), FusedLayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, length, width)`` to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, words: int, length: int, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, dropout) for _ in range(layers)])
        self.norm, self.head = FusedLayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map characters ``(batch, length)`` to scores of the next, ``(batch, length, n)``."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.words(text) + self.places(places))))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--opt-level", choices=["O0", "O1", "O2", "O4", "O5"], default="O2")
    add("--steps", type=int, default=1000)
    add("--batch-size", type=int, default=16)
    add("--length", type=int, default=64, help="characters of a sequence")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64, help=f"a multiple of {HEADS}")
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "length", "layers", "width"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: pass 1 or more")
    if args.width % HEADS:
        parser.error(f"--width {args.width}: pass a multiple of {HEADS}")
    return args


def train(args: argparse.Namespace) -> nn.Module:
    """Train, and show the mean loss of each 100 steps in nats a character."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    raw = "".join(topics.values()).encode("ascii", "replace")
    text = torch.tensor(list(raw), dtype=torch.int64, device=device)
    model = GPT(128, args.length, args.layers, args.width, args.dropout).to(device)
    optimizer = FusedAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(batch[:, :-1]).float()
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        return loss

    step = amp.capture(train_step)  # without this line: step = train_step

    total, began = torch.zeros((), device=device), time.perf_counter()
    places = torch.arange(args.length + 1, device=device)
    for number in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length, (args.batch_size, 1), device=device)
        total += step(text[starts + places])
        schedule.step()
        if number % EVERY == 0 or number == args.steps:
            mean = total.item() / ((number - 1) % EVERY + 1)
            taken = time.perf_counter() - began
            print(f"step {number}/{args.steps}: loss {mean:.3f}, {taken:.0f} s", flush=True)
            total.zero_()
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train."""
    train(parse(argv))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
