"""What the processes of pytest-xdist compute once and share."""

import pytest


@pytest.fixture(scope="session")
def hopper(once):
    """What was found in the cases that the default suite compiles, for an H100."""
    from tests.kernels.test_compiled import compiled

    return once("hopper", lambda: compiled("sm_90"))


@pytest.fixture(scope="session")
def planted(once):
    """What was found in the kernels with planted defects, for an H100."""
    from tests.kernels.test_compiled import PLANTED, program

    return once("planted", lambda: program(str(PLANTED), "sm_90")["sm_90"])
