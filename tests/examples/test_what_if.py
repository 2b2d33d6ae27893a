"""examples/what_if: the answer that its README quotes, and a training with the policy."""

import re

from apex import amp
from apex.commands.command_line import main
from tests.examples.imported import EXAMPLES, program

FOLDER = EXAMPLES / "what_if"


def shape_of(text):
    """An answer without the numbers that another processor's rounding may change."""
    return re.sub(r"[\d.]+(e\+\d+)?%?", "#", " ".join(text.replace("\n> ", " ").split()))


def test_the_answer_is_the_quoted_one_and_its_policy_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["what-if", f"{FOLDER}/train.py:build", "--save", "policy.json"]) == 0
    answer = capsys.readouterr().out.partition("\n")[0]
    for page in (FOLDER / "README.md", EXAMPLES.parent / "README.md"):
        quoted = re.search(r"^(?:> |    )(bfloat16 .+?)\n\n", page.read_text(), re.M | re.S)
        first, *later = re.split(r" \[#\] ?", shape_of(quoted[1]))
        assert shape_of(answer).startswith(first)
        assert all(part in shape_of(answer) for part in later)
        assert later[0].startswith("Use O#")
    page = (EXAMPLES.parent / "docs" / "what-if.md").read_text()
    assert shape_of(answer) == shape_of(re.search(r"^> (.+?)\n\n", page, re.M | re.S)[1])
    losses = {}
    for given in ([], ["--policy", "policy.json"]):
        try:
            program("what_if", "train").main([*given, "--steps", "20"])
        finally:
            amp.reset()
        losses[bool(given)] = float(capsys.readouterr().out.split()[-1])
    assert losses[False] != losses[False]  # NaN
    assert losses[True] < 0.1
