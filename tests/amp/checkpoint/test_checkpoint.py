"""State dicts of models and scalers; runs that go on are in ``test_resume.py``."""

import functools
import gc
import re

import pytest
import torch
from torch import nn

from apex import amp
from tests.amp.levels import LEVELS, cast
from tests.amp.training import MASTERED, batches, net, started, train


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("level", MASTERED)
def test_weights_loaded_in_mid_training_are_respected(level):
    model, optimizer = started(level, optimizer=functools.partial(torch.optim.Adam, lr=1e-2))
    train(model, optimizer, batches(2))
    other = net(9).state_dict()
    model.load_state_dict(other)
    assert equal(dict(model.state_dict()), dict(other))  # unrounded, through the masters
    model[4].load_state_dict({k[2:]: v + 1 for k, v in other.items() if k.startswith("4.")})
    assert torch.equal(model.state_dict()["4.weight"], other["4.weight"] + 1)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.state_dict()["4.weight"], other["4.weight"] + 1)


def test_amp_state_is_plain_and_ordered():
    _ = started("O1", num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 8
    amp._amp_state.loss_scalers[1]._unskipped = 3
    saved = amp.state_dict()
    assert list(saved.items()) == [
        ("loss_scaler0", {"loss_scale": 65536.0, "unskipped": 0}),
        ("loss_scaler1", {"loss_scale": 8.0, "unskipped": 3}),
    ]
    assert type(saved["loss_scaler1"]["unskipped"]) is int
    mine = {}
    assert amp.state_dict(destination=mine) is mine
    assert mine == saved


def test_loading_goes_by_the_number_in_the_key():
    _ = started("O1", num_losses=2)
    saved = {"loss_scaler1": {"loss_scale": 4.0, "unskipped": 1}}
    saved["loss_scaler0"] = {"loss_scale": 2.0, "unskipped": 0, "something": "new"}
    amp.load_state_dict(saved)
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0, 4.0]


def test_another_number_of_losses_warns_with_both_numbers():
    _ = started("O1", num_losses=2)
    entry = {"loss_scale": 4.0, "unskipped": 1}
    with pytest.warns(UserWarning, match=r"1 entries, while 2"):
        amp.load_state_dict({"loss_scaler1": entry})
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [65536.0, 4.0]
    with pytest.warns(UserWarning, match=r"3 entries, while 2"):
        amp.load_state_dict({f"loss_scaler{i}": entry for i in range(3)})


def test_a_state_that_is_no_dict_is_refused():
    _ = started("O1")
    with pytest.raises(TypeError, match="was a list"):
        amp.load_state_dict([])


def test_a_dynamic_state_does_not_make_a_static_scale_dynamic():
    _ = started("O0")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}})
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0


def test_extra_state_and_frozen_weights_pass_through():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": "kept"}

        def set_extra_state(self, state):
            self.note = state["note"]

    for level in LEVELS:
        model = cast(level, Extra(2, 2))
        state = model.state_dict()
        assert state["_extra_state"] == {"note": "kept"}
        model.load_state_dict(state)
        assert model.note == "kept"
        amp.reset()


# -- several trainings -------------------------------------------------------------------------


def two_trainings(**options):
    scales = (32.0, 64.0)
    return [started("O1", nn.Linear(2, 2), init_scale=scale, **options) for scale in scales]


def test_each_training_is_saved_and_loaded_by_its_optimizers():
    (_, first), (_, second) = trainings = two_trainings()
    saved = [amp.state_dict(optimizers=optimizer) for _, optimizer in trainings]
    assert [entry["loss_scaler0"]["loss_scale"] for entry in saved] == [32.0, 64.0]
    amp.load_state_dict(saved[1], optimizers=[first])
    amp.load_state_dict(saved[0], optimizers=(second,))
    assert amp.state_dict(optimizers=first) == saved[1]
    assert amp.state_dict(optimizers=second) == saved[0]


def of_a_handle(scale):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return amp.init(loss_scale=scale).wrap_optimizer(optimizer)


def scale_of(state):
    return state["loss_scaler0"]["loss_scale"]


