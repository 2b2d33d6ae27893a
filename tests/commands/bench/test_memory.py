import subprocess
import sys

import pytest
import torch
from torch import nn

from apex.commands.bench import memory

CPU = torch.device("cpu")
MIB = 2**20


def _bytes(n, device="cpu"):
    return torch.empty(n, dtype=torch.uint8, device=device)


def _three_and_two_of_them_at_once(device):
    first = _bytes(3 * MIB, device)
    second = _bytes(5 * MIB, device)  # the peak: 8
    del first
    third = _bytes(2 * MIB, device)
    del second
    return third


def test_the_peak_of_known_allocations():
    peak = memory.peak_bytes(lambda: _three_and_two_of_them_at_once("cpu"), CPU)
    assert peak == 8 * MIB


def test_what_was_there_before_does_not_count_even_if_an_earlier_measurement_saw_it():
    kept = [_bytes(7 * MIB)]
    memory.peak_bytes(lambda: kept.append(_bytes(MIB)), CPU)
    assert memory.peak_bytes(lambda: _bytes(2 * MIB), CPU) == 2 * MIB
    assert len(kept) == 2


def test_releasing_earlier_memory_does_not_make_the_peak_smaller():
    kept = []
    memory.peak_bytes(lambda: kept.append(_bytes(4 * MIB)), CPU)

    def work():
        kept.clear()
        _bytes(MIB)

    # Freed first, 4 MiB; then 1 MiB is taken: never more in use than at the start.
    assert memory.peak_bytes(work, CPU) == 0


def test_a_training_holds_weights_gradients_and_optimizer_state():
    n = 512

    def train():
        model = nn.Linear(n, n, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, n)).sum().backward()
            optimizer.step()

    weights = 4 * n * n
    assert 3 * weights < memory.peak_bytes(train, CPU) < 3.1 * weights


def test_work_without_tensors_has_no_measurement():
    assert memory.peak_bytes(lambda: None, CPU) is None


def test_a_device_that_nobody_can_watch_has_no_measurement():
    assert memory.peak_bytes(lambda: _bytes(10, "meta"), torch.device("meta")) is None


@pytest.mark.slow
def test_nothing_is_said_and_the_environment_is_left_alone():
    """It takes 2.5 s: a process that imports torch and its profiler."""
    code = """
import os, torch
from apex.commands.bench import memory
before = dict(os.environ)
memory.peak_bytes(lambda: torch.ones(10), torch.device("cpu"))
own = {"TORCHINDUCTOR_CACHE_DIR"} - set(before)  # of torch's profiler
assert {name: one for name, one in os.environ.items() if name not in own} == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_in_the_work_comes_through():
    with pytest.raises(ZeroDivisionError):
        memory.peak_bytes(lambda: 1 / 0, CPU)


@pytest.mark.gpu
def test_the_peak_of_known_allocations_on_a_gpu():
    device = torch.device("cuda")
    peak = memory.peak_bytes(lambda: _three_and_two_of_them_at_once(device), device)
    assert peak == 8 * MIB
