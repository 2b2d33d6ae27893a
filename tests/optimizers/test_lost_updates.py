"""The meter of updates that round to nothing."""

import pytest
import torch

from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.optimizers.common import PATHS, on


def weights(dtype, values):
    param = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    param.grad = -torch.ones_like(param)  # upwards, where the interpreter truncates too
    return param


@pytest.mark.parametrize("path", PATHS)
def test_half_of_the_updates_are_below_half_an_ulp(path):
    # An ulp of bfloat16 is 2**-7 at 1 and 2**-9 at 0.25: a step of 2**-9 is lost at the first.
    param = weights(torch.bfloat16, [1.0, 1.0, 0.25, 0.25])
    optimizer = FusedSGD([param], lr=2.0**-9)
    meter = optimizer.count_lost_updates()
    with on(path):
        optimizer.step()
    assert meter.share == 0.5
    param.grad.zero_()  # nothing to lose
    with on(path):
        optimizer.step()
    assert meter.share == 0.25
    meter.reset()
    assert meter.share == 0.0
    assert optimizer.count_lost_updates(False) is None
    with on(path):
        optimizer.step()
    assert meter.share == 0.0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("storage", "most", "least"),
    [("plain", 1.0, 1.0), ("low_bits", 0.0, 0.0), ("kahan", 0.0, 0.0), ("stochastic", 0.95, 0.7)],
)
def test_what_each_storage_loses(storage, most, least, path):
    param = weights(torch.bfloat16, [1.0] * 512)
    optimizer = FusedAdam([param], lr=1e-3, storage=storage)
    meter = optimizer.count_lost_updates()
    with on(path):
        optimizer.step()
    assert least <= meter.share <= most


@pytest.mark.parametrize("path", PATHS)
def test_float32_loses_nothing_and_a_skipped_step_neither(path):
    param = weights(torch.float32, [1.0] * 8)
    optimizer = FusedAdam([param], lr=1e-3)
    meter = optimizer.count_lost_updates()
    optimizer.step()
    assert meter.share == 0.0
    half = weights(torch.bfloat16, [1.0] * 8)
    optimizer = FusedAdam([half], lr=1e-5)
    meter = optimizer.count_lost_updates()
    optimizer.step_scaled(1.0, torch.ones(()))
    assert meter.share == 0.0


@pytest.mark.parametrize("path", PATHS)
def test_other_optimizers_count_too(path):
    param = weights(torch.bfloat16, [1.0] * 8)
    optimizer = FusedLAMB([param], lr=1e-6)
    meter = optimizer.count_lost_updates()
    with on(path):
        optimizer.step()
    assert meter.share == 1.0


@pytest.mark.parametrize("path", PATHS)
def test_a_step_that_the_device_skips_is_not_counted(path, monkeypatch):
    monkeypatch.setattr(_runtime, "waits", lambda device: True)  # as a GPU that lags behind
    param = weights(torch.bfloat16, [1.0, 0.25])
    optimizer = FusedSGD([param], lr=2.0**-9)  # lost at the first
    meter = optimizer.count_lost_updates()
    with on(path):
        for skipped in (1.0, 0.0, 1.0, 1.0):
            optimizer.step_scaled(1.0, torch.tensor(skipped))
    assert meter.share == 0.5
