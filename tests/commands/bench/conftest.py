"""What several tests of `apex bench` look at."""

import pathlib
from typing import NamedTuple

import pytest

from apex.commands.bench.output.figures import Drawn
from apex.commands.bench.training import plots
from apex.commands.bench.training.verdict import verdicts
from tests.commands.bench import made


class Pictures(NamedTuple):
    """What `plots.draw` wrote and returned."""

    folder: pathlib.Path
    drawn: dict[str, Drawn]


@pytest.fixture(scope="session")
def troubled(once, tmp_path_factory):
    """The pictures of `made.troubled`: to draw its six takes 4 s, so all tests have the same.

    And those that use it are marked slow.
    """
    folder, of = tmp_path_factory.mktemp("troubled"), made.troubled()
    found = once("troubled", lambda: [str(folder), plots.draw(of, verdicts(of), folder)])
    return Pictures(pathlib.Path(found[0]), {name: Drawn(*one) for name, one in found[1].items()})
