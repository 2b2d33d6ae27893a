"""The watch changes nothing: losses, weights, states, hooks; and tells of what it is given."""

import copy
import gc
import json
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp, debug
from tests.checkpoints import assert_equal
from tests.debug.planted import LEVELS, MODELS, Training, explained, plant, watching

ALL_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "GradScaler")


def state_of(training):
    """All that a training goes on from, copied."""
    states = {
        "models": [one.state_dict() for one in training.models],
        "gradients": [[p.grad for p in one.parameters()] for one in training.models],
        "modes": [[m.training for m in one.modules()] for one in training.models],
        "optimizers": [one.state_dict() for one in training.optimizers],
        "masters": [
            [p for group in one.param_groups for p in group["params"]]
            for one in training.optimizers
        ],
        "random": torch.get_rng_state(),
        "scaler": training.scaler and training.scaler.state_dict(),
    }
    if training.scaler is None:
        states["amp"] = amp.state_dict()
    return copy.deepcopy(bits(states))


def bits(tree):
    """Tensors as bytes, so that NaN compares equal to itself and -0 does not to 0."""
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [bits(one) for one in tree]
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tree.detach().contiguous().flatten().view(torch.uint8).tolist())
    return tree


def hooks_of(training):
    """The names in each ``__dict__``, and how many hooks each has."""
    found = []
    things = [m for one in training.models for m in one.modules()]
    things += [*training.optimizers, training.scaler]
    for thing in filter(None, things):
        names = vars(thing)
        hooks = {name: len(value) for name, value in names.items() if "hooks" in name}
        found.append((sorted(names), hooks))
    return found


class Unwatched(Training):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.watch.close()


# -- nothing changes -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", ["O0", "O2", "GradScaler"])
def test_watched_training_is_bit_equal(name, level):
    states = []
    for kind in (Training, Unwatched):
        training = kind(name, level, scale=2.0**24, lr=0.1)  # overflows now and then
        for _ in range(3):
            list(training.steps())
        states.append(state_of(training))
        amp.reset()

    assert_equal(*states)


@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("value", ["nan", "beyond"])
def test_explain_changes_nothing(level, value):
    """Nor does training after it, which goes on as without it."""
    after = []
    for explains in (True, False):
        harm = {"is_on": False}

        def prepare(models, harm=harm):
            plant_when(models[0][1], harm, value)

        training = Training("MLP", level, prepare, lr=0.1)
        list(training.steps())
        harm["is_on"] = True
        list(training.steps())
        torch.rand(3)  # so that a replay that ends where the step did is not enough
        if explains and training.watch.fault is not None:
            before = state_of(training)
            training.watch.explain()
            assert_equal(state_of(training), before)
        assert (training.watch.fault is not None) == (value == "nan" or level in HALF)
        harm["is_on"] = False
        list(training.steps())
        after.append(state_of(training))
        amp.reset()

    assert_equal(*after)


HALF = ("O1", "O2", "O3", "GradScaler")


def plant_when(module, harm, value):
    """Break the output of ``module`` while ``harm["is_on"]``."""
    inner = module.forward

    def forward(x):
        out = inner(x)
        if harm["is_on"]:
            out = (out - out.detach()).sqrt() if value == "nan" else out * 1e4 * 1e4
        return out

    module.forward = forward


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5", "GradScaler"])
@pytest.mark.parametrize("name", ["CNN", "LSTM", "GAN", "transformer", "checkpoint"])
def test_explain_changes_nothing_of_other_models(name, level):
    """BatchNorm's statistics, dropout, several models; reentrant checkpoints write gradients."""

    def prepare(models):
        first = next(m for m in models[-1].modules() if isinstance(m, nn.Linear))
        plant(first, "backward", "nan", "one", None)
        if name == "checkpoint":
            inner = models[0].layers[0].forward
            models[0].layers[0].forward = lambda x: checkpoint(inner, x, use_reentrant=True)

    training = Training("transformer" if name == "checkpoint" else name, level, prepare)
    for _ in training.steps():
        if training.watch.fault is not None:
            break
    assert training.watch.fault is not None
    before = state_of(training)
    report = training.watch.explain()

    assert report.cause == "model"
    assert_equal(state_of(training), before)


