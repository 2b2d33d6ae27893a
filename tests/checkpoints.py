"""Checkpoints compared, and those of trainings whose ranks share the tensors."""

import io

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint import state_dict


def assert_equal(left, right):
    """Two checkpoints, bit for bit, whatever they hold."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


def reloaded(value, weights_only=False):
    """What a file holds that ``value`` was saved to."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def scripted(module):
    """A module that was scripted, after a file held it."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def parts(model, optimizer):
    """What torch.distributed.checkpoint saves of a training, and loads into."""
    return {
        "model": state_dict.get_model_state_dict(model),
        "optimizer": state_dict.get_optimizer_state_dict(model, optimizer),
    }


def put(model, optimizer, state):
    """Continue from what `parts` gave and a checkpoint filled."""
    state_dict.set_model_state_dict(model, state["model"])
    state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"])


def load(model, optimizer, folder, **options):
    """Continue from a checkpoint."""
    state = parts(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder, **options)
    put(model, optimizer, state)


def resumed(made, train, folder, first=None, change=lambda *training: training):
    """Weights and states of a training that goes on, each with that of one that was loaded.

    And the names of the first weight's states.

    Args:
        made: Makes model and optimizer.
        train: Trains them on the numbered batches.
        folder: Where the checkpoint is saved.
        first: What makes the one that is saved, if that is another.
        change: What becomes of the one that goes on, of model and optimizer, after it was saved.
    """
    going, loaded = (first or made)(), made()
    train(*going, range(3))
    checkpoint.save(parts(*going), checkpoint_id=folder)
    going = change(*going)
    load(*loaded, folder)
    for training in (going, loaded):
        train(*training, range(3, 5))
    found = []
    for mine, theirs in zip(*(model.parameters() for model, _ in (going, loaded)), strict=True):
        left, right = going[1].state[mine], loaded[1].state[theirs]
        assert left.keys() == right.keys()
        found += [(mine, theirs), *((left[key], right[key]) for key in left)]
    return found, [*going[1].state[next(going[0].parameters())]]
