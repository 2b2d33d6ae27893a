"""The process in which kernels run ends with the tests."""

import pytest

from tests.gpu.worker import worker


@pytest.fixture(scope="package", autouse=True)
def _process():
    yield
    if worker.cache_info().currsize:
        worker().close()
        worker.cache_clear()