class Stateful(nn.Module):
    """Reads and writes a buffer, has BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        )

    def forward(self, x):
        self.count += 1
        return self.layers(x) * torch.where(self.count == 3, self.count.log() * float("nan"), 1.0)


def test_buffers_stay_and_a_replay_reads_them_as_they_were():
    model = Stateful()
    with watching(model) as (optimizer, watch):
        while watch.fault is None:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        before = bits(model.state_dict())
        report = watch.explain()

    assert watch.steps == 3
    assert report.cause == "model"
    assert report.module == ""
    assert_equal(bits(model.state_dict()), before)


def test_a_replay_draws_the_same_random_numbers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    masks = []
    inner = model[1].forward

    def forward(x):
        out = inner(x)
        masks.append((out == 0).tolist())
        return torch.where(out == 0, out.log(), out)

    model[1].forward = forward
    report = explained(model, lambda: sum(model(torch.randn(4, 8)).mean() for _ in range(2)))
    assert masks[0] != masks[1]
    for number, mask in enumerate(masks):
        assert mask == masks[number % 2]
    assert len(masks) > 4
    assert report.module == "1"


def test_python_and_numpy_draw_on_as_without_a_report():
    np = pytest.importorskip("numpy")
    model = nn.Linear(8, 8)
    inner = model.forward
    model.forward = lambda x: inner(x).sqrt() * random.random() * np.random.rand()
    with watching(model) as (optimizer, watch):
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
        states = random.getstate(), np.random.get_state()
        watch.explain()
        drawn = random.random(), np.random.rand()
    random.setstate(states[0])
    np.random.set_state(states[1])
    assert drawn == (random.random(), np.random.rand())


def test_a_frozen_part_stays_frozen_in_replays_after_one_in_eval():
    norm = nn.BatchNorm1d(8, eps=0.0)  # refuses to train
    norm.running_var[2] = 0.0
    model = nn.Sequential(nn.Linear(8, 8), norm)

    def loss():
        model.eval()
        model(torch.randn(4, 8))  # a validation
        model.train()
        norm.eval()
        return model(torch.randn(4, 8)).mean()

    report = explained(model, loss)
    assert (report.cause, report.module) == ("model", "1"), report.text()
    assert [model.training, norm.training] == [True, False]


# -- what it leaves behind -------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2", "GradScaler"])
def test_closed_watch_leaves_nothing(level):
    training = Unwatched("MLP", level)
    list(training.steps())
    before = hooks_of(training)
    watch = debug.watch(training.models, training.optimizers, scaler=training.scaler)
    list(training.steps())
    assert hooks_of(training) != before
    assert debug.watch_of(training.optimizers[0]) is watch
    watch.close()
    watch.close()

    assert hooks_of(training) == before
    assert debug.watch_of(training.optimizers[0]) is None
    managed = getattr(training.optimizers[0], "_amp_stash", None)
    assert managed is None or managed.observer is None


def test_nothing_is_kept_of_a_closed_watch():
    training = Training("MLP", "O0")
    list(training.steps())
    models, watches = weakref.ref(training.models[0]), weakref.ref(training.watch)
    inputs = weakref.ref(training.inputs)
    training.watch.close()
    del training
    amp.reset()
    gc.collect()

    assert (models(), watches(), inputs()) == (None, None, None)


def test_a_watch_that_nobody_closed_ends_with_its_model():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watches = weakref.ref(debug.watch(model, optimizer))
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
    assert watches() is not None
    del model, optimizer
    gc.collect()

    assert watches() is None


def test_losses_without_steps_are_forgotten():
    net = nn.Linear(4, 1)
    with debug.watch(net, torch.optim.SGD(net.parameters(), 0.1)) as watch:
        for _ in range(600):
            watch.loss(torch.ones(()))
        assert len(watch._losses) <= 256


def test_healthy_steps_keep_no_memory():
    training = Training("MLP", "O0")
    for _ in range(3):
        list(training.steps())

    assert training.watch.kept_bytes() == (0, 0)


def test_an_exception_in_the_step_or_the_forward_ends_it():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = {"is_on": True}

    def refuse(*_):
        if wrong["is_on"]:
            raise KeyError("stop")

    x = torch.randn(4, 8)
    with debug.watch(model, optimizer, on_fault="keep") as watch:
        (model(x) * float("nan")).mean().backward()
        gradient = model.weight.grad
        handle = optimizer.register_step_pre_hook(refuse)  # after the watch has hidden gradients
        with pytest.raises(KeyError, match="stop"):
            optimizer.step()
        wrong["is_on"] = False
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(4, 7))
        model(x).mean().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        handle.remove()

        assert watch.fault is None
        assert not torch.equal(model.weight, before)
        assert gradient is not model.weight.grad
        assert bool(model.weight.isfinite().all())


def test_gradients_are_there_after_a_skipped_step():
    model = nn.Linear(8, 4)
    with watching(model) as (optimizer, watch):
        (model(torch.randn(4, 8)) * float("inf")).mean().backward()
        before, gradient = model.weight.detach().clone(), model.weight.grad
        optimizer.step()

    assert watch.skipped == 1
    assert torch.equal(model.weight, before)
    assert model.weight.grad is gradient


# -- what it is given ------------------------------------------------------------------------------


def test_all_forwards_of_an_accumulated_step_are_replayed():
    """The bad batch is the second of three; the dropout of each is as it was."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    batches = [torch.randn(4, 8) for _ in range(3)]
    batches[1][3, 2] = float("nan")

    def last_loss():
        for x in batches[:2]:
            (model(x).square().mean() / 3).backward()
        return model(batches[2]).square().mean() / 3

    report = explained(model, last_loss)
    assert report.cause == "data"
    assert report.values["rows"] == [3]
    assert "(row 3)" in report.sentence


