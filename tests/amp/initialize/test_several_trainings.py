"""Several trainings in a process: each computes what it computes alone, bit for bit.

The losses are computed in float32 outside of the models, so that they do not depend on the casts
outside of models, which follow the newest ``initialize`` of the thread (``test_casts.py``).
"""

import copy
import functools
import itertools
import math
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.casting import dispatcher
from tests.amp import training
from tests.amp.levels import LEVELS
from tests.amp.training import backward, batches, same, started

MOMENTS = ["in the block", "stepped"]  # each of six caught the same planted bugs
STEPS = 4
PATIENCE = 60  # seconds after which a thread that hangs is a failure


def net(seed):
    """With two functions in a row that O1 and O4 compute in float32 by rules of amp's own."""
    model = training.net(seed)
    model[2] = nn.Sequential(nn.GELU(), nn.Softplus())
    return model


class Run:
    """A training that can be stopped at each moment of each of its steps."""

    def __init__(self, level, seed, model=None):
        self.level, self.seed = level, seed
        self.model = net(seed) if model is None else model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, eps=1e-4)
        self.scalers = []

    def initialize(self, **options):
        options = {"opt_level": self.level, "growth_interval": 2, "verbosity": 0, **options}
        amp.initialize(self.model, self.optimizer, **options)
        self.scalers = amp._amp_state.loss_scalers
        return self

    def moments(self, count=STEPS):
        """Stop at both moments of every step; the gradients of the second step overflow."""
        for number, (x, y) in enumerate(batches(count, self.seed + 10)):
            loss = F.cross_entropy(self.model(x).float(), y)
            self.optimizer.zero_grad()
            with amp.scale_loss(loss, self.optimizer) as scaled:
                yield "in the block"
                scaled.backward()
                if number == 1 and self.level in ("O1", "O2"):
                    self.model[4].bias.grad[0] = math.nan
            self.optimizer.step()
            yield "stepped"

    def train(self, count=STEPS):
        for _ in self.moments(count):
            pass
        return self

    def results(self):
        """Weights, buffers, masters, moments, scale and counter."""
        stepped = list(amp.master_params(self.optimizer))
        slots = [slot for param in stepped for slot in self.optimizer.state[param].values()]
        weights = [*self.model.state_dict().values(), *stepped]
        scales = [[scaler.loss_scale(), scaler._unskipped] for scaler in self.scalers]
        everything = [*weights, *self.model.parameters(), *slots, *map(torch.tensor, scales)]
        return [torch.as_tensor(tensor).detach().clone() for tensor in everything]


@functools.cache
def alone(level, seed):
    results = Run(level, seed).initialize().train().results()
    amp.reset()
    return results


@pytest.fixture(autouse=True, scope="module")
def _alone_first():
    """Have every run by itself ready, since it ends with a reset that others would feel."""
    for level, seed in itertools.product(LEVELS, (0, 1)):
        alone(level, seed)


def advance(moments, to):
    """Let a training go on to a moment; False at its end."""
    return any(moment == to for moment in moments)


def test_the_runs_hold_what_they_are_to_show():
    assert not same(alone("O2", 0), alone("O2", 1))
    assert alone("O2", 0)[-1].tolist() == [2.0**16, 0]  # an overflow, then two steps and growth
    assert alone("O5", 0)[-1].tolist() == [1.0, 0]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_step_within_a_step(level, moment):
    """One waits, inside its block or between two steps, while the other takes a step."""
    one, two = Run(level, 0).initialize(), Run(level, 1).initialize()
    left, right = one.moments(), two.moments()
    while advance(left, moment):
        assert advance(right, "stepped")
    assert same(one.results(), alone(level, 0))
    assert same(two.results(), alone(level, 1))


# -- in threads -----------------------------------------------------------------------------------


