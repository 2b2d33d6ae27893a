"""A user's tasks for the tests of `apex bench`: what each training does is told by its name."""

import multiprocessing
import os
import pathlib
import signal
import time
import warnings

import torch
from torch import nn

FEATURES = 16
LOG = pathlib.Path(os.environ.get("USER_TASK_LOG", os.devnull))


class Regression:
    """Fit a plane; 8 batches an epoch. Each training leaves a line with its process in the log."""

    epochs = 2
    lr = 0.005

    def model(self):
        return nn.Linear(FEATURES, 1)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x).float(), y)

    def loader(self, batch_size, seed):
        if seed % 1000 == 0:  # the first epoch of a training, and what is measured apart
            with LOG.open("a") as log:
                log.write(f"{os.getpid()}\n")
        draw = torch.Generator().manual_seed(seed)
        for _ in range(8):
            x = torch.randn(batch_size, FEATURES, generator=draw)
            yield x, x.sum(1, keepdim=True)

    def accuracy(self, model):
        x = torch.eye(FEATURES)
        error = (model(x).float() - 1).abs().mean()
        return 100 * float(1 / (1 + error))


class Slow(Regression):
    """Takes a second for an epoch."""

    def loader(self, batch_size, seed):
        for batch in super().loader(batch_size, seed):
            time.sleep(0.125)
            yield batch


class Troubled(Regression):
    """Has another trouble at each of the seeds 0 to 3."""

    def loss(self, model, batch):
        seed = torch.initial_seed()
        if seed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if seed == 3:
            raise ValueError("a mistake")
        return super().loss(model, batch) * (float("nan") if seed == 2 else 1.0)


class Loaded(Regression):
    """Its batches come from a process of a DataLoader's. Leaves a line with how that starts."""

    def loader(self, batch_size, seed):
        with LOG.open("a") as log:
            log.write(f"{multiprocessing.get_start_method()}\n")
        data = [(torch.ones(FEATURES) * i, torch.ones(1) * i) for i in range(32)]
        return torch.utils.data.DataLoader(data, batch_size, num_workers=1, drop_last=True)


class Warning_(Regression):
    """Warns in each step, under filters that forget what was shown."""

    def model(self):
        warnings.warn("the model is old", stacklevel=1)
        return super().model()

    def loss(self, model, batch):
        with warnings.catch_warnings():
            warnings.warn(f"weights of {model.weight.dtype}", UserWarning, stacklevel=1)
        return super().loss(model, batch)


class Refusing(Regression):
    """Has no batch of any size."""

    def loader(self, batch_size, seed):
        raise ValueError("no such\nsize")


class Unknown(Regression):
    optimizer = "lion"


class NoEpoch(Regression):
    epochs = 0


def build(options):
    return Regression()


def slow(options):
    return Slow()


def troubled(options):
    return Troubled()


def broken(options):
    raise ValueError("no such data\nanywhere")


def incomplete(options):
    return object()


def loaded(options):
    return Loaded()


def warning(options):
    return Warning_()


def refusing(options):
    return Refusing()


def unknown(options):
    return Unknown()


def no_epoch(options):
    return NoEpoch()
