"""The word language model example, tiny, run in this process on a CPU."""

import contextlib
import importlib
import math
import pathlib
import random
import re
import runpy
import sys
from unittest import mock

import pytest
import torch

from apex import amp
from tests.checkpoints import assert_equal

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "word_language_model"
NAMES = ("data", "checkpoint", "model", "main", "generate")
TINY = "--emsize 16 --nhid 16 --nlayers 2 --batch_size 8 --bptt 10 --log-interval 10 --dropout 0.1"


@pytest.fixture(scope="module")
def modules():
    """The modules of the folder, as its programs import them; other examples have such names."""
    others = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a text in which each word allows two of 20 words to come next."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    paragraphs = []
    for _ in range(150):
        word, words = draw.randrange(20), []
        for _ in range(20):
            words.append(f"w{word}")
            word = (3 * word + draw.randrange(2)) % 20
        paragraphs.append(" ".join(words))
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    return folder


@pytest.fixture
def run(modules, texts, tmp_path, monkeypatch):
    """Run a program with options in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def program(words, name="main"):
        own = [] if name != "main" or "--data" in words else ["--data", str(texts)]
        try:
            with mock.patch("torch.cuda.is_available", return_value=False):
                modules[name].main([*TINY.split(), *own, *words.split()] if own else words.split())
        finally:
            amp.reset()

    return program


EVERY = ["O0", "O1", "O2", "O3", "O4", "O5", "fp16_optimizer"]
CASES = [("LSTM", precision) for precision in EVERY]
CASES += [("mLSTM", "O1"), ("mLSTM", "fp16_optimizer"), ("GRU", "O5"), ("Tanh", "O2"), ("ReLU", "O4")]


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_learns_and_writes(run, kind, precision, capsys):
    run(f"--model {kind} --precision {precision} --epochs 3")
    out = capsys.readouterr().out
    print(out)
    reached, unigram = re.search(r"perplexity ([\d.]+); by frequency alone ([\d.]+)\n$", out).groups()
    assert float(reached) < 0.5 * float(unigram)
