"""The four ranks that the tests of parallel parts share."""

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("four"), count=4) as ranks:
        yield ranks
