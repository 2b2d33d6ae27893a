"""Fine-tune BERT with ``apex.amp`` to tell which part of mathematics a paragraph is about."""

import argparse
import dataclasses
import functools
import math
import os
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB

try:
    import data
    import transformers
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is missing: pip install transformers==4.57.6 scikit-learn"
    ) from None

RATES = {"FusedAdam": 1e-3, "FusedLAMB": 4e-3}  # for random weights
PRETRAINED_RATE = 5e-5
Tokens = dict[str, torch.Tensor]
NOT_COMPARED = {"save", "save_every", "resume", "opt_level"}  # may be others when a run goes on


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program with a message where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--opt_level", "--opt-level", choices=["O0", "O1", "O2", "O4", "O5"], default="O4")
    add("--optimizer", choices=[*RATES], default="FusedAdam")
    add("--lr", type=float, help=f"default: {RATES}, with --model {PRETRAINED_RATE}")
    add("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    add("--clip", type=float, default=1.0, metavar="NORM", help="largest gradient norm; 0: any")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=32, help="paragraphs of a step")
    add("--accumulate", type=int, default=1, metavar="N", help="passes that a step is cut into")
    add("--length", type=int, default=64, help="tokens after which a paragraph is cut off")
    add("--graph", action="store_true", help="replay steps as a CUDA graph; pads to --length")
    add("--limit", type=int, metavar="N", help="train on so many paragraphs only")
    add("--seed", type=int, default=0, help="of weights, order and dropout")
    add("--model", metavar="NAME_OR_DIR", help="pretrained weights and tokenizer, local ones")
    add("--layers", type=int, default=2, help="of the random model")
    add("--hidden", type=int, default=128, help="size of its layers, a multiple of 4")
    add("--dropout", type=float, default=0.1, help="of the random model")
    add("--save", metavar="FILE", help="write a checkpoint at the end of each epoch")
    add("--save-every", type=int, metavar="STEPS", help="and each time after so many steps")
    add("--resume", metavar="FILE", help="go on from a checkpoint")
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "accumulate", "limit", "layers", "hidden", "save_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: it must be at least 1")
    if args.length < 3:
        parser.error(f"--length {args.length}: it must be at least 3, two of them special tokens")
    if args.hidden % 4:
        parser.error(f"--hidden {args.hidden}: it must be a multiple of 4, the number of heads")
    if not (0 <= args.warmup < 1 and 0 <= args.dropout < 1 and args.clip >= 0):
        parser.error("--warmup and --dropout are from 0 to below 1, --clip is 0 or more")
    check_save(parser, args)
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed}: it must be 0 to 2**32 - 1")
    if args.lr is None:
        args.lr = PRETRAINED_RATE if args.model else RATES[args.optimizer]
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr}: it must be above 0 and finite")
    return args


def check_save(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program where a checkpoint could not be written, before the training."""
    if args.save is not None:
        folder = os.path.dirname(args.save) or "."
        writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
        if os.path.isdir(args.save or ".") or not writable:
            parser.error(f"--save {args.save}: pass a file in a folder that can be written to")
    elif args.save_every:
        parser.error("--save-every needs --save FILE")


@dataclasses.dataclass
class Run:
    """A training and where it is."""

    args: argparse.Namespace
    train: data.Texts
    test: data.Texts
    tokenizer: transformers.PreTrainedTokenizerBase
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    step: int = 0  # steps done
    loss: float | torch.Tensor = 0.0  # sum over the steps of this epoch

    def __post_init__(self) -> None:
        """Make the step, with ``--graph`` one that is replayed."""
        step = functools.partial(step_on, self)
        self.step_on = amp.capture(step) if self.args.graph else step

    @property
    def parts(self) -> dict[str, object]:
        """What has a state."""
        names = ("model", "optimizer", "scheduler")
        return {**{name: getattr(self, name) for name in names}, "amp": amp}

    @property
    def origin(self) -> dict[str, object]:
        """What the course of the training follows from."""
        options = {k: v for k, v in vars(self.args).items() if k not in NOT_COMPARED}
        return {**options, "data": data.fingerprint(self.train, self.test)}

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return -(-len(self.train.texts) // self.args.batch_size)

    def save(self) -> None:
        """Write a checkpoint: at any moment there is the old file or the new one, whole."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state.update(step=self.step, loss=float(self.loss), origin=self.origin)
        temporary = f"{self.args.save}.tmp"
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it gets its name
        os.replace(temporary, self.args.save)

    def load(self, path: str) -> None:
        """Go on from a checkpoint of the same training."""
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            origin = saved["origin"]
        except FileNotFoundError:
            raise SystemExit(f"--resume {path}: there is no such file") from None
        except Exception:  # noqa: BLE001  (whatever torch.load raises on another kind of file)
            raise SystemExit(f"--resume {path}: this is no checkpoint of this program") from None
        for name, now in self.origin.items():
            if origin.get(name) != now:
                raise SystemExit(
                    f"--resume {path}: {name} was {origin.get(name)} and is {now} now; the run "
                    "goes on with the same options and data only"
                )
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.step, self.loss = saved["step"], saved["loss"]
        print(f"resumed at step {self.step}", flush=True)


def prepare(args: argparse.Namespace) -> Run:
    """Make data, model, optimizer and schedule."""
    train, test = data.load(args.limit)
    torch.manual_seed(args.seed)
    tokenizer, model = pretrained(args) if args.model else random_model(args, train.texts)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    # Biases and the weights of norms are not decayed, as BERT's authors do.
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    if args.optimizer == "FusedLAMB":
        optimizer = FusedLAMB(groups, args.lr, max_grad_norm=0.0)  # --clip is what clips
    else:
        optimizer = FusedAdam(groups, args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    run = Run(args, train, test, tokenizer, model, optimizer, None)
    total = args.epochs * run.epoch_steps
    rising = max(1, round(args.warmup * total))
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rising, (total - step) / max(1, total - rising))
    )
    return run