def scales_of(*trainings):
    return [scale_of(amp.state_dict(optimizers=optimizer)) for _, optimizer in trainings]


def step(model, optimizer):
    """A step, and what ``_amp_state.loss_scalers`` says in it."""
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
        shown = amp._amp_state.loss_scalers[0].loss_scale()
    optimizer.step()
    optimizer.zero_grad()
    return shown


STATE = {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}}
SEVERAL = "several trainings exist, with different loss scales, and this call used only the newest"


def test_without_optimizers_it_is_the_newest_with_a_warning_where_scales_differ():
    trainings = two_trainings()
    with pytest.warns(UserWarning, match=SEVERAL + r".*optimizers=\.\.\.") as caught:
        saved = amp.state_dict()
    assert {warning.filename for warning in caught} == {__file__}
    assert saved["loss_scaler0"]["loss_scale"] == 64.0
    amp.load_state_dict(STATE)  # a script loads before it trains
    assert scales_of(*trainings) == [2.0, 2.0]
    assert amp.state_dict() == STATE
    step(*trainings[0])
    step(*trainings[1])
    assert scale_of(amp.state_dict()) == 2.0  # equal still
    step(*trainings[0])
    with pytest.warns(UserWarning, match="amp.state_dict: " + SEVERAL):
        saved = amp.state_dict()
    with pytest.warns(UserWarning, match="amp.load_state_dict: " + SEVERAL) as caught:
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert {warning.filename for warning in caught} == {__file__}
    assert scales_of(*trainings) == [2.0, 8.0]
    del trainings[1]
    assert scale_of(amp.state_dict()) == 2.0  # the other is gone
    amp.load_state_dict(saved)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("second", ["encoder", "teacher"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_that_is_initialised_and_not_trained_does_not_matter(level, second, is_first):
    """MoCo's momentum encoder, which has an optimizer; or a teacher, which has none."""

    def begin():
        def idle():
            if second == "encoder":
                return started(level, nn.Linear(2, 2))
            return cast(level, nn.Identity())

        before = None if is_first else idle()
        training = started(level, nn.Linear(2, 2))
        return training, before, idle() if is_first else None

    training, *_ = begin()
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**20  # of one of them
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 5}})
    assert step(*training) == 32.0
    assert step(*training) == 32.0
    saved = amp.state_dict()
    assert saved == {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 7}}
    amp.reset()
    training, *_ = begin()
    amp.load_state_dict(saved)
    assert step(*training) == 32.0
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 8}}


def test_a_training_with_a_static_scale_does_not_matter_either():
    training = started("O1", nn.Linear(2, 2), init_scale=32.0)
    _ = started("O5", nn.Linear(2, 2)), cast("O1", nn.Linear(2, 2))
    assert scale_of(amp.state_dict()) == 32.0
    amp.load_state_dict(STATE)
    assert step(*training) == 2.0


def test_of_static_scales_the_newest_is_saved_and_none_is_loaded():
    trainings = [started("O1", nn.Linear(2, 2), loss_scale=scale) for scale in (8.0, 16.0)]
    step(*trainings[0])
    amp.load_state_dict(STATE)
    step(*trainings[1])
    assert scale_of(amp.state_dict()) == 16.0
    assert scales_of(*trainings) == [8.0, 16.0]


def test_the_scalers_shown_are_those_just_made_and_then_those_in_use():
    """Programs set the scale after ``initialize``, and read it in the loop."""
    first = started("O1", nn.Linear(2, 2), init_scale=32.0)
    step(*first)
    second = started("O1", nn.Linear(2, 2), init_scale=64.0)  # the next fold
    amp._amp_state.loss_scalers[0]._loss_scale = 128.0
    assert scales_of(first, second) == [32.0, 128.0]
    assert step(*first) == 32.0
    assert step(*second) == 128.0
    amp.initialize(*second, enabled=False)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 32.0
    del first
    amp.reset()
    assert not hasattr(amp._amp_state, "loss_scalers")


