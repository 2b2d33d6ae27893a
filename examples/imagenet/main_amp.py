"""ImageNet training with ``apex.amp``, on one process or many; it resumes bit for bit.

NVIDIA's ``examples/imagenet/main_amp.py`` with its options, on today's PyTorch and on CPUs too.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import checkpoint
import data
import meters
import models
import options
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from apex import amp, parallel
from apex.parallel import launch

LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"  # in the current folder


class Place(NamedTuple):
    """Which of the processes this is, and the device that it computes on."""

    rank: int
    ranks: int
    device: torch.device

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def summed(self, sums: torch.Tensor) -> torch.Tensor:
        """Add up over the ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(sums)
        return sums


@dataclasses.dataclass
class Run:
    """A training and where it is."""

    args: Any
    place: Place
    model: nn.Module
    parallel_model: nn.Module  # the same, wrapped where there are several ranks
    optimizer: torch.optim.Optimizer
    train_set: data.Images | None  # None with --evaluate
    val_set: data.Images
    epoch: int = 0
    step: int = 0  # of the epoch: the next one
    best_prec1: float = 0.0

    @property
    def global_batch(self) -> int:
        """Images in a step of all ranks."""
        return self.args.batch_size * self.place.ranks

    def batches(
        self, images: data.Images, keys: list[tuple[int, int]], first: int = 0
    ) -> Iterator[data.Batch]:
        """Load batches of ``keys`` onto the device, from number ``first`` on."""
        size, cuda = self.args.batch_size, self.place.device.type == "cuda"
        loader = data.load_batches(
            images, keys, size, first=first, workers=self.args.workers, pin=cuda
        )
        return data.on_device(loader, self.place.device, memory_format(self.args))

    def save(self, *names: str) -> None:
        """Write checkpoints, on rank 0."""
        if self.place.rank > 0:
            return
        state = {
            "epoch": self.epoch,
            "arch": self.args.arch,
            "state_dict": self.model.state_dict(),
            "best_prec1": self.best_prec1,
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
            "images_done": self.step * self.global_batch,
            "images": len(self.train_set),
            "seed": self.args.seed,
        }
        for name in names:
            checkpoint.save(name, state)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or evaluate, as the options say."""
    args = options.parse(argv)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not args.deterministic
    run = prepare(args, find_place(args))
    if args.resume:
        resume(run)
    if args.evaluate:
        validate(run)
    else:
        train(run)
    if run.place.ranks > 1:
        dist.destroy_process_group()


def find_place(args: Any) -> Place:
    """Choose this process's device, by what its launcher says."""
    here = launch.environment()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        index = here.local_rank if args.local_rank is None else args.local_rank
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"the local rank is {index}, but this machine has {torch.cuda.device_count()} "
                "GPUs. Start one process per GPU."
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return Place(here.rank, here.world_size, device)


def prepare(args: Any, place: Place) -> Run:
    """Make data, model and optimizer, join the other processes, and wrap the model."""
    train_set, val_set = data.splits(args)
    torch.manual_seed(args.seed)
    model = models.build(args.arch, len(val_set.classes), pretrained=args.pretrained)
    if args.sync_bn:
        model = parallel.convert_syncbn_model(model)
    model = model.to(place.device, memory_format=memory_format(args))
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    parallel_model = model
    if place.ranks > 1:
        join(place)
        parallel_model = parallel.DistributedDataParallel(model, delay_allreduce=True)
    run = Run(args, place, model, parallel_model, optimizer, train_set, val_set)
    run.epoch = args.start_epoch
    return run


def join(place: Place) -> None:
    """Join the other processes.

    After the optimizer is made: its first use imports torch._dynamo, and torch 2.13 never frees a
    process group that was there before. gloo's threads then still run when Python ends, which
    crashed or blocked 4 of 10 runs on a busy machine.
    """
    address, port = launch.master_address()
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    store, rank, ranks = next(dist.rendezvous("env://", place.rank, place.ranks))
    # torchrun keeps its store when it restarts the processes. Without names of its own, 11 of
    # 15 restarted jobs failed or hung: gloo looked for the addresses of the processes before.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def resume(run: Run) -> None:
    """Load ``--resume`` on every rank."""
    args, path = run.args, run.args.resume
    if path == "auto":
        # Rank 0 decides: a rank that does not see the file must fail, not begin anew by itself.
        found = torch.tensor(float(run.place.rank == 0 and os.path.exists(LATEST)))
        if not run.place.summed(found.to(run.place.device)):
            run.place.say(f"=> no {LATEST} here yet: from the beginning")
            return
        path = LATEST
    optimizer = None if args.evaluate else run.optimizer
    saved = checkpoint.load(path, args.arch, run.model, optimizer)
    run.epoch, run.best_prec1 = saved["epoch"], saved["best_prec1"]
    if not args.evaluate:
        images = len(run.train_set)
        run.step = checkpoint.position(
            saved, images=images, seed=args.seed, global_batch=run.global_batch
        )
    run.place.say(f"=> loaded checkpoint '{path}' (epoch {run.epoch}, step {run.step})")
    if "amp" not in saved:
        run.place.say(f"=> '{path}' holds no state of amp: the loss scale starts anew")


