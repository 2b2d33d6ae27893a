"""One training: each precision is what it says, and what is measured of it."""

import dataclasses

import pytest
import torch

from apex.bench.training import cell as cells
from apex.bench.training import probe as probes
from apex.bench.training.precision import LEVELS, precision
from apex.bench.training.results import Cell
from tests.bench import user_task

CPU = torch.device("cpu")
CELL = Cell("regression", "O0", None, 8, 0, "sgd", 0.02, 2, compile=False, quick=False)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(task, **changes):
    from apex.bench.training.tasks import complete

    return cells.train(dataclasses.replace(CELL, **changes), complete(task), CPU, alone=False)


class Watched(user_task.Regression):
    """Notes the dtypes of weights and outputs in training."""

    def __init__(self):
        self.seen = set()

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        weight = next(model.parameters())
        self.seen.add((weight.dtype, out.dtype))
        return torch.nn.functional.mse_loss(out.float(), y)


HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
DTYPES = {
    "O0": (FULL, FULL), "O1": (FULL, HALF), "O2": (HALF, FULL), "O3": (HALF, HALF),
    "O4": (FULL, BF16), "O5": (BF16, FULL),
    "native-fp16": (FULL, HALF), "native-bf16": (FULL, BF16), "FP16": (HALF, HALF),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_is_what_it_says(level):
    task = Watched()
    run = train(task, level=level)
    assert (run.status, run.error) == ("ok", None)
    ((weight, out),) = task.seen
    assert weight == DTYPES[level][0]
    assert out == DTYPES[level][1] or level in ("O2", "O3", "O5")  # cast to float32 on the way out
    scale = {"O1": 65536, "O2": 65536, "native-fp16": 65536, "FP16": 128}.get(level, 1)
    assert run.scales[0] == scale
    assert len(run.scales) == len(run.losses) == 16


def test_the_same_cell_gives_the_same_training_whatever_ran_before():
    first = train(user_task.Regression(), level="O5", seed=3)
    train(user_task.Regression(), level="O4", seed=1)
    second = train(user_task.Regression(), level="O5", seed=3)
    for name in ("losses", "accuracy", "scales", "peak_tensor_bytes", "flops", "moved_bytes"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.losses != train(user_task.Regression(), level="O5", seed=4).losses


def test_levels_start_alike_and_see_the_same_batches():
    first = {level: train(user_task.Regression(), level=level).losses[0] for level in ("O0", "O5")}
    assert first["O5"] == pytest.approx(first["O0"], rel=0.02)


class Overflowing(user_task.Regression):
    """Its loss is too large for float16 until the scale has fallen to 2**12."""

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        largest = 2.0**4  # times the scale: above 65504 the gradient of out is inf in float16
        return (out * largest).mean() if out.dtype == HALF else out.float().mean()


def test_skipped_steps_and_the_scale_are_seen():
    run = train(Overflowing(), level="O1", lr=1e-6)
    assert run.status == "ok"
    assert run.skipped == sum(b < a for a, b in zip(run.scales, run.scales[1:], strict=False)) > 0
    native = train(Overflowing(), level="native-fp16", lr=1e-6)
    assert native.skipped == run.skipped
    assert native.scales == run.scales


def test_the_share_that_is_told_ends_at_one():
    told = []
    from apex.bench.training.tasks import complete

    cells.train(CELL, complete(user_task.Regression()), CPU, told.append, alone=False)
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("could not create a memory object"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error, is_memory):
    assert cells.out_of_memory(error) is is_memory


def test_an_empty_loader_is_said():
    class Empty(user_task.Regression):
        def loader(self, batch_size, seed):
            return iter(())

    run = train(Empty())
    assert run.status == "failed"
    assert "no batch of 8" in run.error


def test_compiled_models_train(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    train(user_task.Regression(), compile=True)
    assert len(compiled) == 2  # the training, and the one whose memory is measured


def test_an_earlier_cell_leaves_nothing_compiled(monkeypatch):
    done = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: done.append("compile"))
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    train(user_task.Regression(), compile=True)
    assert done[:2] == ["reset", "compile"]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([[8, 8, 3], [8, 8, 3]], "the loader's last batch has 3 rows and not 8"),
        ([[8, 8], [8]], "2 batches in an epoch and 1 in the next"),
    ],
)
def test_steps_that_differ_are_said(sizes, said):
    class Uneven(user_task.Regression):
        def loader(self, batch_size, seed):
            for size in sizes[seed]:
                yield torch.ones(size, user_task.FEATURES), torch.ones(size, 1)

    run = train(Uneven())
    assert run.status == "failed"
    assert said in run.error


