"""What the three programs share: network, options, start of processes, lines, evaluation."""

import argparse
import importlib
import os
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from apex.parallel.launch import Environment, environment, master_address

EVERY = 100  # steps from one line of progress to the next


class ConvNet(nn.Module):
    """Two blocks of convolution, batchnorm, ReLU and pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = _block(1, 16)
        self.layer2 = _block(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images ``(n, 1, 28, 28)`` to ten scores each."""
        return self.fc(self.layer2(self.layer1(images)).flatten(1))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=5, padding=2),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def parser(description: str) -> argparse.ArgumentParser:
    """Declare the options that the three programs have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("-n", "--nodes", type=int, default=1, help="machines")
    made.add_argument("-g", "--gpus", type=int, default=1, help="GPUs, or processes, of each")
    made.add_argument("-nr", "--nr", type=int, default=0, help="number of this machine, from 0")
    made.add_argument("--epochs", type=int, default=2)
    made.add_argument("--lr", type=float, default=1e-4)
    made.add_argument("--batch-size", type=int, default=100, help="images per step and process")
    made.add_argument("--data", metavar="FOLDER", help="files of MNIST (default: small digits)")
    made.add_argument("--limit", type=int, help="train on so many images only")
    return made


# --- processes -----------------------------------------------------------------------------------


class Process(NamedTuple):
    """One of the processes that train together."""

    rank: int
    world_size: int
    device: torch.device


def start(train: Callable[[Process, argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Call ``train`` in every process that this machine is to have.

    This program starts them: ``--gpus`` on each of ``--nodes`` machines. Where torchrun, srun or
    mpirun started several processes, each of them is a rank and starts none; or, if there are
    ``--nodes`` of them and not ``--nodes`` times ``--gpus``, each is a machine.
    """
    here, asked = environment(), args.nodes * args.gpus
    are_ranks = here.world_size > 1 and asked in (1, here.world_size)
    _check(args, here, are_ranks)
    address, port = master_address()
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    if are_ranks:
        first = here.rank - here.local_rank
        _run(here.local_rank, first, here.world_size, here.local_world_size, train, args)
    else:
        machine = args.nr if here.world_size == 1 else here.rank
        words = (machine * args.gpus, asked, args.gpus, train, args)
        torch.multiprocessing.spawn(_run, words, nprocs=args.gpus)


def device_of(local_rank: int) -> torch.device:
    """Pick the GPU of a process, or the CPU where there are no GPUs."""
    gpus = torch.cuda.device_count()  # 1 in each process where srun gives each a GPU of its own
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def _check(args: argparse.Namespace, here: Environment, are_ranks: bool) -> None:
    asked = f"-n {args.nodes} -g {args.gpus} -nr {args.nr}"
    if args.nodes < 1 or args.gpus < 1 or not 0 <= args.nr < args.nodes:
        raise SystemExit(
            f"{asked}: machines and GPUs are 1 or more, and the number of this machine is from 0 "
            "to the number of machines less 1"
        )
    if are_ranks:
        return
    if here.world_size not in (1, args.nodes):
        raise SystemExit(
            f"{asked}, but {here.launcher} started {here.world_size} processes: leave these "
            "options out"
        )
    if 0 < torch.cuda.device_count() < args.gpus:
        raise SystemExit(f"{asked}, but this machine has {torch.cuda.device_count()} GPUs")


def _run(
    local_rank: int,
    first: int,
    world_size: int,
    processes: int,
    train: Callable[[Process, argparse.Namespace], None],
    args: argparse.Namespace,
) -> None:
    """Join the process group as rank ``first + local_rank`` and train."""
    device = device_of(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    # Optimizers import this. torch 2.13 never frees a process group that was made before, whose
    # threads then can crash or block the end of the program.
    importlib.import_module("torch._dynamo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank = first + local_rank
    dist.init_process_group(backend, "env://", world_size=world_size, rank=rank)
    train(Process(rank, world_size, device), args)
    dist.destroy_process_group()


# --- what is shown -------------------------------------------------------------------------------


class Report:
    """The lines of a training.

    Use it as a context manager around the loop.

    Args:
        epochs: How many there are.
        steps: How many an epoch has.
        silent: Whether to show nothing, as all ranks but the first do.
    """

    def __init__(self, epochs: int, steps: int, *, silent: bool = False) -> None:
        self._epochs, self._steps, self._silent = epochs, steps, silent
        self._done = 0

    def __enter__(self) -> "Report":
        self._began = datetime.now()
        return self

    def step(self, loss: torch.Tensor) -> None:
        """Count a step; every 100 steps of an epoch show the loss of the last one."""
        epoch, step = divmod(self._done, self._steps)
        self._done += 1
        if not self._silent and (step + 1) % EVERY == 0:
            print(
                f"Epoch [{epoch + 1}/{self._epochs}], Step [{step + 1}/{self._steps}], "
                f"Loss: {loss.item():.4f}",
                flush=True,
            )

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and not self._silent:
            print(f"Training complete in: {datetime.now() - self._began}", flush=True)


def evaluate(model: nn.Module, dataset: Dataset, device: torch.device) -> None:
    """Show how many images of ``dataset`` the model recognises. One rank may do this alone."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in DataLoader(dataset, batch_size=1000):
            found = model(images.to(device)).argmax(dim=1)
            right += (found == labels.to(device)).sum().item()
            total += len(labels)
    print(f"Accuracy on {total} test images: {100 * right / total:.2f} %", flush=True)