def train(run: Run) -> None:
    """Train the epochs that are left, each with an evaluation and a checkpoint."""
    with meters.Profile(run.args.prof, run.place.rank) as profile:
        while run.epoch < run.args.epochs and train_epoch(run, profile):
            prec1 = validate(run)
            run.epoch, run.step = run.epoch + 1, 0
            is_best = prec1 > run.best_prec1
            run.best_prec1 = max(prec1, run.best_prec1)
            # The best one first: after a kill between the two, the epoch is done again with both.
            run.save(*([BEST] if is_best else []), LATEST)


def train_epoch(run: Run, profile: meters.Profile) -> bool:
    """Train from ``run.step`` to the end of the epoch; ``False`` if the profile ended it."""
    args, place, epoch = run.args, run.place, run.epoch
    seed = data.seed_of("order", args.seed)  # the sampler adds the epoch to it
    sampler = DistributedSampler(run.train_set, place.ranks, place.rank, seed=seed)
    sampler.set_epoch(epoch)
    keys = [(epoch, index) for index in sampler]
    steps, title = math.ceil(len(keys) / args.batch_size), f"Epoch: [{epoch}]"
    report = meters.Report(title, steps, place.ranks)
    run.model.train()
    for images, labels in run.batches(run.train_set, keys, run.step):
        if profile.is_over():
            return False
        step = run.step
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(args.lr * run.global_batch / 256, epoch, step, steps)
        # Dropout follows from these alone, so a checkpoint needs no state of random generators.
        torch.manual_seed(data.seed_of("dropout", args.seed, place.rank, epoch, step))
        logits = run.parallel_model(images)
        loss = F.cross_entropy(logits, labels)
        run.optimizer.zero_grad()
        with amp.scale_loss(loss, run.optimizer) as scaled_loss:
            scaled_loss.backward()
        run.optimizer.step()
        report.count(len(images))
        if step % args.print_freq == 0:  # reading a number waits for the device, and for the ranks
            place.say(report.line(step, place.summed(sums_of(logits, labels, loss))))
        run.step += 1
        if args.checkpoint_freq and run.step % args.checkpoint_freq == 0:
            run.save(LATEST)
    return True


def learning_rate(base: float, epoch: int, step: int, steps: int) -> float:
    """The rate of a step: a tenth from epochs 30, 60 and 80 on, after a linear rise over five."""
    rate = base * 0.1 ** (epoch // 30 + (epoch >= 80))
    return rate * min(1.0, (1 + step + epoch * steps) / (5 * steps))


def validate(run: Run) -> float:
    """Evaluate each image once, divided among the ranks; return the percentage of right classes."""
    place, count = run.place, len(run.val_set)
    keys = [(0, index) for index in range(place.rank, count, place.ranks)]
    report = meters.Report("Test: ", math.ceil(len(keys) / run.args.batch_size), place.ranks)
    total = torch.zeros(4, dtype=torch.float64, device=place.device)
    run.model.eval()
    with torch.no_grad():
        for step, (images, labels) in enumerate(run.batches(run.val_set, keys)):
            logits = run.model(images)
            sums = sums_of(logits, labels, F.cross_entropy(logits, labels))
            total += sums
            report.count(len(images))
            if step % run.args.print_freq == 0 and place.rank == 0:
                place.say(report.line(step, sums))  # rank 0's: the others may have fewer batches
    _, top1, top5, images_seen = place.summed(total).tolist()
    prec1, prec5 = 100 * top1 / images_seen, 100 * top5 / images_seen
    place.say(f" * Prec@1 {prec1:.3f} Prec@5 {prec5:.3f}")
    return prec1


def sums_of(logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Of a batch: the loss times images, hits at 1, hits at 5, images; float64."""
    images = torch.full((1,), len(labels), dtype=torch.float64, device=loss.device)
    return torch.cat(
        [loss.detach().double() * images, meters.hits(logits.detach(), labels), images]
    )


def memory_format(args: Any) -> torch.memory_format:
    """Of weights and images."""
    return torch.channels_last if args.channels_last else torch.contiguous_format


if __name__ == "__main__":
    main()
