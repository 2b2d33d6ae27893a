"""Every test here leaves the process as if neither amp nor a watch had ever been used."""

import pytest
import torch

from apex import amp
from apex.debug.watch import _watches


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()
    assert not torch.is_autocast_enabled("cpu")
    _watches.clear()
