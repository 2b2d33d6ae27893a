"""Train a small transformer whose layers are spread over the ranks.

    python examples/tensor_parallel/train.py
    torchrun --nproc-per-node 2 examples/tensor_parallel/train.py --sequence-parallel

Both print the same losses: the first has all of each weight, in the second each rank has half of
the heads, of the inner features and of the vocabulary.
"""

import argparse
import codecs
import contextlib
import io
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from apex.optimizers import FusedAdam
from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.layers import FusedLayerNorm

HIDDEN, HEADS, VOCABULARY = 32, 4, 64


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=32, help="letters in a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument(
        "--sequence-parallel", action="store_true",
        help="divide activations outside of the layers' pairs along the sequence",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: it must be at least 1")
    return options


def letters() -> torch.Tensor:
    """The Zen of Python, as numbers from 0 to 63."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = codecs.decode(this.s, "rot13")
    known = sorted(set(text))
    return torch.tensor([known.index(letter) for letter in text])


class Block(torch.nn.Module):
    """Attention and a perceptron, each between a column- and a row-parallel layer."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.heads = HEADS // ranks
        common = {
            "use_cpu_initialization": True,  # the weights of one process, in parts
            "sequence_parallel_enabled": sequence_parallel,
        }
        column = {"gather_output": False, **common}
        row = {"input_is_parallel": True, **common}
        # queries, keys and values side by side: each is divided by itself
        self.qkv = tensor_parallel.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, stride=3, **column)
        self.out = tensor_parallel.RowParallelLinear(HIDDEN, HIDDEN, **row)
        self.up = tensor_parallel.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **column)
        self.down = tensor_parallel.RowParallelLinear(4 * HIDDEN, HIDDEN, **row)
        self.norms = torch.nn.ModuleList(
            FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return ``(sequence, batch, features)``; the sequence may be in parts."""
        x = x + self.out(self.attention(self.qkv(self.norms[0](x))[0]))[0]
        return x + self.down(F.gelu(self.up(self.norms[1](x))[0]))[0]

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """Compute the heads of this rank."""
        length, batch, _ = qkv.shape
        q, k, v = (
            part.view(length, batch, self.heads, -1).permute(1, 2, 0, 3)
            for part in qkv.chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).reshape(length, batch, -1)


class Model(torch.nn.Module):
    """An embedding, a block, a norm, and the logits."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.embedding = tensor_parallel.VocabParallelEmbedding(
            VOCABULARY, HIDDEN, use_cpu_initialization=True
        )
        self.block = Block(sequence_parallel)
        self.norm = FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel)
        self.logits = tensor_parallel.ColumnParallelLinear(
            HIDDEN, VOCABULARY, bias=False, gather_output=False, use_cpu_initialization=True,
            sequence_parallel_enabled=sequence_parallel,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's part of the vocabulary."""
        x = self.embedding(ids)
        if self.sequence_parallel:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        return self.logits(self.norm(self.block(x)))[0]


def add_up_sequence_parallel_gradients(model: Model) -> None:
    """Add up gradients of norms and biases, of which each rank saw its part of the sequence."""
    group = parallel_state.get_tensor_model_parallel_group()
    for param in model.parameters():
        if getattr(param, "sequence_parallel_enabled", False):
            dist.all_reduce(param.grad, group=group)


def train(options: argparse.Namespace) -> tuple[list[float], Model]:
    """Train, and return the losses and the model; the groups have to be initialised."""
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model = Model(options.sequence_parallel).to(torch.float64 if options.float64 else torch.float32)
    optimizer = FusedAdam(model.parameters(), lr=options.lr)
    text, losses = letters(), []
    choose = torch.Generator().manual_seed(0)  # the same letters on all ranks
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.length, (options.batch,), generator=choose)
        batch = torch.stack([text[start : start + options.length + 1] for start in starts], 1)
        logits = model(batch[:-1])
        loss = tensor_parallel.vocab_parallel_cross_entropy(logits, batch[1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        if options.sequence_parallel:
            add_up_sequence_parallel_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def main(arguments: list[str] | None = None) -> None:
    """Train and print the losses."""
    options = parse(arguments)
    if "RANK" in os.environ:  # of torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report(options)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def report(options: argparse.Namespace) -> None:
    """Train on all ranks, and print on the first."""
    ranks = dist.get_world_size()
    if HEADS % ranks or options.length % ranks:
        raise SystemExit(f"{ranks} ranks: start 1, 2 or 4, which divide --length {options.length}")
    parallel_state.initialize_model_parallel(ranks)
    losses, model = train(options)
    if dist.get_rank() == 0:
        size = sum(param.numel() for param in model.parameters())
        print(f"{ranks} ranks, {size} parameters on each")
        for step in range(0, len(losses), max(1, len(losses) // 6)):
            print(f"step {step:3d}: loss {losses[step]:.4f}")
        print(f"last step: loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
