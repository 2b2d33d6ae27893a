"""The programs of examples/fp16_optimizer, each against its own float32 run."""

import importlib
import os
import pathlib
import re
import runpy
import sys

import pytest
import torch

from tests.checkpoints import assert_equal
from tests.tolerance import MASTERS_REGRESSION, TWO_LOSSES_REGRESSION

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "fp16_optimizer"
NAMES = ("common", "minimal", "closure", "multi_loss")


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """The modules of the folder, in an empty folder and on a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.syspath_prepend(FOLDER)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]


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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--dtype float64", "invalid choice: 'float64'"),
        ("--steps 1", "--steps 1: pass 2 or more"),
        ("--save no/saved.pth", "--save no/saved.pth: pass a file in a folder that can be written"),
        ("--save .", "--save .: pass a file in a folder that can be written to"),
    ],
)
def test_wrong_options(losses, words, text, capsys):
    with pytest.raises(SystemExit):
        losses("minimal", *words.split())
    assert text in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "text"), [(KeyboardInterrupt(), "stopped"), (OSError(28, "disk full"), "disk full")]
)
def test_ends_with_one_line(programs, monkeypatch, error, text):
    def ended(*args, **kwargs):
        raise error

    monkeypatch.setattr("torch.nn.functional.mse_loss", ended)
    monkeypatch.setattr(sys, "argv", ["closure.py"])
    with pytest.raises(SystemExit, match=text):
        runpy.run_path(str(FOLDER / "closure.py"), run_name="__main__")


def test_a_bar_in_a_terminal(programs, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(programs["common"].progress(range(1, 8))) == list(range(1, 8))
    shown = capsys.readouterr().out
    assert "100%" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0  # the cursor is back