def test_an_input_that_was_written_to_is_said():
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    report = explained(model, lambda: (model(x) * float("nan")).mean(), before_step=x.normal_)
    assert report.cause == "unrepeatable"
    assert "not replayable: input 0 was written to after the forward" in report.sentence


def bad_step(**options):
    """One step with a NaN; the watch and the number of the step after it."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = debug.watch(model, optimizer, **options)
    (model(torch.randn(4, 8)) - 1e9).sqrt().mean().backward()
    try:
        optimizer.step()
    finally:
        watch.close()
    return watch


def test_on_fault():
    with pytest.warns(debug.FaultWarning, match="the gradient of|its gradient has"):
        watch = bad_step()
    assert watch.report.cause == "loss"

    with pytest.raises(
        debug.NonFiniteError, match="apex.debug: Output 0 of the model is finite but"
    ) as error:
        bad_step(on_fault="raise")
    assert error.value.report.cause == "loss"

    assert bad_step(on_fault="keep").report is None

    reports = []
    bad_step(on_fault=reports.append)
    assert [one.cause for one in reports] == ["loss"]


def test_only_the_first_fault_is_told():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = []
    with debug.watch(model, optimizer, on_fault=reports.append) as watch:
        for factor in (1.0, float("nan"), float("nan"), 1.0, float("nan")):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) * factor).mean().backward()
            optimizer.step()

    assert [(one.step, one.since) for one in reports] == [(2, 1)]
    assert (watch.steps, watch.skipped) == (5, 3)


def test_skip_can_be_switched_off():
    model = nn.Linear(8, 4)
    with watching(model, skip=False) as (optimizer, watch):
        (model(torch.randn(4, 8)) * float("nan")).mean().backward()
        optimizer.step()

    assert watch.skipped == 0
    assert bool(model.weight.isnan().all())


def test_a_loss_is_looked_at_too():
    model = nn.Linear(8, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.full((64, 8), 100.0).half()
    with debug.watch(model, optimizer, on_fault="keep") as watch:
        for x, bad in ((x, True), (x[:0], False)):  # noqa: B020
            loss = (model(x).abs() + 1e4).sum() if len(x) else model(x).mean()
            watch.loss(loss).backward()
            optimizer.step()
            assert not bool(loss.isfinite())
            assert (watch.fault is not None) == bad


class Masked(nn.Linear):
    """Gives NaN in row 1, in both directions finite for what a mask makes of it."""

    def forward(self, x):
        out = super().forward(x)
        sign = torch.ones(len(x), 1)
        sign[1] = -1
        return ((out.square() + 1) * sign).log()


def test_an_output_that_the_loss_masks_is_looked_at_where_it_is_asked_for():
    model = Masked(8, 4)
    with watching(model) as (optimizer, watch):
        for asked in (False, True):
            out = model(torch.randn(4, 8))
            if asked:
                watch.loss(out)
            optimizer.zero_grad()
            torch.where(out.isnan(), 0.0, out).mean().backward()
            assert bool(model.weight.grad.isfinite().all())
            optimizer.step()
            assert (watch.fault is not None) == asked
        report = watch.explain()

    assert (report.cause, report.operation, report.module) == ("model", "aten.log.default", "")


# -- dynamic scales, amp ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "GradScaler"])
def test_skips_are_reported_only_if_they_do_not_help(level):
    harm = {"is_on": True}
    reports = []
    training = Training(
        *("MLP", level, lambda models: plant_when(models[0][1], harm, "nan")),
        patience=3,
        on_fault=reports.append,
    )
    for _ in range(3):
        list(training.steps())
    assert reports == []
    list(training.steps())
    (report,) = reports
    assert (report.cause, report.module, report.direction) == ("model", "1", "backward")
    assert training.watch.skipped == 4
    harm["is_on"] = False
    list(training.steps())
    assert training.watch.fault is None


def test_the_scale_is_that_of_the_loss_that_overflowed():
    """And the line is one of the program, not of amp's cast of the output."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": "O2", "verbosity": 0, "num_losses": 2}
    model, optimizer = amp.initialize(model, optimizer, **options)
    scales = []
    with debug.watch(model, optimizer, on_fault="keep", patience=0) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            for loss_id, factor in enumerate((1.0, 1e9)):
                loss = model(torch.ones(4, 8)).float().mean() * factor
                with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            optimizer.step()
            report = watch.explain()
            scales.append(report.scale)
    assert scales == [2.0**16, 2.0**15]  # the first loss has 65536 in both steps
    assert "apex/amp" not in report.text()


