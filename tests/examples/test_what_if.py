"""examples/what_if: the answer that its README quotes, and a training with the policy."""

import re

from apex import amp
from apex.commands.command_line import main
from tests.examples.imported import EXAMPLES, program

FOLDER = EXAMPLES / "what_if"


def shape_of(text):
    """An answer without the numbers that another processor's rounding may change."""
    return re.sub(r"[\d.]+(e\+\d+)?%?", "#", " ".join(text.split()))


def test_the_answer_is_the_quoted_one_and_its_policy_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["what-if", f"{FOLDER}/train.py:build", "--save", "policy.json"]) == 0
    answer = shape_of(capsys.readouterr().out.partition("\n\n")[0])
    pages = [
        FOLDER / "README.md",
        EXAMPLES.parent / "README.md",
        EXAMPLES.parent / "docs/what-if.md",
    ]
    for page in pages:
        quoted = shape_of(re.search(r"^    (Use O.+?)\n\n", page.read_text(), re.M | re.S)[1])
        first, mark, _ = quoted.partition(" [#]")
        assert answer.startswith(first)
        assert mark or answer == first
    losses = {}
    for given in ([], ["--policy", "policy.json"]):
        try:
            program("what_if", "train").main([*given, "--steps", "20"])
        finally:
            amp.reset()
        losses[bool(given)] = float(capsys.readouterr().out.split()[-1])
    assert losses[False] != losses[False]  # NaN
    assert losses[True] < 0.1
