"""Import the programs of an example, and end them in the middle."""

import contextlib
import importlib
import pathlib
import sys
from unittest import mock

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
NEEDS = {
    "bert": "transformers sklearn",
    "dcgan": "sklearn matplotlib",
    "mnist": "sklearn",
    "reinforcement_learning": "gymnasium matplotlib",
}


def programs(folder, *names):
    """Import programs with their siblings; other examples have modules of the same names."""
    for needed in NEEDS.get(folder, "").split():
        pytest.importorskip(needed)
    path = EXAMPLES / folder
    own = [file.stem for file in path.glob("*.py")]
    others = {module: sys.modules.pop(module) for module in own if module in sys.modules}
    sys.path.insert(0, str(path))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(path))
        for module in own:
            sys.modules.pop(module, None)
        sys.modules.update(others)


def program(folder, name):
    return programs(folder, name)[0]


class Killed(BaseException):
    """Ends a run; nothing may catch it."""


@contextlib.contextmanager
def killed_at(owner, name, number):
    """The n-th call of a function raises ``Killed``, which ends the block."""
    effects = [*[mock.DEFAULT] * (number - 1), Killed]
    dying = mock.Mock(wraps=getattr(owner, name), side_effect=effects)
    with mock.patch.object(owner, name, dying), contextlib.suppress(Killed):
        yield
        raise AssertionError(f"{name} was called {dying.call_count} times, not {number}")
