"""Every test here leaves the process as if amp had never been used."""

import pytest
import torch

from apex import amp
from apex.amp.gradients import overflow
from tests.amp.levels import autocast_state
from tests.amp.training import Delayed


@pytest.fixture
def _group():
    """A process group of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def runs_behind(monkeypatch):
    """Treat the CPU as a device that runs behind the host."""
    monkeypatch.setattr(overflow, "runs_behind", lambda device: True)
    monkeypatch.setattr(overflow, "AsyncCopy", Delayed)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two ranks, for the tests of a file."""
    from tests.amp.ranks.cells import Pair

    with Pair(tmp_path_factory.mktemp("ranks")) as both:
        yield both


@pytest.fixture(autouse=True)
def _reset():
    before = autocast_state()
    yield
    amp.reset()
    assert torch.is_autocast_enabled("cpu") is False
    assert autocast_state() == before
