"""The table of behaviours fits the tree; what plants their bugs tells a test that is red."""

import re

import pytest

from tests import plant
from tests.behaviours import AREAS, BEHAVIOURS, Behaviour
from tests.trees import small_repository
from tools.copies import Copy

COUNTS = {"amp": 20, "optimizers": 12, "ops": 10, "debug": 6, "report": 6}
ONE = BEHAVIOURS[0]

pytestmark = pytest.mark.skipif(not (plant.ROOT / "src").is_dir(), reason="not in a checkout")


def test_every_text_that_a_bug_replaces_is_there_once_and_its_test_is_there():
    """If a change of the code moved one: plant it anew from the sentence, and see its test red."""
    assert plant.problems(BEHAVIOURS) == []


def test_the_table_is_whole():
    assert {area: len(some) for area, some in AREAS.items()} == COUNTS
    assert len({one.name for one in BEHAVIOURS}) == len(BEHAVIOURS)
    for one in BEHAVIOURS:
        assert one.users.endswith("."), one.name
        assert one.plant.endswith("."), one.name
        assert one.old != one.new, one.name


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"old": "not in the file"}, "old occurs 0 times"),
        ({"old": "\n"}, r"old occurs \d\d+ times"),
        ({"file": "src/apex/gone.py"}, "old occurs 0 times in src/apex/gone.py"),
        ({"test": "tests/test_plant.py::test_gone[case]"}, "no tests/test_plant.py::test_gone"),
        ({"test": "tests/gone.py::test_one"}, "no tests/gone.py::test_one"),
    ],
)
def test_what_no_longer_fits_is_to_be_planted_anew(changed, said, monkeypatch, capsys):
    monkeypatch.setattr(plant, "BEHAVIOURS", [ONE._replace(**changed)])
    assert plant.main(["--check"]) == 1
    pattern = rf"{ONE.name}: .*{said}.*plant it anew from the sentence.*\n"
    (line,) = capsys.readouterr().out.splitlines(keepends=True)
    assert re.fullmatch(pattern, line)


MODULE, TEST = "def double(x):\n    return 2 * x\n", "from module import double\n"
TEST += "def test_two():\n    assert double(1) == 2\ndef test_none():\n    assert double(0) == 0\n"
BUG = Behaviour("bug", "", "", "test_it.py::test_two", "module.py", "2 * x", "3 * x")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    folder = small_repository(tmp_path / "tree", MODULE, TEST)
    monkeypatch.setattr(plant, "ROOT", folder)
    return folder


def test_a_bug_is_planted_in_a_copy_and_taken_out_again(tree, tmp_path):
    copy = Copy(tree, tmp_path / "copy")
    with copy.changed("module.py", "x = 3\n"):
        assert (tmp_path / "copy/module.py").read_text() == "x = 3\n"
    assert (tmp_path / "copy/module.py").read_text() == MODULE
    assert (tree / "module.py").read_text() == MODULE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "status", "said"),
    [
        ("test_it.py::test_two", 0, "red    bug: test_it.py::test_two\n1 of 1 bugs were seen\n"),
        ("test_it.py::test_none", 1, "GREEN  bug: 1 passed in [^\n]*\n0 of 1 bugs were seen\n"),
        ("test_it.py::test_no", 1, "These are not green without a bug:\n  ERROR: not found: .*\n"),
    ],
    ids=["red", "green", "not there"],
)
def test_a_test_is_red_green_or_not_there(tree, test, status, said, capsys):
    assert plant.see_all([BUG._replace(test=test)], [], count=2) == status
    assert re.fullmatch(said, capsys.readouterr().out)
