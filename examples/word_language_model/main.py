"""Train a recurrent language model on words, in mixed precision."""

import argparse
import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import checkpoint
import data
import torch
import torch.nn.functional as F
from model import KINDS, Model, with_options

from apex import amp
from apex.fp16_utils import FP16_Optimizer

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
HELD_OUT_BATCH = 10
POSITIVE = ("emsize", "nhid", "nlayers", "lr", "clip", "epochs", "batch_size", "bptt")
MAY_CHANGE = ("data", "epochs", "log_interval", "save", "resume")  # when a run is resumed


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="of .txt files; default: Python's documentation")
    add("--model", choices=KINDS, default="LSTM", help="a network of apex.RNN (default: LSTM)")
    add("--precision", choices=[*LEVELS, "fp16_optimizer"], default="O4", help="default: O4")
    add("--loss-scale", help="a number, or dynamic; default: the level's own, or dynamic")
    add("--emsize", type=int, default=200, help="features of a word")
    add("--nhid", type=int, default=200, help="features of a layer")
    add("--nlayers", type=int, default=2)
    add("--lr", type=float, default=20.0, help="divided by 4 after an epoch without progress")
    add("--clip", type=float, default=0.25, help="norm of the gradients")
    add("--epochs", type=int, default=20)
    add("--batch_size", "--batch-size", type=int, default=20)
    add("--bptt", type=int, default=35, help="words of a step")
    add("--dropout", type=float, default=0.2)
    add("--tied", action="store_true", help="the last layer has the embedding's weights")
    add("--seed", type=int, default=1111)
    add("--log-interval", type=int, default=50, metavar="STEPS")
    add("--save", default="model.pt", metavar="FILE", help="for the state after the best epoch")
    add("--resume", action="store_true", help="go on from the file of --save")
    args = parser.parse_args(argv)
    for name in (*POSITIVE, "log_interval"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: pass more than 0")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout}: pass 0 or more, and less than 1")
    if args.loss_scale not in (None, "dynamic"):
        with contextlib.suppress(ValueError):
            args.loss_scale = float(args.loss_scale)
        if not isinstance(args.loss_scale, float) or not 0 < args.loss_scale < math.inf:
            parser.error(f"--loss-scale {args.loss_scale}: pass a number above 0, or dynamic")
    if args.tied and args.emsize != args.nhid:
        parser.error(f"--tied: --emsize {args.emsize} and --nhid {args.nhid} must be equal")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed}: pass 0 to 2**32 - 1")
    folder = os.path.dirname(args.save) or "."
    writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
    if os.path.isdir(args.save or ".") or not writable:
        parser.error(f"--save {args.save}: pass a file in a folder that can be written to")
    return args


def build(args: argparse.Namespace, words: int, device: torch.device) -> tuple[Model, Any]:
    """Make the model and its optimizer, in a precision."""
    torch.manual_seed(args.seed)
    model = with_options(vars(args), words).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    scale = args.loss_scale
    if args.precision in LEVELS:
        level = args.precision
        return amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    dynamic = scale in (None, "dynamic")
    scales = {"dynamic_loss_scale": True} if dynamic else {"static_loss_scale": scale}
    model = model.half()
    return model, FP16_Optimizer(optimizer, **scales, verbose=False)


def losses(model: Model, text: torch.Tensor, bptt: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the loss of each piece of a text, and how many words were predicted."""
    model.rnn.reset_hidden(text.shape[1])
    for start in range(0, len(text) - 1, bptt):
        piece = text[start : start + bptt + 1]
        scores = model(piece[:-1])
        yield F.cross_entropy(scores.flatten(0, 1), piece[1:].flatten()), piece[1:].numel()
        model.rnn.detach_hidden()  # the states go on, their history ends


def take_step(loss: torch.Tensor, optimizer: Any, clip: float) -> None:
    """Step on a loss, in either of two ways."""
    optimizer.zero_grad()
    if isinstance(optimizer, FP16_Optimizer):
        optimizer.backward(loss)
        optimizer.clip_master_grads(clip)
    else:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
    optimizer.step()


def train_epoch(
    args: argparse.Namespace, epoch: int, model: Model, optimizer: Any, text: torch.Tensor
) -> None:
    """Take a step for each piece of the text."""
    torch.manual_seed(args.seed + epoch)  # dropout: a checkpoint needs no state of generators
    model.train()
    steps, rate = math.ceil((len(text) - 1) / args.bptt), optimizer.param_groups[0]["lr"]
    total = torch.zeros((), device=text.device)
    for step, (loss, _) in enumerate(losses(model, text, args.bptt), 1):
        take_step(loss, optimizer, args.clip)
        total += loss.detach()
        if step % args.log_interval == 0:
            mean = total.item() / args.log_interval
            print(
                f"| epoch {epoch:3d} | {step:5d}/{steps:5d} batches | lr {rate:5.2f} | loss "
                f"{mean:5.2f} | ppl {perplexity(mean):8.2f}",
                flush=True,
            )
            total.zero_()


@torch.no_grad()
def evaluate(model: Model, text: torch.Tensor, bptt: int) -> float:
    """Compute the mean loss of a held-out word."""
    model.eval()
    total = [(loss.item() * count, count) for loss, count in losses(model, text, bptt)]
    return sum(part for part, _ in total) / sum(count for _, count in total)


def perplexity(loss: float) -> float:
    """Compute e to the loss; inf where that is too large."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Train for ``--epochs``, with an evaluation after each."""
    args = options(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = data.load(args.data)
    train = data.columns(text.train, args.batch_size, device)
    held = data.columns(text.held, HELD_OUT_BATCH, device)
    unigram = data.unigram_perplexity(text)
    print(f"{len(text.train)} words to train on, {len(text.held)} held out", flush=True)
    model, optimizer = build(args, len(text.vocabulary), device)
    kept = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    kept["checksum"] = text.checksum
    done, best = 0, math.inf
    if args.resume:
        saved = checkpoint.load(args.save)
        checkpoint.check_options(args.save, saved["options"], kept)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if args.precision in LEVELS:
            amp.load_state_dict(saved["amp"])
        done, best = saved["epoch"], saved["loss"]
        print(f"resumed after epoch {done}", flush=True)
    for epoch in range(done + 1, args.epochs + 1):
        since = time.monotonic()
        train_epoch(args, epoch, model, optimizer, train)
        loss = evaluate(model, held, args.bptt)
        print(
            f"| end of epoch {epoch:3d} | time: {time.monotonic() - since:5.2f}s | held-out loss "
            f"{loss:5.2f} | held-out ppl {perplexity(loss):8.2f}",
            flush=True,
        )
        if loss < best:
            best = loss
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["amp"] = amp.state_dict() if args.precision in LEVELS else None
            state |= {"epoch": epoch, "loss": loss, "options": kept}
            checkpoint.save(args.save, {**state, "vocabulary": text.vocabulary})
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4
    if best == math.inf:
        raise SystemExit(f"no epoch ended with a finite loss; try less than --lr {args.lr:g}")
    print(f"held-out perplexity {perplexity(best):.1f}; by frequency alone {unigram:.1f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; --resume goes on after the best epoch") from None
    except OSError as error:  # a text that cannot be read, a full disk
        raise SystemExit(str(error)) from None
