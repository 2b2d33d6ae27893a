"""Objects that an older Apex pickled whole, with the names that its classes and files had."""

import pytest
import torch

from apex import amp
from tests.saved_whole import make

MODULES = {
    "lstm": lambda m: m(make.inputs(5, 2, 4))[0],
    "mlstm": lambda m: m(make.inputs(5, 2, 4))[0],
    "attention": lambda m: m(make.inputs(5, 2, 8), None, None)[0],
    "softmax": lambda m: m(make.inputs(1, 2, 4, 4).bfloat16(), None),
    "column": lambda m: m(make.inputs(3, 2, 4))[0],
    "bottleneck": lambda m: m(make.inputs(2, 4, 6, 6)),
    "batchnorm": lambda m: m(make.inputs(2, 4, 4, 4)),
    "cross-entropy": lambda m: m(make.inputs(3, 4), torch.arange(3, device="cpu")),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with make.one_rank():
        yield


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def _load(name):
    return torch.load(make.HERE / f"{name}.pt", weights_only=False)


def _of_amp(name, saved):
    """The same training of today with the saved states: ``initialize`` refuses saved masters."""
    made = make.TRAININGS[name]()
    for key in ("model", "optimizer"):
        made[key].load_state_dict(saved[key].state_dict())
    return made


@pytest.mark.parametrize("name", make.TRAININGS)
def test_a_training_goes_on(name):
    saved = _load(name)
    assert make.loss_of(saved).isfinite()
    if name.startswith("amp-O"):
        saved = _of_amp(name, saved)
    losses = [make.step(saved) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    saved["optimizer"].load_state_dict(saved["optimizer"].state_dict())
    repr(saved["model"]), repr(saved["optimizer"])


def test_modules_run():
    saved = _load("modules")
    assert saved.keys() == MODULES.keys()
    for name, module in saved.items():
        assert MODULES[name](module).isfinite().all(), name


def test_loss_scalers_go_on():
    saved = _load("loss-scalers")
    assert saved["amp"].loss_scale() == 2.0**16
    assert saved["static"].loss_scale == saved["dynamic"].loss_scale == 128.0
    saved["dynamic"].update_scale(True)
    assert saved["dynamic"].loss_scale == 64.0


def test_options_of_a_level():
    saved = _load("options")
    assert (saved.opt_level, saved.loss_scale) == ("O2", 128.0)
