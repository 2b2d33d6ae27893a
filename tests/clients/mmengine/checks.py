"""mmengine: ApexOptimWrapper in the Runner and by hand, and its checkpoints."""

import io

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import ApexOptimWrapper, OptimWrapper
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner

from apex import amp
from apex.optimizers import FusedAdam
from tests.checkpoints import assert_equal

OPTIMIZERS.register_module(module=FusedAdam)

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
STEPS, SAVED_AT = 20, 10
CLIP = 0.5


class Net(BaseModel):
    """A small classifier."""

    def __init__(self, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
            torch.nn.Dropout(dropout), torch.nn.Linear(32, 4),
        )  # fmt: skip

    def forward(self, inputs, labels, mode="loss"):
        assert mode == "loss"
        return {"loss": torch.nn.functional.cross_entropy(self.layers(inputs), labels)}


def examples():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :4].argmax(1)


class Watch(Hook):
    """Notes the loss of each iteration; seeds where a checkpoint was written, as none has seeds."""

    def __init__(self, saved_at):
        self.saved_at = saved_at
        self.losses = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == self.saved_at:
            torch.manual_seed(1)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(outputs["loss"].item())


def run(folder, level, accumulated, resume=None):
    """Train with the Runner; return the losses of its iterations and the weights."""
    iterations, saved_at = STEPS * accumulated, SAVED_AT * accumulated
    watch = Watch(saved_at)
    # Its schedulers warn where the first iteration takes no step.
    scheduler = {"type": "LinearLR", "by_epoch": False, "start_factor": 1.0, "end_factor": 0.1}
    runner = Runner(
        model=Net(),
        work_dir=str(folder),
        train_dataloader={
            "dataset": [{"inputs": x, "labels": y} for x, y in zip(*examples(), strict=True)],
            "batch_size": 16,
            "sampler": {"type": "InfiniteSampler", "shuffle": True},
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": False, "max_iters": iterations},
        optim_wrapper={
            "type": "ApexOptimWrapper", "opt_level": level, "accumulative_counts": accumulated,
            "clip_grad": {"max_norm": CLIP}, "optimizer": {"type": "FusedAdam", "lr": 2e-2},
        },
        param_scheduler={**scheduler, "end": iterations} if accumulated == 1 else None,
        default_hooks={
            "checkpoint": {"type": "CheckpointHook", "interval": saved_at, "by_epoch": False}
        },
        custom_hooks=[watch],
        load_from=resume,
        resume=resume is not None,
        randomness={"seed": 0},
        log_level="WARNING",
        experiment_name=f"{folder.name}-{accumulated}-{resume is not None}",
    )  # fmt: skip
    model = runner.train()
    assert type(runner.optim_wrapper) is ApexOptimWrapper
    assert type(runner.optim_wrapper.optimizer) is FusedAdam
    half = {torch.float16, torch.float32} if level == "O2" else {torch.float32}
    assert {p.dtype for p in model.parameters()} == half
    return watch.losses, {name: entry.clone() for name, entry in model.state_dict().items()}


# Its files hold classes of its own, and torch.load has refused those since torch 2.6.
@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS:UserWarning")
@pytest.mark.parametrize("accumulated", [1, 2])
@LEVELS
def test_runner_trains_and_resumes(tmp_path, monkeypatch, level, accumulated):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    losses, weights = run(tmp_path, level, accumulated)
    scalers = amp.state_dict()
    assert scalers["loss_scaler0"]["unskipped"] >= STEPS - 1  # at O2 the first step may overflow
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    file = str(tmp_path / f"iter_{SAVED_AT * accumulated}.pth")
    resumed_losses, resumed_weights = run(tmp_path, level, accumulated, file)
    assert resumed_losses == losses[SAVED_AT * accumulated :]
    assert_equal(resumed_weights, weights)
    assert amp.state_dict() == scalers


def make(wrapper, **options):
    model = Net(dropout=0.0)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    return model, wrapper(optimizer=optimizer, clip_grad={"max_norm": CLIP}, **options)


def train(model, wrapper, iterations):
    """Train as a loop of one's own does; return the losses and the norms that were logged."""
    logged = wrapper.message_hub.log_scalars
    before = len(logged["train/grad_norm"].data[0]) if "train/grad_norm" in logged else 0
    losses = []
    for rows in iterations:
        inputs, labels = (part.roll(rows, 0)[:16] for part in examples())
        with wrapper.optim_context(model):
            loss = model(inputs, labels)["loss"]
        wrapper.update_params(loss)
        losses.append(loss.item())
    return losses, logged["train/grad_norm"].data[0][before:].tolist()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_accumulation_and_clipping_are_those_of_the_plain_wrapper(level):
    ran = []
    apexs = {"opt_level": level, "loss_scale": 2.0**10}
    for wrapper, options in [(ApexOptimWrapper, apexs), (OptimWrapper, {})]:
        model, wrapped = make(wrapper, accumulative_counts=3, **options)
        wrapped.initialize_count_status(model, 0, 10)  # steps after 3, 6, 9 and 10
        ran.append((*train(model, wrapped, range(10)), model.state_dict()))
    (losses, norms, weights), (plain_losses, plain_norms, plain_weights) = ran
    assert len(norms) == 4
    assert min(norms) > CLIP
    if level == "O0":  # scaled by a power of two, and otherwise the same
        assert losses == plain_losses
        assert norms == plain_norms
        assert_equal(weights, plain_weights)
    else:
        assert_close_for_half(losses, plain_losses)
        assert_close_for_half(norms, plain_norms)


def assert_close_for_half(found, wanted):
    """Assert that numbers are equal by torch's tolerance for float16."""
    torch.testing.assert_close(torch.tensor(found).half(), torch.tensor(wanted).half())


@pytest.mark.parametrize("loaded", ["before initialize", "after initialize"])
@LEVELS
def test_state_makes_a_round_trip(level, loaded):
    model, wrapper = make(ApexOptimWrapper, opt_level=level, accumulative_counts=2)
    train(model, wrapper, range(6))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": wrapper.state_dict()}, file)
    wanted = train(model, wrapper, range(6, 12)), model.state_dict()

    model, wrapper = make(ApexOptimWrapper, opt_level=level, accumulative_counts=2)
    if loaded == "after initialize":
        with wrapper.optim_context(model):
            pass
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert state["optimizer"]["apex_amp"]["loss_scaler0"]["unskipped"] == 3
    model.load_state_dict(state["model"])
    wrapper.load_state_dict(state["optimizer"])
    found = train(model, wrapper, range(6, 12)), model.state_dict()
    assert_equal(found, wanted)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 6