def attention(args: argparse.Namespace) -> str:
    """Choose how transformers computes attention: "sdpa" reads on the host whether it is masked."""
    return "eager" if args.graph else "sdpa"


def random_model(
    args: argparse.Namespace, texts: list[str]
) -> tuple[transformers.PreTrainedTokenizerBase, torch.nn.Module]:
    """Make a small BERT with random weights and a vocabulary of the training texts."""
    tokenizer = data.tokenizer(texts)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=4 * args.hidden,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        initializer_range=0.02 * (768 / args.hidden) ** 0.5,  # 0.02 is BERT's, whose size is 768
        max_position_embeddings=args.length,
        num_labels=len(data.CLASSES),
        attn_implementation=attention(args),
    )
    return tokenizer, transformers.BertForSequenceClassification(config)


def pretrained(
    args: argparse.Namespace,
) -> tuple[transformers.PreTrainedTokenizerBase, torch.nn.Module]:
    """Load ``--model`` from a folder or from the files that transformers has downloaded before."""
    transformers.logging.set_verbosity_error()  # it warns that the classifier is a new one
    words = {"local_files_only": True}
    head = {"num_labels": len(data.CLASSES), "ignore_mismatched_sizes": True}
    head["attn_implementation"] = attention(args)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, **words)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            args.model, **words, **head
        )
    except (ImportError, OSError, ValueError) as error:  # ImportError: there is no tokenizer
        raise SystemExit(
            f"--model {args.model}: neither a folder with a model and its tokenizer nor a name "
            f"that transformers has downloaded before ({' '.join(str(error).split())})"
        ) from None
    most = getattr(model.config, "max_position_embeddings", args.length)
    if args.length > most:
        raise SystemExit(f"--length {args.length}: {args.model} takes {most} tokens at most")
    return tokenizer, model.float()


def encode(run: Run, part: data.Texts, indices: list[int]) -> tuple[Tokens, torch.Tensor]:
    """Turn some paragraphs into tokens; return their labels too."""
    tokens = run.tokenizer(
        [part.texts[index] for index in indices],
        truncation=True,
        max_length=run.args.length,
        padding="max_length" if run.args.graph else True,
        return_tensors="pt",
    ).to(run.model.device)
    labels = torch.tensor([part.labels[index] for index in indices], device=run.model.device)
    return dict(tokens), labels


def step_on(run: Run, passes: list[tuple[Tokens, torch.Tensor]]) -> torch.Tensor:
    """Take one step on a batch that is cut into passes, whose gradients add up."""
    args, optimizer, total = run.args, run.optimizer, 0.0
    optimizer.zero_grad()
    count = sum(len(labels) for _, labels in passes)
    for tokens, labels in passes:
        loss = F.cross_entropy(run.model(**tokens).logits, labels, reduction="sum") / count
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        total = total + loss.detach()
    if args.clip:
        amp.clip_grad_norm_(optimizer, args.clip)
    optimizer.step()
    return total


def train_step(run: Run, indices: torch.Tensor) -> None:
    """Take one step on a batch, in ``--accumulate`` passes."""
    # Dropout follows from these alone, so a checkpoint needs no state of random generators.
    torch.manual_seed(run.args.seed * 10**6 + run.step)
    run.model.train()
    chunks = indices.chunk(run.args.accumulate)
    loss = run.step_on([encode(run, run.train, some.tolist()) for some in chunks])
    run.loss = run.loss + loss  # read at the end: on a GPU .item() would wait
    run.scheduler.step()
    run.step += 1


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Compute the accuracy on the paragraphs that were held out."""
    run.model.eval()
    right = 0
    for some in torch.arange(len(run.test.texts)).split(128):
        tokens, labels = encode(run, run.test, some.tolist())
        right += (run.model(**tokens).logits.argmax(dim=1) == labels).sum().item()
    return right / len(run.test.texts)


def train(run: Run) -> None:
    """Train the steps that are left, with an evaluation after each epoch."""
    args, length, began = run.args, run.epoch_steps, time.perf_counter()
    for step in range(run.step, args.epochs * length):
        epoch, position = divmod(step, length)
        order = torch.Generator().manual_seed(args.seed * 10**6 + epoch)
        batches = torch.randperm(len(run.train.texts), generator=order).split(args.batch_size)
        train_step(run, batches[position])
        if position + 1 == length:
            loss, accuracy = float(run.loss) / length, evaluate(run)
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy on held-out files "
                f"{accuracy:.1%}, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            run.loss = 0.0
        if args.save and (position + 1 == length or run.step % (args.save_every or length) == 0):
            run.save()


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and compare with simpler classifiers."""
    args = parse(argv)
    run = prepare(args)
    if args.resume is not None:
        run.load(args.resume)
    print(f"{len(run.train.texts)} paragraphs to train on, {len(run.test.texts)} held out", end="")
    print(f"; accuracy of the largest class {data.majority(run.train, run.test):.1%}", end="")
    print(f", of a bag of words {data.bag_of_words(run.train, run.test):.1%}", flush=True)
    try:
        train(run)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after step {run.step}") from None


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    except OSError as error:  # a full disk
        raise SystemExit(str(error)) from None
