"""Programs that save, copy or reset under ``torch.inference_mode``, and train on afterwards."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam
from tests.amp.levels import HALF, LEVELS, MODEL, assert_same, cast, product
from tests.amp.training import scaled_backward, started


class Adapted(nn.Module):
    """A frozen layer, a buffer, and a head that trains (LoRA)."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.base.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.head(self.base(x) * self.scale)


def start(level, optimizer_class=torch.optim.SGD):
    torch.manual_seed(0)
    model = Adapted()
    return started(level, model, optimizer_class(model.head.parameters(), lr=0.1))


def step(model, optimizer):
    optimizer.zero_grad()
    scaled_backward(model(torch.ones(2, 3)).float().square().mean(), optimizer)
    optimizer.step()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedAdam])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_saved_there_changes_nothing(level, optimizer_class):
    """State dicts, gradients' norms and masters, as a callback may ask for them."""
    results = []
    for saves in (False, True):
        model, optimizer = start(level, optimizer_class)
        for _ in range(2):
            step(model, optimizer)
            with torch.inference_mode():
                model(torch.ones(2, 3))
                if saves:
                    saved = model.state_dict(), optimizer.state_dict(), amp.state_dict()
                    assert {x.dtype for x in saved[0].values()} == {torch.float32}
                    assert list(amp.master_params(optimizer))
        results.append([*model.state_dict().values()])
        amp.reset()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        step_plainly(model, optimizer)
    assert_same(*results)


def step_plainly(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_entries_made_there_can_be_written_to_as_any_other(level):
    model, optimizer = start(level)
    with torch.inference_mode():
        entry = model.state_dict()["base.weight"]
    entry.fill_(0.5)
    model(torch.ones(2, 3))
    assert model.base.weight[0, 0] == 0.5
    step(model, optimizer)
    assert torch.equal(model.state_dict()["base.weight"], torch.full((4, 3), 0.5))


@pytest.mark.parametrize("level", MODEL)
def test_a_buffer_made_there_has_a_copy_as_its_entry(level):
    model, optimizer = start(level)
    with torch.inference_mode():
        model.scale = model.scale * 2
        assert model.state_dict()["scale"].tolist() == [2.0] * 4
    saved = model.state_dict()["scale"]
    assert (saved.dtype, saved.tolist()) == (torch.float32, [2.0] * 4)
    with torch.inference_mode():
        model.scale.fill_(3.0)
    assert model.state_dict()["scale"].tolist() == [3.0] * 4
    amp.reset()
    assert (model.scale.dtype, model.scale.tolist()) == (torch.float32, [3.0] * 4)


@pytest.mark.parametrize("level", MODEL)
def test_a_buffer_made_there_before_initialize(level):
    """Its data is replaced by data of 16 bits, which hides where it was made."""
    model = Adapted()
    with torch.inference_mode():
        model.scale = torch.full((4,), 2.0)
    cast(level, model)
    for _ in range(2):
        assert model.scale.dtype == MODEL[level]
        saved = model.state_dict()["scale"]
        assert (saved.dtype, saved.tolist()) == (torch.float32, [2.0] * 4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_deepcopy_made_there(level):
    model, optimizer = start(level)
    step(model, optimizer)
    with torch.inference_mode():
        best = copy.deepcopy(model)
        inside = best.state_dict()
    with torch.no_grad():
        assert torch.equal(best(torch.ones(2, 3)), model(torch.ones(2, 3)))
    assert_same(best.state_dict().values(), inside.values())
    model.load_state_dict(best.state_dict())
    step(model, optimizer)
    amp.initialize(best, enabled=False)
    assert {p.dtype for p in best.parameters()} == {torch.float32}
    with pytest.raises(RuntimeError, match="was created in torch.inference_mode"):
        amp.initialize(best, torch.optim.SGD(best.parameters(), lr=0.1), opt_level=level)


@pytest.mark.parametrize("level", ["O0", *MODEL])
def test_reset_there_gives_weights_back_that_train(level):
    model, optimizer = start(level)
    step(model, optimizer)
    with torch.inference_mode():
        model.state_dict()
        amp.reset()
    assert not any(p.is_inference() for p in [*model.parameters(), *model.buffers()])
    step_plainly(model, optimizer)


@pytest.mark.parametrize("level", HALF)
def test_casts_of_functions_cannot_be_switched_there(level):
    """The end of the block puts autocast's state back."""
    model, optimizer = start(level)
    calls = amp.reset, amp.init, lambda: amp.initialize(model, optimizer, enabled=False)
    for call in calls:
        with torch.inference_mode(), pytest.raises(RuntimeError, match="end of that block would"):
            call()
    step(model, optimizer)
    amp.reset()
    assert product() == torch.float32


def test_a_scale_that_is_loaded_there_scales():
    model, optimizer = start("O2")
    with torch.inference_mode():
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    step(model, optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 2}}


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_is_refused_there_and_changes_nothing(level):
    model = Adapted()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with torch.inference_mode():
        for call in (lambda: cast(level, model), lambda: amp.initialize(model, optimizer)):
            with pytest.raises(RuntimeError, match="under torch.inference_mode.*before that block"):
                call()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model._forward_pre_hooks
    step_plainly(model, optimizer)
