"""What the processes of pytest-xdist compute once and share."""

import fcntl
import json
import os

import pytest


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A function: ``once(name, make)`` is what ``make()`` returned in the first process to ask."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def shared(name, make):
        with open(folder / f"{name}.json", "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if not text:
                text = json.dumps(make())
                file.write(text)
        return json.loads(text)

    return shared


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
