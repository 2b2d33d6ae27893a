"""The programs of examples/fp16_optimizer, each against its own float32 run."""

import os
import re

import pytest
import torch

from tests.checkpoints import assert_equal
from tests.examples import imported
from tests.tolerance import MASTERS_REGRESSION, TWO_LOSSES_REGRESSION

NAMES = ("minimal", "closure", "multi_loss")


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """The programs of the folder, in an empty folder and on a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return dict(zip(NAMES, imported.programs("fp16_optimizer", *NAMES), strict=True))


@pytest.fixture
def losses(programs, capsys):
    """Run a program; give back the losses that it printed."""

    def run(name, *words):
        programs[name].main(words)
        return [float(text) for text in re.findall(r"\d\.\d+(?:e-\d+)?", capsys.readouterr().out)]

    return run


def test_minimal(programs, losses, capsys):
    """As in float32; and saved and loaded it is the run that was never stopped."""
    exact, found = losses("minimal", "--dtype", "float32"), losses("minimal")
    assert exact[-1] < exact[0] / 1000
    assert found == pytest.approx(exact, rel=MASTERS_REGRESSION)
    saved = torch.load("saved.pth", weights_only=True)
    assert saved["optimizer"]["fp32_from_fp16"][0][0].dtype == torch.float32
    assert os.listdir() == ["saved.pth"]

    minimal = programs["minimal"]
    model, x, y = minimal.problem(minimal.parse(minimal.parser("", 200), []))
    optimizer = minimal.make_optimizer(model)
    minimal.train(model, optimizer, x, y, range(1, 101))
    assert_equal(dict(model.state_dict()), dict(saved["model"]))
    minimal.train(model, optimizer, x, y, range(101, 201))
    assert f"step 200: loss {found[-1]}\n" in capsys.readouterr().out


def test_closure(losses):
    """L-BFGS reaches the smallest loss that float16 weights have; in float32 5e-12."""
    exact, found = losses("closure", "--dtype", "float32"), losses("closure", "--steps", "2")
    assert found[0] == pytest.approx(exact[0], rel=MASTERS_REGRESSION)
    assert exact[-1] < 1e-10
    assert found[-1] < 1e-6  # 8.5e-8 over five seeds


def test_multi_loss(losses):
    exact, found = losses("multi_loss", "--dtype", "float32"), losses("multi_loss")
    square, absolute = exact[-2:]
    assert square < exact[0] / 100
    assert absolute < exact[1] / 10
    assert found == pytest.approx(exact, rel=TWO_LOSSES_REGRESSION)


def test_bfloat16(losses):
    assert losses("closure", "--dtype", "bfloat16", "--steps", "2")[-1] < 1e-4  # 5e-6
