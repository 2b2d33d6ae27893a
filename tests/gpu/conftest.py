"""The process in which kernels run ends with the tests."""

import pytest

from tests.gpu.worker import process


@pytest.fixture(scope="package", autouse=True)
def _process():
    yield
    if process.cache_info().currsize:
        process().shutdown()
        process.cache_clear()
