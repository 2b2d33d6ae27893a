"""Three programs with one line changed: with amp.capture they end at the weights of single steps.

The graph is recorded on a CPU (:mod:`tests.recorded_graph`).
"""

import argparse
import contextlib
from unittest import mock

import pytest
import torch

from apex import amp
from tests.examples.imported import program, programs
from tests.recorded_graph import like_a_gpu


def both_ways(train):
    """The weights after ``train()`` with amp.capture and without, and the captured steps."""
    steps, capture, found = [], amp.capture, []

    def captured(function):
        steps.append(capture(function))
        return steps[-1]

    for replacement in (captured, lambda function: function):
        with like_a_gpu(), mock.patch.object(amp, "capture", replacement):
            model = train()
            found.append([tensor.clone() for tensor in model.state_dict().values()])
        amp.reset()
    return (*found, steps)


def assert_replayed(train, replays):
    replayed, single, (step,) = both_ways(train)
    assert [*map(torch.equal, replayed, single)] == [True] * len(single)
    assert step.replays == replays


@pytest.mark.slow
@pytest.mark.onednn
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_mnist(level):
    graph, common = programs("mnist", "mnist-graph", "common")
    words = {"lr": 0.01, "data": None, "limit": 44, "batch_size": 4, "epochs": 1}
    args = argparse.Namespace(opt_level=level, **words)
    process = common.Process(0, 1, torch.device("cpu"))

    def train():
        with mock.patch.object(graph.common, "evaluate") as evaluate:
            graph.train(process, args)
        return evaluate.call_args.args[0]

    assert_replayed(train, 11 - 3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_small_gpt(level, capsys):
    gpt = program("gpt", "train")
    words = "--steps 12 --layers 1 --width 16 --length 12 --batch-size 2 --opt-level"
    assert_replayed(lambda: gpt.train(gpt.parse([*words.split(), level])), 12 - 3)
    assert capsys.readouterr().out.count("step 12/12: loss ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_bert(level, monkeypatch):
    pytest.importorskip("transformers")
    finetune = program("bert", "finetune")
    texts = finetune.data.Texts(
        [f"word number {n}" for n in range(88)], [n % 10 for n in range(88)]
    )
    monkeypatch.setattr(finetune.data, "load", lambda limit: (texts, texts))
    words = "--hidden 16 --layers 1 --length 8 --batch-size 8 --epochs 1 --accumulate 2 --graph"

    def train():
        run = finetune.prepare(finetune.parse([*words.split(), "--opt_level", level]))
        with contextlib.redirect_stdout(None):
            finetune.train(run)
        return run.model

    assert_replayed(train, 11 - 3)