def in_threads(*bodies, barrier=None):
    """Run functions at the same time, and raise what one of them raised."""
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
            if barrier is not None:
                barrier.abort()

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def restless():
    """Threads that give way at every chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("level", LEVELS)
def test_in_two_threads_at_once(level, where, restless):
    """Both begin each moment together; ``initialize`` was called here, or in the threads."""
    runs = [Run(level, 0), Run(level, 1)]
    if where == "here":
        for run in runs:
            run.initialize()
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def body(run):
        barrier.wait()
        if where == "there":
            run.initialize()
        for _ in run.moments():
            barrier.wait()

    in_threads(*(functools.partial(body, run) for run in runs), barrier=barrier)
    if where == "there":  # both at once: which one the view of old shows is a matter of luck
        for run in runs:
            run.scalers = run.optimizer._amp_stash.training.loss_scalers
    assert same(runs[0].results(), alone(level, 0))
    assert same(runs[1].results(), alone(level, 1))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.slow
def test_many_trainings_that_begin_in_threads(level, restless):
    """While one makes masters the others find, make and drop theirs: the table is the process's."""

    def body():
        for _ in range(10):
            model, _ = started(level, nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)]))
            assert len(model.state_dict()) == 80

    in_threads(*[body] * 4)


def test_an_initialize_that_fails_undoes_nothing_of_another_thread():
    """What is put back was saved before; the other has to wait until then."""
    begun, ahead = threading.Event(), threading.Event()

    class Failing(nn.LSTM):
        def flatten_parameters(self):  # called in the constructor and when weights are cast
            if self.weight_ih_l0.dtype == torch.float16:
                begun.set()
                ahead.wait(0.2)
                raise ArithmeticError("planted")

    failing, model = Failing(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def fail():
        with pytest.raises(ArithmeticError, match="planted"):
            started("O2", failing)

    def succeed():
        assert begun.wait(PATIENCE)
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        ahead.set()

    in_threads(fail, succeed)
    assert model.weight.dtype == torch.float16
    amp.reset()  # finds what belongs to amp
    assert model.weight.dtype == torch.float32
    assert not hasattr(optimizer, "_amp_stash")


def test_a_thread_waits_while_another_registers_kernels(monkeypatch):
    """The other begins in the middle of it, and would compute without the rest."""
    register = dispatcher._register
    begun, ahead, who = threading.Event(), threading.Event(), set()

    def slow(*args):
        begun.set()
        who.add(threading.get_ident())
        assert not ahead.wait(0.01)
        register(*args)

    def second():
        assert begun.wait(PATIENCE)
        dispatcher.install(torch.float16)
        ahead.set()

    monkeypatch.setattr(dispatcher, "_register", slow)
    in_threads(Run("O1", 0).initialize, second)
    assert len(who) == 1


# -- a later initialize ---------------------------------------------------------------------------


disabled = functools.partial(started, "O1", enabled=False)


def for_the_next_fold():
    other, optimizer = started("O2")
    loss_of(other, optimizer)
    return amp.initialize(other, optimizer, opt_level="O1", verbosity=0)


def loss_of(model, optimizer):
    backward(model, optimizer, *batches(1, seed=8))
    optimizer.step()


LATER = {
    "disabled": disabled,
    "next fold": for_the_next_fold,
    **{level: functools.partial(started, level) for level in ("O0", "O1", "O3", "O5")},
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_a_later_initialize_changes_nothing_for_an_earlier_training(level, later, moment):
    run = Run(level, 0).initialize()
    moments = run.moments()
    advance(moments, "stepped")
    advance(moments, moment)
    loss_of(*later())
    advance(moments, None)
    assert same(run.results(), alone(level, 0))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_same_model_in_every_fold_of_a_cross_validation(level):
    """Each fold is as in a process of its own, and so is a training beside them."""
    beside = Run("O2", 1).initialize()
    moments = beside.moments()
    model, begun = net(0), copy.deepcopy(net(0).state_dict())
    for _ in range(3):
        fold = Run(level, 0, model).initialize()
        model.load_state_dict(begun)
        own = fold.moments()
        while advance(own, "stepped"):
            advance(moments, "stepped")
        assert same(fold.results(), alone(level, 0))
    assert same(beside.results(), alone("O2", 1))


def take_over(fresh, run):
    """Load what a run would save."""
    fresh.model.load_state_dict(run.model.state_dict())
    fresh.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return fresh


CHANGES = [("O0", "O1"), ("O1", "O2"), ("O2", "O5"), ("O5", "O3"), ("O3", "O4"), ("O2", "O1")]
CHANGES += [("O1", "O4"), ("O2", "O2")]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_initialised_again_at_another_level_is_saved_and_loaded_there(before, after):
    run = Run(before, 0).initialize().train(2)
    fresh = take_over(Run(after, 0), run).initialize().train()
    run.level = after
    run.initialize().train()
    assert same(run.results(), fresh.results())


# -- back to plain torch --------------------------------------------------------------------------


def plain_twin(run):
    """A model and an optimizer that amp has never seen, with the values of ``run``."""
    return take_over(Run("O0", run.seed), run)


def train_plainly(run):
    for x, y in batches(3, seed=20):
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
    return run.results()


ENDS = {
    "reset": lambda run: amp.reset(),
    "disabled": lambda run: amp.initialize(run.model, run.optimizer, enabled=False),
    "disabled lists": lambda run: amp.initialize([run.model], [run.optimizer], enabled=False),
    "disabled wrapped": lambda run: amp.initialize(
        nn.DataParallel(run.model), run.optimizer, enabled=False
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("level", "end"), [*((level, "reset") for level in LEVELS), *(("O2", end) for end in ENDS)]
)
def test_what_is_released_in_mid_training_is_plain_torch(level, end, moment):
    run = Run(level, 0)
    step = run.optimizer.step.__func__
    moments = run.initialize().moments()
    advance(moments, "stepped")
    advance(moments, moment)
    twin = plain_twin(run)
    ENDS[end](run)
    moments.close()
    run.scalers = []
    assert amp.state_dict() == {}
    assert run.optimizer.step.__func__ is step
    assert not hasattr(run.optimizer, "_amp_stash")
    assert not run.model._forward_pre_hooks
    assert not run.model._forward_hooks
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    params = run.optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(params, run.model.parameters(), strict=True))
    assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.float32
    assert same(train_plainly(run), train_plainly(twin))


def test_a_disabled_initialize_leaves_an_earlier_training_its_checkpoint():
    run = Run("O2", 0).initialize().train()
    saved = amp.state_dict()
    other, optimizer = disabled()
    assert amp.state_dict() == saved == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert run.scalers[0].loss_scale() == 8.0
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
        assert scaled.item() == 1.0
    amp.initialize(other, optimizer, enabled=False)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}
    amp.initialize(run.model, run.optimizer, enabled=False)
    assert amp.state_dict() == {}


def test_a_training_without_optimizers_ends_with_its_model():
    model = amp.initialize(net(0), opt_level="O2", verbosity=0)
    assert list(amp.state_dict()) == ["loss_scaler0"]
    del model
    amp.initialize(net(1), enabled=False)
    assert amp.state_dict() == {}


def test_of_two_optimizers_one_is_released():
    models = [net(0), net(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    amp.initialize(models[0], optimizers[0], enabled=False)
    assert {p.dtype for p in models[0].parameters()} == {torch.float32}
    assert models[1][4].weight.dtype == torch.float16
    assert list(amp.state_dict()) == ["loss_scaler0"]
    loss_of(models[1], optimizers[1])
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1
    amp.initialize(models, optimizers, enabled=False)
    assert amp.state_dict() == {}


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_released_without_its_optimizer_is_trained_on(level):
    """The optimizer keeps its scale; it steps the float32 weights through what it has."""
    run = Run(level, 0).initialize().train()
    amp.initialize(run.model, enabled=False)
    before = [p.clone() for p in run.model.parameters()]
    assert {p.dtype for p in before} == {torch.float32}
    loss_of(run.model, run.optimizer)
    assert not any(map(torch.equal, before, run.model.parameters()))


def test_a_superseded_optimizer_stays_refused_whatever_is_initialised_later():
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    first, *rest = (torch.optim.SGD(one.parameters(), lr=0.0) for one in (model, model, other))
    for one, optimizer in ((model, first), (model, rest[0]), (other, rest[1])):
        amp.initialize(one, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="another amp.initialize"):
        first.step()