def test_a_loss_of_one_element_is_a_loss():
    class One(user_task.Regression):
        def loss(self, model, batch):
            return super().loss(model, batch).reshape(1)

    assert train(One()).losses == train(user_task.Regression()).losses


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


def test_tf32_is_chosen_for_recurrent_layers_too():
    def now():
        backends = torch.backends
        places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        return [place.fp32_precision for place in places]

    before = now()
    for wanted, name in ((True, "tf32"), (False, "ieee")):
        with cells._tf32(wanted):
            assert now() == [name] * 3
    assert now() == before


def test_a_device_error_keeps_its_words(monkeypatch):
    class Broken:
        def start(self):
            pass

        def stop(self):
            pass

        def milliseconds(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(cells, "stopwatch", lambda device: Broken())
    run = train(user_task.Regression())
    assert (run.status, "device-side assert" in run.error) == ("failed", True)


@pytest.mark.parametrize("name", ["columns", "constant", "raises"])
def test_a_batch_to_try_has_as_many_samples_as_it_says(monkeypatch, name):
    """Wherever the dimension of the samples is; where there is none, every size would fit."""
    seen = []

    class Task(user_task.Regression):
        def loader(self, batch_size, seed):
            if name == "raises":
                raise ValueError("no such size")
            size = batch_size if name == "columns" else 1
            yield {"x": torch.ones(user_task.FEATURES, size), "scalar": torch.tensor(1.0)}

        def loss(self, model, batch):
            seen.append((batch["x"].shape, batch["scalar"].shape))
            return model(batch["x"].T).float().mean()

    from apex.bench.training.tasks import complete

    monkeypatch.setattr(probes, "_limit", lambda *_: None)  # it would be this process's own
    run = probes.probe(dataclasses.replace(CELL, batch=5), complete(Task()), CPU, 0)
    if name == "columns":
        assert run.status == "ok"
        assert set(seen) == {((user_task.FEATURES, 5), ())}
    else:
        assert (run.status, seen) == ("failed", [])
        assert {"constant": "twice as long", "raises": "no such size"}[name] in run.error


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
    orders = [task.seeds[:2] for task in (first, other)]  # then come measurements apart
    assert len({seed for order in orders for seed in order}) == 4


@pytest.mark.parametrize(("level", "dtype"), [("O0", FULL), ("O4", BF16), ("native-bf16", BF16)])
def test_accuracy_is_that_of_the_level(level, dtype):
    task = Noting()
    assert train(task, level=level).accuracy
    assert task.dtypes == {dtype}


def test_weights_that_are_not_finite_after_the_last_step_are_a_divergence():
    class Last(user_task.Regression):
        def loader(self, batch_size, seed):
            return [torch.ones(batch_size, user_task.FEATURES)]

        def loss(self, model, batch):  # 0, and its gradient is nan
            return (model(batch) * 0).float().abs().sqrt().sum()

    run = train(Last(), epochs=1)
    assert run.losses == (0.0,)
    assert run.status == "diverged"


@pytest.mark.parametrize(("epochs", "left_out"), [(2, 8), (3, 10)])  # of 8 steps each
def test_the_first_steps_do_not_count(epochs, left_out):
    run = train(user_task.Regression(), epochs=epochs)
    assert run.warm_up == left_out
    assert len(run.counted_ms) == 8 * epochs - left_out
