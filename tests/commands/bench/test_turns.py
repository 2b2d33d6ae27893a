"""Trainings that take turns in one process: each is what it would be alone, and is measured."""

import dataclasses
import math
import random
import re
import sys

import numpy
import pytest
import torch
from torch import nn

from apex.amp.casting import cpu_float16, dispatcher
from apex.commands.bench import memory
from apex.commands.bench.training import process_state, profiling, trainer, turns
from apex.commands.bench.training.precision import LEVELS, precision
from apex.commands.bench.training.results import Cell
from apex.commands.bench.training.tasks import complete
from tests.commands.bench import user_task

CPU = torch.device("cpu")
CELL = Cell("regression", "O0", None, 8, 0, "sgd", 0.02, 2, compile=False, quick=False)
HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_profiling(monkeypatch):
    """Leave memory and operators, which take a second, to the test of them."""
    monkeypatch.setattr(profiling, "measure", lambda *args, **kwargs: {})


def train(task, levels=("O0",), on_progress=lambda share, line: None, budget_s=None, **changes):
    cells = [dataclasses.replace(CELL, level=level, **changes) for level in levels]
    return turns.train(cells, complete(task), CPU, on_progress, budget_s)


# --- as alone ------------------------------------------------------------------------------------


class Dropping(user_task.Regression):
    """Draws from every generator in its step."""

    epochs = 3

    def model(self):
        return nn.Sequential(
            nn.Linear(user_task.FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
        )

    def loss(self, model, batch):
        x, y = batch
        noise = random.random() + numpy.random.rand()
        return nn.functional.mse_loss(model(x).float() + 0.01 * noise, y)


def by_itself(task, level, seed, epochs):
    """The losses of a plain loop in which nothing else is trained."""
    process_state.take_off()
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    cell = dataclasses.replace(CELL, level=level, seed=seed)
    alone, losses, scales = trainer.Trainer(cell, complete(task), CPU), [], []
    for epoch in range(epochs):
        for batch in task.loader(cell.batch, 1000 * seed + epoch):
            scales.append(float(alone.precision.scale()))
            losses.append(float(alone.step(batch)))
    process_state.take_off()
    return tuple(losses), tuple(scales)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.slow
def test_losses_are_those_of_the_level_alone_with_dropout_to_the_last_bit(seed, monkeypatch):
    monkeypatch.setattr(turns, "TURN_MS", 0.0)  # else a fast task has one long turn
    task, levels = Dropping(), list(LEVELS)[:-1]
    together = train(task, levels, seed=seed, epochs=3)
    assert [run.status for run in together] == ["ok"] * len(levels)
    assert len(together[0].blocks) > 2
    for run, level in zip(together, levels, strict=True):
        assert (run.losses, run.scales) == by_itself(task, level, seed, 3), level
    other = train(task, ["O0"], seed=seed + 1, epochs=3)[0]
    assert other.losses != together[0].losses


@pytest.mark.slow
def test_torchs_own_levels_and_o0_run_without_amps_kernels():
    seen = {}

    class Looking(user_task.Regression):
        def loss(self, model, batch):
            kernels = (bool(dispatcher.installed()), cpu_float16.is_on())
            if torch.is_grad_enabled():
                key = (torch.is_autocast_enabled("cpu"), *kernels)
                seen.setdefault(torch.get_autocast_dtype("cpu") if key[0] else None, set()).add(key)
            return super().loss(model, batch)

    for levels in (("O1", "native-fp16"), ("O4", "native-bf16"), ("O2", "O0", "O5")):
        seen.clear()
        for run in train(Looking(), levels):
            assert run.status == "ok"
        found = {key for keys in seen.values() for key in keys}
        if "native" in levels[1]:  # autocast with amp's kernels, and without
            assert {(True, True), (True, False)} <= {(cast, kernel) for cast, kernel, _ in found}
        else:
            assert (False, False, False) in found
            assert (False, False, True) in found
    assert not cpu_float16.is_on()
    assert not dispatcher.installed()


def test_levels_start_alike_and_see_the_same_batches():
    first, other = train(user_task.Regression(), ["O0", "O5"])
    assert other.losses[0] == pytest.approx(first.losses[0], rel=0.02)


class Noting(user_task.Regression):
    """Notes the first weights, the seeds of its loader, and the outputs' dtype in evaluation."""

    def __init__(self):
        self.weights, self.seeds, self.dtypes = [], [], set()

    def model(self):
        model = super().model()
        self.weights.append(model.weight.detach().clone())
        return model

    def loader(self, batch_size, seed):
        self.seeds.append(seed)
        return super().loader(batch_size, seed)

    def accuracy(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        self.dtypes.add(model(torch.eye(user_task.FEATURES)).dtype)
        return super().accuracy(model)


def test_the_seed_decides_weights_and_order_and_each_epoch_has_its_own_order():
    tasks = [Noting(), Noting(), Noting()]
    for task, seed in zip(tasks, (3, 3, 4), strict=True):
        train(task, seed=seed)
    first, again, other = tasks
    assert all(torch.equal(first.weights[0], weight) for weight in first.weights + again.weights)
    assert not torch.equal(first.weights[0], other.weights[0])
    assert len({seed for task in (first, other) for seed in task.seeds}) == 4


# --- levels --------------------------------------------------------------------------------------


class Watched(user_task.Regression):
    """Notes the dtypes of weights and outputs in training."""

    def __init__(self):
        self.seen = set()

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        if torch.is_grad_enabled():
            self.seen.add((next(model.parameters()).dtype, out.dtype))
        return torch.nn.functional.mse_loss(out.float(), y)


DTYPES = {
    "O0": (FULL, FULL), "O1": (FULL, HALF), "O2": (HALF, FULL), "O3": (HALF, HALF),
    "O4": (FULL, BF16), "O5": (BF16, FULL),
    "native-fp16": (FULL, HALF), "native-bf16": (FULL, BF16), "FP16": (HALF, HALF),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_is_what_it_says(level):
    task = Watched()
    (run,) = train(task, [level])
    assert (run.status, run.error) == ("ok", None)
    ((weight, out),) = task.seen
    assert weight == DTYPES[level][0]
    assert out == DTYPES[level][1] or level in ("O2", "O3", "O5")  # cast to float32 on the way out
    scale = {"O1": 65536, "O2": 65536, "native-fp16": 65536, "FP16": 128}.get(level, 1)
    assert run.scales[0] == scale
    assert len(run.scales) == len(run.losses) == 16


class Overflowing(user_task.Regression):
    """Its loss is too large for float16 until the scale has fallen to 2**12."""

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        largest = 2.0**4  # times the scale: above 65504 the gradient of out is inf in float16
        return (out * largest).mean() if out.dtype == HALF else out.float().mean()


def test_skipped_steps_and_the_scale_are_those_of_each_level():
    """Each has a scaler of its own: another level that overflows does not move it."""
    runs = train(Overflowing(), ["O1", "native-fp16", "O4", "O0"], lr=1e-6)
    first, native, *others = runs
    assert first.skipped == sum(
        b < a for a, b in zip(first.scales, first.scales[1:], strict=False)
    ) > 0  # fmt: skip
    assert native.scales == first.scales
    assert native.skipped == first.skipped
    assert [set(run.scales) for run in others] == [{1.0}] * 2


def test_the_scale_is_read_without_waiting(monkeypatch):
    """A level that reads from the GPU before each step would be timed without overlap."""

    def waits(self):
        raise AssertionError("reads the device")

    for level in ("O1", "native-fp16"):
        of_level = precision(level, CPU)
        model = torch.nn.Linear(2, 1)
        made, optimizers = of_level.start([model], [torch.optim.SGD(model.parameters(), 0.1)], 1)
        with of_level.forward():
            loss = made[0](torch.ones(1, 2)).sum() / 16
        of_level.backward(loss, optimizers[0])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", waits)
            patch.setattr(torch.Tensor, "item", waits)
            patch.setattr(torch.Tensor, "__float__", waits)
            scale = of_level.scale()
        of_level.step(optimizers[0])
        assert float(scale) == 65536


@pytest.mark.parametrize(("level", "dtype"), [("O0", FULL), ("O4", BF16), ("native-bf16", BF16)])
def test_accuracy_is_that_of_the_level(level, dtype):
    task = Noting()
    assert train(task, [level])[0].accuracy
    assert task.dtypes == {dtype}


def test_tf32_is_chosen_for_recurrent_layers_too_and_put_back():
    def now():
        backends = torch.backends
        places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        return [place.fp32_precision for place in places]

    before = now()
    for wanted, name in ((True, "tf32"), (False, "ieee")):
        with trainer.OwnState(dataclasses.replace(CELL, tf32=wanted), CPU):
            assert now() == [name] * 3
        assert now() == before


# --- what is measured ----------------------------------------------------------------------------


def test_the_accuracy_before_the_training_is_measured_apart_at_o0(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(memory, "peak_bytes", lambda *args: None)
    monkeypatch.setattr(profiling, "operators", lambda *args: ())
    first, other = train(user_task.Regression(), ["O0", "O4"])
    torch.manual_seed(0)
    model = user_task.Regression().model()
    with torch.no_grad():
        assert first.untrained == pytest.approx(user_task.Regression().accuracy(model))
    assert other.untrained is None


def test_turns_are_blocks_of_steps_in_pairs_of_opposite_order(monkeypatch):
    monkeypatch.setattr(turns, "TURN_MS", 0.0)
    order = []

    class Ordered(user_task.Regression):
        def loss(self, model, batch):
            if torch.is_grad_enabled():
                order.append(id(model))
            return super().loss(model, batch)

    first, other = train(Ordered(), ["O0", "native-bf16"], epochs=10)
    assert first.blocks == other.blocks == tuple(range(0, 80, turns.BLOCK))
    assert all(len(turn) == turns.BLOCK - 1 for turn in first.turns)
    assert len(first.turns) == 9  # the first round does not count
    taken = order[:: turns.BLOCK]
    rounds = [tuple(taken[i : i + 2]) for i in range(0, 20, 2)]
    assert all(two == one[::-1] for one, two in zip(rounds[1:9:2], rounds[2:9:2], strict=True))
    assert first.together == other.together == ("O0", "native-bf16")
    assert len(first.inference_ms) == len(other.inference_ms) == turns.INFERENCES - 1


def test_the_share_that_is_reported_ends_at_one_with_a_line_after_the_first_round():
    seen = []
    train(user_task.Regression(), ["O0", "O4"], on_progress=lambda *words: seen.append(words))
    shares, lines = [share for share, _ in seen], [line for _, line in seen if line]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    (line,) = lines
    assert line.startswith("regression, batch 8: first steps in ms, no result yet: O0 ")


@pytest.mark.usefixtures("no_profiling")
@pytest.mark.slow
def test_memory_and_operators_are_measured_at_the_first_seed(monkeypatch):
    monkeypatch.undo()
    first, native = train(user_task.Regression(), ["O0", "native-bf16"])
    assert first.peak_bytes > 0
    assert {one.name for one in first.operators} >= {"addmm"}
    assert any(one.dtype == "bfloat16" for one in native.operators)
    assert all(one.ms > 0 for one in first.operators)
    (later,) = train(user_task.Regression(), seed=1)
    assert (later.peak_bytes, later.operators) == (None, ())


# --- a time budget, by a clock of the test's -----------------------------------------------------


class Clock:
    """Time that passes only in steps: a second each at O0, more at others."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(turns.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.now)
        clock = self
        step = trainer.Trainer.step

        def timed(of, batch):
            clock.now += clock.seconds[of.precision_name]
            return step(of, batch)

        init = trainer.Trainer.__init__

        def named(of, cell, *args):
            of.precision_name = cell.level
            init(of, cell, *args)

        monkeypatch.setattr(trainer.Trainer, "__init__", named)
        monkeypatch.setattr(trainer.Trainer, "step", timed)


def test_a_budget_stops_slow_levels_and_says_why(monkeypatch):
    clock = Clock(monkeypatch, {"O0": 1.0, "O4": 0.8, "native-fp16": 30.0})
    budget = 400.0
    first, fast, slow = train(
        user_task.Regression(), ["O0", "O4", "native-fp16"], epochs=10, budget_s=budget
    )
    assert clock.now <= budget
    assert (first.status, fast.status, slow.status) == ("ok", "ok", "stopped")
    assert len(first.losses) == len(fast.losses) == 80
    assert slow.error == (
        f"stopped after {len(slow.losses)} of 80 steps to keep to the time budget: a step takes "
        "30.0 times O0's"
    )


@pytest.mark.parametrize("budget_s", [200.0, 500.0])
@pytest.mark.slow
def test_a_budget_is_kept_in_the_first_epoch_of_a_loader_without_a_length(monkeypatch, budget_s):
    class Long(user_task.Regression):
        def loader(self, batch_size, seed):
            for _ in range(50):
                yield from super().loader(batch_size, seed)

    clock = Clock(monkeypatch, {"O0": 1.0, "O4": 0.8, "native-fp16": 3.0})
    runs = train(Long(), ["O0", "O4", "native-fp16"], epochs=1, budget_s=budget_s)
    assert clock.now <= budget_s
    assert [run.status for run in runs] == ["ok", "ok", "stopped"]
    assert len(runs[0].losses) == len(runs[1].losses) < runs[0].planned_steps == 400


@pytest.mark.slow
def test_a_budget_cuts_all_to_the_same_number_of_steps(monkeypatch):
    clock = Clock(monkeypatch, {"O0": 1.0, "O4": 0.8})
    first, other = train(user_task.Regression(), ["O0", "O4"], epochs=100, budget_s=300.0)
    assert clock.now <= 300.0
    assert (first.status, other.status) == ("ok", "ok")
    assert 80 < len(first.losses) == len(other.losses) < first.planned_steps == 800
    assert len(first.accuracy) == len(other.accuracy) > 0
    alone = train(user_task.Regression(), ["O0"], epochs=100)[0]
    assert alone.losses[: len(first.losses)] == first.losses


BUDGETS = [
    0.0,
    20.0,
    47.0,
    *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (1, 9, 33, 160)),
]


@pytest.mark.parametrize("budget_s", BUDGETS)
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.slow
def test_levels_of_any_budget_end_after_as_many_steps(monkeypatch, budget_s, epochs):
    seconds = {"O0": 1.0, "O4": 0.4, "O5": 1.3, "native-fp16": 2.6}
    clock = Clock(monkeypatch, seconds)
    runs = train(user_task.Regression(), list(seconds), epochs=epochs, budget_s=budget_s)
    assert {run.status for run in runs} <= {"ok", "stopped"}
    assert len({len(run.losses) for run in runs if run.finished}) == 1
    first_turns = turns.BLOCK * sum(seconds.values())
    assert clock.now <= max(budget_s, 2 * first_turns)


def test_what_is_measured_apart_keeps_to_the_budget(monkeypatch):
    """It takes longer than some steps do: the second is measured if as much time is left again."""
    clock, measured = Clock(monkeypatch, {"O0": 1.0, "O4": 1.0, "O5": 1.0}), []

    def measure(cell, *args, **kwargs):
        measured.append(cell.level)
        clock.now += 100.0
        return {}

    monkeypatch.setattr(profiling, "measure", measure)
    train(user_task.Regression(), ["O0", "O4", "O5"], epochs=1, budget_s=250.0)
    assert measured == ["O0", "O4"]
    assert clock.now <= 250.0


@pytest.mark.parametrize(("budget_s", "timed"), [(4.0, 0), (7.5, 0), (8.5, 1), (None, 5)])
def test_inference_keeps_to_the_budget(monkeypatch, budget_s, timed):
    """Two steps of both take 4 s, a round 2 s. The first does not count: one alone is not begun."""
    clock = Clock(monkeypatch, {"O0": 1.0, "O4": 1.0})

    def infer(of, batch):
        clock.now += 1.0

    monkeypatch.setattr(trainer.Trainer, "infer", infer)
    runs = train(user_task.Regression(), ["O0", "O4"], epochs=1, budget_s=budget_s)
    assert {len(run.inference_ms) for run in runs} == {timed}
    assert clock.now <= (budget_s or math.inf)


def test_without_a_budget_nothing_is_stopped(monkeypatch):
    Clock(monkeypatch, {"O0": 1.0, "native-fp16": 1000.0})
    runs = train(user_task.Regression(), ["O0", "native-fp16"])
    assert [(run.status, len(run.losses)) for run in runs] == [("ok", 16), ("ok", 16)]


# --- what goes wrong -----------------------------------------------------------------------------


def test_an_error_of_one_level_leaves_the_others_alone():
    class Half(user_task.Regression):
        def loss(self, model, batch):
            if next(model.parameters()).dtype == HALF:
                raise ValueError("no half\nweights")
            return super().loss(model, batch)

    base, failed, other = train(Half(), ["O0", "O3", "O4"])
    assert failed.status == "failed"
    assert re.fullmatch(r"ValueError: no half weights \(test_turns\.py:\d+\)", failed.error)
    assert base.status == other.status == "ok"
    assert base.losses == train(Half(), ["O0"])[0].losses


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("could not create a memory object"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error, is_memory):
    assert trainer.out_of_memory(error) is is_memory


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([[], []], "no batch of 8"),
        ([[8, 8, 3], [8, 8, 3]], "the loader's last batch has 3 rows and not 8"),
        ([[8, 8], [8]], "2 batches in one epoch and 1 in the next"),
    ],
)
def test_a_loader_that_is_no_epoch_is_said(sizes, said):
    class Uneven(user_task.Regression):
        def loader(self, batch_size, seed):
            for size in sizes[seed]:
                yield torch.ones(size, user_task.FEATURES), torch.ones(size, 1)

    (run,) = train(Uneven())
    assert run.status == "failed"
    assert said in run.error


def test_a_loss_of_one_element_is_a_loss():
    class One(user_task.Regression):
        def loss(self, model, batch):
            return super().loss(model, batch).reshape(1)

    assert train(One())[0].losses == train(user_task.Regression())[0].losses


def test_weights_that_are_not_finite_after_the_last_step_are_a_divergence():
    class Last(user_task.Regression):
        def loader(self, batch_size, seed):
            return [torch.ones(batch_size, user_task.FEATURES)]

        def loss(self, model, batch):  # 0, and its gradient is nan
            return (model(batch) * 0).float().abs().sqrt().sum()

    (run,) = train(Last(), epochs=1)
    assert run.losses == (0.0,)
    assert run.status == "diverged"


def test_a_device_error_keeps_its_words(monkeypatch):
    def broken(self, batch):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(trainer.Trainer, "step", broken)
    (run,) = train(user_task.Regression())
    assert (run.status, "device-side assert" in run.error) == ("failed", True)


# --- torch.compile -------------------------------------------------------------------------------


class Counting(nn.Linear):
    """Compiled again for each epoch, whose number is part of the code."""

    epoch = ""

    def forward(self, x):
        return super().forward(x) + (self.epoch == "another")


@pytest.mark.parametrize(("epochs", "status"), [(12, "ok"), (20, "failed")])
@pytest.mark.slow
def test_compiled_levels_do_not_fall_back_in_silence(monkeypatch, epochs, status):
    """Past Dynamo's limit of 8 compilations all is compiled, past our own the level fails."""
    compiled = []

    def graph(module, inputs):
        compiled.append(module)
        return module.forward

    class Task(user_task.Regression):
        def model(self):
            self.made = Counting(user_task.FEATURES, 1)
            return self.made

        def loader(self, batch_size, seed):
            self.made.epoch += "x"
            yield from super().loader(batch_size, seed)

    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda of: compile_(of, backend=graph))
    monkeypatch.setattr(turns, "INFERENCES", 0)
    monkeypatch.setattr(turns, "COMPILATIONS", 16)  # 64 take 2 s
    task = Task()
    task.accuracy = None
    (run,) = train(task, compile=True, epochs=epochs)
    assert run.status == status, run.error
    assert len(compiled) >= min(12, epochs)
    assert status == "ok" or "recompile" in run.error
    assert torch._dynamo.config.recompile_limit == 8


def test_losses_are_numbers_of_the_training():
    (run,) = train(user_task.Regression())
    assert all(map(math.isfinite, run.losses))
    assert len(run.step_ms) == len(run.data_ms) == len(run.losses) == 16
    assert (run.steps_per_epoch, run.planned_steps, len(run.epoch_seconds)) == (8, 16, 2)


def test_the_time_of_an_operator_is_without_those_that_it_calls():
    calls = [
        {"tid": 1, "ts": 0.0, "dur": 100.0},
        {"tid": 1, "ts": 10.0, "dur": 50.0},
        {"tid": 1, "ts": 20.0, "dur": 30.0},
        {"tid": 2, "ts": 15.0, "dur": 40.0},  # of another thread
        {"tid": 1, "ts": 70.0, "dur": 20.0},
    ]
    assert profiling._of_their_own(calls) == {0: 30.0, 1: 20.0, 2: 30.0, 3: 40.0, 4: 20.0}


def test_the_scale_of_several_losses_is_that_of_the_first():
    of_level, model = precision("O1", CPU), nn.Linear(2, 1)
    made, (optimizer,) = of_level.start([model], [torch.optim.SGD(model.parameters(), 0.1)], 2)
    of_level.backward(made[0](torch.ones(1, 2)).sum() * float("inf"), optimizer, loss_id=1)
    of_level.step(optimizer)
    assert float(of_level.scale()) == 65536
    optimizer.zero_grad()
    of_level.backward(made[0](torch.ones(1, 2)).sum() * float("inf"), optimizer, loss_id=0)
    of_level.step(optimizer)
    assert float(of_level.scale()) == 32768
    process_state.take_off()


# --- other programs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clock", "processor", "forced", "own", "waited"),
    [
        (10.0, 9.9, 700, 0, 0.01),  # idle: switches, but hardly a time without the processor
        (10.0, 5.7, 2040, 30, 0.43),  # beside a busy loop
        (10.0, 2.0, 1270, 10, 0.8),  # beside six
        (10.0, 2.0, 100, 10, 0.0),  # few forced switches: it waited by itself, for one thing
        (10.0, 2.0, 1270, 9000, 0.0),  # or for many, as a GPU's results
        (10.0, 10.1, 700, 0, 0.0),  # two clocks that differ
        (0.0, 0.0, 0, 0, 0.0),  # Windows
    ],
)
def test_other_programs_are_known_by_the_time_without_the_processor(
    clock, processor, forced, own, waited, monkeypatch
):
    monkeypatch.setattr(turns, "_processor", lambda: (clock, processor, forced, own))
    assert turns._waited((0.0,) * 4) == pytest.approx(waited)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count switches")
def test_what_is_read_of_the_processor_grows_with_its_use():
    before = turns._processor()
    sum(range(100_000))
    after = turns._processor()
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert all(now >= then for then, now in zip(before, after, strict=True))


def test_the_turns_time_is_in_each_run(monkeypatch):
    monkeypatch.setattr(turns, "_waited", lambda before: 0.25)
    assert [run.waited for run in train(user_task.Regression(), ["O0", "O4"])] == [0.25, 0.25]