def dead_training(**options):
    """Steps of amp that are all skipped, until it raises."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plant_when(model[0], {"is_on": True}, "nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": "O2", "verbosity": 0, "max_skipped_steps": 4} | options
    model, optimizer = amp.initialize(model, optimizer, **options)
    while True:
        with amp.scale_loss(model(torch.randn(4, 8)).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_amps_error_carries_the_sentence():
    with pytest.raises(RuntimeError, match=r"4 steps in a row .* in module 0 .* inf"):
        dead_training(debug=True)


def test_amps_error_says_how_to_watch():
    with pytest.raises(RuntimeError, match=r"amp.initialize\(..., debug=True\) names the oper"):
        dead_training()


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_amp_initialize_puts_a_watch_on(level):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, debug=True, loss_scale=1.0
    )
    watch = debug.watch_of(optimizer)
    plant_when(model[0], {"is_on": True}, "nan")
    before = bits(model.state_dict())
    with amp.scale_loss(model(torch.randn(4, 8)).mean(), optimizer) as scaled:
        scaled.backward()
    with pytest.warns(debug.FaultWarning, match="in module 0 "):
        optimizer.step()

    assert (watch.report.cause, watch.report.module) == ("model", "0")
    assert_equal(bits(model.state_dict()), before)
    watch.close()
    assert debug.watch_of(optimizer) is None


# -- drifts ----------------------------------------------------------------------------------------


def drift_training(steps, jump=None):
    """Steps with a sample each; ``jump``: the step where gradients of the middle layer are 1e4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with watching(model, 0.01, on_fault="raise", every=1) as (optimizer, watch):
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            (model(x) - x[:, :4].sin()).square().mean().backward()
            if number == jump:
                model[2].weight.grad *= 1e4
            optimizer.step()
    return watch.drifts


def test_a_jump_of_gradients_is_named():
    drift = drift_training(60, jump=50)[0]  # weights have jumped too, so others follow

    assert (drift.step, drift.module, drift.zeros) == (50, "2", None)
    assert 1e3 < drift.norm / drift.median < 1e5
    assert "step 50: the gradient norm of 2 is" in str(drift)


