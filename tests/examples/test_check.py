"""examples/check: `apex check` finds its two mistakes, and its pages quote what is printed."""

import re

import pytest

from apex.debug.check.mistakes import KINDS
from tests.debug.in_process import main
from tests.examples.imported import EXAMPLES

SCRIPT = "examples/check/train.py"
PAGES = [EXAMPLES / "check" / "README.md", EXAMPLES.parent / "docs" / "check.md"]


@pytest.fixture
def check(monkeypatch, capsys):
    """Run `apex check` on the program; its exit code, losses and errors."""
    monkeypatch.chdir(EXAMPLES.parent)  # lines of programs are named from here
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(*words):
        code = main(["check", SCRIPT, *words])
        out, err = capsys.readouterr()
        return code, [float(one) for one in re.findall(r"\d\.\d+", out)], err

    return run


def shape_of(text):
    """A report without the numbers that another processor's rounding may change."""
    return re.sub(r"\d\S*", "#", " ".join(text.split()))


def test_both_mistakes_are_found_as_the_pages_say(check):
    code, losses, said = check()
    assert code == 3
    assert min(losses) > 1
    for page in PAGES:
        quoted = re.search(r"^    apex check: 2 precision .+?\n\n", page.read_text(), re.M | re.S)[
            0
        ]
        assert shape_of(quoted) == shape_of(said)
        lines = [int(one) for one in re.findall(r"train\.py:(\d+)", quoted)]
        assert lines == [int(one) for one in re.findall(r"train\.py:(\d+)", said)]
    readme = (EXAMPLES.parent / "README.md").read_text()
    block = re.search(rf"^    \$ apex check {SCRIPT}\n(    1 .+?)\n\n", readme, re.M | re.S)[1]
    finding, mark, end = block.partition("\n    [...]")  # the second mistake is left out
    assert shape_of(f"{finding} 2 sum-in-16-bits") in shape_of(said)
    assert (mark, end) == ("\n    [...]", "")
    assert re.findall(r"train\.py:\d+", block)[0] in said


def test_the_program_that_is_mended_trains_and_nothing_is_found(check):
    code, losses, said = check("--fixed")
    assert code == 0
    assert max(losses) < 0.5
    assert said.startswith("apex check: no precision mistakes in 200 steps")


def test_the_page_has_a_row_for_each_kind():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", PAGES[1].read_text(), re.M)
    kinds = {name: text for name, text in rows if name in KINDS}
    assert kinds == {
        name: " | ".join([kind.does, kind.hurts, " ".join(kind.fix)])
        for name, kind in KINDS.items()
    }
