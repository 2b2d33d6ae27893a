"""What a benchmark trains: the protocol of a task, ours and the user's alike.

``apex bench --task user.py:build`` imports the file, with its folder first on the import path. It
calls ``build`` with a `TaskOptions`, and needs three functions of what that returns, which may be
any object or a module (two, without ``loss``, if it has a `step`)::

    class Regression:
        def model(self):  # in float32, on the CPU; the seed is set before
            return torch.nn.Linear(1024, 512)

        def loss(self, model, batch):  # a scalar; the batch is on the model's device
            x, y = batch
            return torch.nn.functional.mse_loss(model(x).float(), y)

        def loader(self, batch_size, seed):  # one epoch; the seed decides the order
            yield ...


    def build(options):
        return Regression()

Each epoch asks for ``loader(batch_size, seed)`` again, with another seed. A batch is a tensor, or a
tuple, list or dict of tensors, on any device. What else a task may have is in `Task`.

At the level ``FP16`` a model must take one tensor, which `network_to_half` rounds to float16.
Numbers of words or characters stay exact up to 2,048; ``embedding(tokens.long())`` takes them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from apex.commands.bench.training.precision import Precision

__all__ = ["Task", "TaskOptions"]


@dataclass(frozen=True)
class TaskOptions:
    """What ``build`` is told."""

    device: torch.device
    """Where the training will be. Data that is small may be there from the start."""
    quick: bool = False
    """Whether to take less data, so that an epoch takes a few seconds on a CPU."""
    data: Path | None = None
    """The folder of ``--data``, for tasks whose data are files of the user's."""


class Task:
    """`model`, `loss` and `loader` are needed; the rest has defaults.

    A user's class need not inherit: its attributes are looked up with these defaults.
    """

    def __init__(self, **attributes: Any) -> None:
        """Make a task of these functions and numbers, by their names here."""
        for name, value in attributes.items():
            setattr(self, name, value)

    optimizer: str = "sgd"
    """One of `OPTIMIZERS` in ``trainer.py``, where ``--optimizer`` says nothing."""
    lr: float | None = None
    """Learning rate for `optimizer`; ``None`` is that of `OPTIMIZERS`."""
    epochs: int = 1
    """Where ``--epochs`` says nothing."""

    def model(self) -> nn.Module | Sequence[nn.Module]:
        """Build the model in float32; a sequence of models has an optimizer for each."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the loss of a batch, a scalar."""
        raise NotImplementedError

    def loader(self, batch_size: int, seed: int) -> Iterable[Any]:
        """Give the batches of one epoch; the last may not be smaller."""
        raise NotImplementedError

    accuracy: Callable[[nn.Module], float] | None = None
    """``accuracy(model)``: per cent right on data that were not trained on, called after each epoch
    in evaluation mode without gradients; ``None`` where a task has no such number."""

    test_loss: Callable[[nn.Module], float] | None = None
    """``test_loss(model)``: mean loss on those data, from losses in float32, called like `accuracy`
    and in the level's forward context; ``None`` where there is none."""

    test_size: int | None = None
    """How many answers `accuracy` counts: images, or characters of a text. ``None`` if unknown."""

    chance: float | None = None
    """The accuracy of guessing, in per cent, that a trained model must exceed. ``None`` if
    unknown: then an accuracy is compared with that of the untrained model."""

    step: (
        Callable[
            ["Precision", Sequence[nn.Module], Sequence[torch.optim.Optimizer], Any], torch.Tensor
        ]
        | None
    ) = None
    """``step(precision, models, optimizers, batch)``: a whole training step that returns the loss,
    for tasks with several losses or models; ``None`` is zero_grad, `loss`, backward, step.
    Yours computes losses under ``with precision.forward():`` (without it `native-fp16` trains in
    float32), then calls ``precision.backward(loss, optimizer, loss_id)`` and
    ``precision.step(optimizer)``."""

    losses: int = 1
    """How many losses a step has, each with a loss scale of its own."""

    growth_interval: int = 2000
    """Steps without an overflow after which a loss scale that moves is doubled."""
