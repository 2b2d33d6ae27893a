"""Every test here leaves the process as if amp had never been used."""

import pytest
import torch

from apex import amp


def _autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@pytest.fixture(autouse=True)
def _reset():
    before = _autocast_state()
    yield
    amp.reset()
    assert torch.is_autocast_enabled("cpu") is False
    assert _autocast_state() == before