def test_models_with_the_same_paths_have_bands_of_their_own():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 4)), torch.compile(nn.Linear(8, 4), backend="eager")]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.0)
    with debug.watch(models, optimizer, every=1) as watch:
        for number in range(1, 31):
            optimizer.zero_grad()
            for model, factor in zip(models, (1.0, 1e4 if number == 30 else 1.0), strict=True):
                (model(torch.ones(2, 8)).sum() * factor).backward()
            optimizer.step()

    assert [drift.module for drift in watch.drifts] == ["Linear"]


def test_healthy_steps_do_not_drift():
    assert drift_training(500) == []


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (lambda m, o: ((3, o), {}), TypeError, "model was int, not an nn.Module"),
        (lambda m, o: ((["m"], o), {}), TypeError, "model was str, not an nn.Module"),
        (lambda m, o: (([], o), {}), ValueError, "model was an empty list"),
        (lambda m, o: ((m, []), {}), ValueError, "optimizer was an empty list"),
        (lambda m, o: ((m, 0.1), {}), TypeError, "optimizer was float; it must be a torch"),
        (lambda m, o: ((m, o), {"on_fault": "stop"}), ValueError, "on_fault was 'stop'; it must"),
        (lambda m, o: ((m, o), {"patience": -1}), ValueError, "patience was -1; it must be 0"),
        (lambda m, o: ((m, o), {"every": 0.5}), ValueError, "every was 0.5; it must be 0 or"),
        (lambda m, o: ((m, o), {"every": True}), ValueError, "every was True"),
        (lambda m, o: ((m, o), {"scaler": 65536.0}), TypeError, "scaler was float, not a GradSc"),
        (lambda m, o: ((m, o), {"step": 3}), TypeError, "step was int, not a function"),
        (lambda m, o: ((nn.Linear(2, 2), o), {}), ValueError, "no parameter of the SGD is in the"),
    ],
)
def test_bad_input(arguments, error, text):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args, options = arguments(model, optimizer)
    with pytest.raises(error, match=text):
        debug.watch(*args, **options)
    debug.watch(model, optimizer).close()  # nothing of the refused one is left


def test_a_second_watch_is_refused():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"another watch watches this optimizer already; close\(\) it"
    with debug.watch(model, optimizer), pytest.raises(RuntimeError, match=said):
        debug.watch(model, optimizer)


def test_explain_without_a_fault():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = "there is nothing to explain"
    with debug.watch(model, optimizer) as watch, pytest.raises(RuntimeError, match=said):
        watch.explain()


def test_step_has_to_return_the_loss():
    model = nn.Linear(8, 4)
    with watching(model) as (optimizer, watch):
        (model(torch.randn(4, 8)) * float("nan")).mean().backward()
        optimizer.step()
        with pytest.raises(TypeError, match=r"step\(\) returned NoneType; it must compute"):
            watch.explain(step=lambda: None)
        assert watch.explain().cause == "loss"  # without a warning


def test_a_scaler_that_was_not_passed_is_asked_for():
    model = torch.nn.Linear(4, 1)
    with watching(model) as (optimizer, _):
        for _ in range(256):
            model(torch.ones(1, 4)).sum().backward()
        with pytest.warns(UserWarning, match="pass watch.*scaler=scaler"):
            model(torch.ones(1, 4))


def test_a_scaler_that_is_switched_off_leaves_the_look_to_the_watch():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with debug.watch(model, optimizer, scaler=scaler, on_fault="keep") as watch:
        scaler.scale(model(torch.ones(2, 4)).sum() * float("nan")).backward()
        scaler.step(optimizer)
        scaler.update()

    assert (watch.steps, watch.skipped) == (1, 1)


def test_a_forward_that_gives_nan_is_explained_at_the_first_skipped_step():
    """No other loss scale changes it, so there is no wait for one."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LogSigmoid(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.ones(2, 4)
    x[1, 2] = float("nan")
    with debug.watch(model, optimizer, scaler=scaler, on_fault="raise"):
        scaler.scale(model(x).sum()).backward()
        with pytest.raises(debug.NonFiniteError, match=r"Input 0 of the model .*row 1"):
            scaler.step(optimizer)


def test_a_report_is_json_at_any_scale():
    report = debug.Report("scale", "The loss scale is too high.", 1, scale=float("inf"))
    assert json.loads(report.to_json())["scale"] == "inf"
