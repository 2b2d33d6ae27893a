"""examples/debug: each program fails, and `apex debug` says of it what the README quotes."""

import json
import re

import pytest

from apex import amp
from tests.debug.in_process import main
from tests.examples.imported import EXAMPLES, program

FOLDER = EXAMPLES / "debug"
STORIES = {  # program -> cause, losses that are NaN without a watch, step of the report
    "attention": ("range", 20, 1),
    "distances": ("model", 4, 1),
    "corrupted_row": ("data", 12, 5),
}


@pytest.fixture
def debug(monkeypatch, tmp_path, capsys):
    """Run `apex debug` on a program; give back its losses, stderr and the folder of reports."""
    monkeypatch.chdir(EXAMPLES.parent)  # lines of programs are named from here
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "apex-debug"

    def run(*words):
        *options, name = [word for word in words if word != "--fixed"]
        script = [f"examples/debug/{name}.py", *["--fixed"] * ("--fixed" in words)]
        amp.reset()
        try:
            code = main(["debug", "--out", str(out), *options, *script])
        finally:
            amp.reset()
        said = capsys.readouterr()
        assert code == 0, said.err
        return losses(said.out), said.err, out

    return run


def losses(printed):
    return re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)


def quoted():
    """The sentences that the README quotes, each as one line, in the order of its sections."""
    blocks = re.findall(r"(?:^> .+\n)+", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return [" ".join(block.replace("\n> ", " ").removeprefix("> ").split()) for block in blocks]


def shape_of(sentence):
    """A sentence without the numbers that another processor's rounding may change."""
    return re.sub(r"\b\d+ inf\b|\b\d\.\d+e\+\d+\b", "#", sentence)


@pytest.mark.parametrize("story", STORIES)
def test_a_story_is_explained_as_its_readme_says(debug, story):
    found, said, out = debug("--skip", story)
    report = json.loads((out / "report.json").read_text())
    assert (report["cause"], report["step"]) == (STORIES[story][0], STORIES[story][2])
    sentence = quoted()[list(STORIES).index(story)]
    assert shape_of(report["sentence"]) == shape_of(sentence)
    assert report["sentence"] in said
    assert (out / "report.txt").read_text().strip() in said
    assert (found[-1] == "nan") == (story == "attention")  # a step that is skipped harms no other


@pytest.mark.parametrize("page", ["README.md", "docs/nan.md"])
def test_a_page_begins_with_the_report_of_the_first_story(debug, page):
    _, said, _ = debug("attention")
    text = (EXAMPLES.parent / page).read_text()
    block = re.search(r"^    apex\.debug: bmm .+?\n\n", text, re.MULTILINE | re.DOTALL)[0]
    report = " ".join(said[said.index("apex.debug: bmm") :].split())
    assert shape_of(report).startswith(shape_of(" ".join(block.split())))


@pytest.mark.parametrize("story", STORIES)
def test_without_apex_debug_a_story_becomes_nan(story, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    program("debug", story).main([])
    amp.reset()
    assert losses(capsys.readouterr().out).count("nan") == STORIES[story][1]


@pytest.mark.parametrize("story", STORIES)
def test_a_story_that_is_mended_trains_and_nothing_is_written(debug, story):
    found, said, out = debug(story, "--fixed")
    assert "nan" not in found
    assert (said.count("\n"), out.exists()) == (1, False)
    assert " losses were finite\n" in said or " losses and gradients of " in said
