"""What amp says, and where."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from apex.amp import _speech
from tests.amp.training import scaled_backward, started

SCRIPT = """
import logging, sys, torch
from apex import amp

def train(verbosity):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=verbosity)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
        model.weight.grad.fill_(float("nan"))
    optimizer.step()
    for stream in (sys.stdout, sys.stderr):
        print("-" * 10, file=stream)

train(0)
train(False)
train(1)
logging.basicConfig(level=logging.INFO)
train(1)
"""


@pytest.mark.slow
def test_lines_on_standard_output_or_to_logging():
    """None at verbosity 0; to logging where the program has set it up."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    *silent, spoken, after, end = done.stdout.split("----------\n")
    assert (silent, after, end) == (["", ""], "", "")
    assert "Selected optimization level O1:  Insert automatic casts" in spoken
    assert "Defaults for this optimization level are:" in spoken
    assert "cast_model_type        : None" in spoken
    assert "loss_scale             : dynamic" in spoken
    overflow = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert overflow in spoken
    *silent, logged, end = done.stderr.split("----------\n")
    assert (silent, end) == ([""] * 3, "")
    assert "INFO:apex.amp:Selected optimization level O1" in logged
    assert "WARNING:apex.amp:Gradient overflow." in logged


@pytest.mark.parametrize("is_rank0", [False, True])
def test_only_rank_0_speaks(monkeypatch, capsys, is_rank0):
    """Of levels, casts and overflows."""
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers
    monkeypatch.setattr(_speech, "is_rank0", lambda: is_rank0)
    model, optimizer = started("O1", nn.Linear(2, 2), verbosity=2)
    scaled_backward(model(torch.full((1, 2), torch.nan)).sum(), optimizer)
    optimizer.step()
    text = capsys.readouterr().out
    for line in ("Selected optimization level", "Float->Half (linear)", "Gradient overflow"):
        assert (line in text) == is_rank0
