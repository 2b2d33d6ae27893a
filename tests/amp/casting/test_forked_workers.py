"""Workers of a DataLoader compute in float32 at O1 and O4, forked or spawned."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from apex import amp

ONES = {"device": "cpu", "dtype": torch.float32}


class Products(Dataset):
    """Of each item: the dtype of a product, and of what a model gives."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 1

    def __getitem__(self, index):
        x = torch.ones(4, 4, **ONES)
        product = (x @ x).dtype
        inside = []
        hook = self.model[0].register_forward_hook(lambda *of: inside.append(of[-1].dtype))
        self.model(x)
        hook.remove()
        return str(product), str(inside[0]), str((x @ x).dtype)


def dtypes(model, **options):
    loader = DataLoader(Products(model), batch_size=None, **options)
    return [name.removeprefix("torch.") for name in next(iter(loader))]


@pytest.mark.parametrize(("level", "half"), [("O1", "float16"), ("O4", "bfloat16")])
@pytest.mark.parametrize("inside_of_off", [False, True])
def test_forked_workers_are_as_spawned_ones(level, half, inside_of_off):
    """A model that a worker calls computes at its own level; functions are not cast."""
    model = nn.Sequential(nn.Linear(4, 4, **ONES))
    model = amp.initialize(model, opt_level=level, verbosity=0)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    if inside_of_off:
        with amp.disable_casts():
            assert dtypes(model, **workers) == ["float32", half, "float32"]
    assert dtypes(model, **workers) == ["float32", half, "float32"]
    # Here the dataset runs in the thread of the training, on the CPU as its losses do.
    assert dtypes(model) == [half, half, half]


def test_a_forked_workers_cast_log_is_silent(capfd):
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4, **ONES)), opt_level="O1", verbosity=2)
    capfd.readouterr()
    dtypes(model, num_workers=1, multiprocessing_context="fork")
    assert "matmul" not in capfd.readouterr().out
