"""FusedLion: the formula."""

import pytest
import torch

from apex.optimizers import FusedLion
from tests.optimizers.common import PATHS, take_step

paths = pytest.mark.parametrize("path", PATHS)


@paths
def test_by_hand(path):
    """The gradient's sign, then that of the average; 0 moves by the decay alone; nan shows."""
    param = torch.nn.Parameter(torch.tensor([4.0, 4.0, 4.0, 4.0]))
    optimizer = FusedLion([param], lr=0.25, betas=(0.75, 0.5), weight_decay=0.5)
    param.grad = torch.tensor([2.0, -8.0, 0.0, torch.nan])
    take_step(path, optimizer)  # 4 - 0.25 * (sign + 2)
    first = param.detach().clone()
    param.grad = torch.tensor([-2.0, 32.0, 0.0, 0.0])  # averages 1, -4, 0, nan
    take_step(path, optimizer)  # signs of 0.75 - 0.5 and -3 + 8
    nan = torch.nan
    assert first.nan_to_num(9).tolist() == [3.25, 3.75, 3.5, 9]
    second = torch.tensor([3.25 - 0.25 * 2.625, 3.75 - 0.25 * 2.875, 3.5 - 0.25 * 1.75, nan])
    assert torch.equal(param.detach().nan_to_num(9), second.nan_to_num(9))
    average = optimizer.state[param]["exp_avg"]
    assert torch.equal(average.nan_to_num(9), torch.tensor([-0.5, 14.0, 0.0, 9.0]))


@paths
def test_signs_of_awkward_numbers(path):
    """Of the smallest and the largest, of zeros, and of inf, which stays inf in the average."""
    grads = [1e-45, -1e-45, 3e38, -3e38, 0.0, -0.0, torch.inf, -torch.inf]
    signs = [1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 1.0, -1.0]
    for betas, steps, some in (((0.0, 0.5), 1, slice(8)), ((0.5, 0.5), 2, slice(2, 8))):
        param = torch.nn.Parameter(torch.full((8,), 4.0)[some])
        optimizer = FusedLion([param], lr=0.25, betas=betas)
        for number in range(1, steps + 1):
            param.grad = torch.tensor(grads[some])
            take_step(path, optimizer)
            assert param.tolist() == [4 - number * 0.25 * sign for sign in signs[some]]
        assert optimizer.state[param]["exp_avg"][-2:].tolist() == grads[-2:]
