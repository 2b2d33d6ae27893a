"""Checkpoints that are whole at any moment, and from which a run goes on bit for bit.

The keys are those of NVIDIA's example, and three more:

* ``images_done``: images of the epoch that all ranks together have trained on.
* ``images``, ``seed``: what the order of images follows from.

No state of a random generator is saved: crops follow from the seed, the epoch and the image, and
dropout from the seed, the epoch, the step and the rank. Nor is anything of other ranks saved, since
weights, optimizer, loss scale and buffers are equal on all of them.
"""

import os
from typing import Any

import torch
from torch import nn

from apex import amp

__all__ = ["load", "position", "save"]

KEYS = ("epoch", "arch", "state_dict", "best_prec1", "optimizer")


def save(path: str, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path``, where at any moment there is the old file or the new, whole."""
    temporary = f"{path}.tmp"  # in the same folder: os.replace cannot cross file systems
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    os.replace(temporary, path)


def load(
    path: str, arch: str, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Load a checkpoint of this example, or of NVIDIA's, into the model on its device.

    Args:
        path: The file.
        arch: Name of the network.
        model: What ``amp.initialize`` returned, not wrapped in data parallelism.
        optimizer: Its optimizer, to go on training; ``None`` loads the weights alone.

    Returns:
        What the file holds, with ``best_prec1`` a float and every key that this example writes
        but, in NVIDIA's, ``amp``, ``images`` and ``seed``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not such a checkpoint, or of another network.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"--resume: there is no file {path}. Leave the option out to begin anew, or say "
            "--resume auto to begin anew if there is no checkpoint.pth.tar yet."
        )
    saved = torch.load(path, map_location="cpu", weights_only=True)
    missing = [key for key in KEYS if not isinstance(saved, dict) or key not in saved]
    if missing:
        raise ValueError(
            f"--resume: {path} is no checkpoint of this example: it lacks {', '.join(missing)}."
        )
    if saved["arch"] != arch:
        raise ValueError(
            f"--resume: {path} is of the network {saved['arch']}, the options say {arch}. Pass "
            f"--arch {saved['arch']}."
        )
    model.load_state_dict({k.removeprefix("module."): v for k, v in saved["state_dict"].items()})
    if optimizer is not None:
        optimizer.load_state_dict(saved["optimizer"])
        if "amp" in saved:
            amp.load_state_dict(saved["amp"])
    saved["best_prec1"] = float(saved["best_prec1"])
    saved.setdefault("images_done", 0)
    return saved


def position(saved: dict[str, Any], *, images: int, seed: int, global_batch: int) -> int:
    """The step of its epoch at which a checkpoint goes on.

    Args:
        saved: What ``load`` returned.
        images: Number of training images.
        seed: Of the data's order.
        global_batch: Images in a step of all ranks together.

    Raises:
        ValueError: It is of mid-epoch, and the order of images or the steps are others now, so that
            some images would be seen twice in the epoch and others not at all.
    """
    done = saved["images_done"]
    if done == 0:
        return 0
    for name, now in (("images", images), ("seed", seed)):
        if saved[name] != now:
            raise ValueError(
                f"--resume: the checkpoint is of mid-epoch, with {name} {saved[name]}; now it is "
                f"{now}. Use the same, or a checkpoint of the end of an epoch."
            )
    if done % global_batch:
        raise ValueError(
            f"--resume: the checkpoint is of mid-epoch, after {done} images; a step has "
            f"{global_batch} now (batch size times processes), which does not divide that. Use a "
            "batch size that does, or a checkpoint of the end of an epoch."
        )
    return int(done // global_batch)
