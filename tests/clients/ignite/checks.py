"""pytorch-ignite: its supervised trainer with amp_mode="apex", and its checkpoints."""

import pytest
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver

from apex import amp
from apex.optimizers import FusedSGD
from tests.checkpoints import assert_equal

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


@pytest.fixture(autouse=True)
def _end_without_casts():
    yield
    amp.reset()  # the casts of O1 hold for a whole thread, as in NVIDIA's Apex


def start(level=None, optimizer_class=FusedSGD):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = optimizer_class(model.parameters(), lr=0.5, momentum=0.9)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    trainer = create_supervised_trainer(
        model, optimizer, torch.nn.functional.cross_entropy, device="cpu",
        amp_mode=None if level is None else "apex", gradient_accumulation_steps=2,
    )  # fmt: skip
    return model, optimizer, trainer


def train(trainer, epochs):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = list(zip(inputs.split(16), inputs[:, :4].argmax(1).split(16), strict=True))
    losses = []
    watch = trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    trainer.run(data, max_epochs=epochs)
    watch.remove()
    return losses


@LEVELS
def test_trainer_accumulates_and_trains(level):
    wanted = train(start(optimizer_class=torch.optim.SGD)[2], epochs=6)
    model, optimizer, trainer = start(level)
    losses = train(trainer, epochs=6)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 12}}
    assert {p.dtype for p in model.parameters()} == {
        torch.float16 if level == "O2" else torch.float32
    }
    assert losses[-1] < 0.7 * losses[0]
    # By torch's tolerance for float16.
    torch.testing.assert_close(torch.tensor(losses).half(), torch.tensor(wanted).half())


@LEVELS
def test_checkpoint_resumes_to_the_bit(tmp_path, level):
    model, optimizer, trainer = start(level)
    # The scale is not the one that a new training starts with.
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 0}})
    train(trainer, epochs=2)
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer, "amp": amp}
    handler = Checkpoint(saved, DiskSaver(str(tmp_path), create_dir=False))
    handler(trainer)
    file = str(tmp_path / handler.last_checkpoint)
    wanted = train(trainer, epochs=4), model.state_dict()
    model = optimizer = trainer = saved = handler = None  # one training is to be alive below

    model, optimizer, trainer = start(level)
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer, "amp": amp}
    Checkpoint.load_objects(saved, torch.load(file, weights_only=True))
    assert trainer.state.iteration == 8
    found = train(trainer, epochs=4), model.state_dict()
    assert_equal(found, wanted)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 8}}
