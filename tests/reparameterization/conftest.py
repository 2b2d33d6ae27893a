"""Every test here leaves the process as if amp had never been used."""

import pytest

from apex import amp


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()