def test_loading_for_the_next_fold_leaves_the_one_before_alone():
    first = started("O1", nn.Linear(2, 2), init_scale=32.0)
    step(*first)
    second = started("O1", nn.Linear(2, 2), init_scale=64.0)
    with pytest.warns(
        UserWarning, match="apex loads the state into each training that has not entered scale_loss"
    ):
        amp.load_state_dict(STATE)
    assert scales_of(first, second) == [32.0, 2.0]


def test_the_number_of_losses_may_be_that_of_any_training_that_is_loaded():
    _ = started("O1", nn.Linear(2, 2), num_losses=2), started("O1", nn.Linear(2, 2))
    entry = STATE["loss_scaler0"]
    amp.load_state_dict({"loss_scaler0": entry, "loss_scaler1": entry})
    with pytest.warns(UserWarning, match="3 entries, while 1 loss_scalers"):
        amp.load_state_dict({f"loss_scaler{number}": entry for number in range(3)})


def test_a_static_handle_beside_initialize_is_passed_over():
    _ = of_a_handle(4.0), two_trainings(loss_scale=8.0)
    assert scale_of(amp.state_dict()) == 8.0
    amp.load_state_dict(amp.state_dict())
    dynamic = of_a_handle("dynamic")
    assert scale_of(amp.state_dict()) == 2.0**16
    assert scale_of(amp.state_dict(optimizers=dynamic)) == 2.0**16


def test_what_is_left_when_the_newest_was_released():
    """An older training is alive beside that of a handle."""
    (_, older), newest = two_trainings()
    amp.initialize(*newest, enabled=False)
    assert scale_of(amp.state_dict()) == 32.0  # the only one
    static = of_a_handle(4.0)
    assert scale_of(amp.state_dict()) == 32.0
    dynamic = of_a_handle("dynamic")
    with pytest.warns(UserWarning, match=SEVERAL):
        assert scale_of(amp.state_dict()) == 2.0**16
    amp.load_state_dict(STATE)
    found = [scale_of(amp.state_dict(optimizers=one)) for one in (older, static, dynamic)]
    assert found == [2.0, 4.0, 2.0]


def test_the_only_handle_that_is_left():
    """Optimizers that nothing refers to any more are part of a cycle."""
    for scale in (4.0, "dynamic", 8.0):
        wrapped = of_a_handle(scale)
    assert scale_of(amp.state_dict()) == 8.0
    del wrapped
    gc.collect()
    assert amp.state_dict() == {}


def test_an_optimizer_that_cannot_be_stepped_any_more_is_no_other_training():
    model, wrapped = nn.Linear(2, 2), of_a_handle(4.0)
    first, second = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    for optimizer in (first, second):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="another amp.initialize"):
        first.step()
    assert scale_of(amp.state_dict()) == 2.0**16
    amp.initialize(model, second, enabled=False)
    assert amp.state_dict() == amp.state_dict(optimizers=wrapped)


def test_optimizers_of_other_trainings_or_of_none_are_refused():
    (_, first), (_, second) = two_trainings()
    with pytest.raises(ValueError, match="several initialize calls"):
        amp.state_dict(optimizers=[first, second])
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="SGD, which did not go through amp.initialize"):
        amp.load_state_dict({}, optimizers=stranger)
    with pytest.raises(ValueError, match="did not go through"):
        amp.state_dict(optimizers=[])


def test_the_scale_goes_from_amp_to_a_grad_scaler_and_back_as_their_errors_say():
    _, optimizer = started("O1", nn.Linear(2, 2))
    amp.load_state_dict(STATE)
    saved, scaler = amp.state_dict(), amp.GradScaler("cpu")
    with pytest.raises(
        ValueError, match=r"load_state_dict was given what amp.state_dict\(\) ret"
    ) as e:
        scaler.load_state_dict(saved)
    scaler.load_state_dict(eval(re.search(r"pass (\{.*\})\.", str(e.value))[1]))
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (2.0, 1)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    saved = scaler.state_dict()
    with pytest.raises(
        RuntimeError, match="Unexpected key.*This is the state of a GradScaler"
    ) as e:
        amp.load_state_dict(saved)
    amp.load_state_dict(eval(re.search(r"pass (\{.*\})\.", str(e.value))[1]))
    assert amp.state_dict(optimizers=optimizer) == STATE
