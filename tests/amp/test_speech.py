"""What amp says, and where."""

import logging
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _speech

SCRIPT = """
import sys, torch
{setup}
from apex import amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity={verbosity})
with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
    scaled.backward()
    model.weight.grad.fill_(float("nan"))
optimizer.step()
"""


def run(setup="", verbosity="1"):
    code = SCRIPT.format(setup=setup, verbosity=verbosity)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def test_bare_lines_on_stdout_without_logging():
    out, err = run()
    assert "Selected optimization level O1:  Insert automatic casts" in out
    assert "Defaults for this optimization level are:" in out
    assert "cast_model_type        : None" in out
    assert "loss_scale             : dynamic" in out
    assert (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n" in out
    )
    assert err == ""


@pytest.mark.parametrize("verbosity", ["0", "False"])
def test_verbosity_0_is_silent(verbosity):
    assert run(verbosity=verbosity) == ("", "")


def test_configured_logging_gets_the_lines_instead():
    out, err = run("import logging; logging.basicConfig(level=logging.INFO)")
    assert out == ""
    assert "INFO:apex.amp:Selected optimization level O1" in err
    assert "WARNING:apex.amp:Gradient overflow." in err


def test_other_ranks_are_silent(monkeypatch, caplog):
    monkeypatch.setattr(_speech, "is_rank0", lambda: False)
    caplog.set_level(logging.INFO)
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert caplog.text == ""
    monkeypatch.undo()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert "Selected optimization level" in caplog.text


def test_only_rank_0_speaks_of_casts_and_overflows(monkeypatch, capsys):
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers

    def spoken():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=2)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
            model.weight.grad.fill_(math.nan)
        optimizer.step()
        return capsys.readouterr().out

    monkeypatch.setattr(_speech, "is_rank0", lambda: False)
    assert spoken() == ""
    monkeypatch.setattr(_speech, "is_rank0", lambda: True)
    text = spoken()
    assert "Float->Half (linear)" in text
    assert text.count("Gradient overflow") == 1
