"""The tasks of `apex bench`: that each learns at each level, their data, and the user's own."""

import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.commands.bench.training.precision import LEVELS, precision
from apex.commands.bench.training.tasks import TASKS, cifar10, complete, load, text
from apex.commands.bench.training.tasks.classification import (
    IGNORED,
    Batches,
    Classification,
    Split,
)
from apex.commands.bench.training.tasks.networks import vgg16
from apex.commands.bench.training.tasks.task import Task, TaskOptions
from apex.commands.command_line import UsageError
from apex.optimizers import FusedAdam
from tests.tolerance import RESAMPLED, assert_close_to_largest

pytest.importorskip("sklearn")
from apex.commands.bench.training.tasks import digits

CPU = torch.device("cpu")
QUICK = TaskOptions(CPU, quick=True)
OTHERS = ("digits-vgg16", "cifar10-vgg16", "cifar10-resnet18", "resnet50", "bert-base")  # large
SMALL = [name for name in TASKS if name not in OTHERS]


@pytest.fixture(autouse=True)
def _clean():
    yield
    amp.reset()


@pytest.fixture(scope="module")
def tasks():
    return {}


def _load(tasks, name):
    if name.startswith("bert"):
        pytest.importorskip("transformers")
    if name not in tasks:
        tasks[name] = load(name, QUICK)
    return tasks[name]


def _trained(task, level, *, batch=4, steps=20):
    """Train as `apex bench` does; return the losses, the scales and the models."""
    torch.manual_seed(0)
    made = task.model()
    models = [made.train()] if isinstance(made, nn.Module) else [model.train() for model in made]
    kind, extra = (
        (torch.optim.SGD, {"momentum": 0.9}) if task.optimizer == "sgd" else (FusedAdam, {})
    )
    lr = 0.05 if task.lr is None else task.lr
    way = precision(level, CPU, task.growth_interval)
    models, optimizers = way.start(
        models, [kind(model.parameters(), lr=lr, **extra) for model in models], task.losses
    )
    losses, scales = [], []
    for _, data in zip(range(steps), task.loader(batch, 0), strict=False):
        scales.append(float(way.scale()))
        if task.step is not None:
            loss = task.step(way, models, optimizers, data)
        else:
            optimizers[0].zero_grad()
            with way.forward():
                loss = task.loss(models[0], data)
            way.backward(loss, optimizers[0])
            way.step(optimizers[0])
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    return losses, scales, models


# --- every task -----------------------------------------------------------------------------------


def _cases():
    """Name every pair; in float16 a step of the larger networks takes 0.2 s here."""
    for name in SMALL:
        for level in LEVELS:
            common = level in ("O5", "FP16") or name in ("linear", "digits-mlp")
            yield pytest.param(name, level, marks=[] if common else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "level"), list(_cases()))
@pytest.mark.slow
def test_each_task_learns_at_each_level(tasks, name, level):
    if (name, level) == ("text-lstm", "native-fp16"):
        pytest.skip("torch's own autocast has no float16 LSTM on a CPU")
    task = _load(tasks, name)
    batch, steps = {"linear": (32, 20), "dcgan-digits": (16, 6), "digits-cnn": (32, 8)}.get(
        name, (8, 20) if name in ("digits-mlp", "seq2seq") else (4, 8)
    )
    losses, _, models = _trained(task, level, batch=batch, steps=steps)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < np.mean(losses[:2])
    if task.test_loss is not None and level == "O5":
        with torch.no_grad():
            model = models[0].eval()
            assert 0 < task.test_loss(model) < np.inf
            assert task.accuracy is None or 0 < task.accuracy(model) <= 100


@pytest.mark.parametrize("name", ["digits-mlp", "text-lstm", "seq2seq", "bert-tiny"])
def test_accuracy_and_test_loss_are_those_of_all_labels(tasks, name, monkeypatch):
    """In one pass over all as in several, whose last is smaller or has fewer words to guess."""
    task = _load(tasks, name)
    torch.manual_seed(0)
    model = task.model().eval()
    x, y = task.data.test_x, task.data.test_y
    with torch.no_grad():
        logits = model(x).double()
        right = (logits.argmax(-1) == y)[y != -100]
        exact = F.cross_entropy(logits.movedim(-1, 1), y)  # leaves -100 out
        in_a_sequence = 16 if name == "seq2seq" else 1  # whose loss is a sum over characters
        monkeypatch.setattr(task, "at_once", 25, raising=False)
        assert task.test_size == len(right)
        assert task.accuracy(model) == pytest.approx(100 * float(right.double().mean()))
        assert task.test_loss(model) == pytest.approx(in_a_sequence * float(exact), rel=1e-5)


def test_the_levels_are_what_they_are_called(tasks):
    task = _load(tasks, "linear")
    dtypes = {level: _trained(task, level, steps=1)[2][0] for level in ("O0", "O2", "O5", "FP16")}
    weights = {level: next(model.parameters()).dtype for level, model in dtypes.items()}
    assert weights == {
        "O0": torch.float32, "O2": torch.float16, "O5": torch.bfloat16, "FP16": torch.float16,
    }  # fmt: skip
    assert _trained(task, "native-bf16", steps=2)[1] == [1.0, 1.0]
    assert _trained(task, "native-fp16", steps=1)[1] == [65536.0]


@pytest.mark.slow
def test_the_loss_scale_falls_and_grows_again(tasks):
    task = complete(_load(tasks, "seq2seq"))
    assert task.growth_interval == 100
    faster = types.SimpleNamespace(
        **{name: getattr(task, name) for name in dir(Task) if "_" not in name}
    )
    faster.growth_interval = 10
    for level in ("O1", "native-fp16"):
        _, scales, _ = _trained(complete(faster), level, batch=8, steps=30)
        lowest = scales.index(min(scales))
        assert scales[0] == 65536.0
        assert scales[lowest] < scales[0]
        assert max(scales[lowest:]) > scales[lowest]


def test_batches_are_whole_in_an_order_of_the_seed():
    rows = torch.arange(10)
    first, again, other = (
        [batch.tolist() for (batch,) in Batches((rows,), 4, seed)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert [len(batch) for batch in first] == [4, 4]
    assert len({row for batch in first for row in batch}) == 8
    with pytest.raises(UsageError, match="--batch 11: the task has 10 training samples"):
        Batches((rows,), 11, 0)


@pytest.mark.parametrize("name", ["text-lstm", "text-transformer"])
def test_a_character_is_guessed_from_those_before_it(tasks, name):
    task = _load(tasks, name)
    model, rows = task.model(), task.data.train_x[:1]
    assert torch.equal(rows[0, 1:], task.data.train_y[0, :-1])
    other = rows.clone()
    other[0, 40] += 1
    changed = (model(rows) != model(other)).any(-1)[0]
    assert not changed[:40].any()
    assert changed[40:].all()


def test_the_decoder_reads_what_was_before_and_the_whole_source(tasks):
    task = _load(tasks, "seq2seq")
    x, y = task.data.train_x[:1], task.data.train_y[:1]
    assert torch.equal(x[:, :16], y.flip(1))
    assert x[0, 16] == text.MASK
    assert torch.equal(x[:, 17:], y[:, :15])
    model, other = task.model(), x.clone()
    other[0, 26] += 1
    assert torch.equal((model(x) != model(other)).any(-1)[0], torch.arange(16) >= 10)


# --- data -----------------------------------------------------------------------------------------


def test_digits_are_the_same_bits_each_time():
    one, two = digits.load(16, QUICK), digits.load(16, QUICK)
    assert all(map(torch.equal, one, two))
    assert one.train_x.shape == (4096, 1, 16, 16)
    assert one.test_x.shape == (599, 1, 16, 16)
    assert one.train_x.min() >= 0
    assert one.train_x.max() <= 1
    assert len(torch.unique(one.train_x, dim=0)) == 4096  # no two alike, though of 1,198 digits
    whole = digits.load(8, TaskOptions(CPU))
    assert len(whole.train_x) == 20_480
    assert len(whole.train_y.bincount()) == 10


def test_digits_held_out_are_not_trained_on(monkeypatch):
    from sklearn.datasets import load_digits

    monkeypatch.setattr(digits, "SHIFT", 0.0)  # so that an image is still the digit it is made of
    monkeypatch.setattr(digits, "ROTATION", 0.0)
    data = digits.load(8, QUICK)
    # Pixels are sixteenths; a resampled one is off by a rounding or two.
    parts = ((16 * part).round().to(torch.uint8) for part in (data.train_x, data.test_x))
    train, held = ({x.numpy().tobytes() for x in part} for part in parts)
    assert not train & held
    assert train | held == {x.tobytes() for x in load_digits().data.astype(np.uint8)}


def test_digits_move_and_turn_as_they_are_told():
    image = torch.rand(1, 1, 8, 8)
    none, right, down = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    moved = digits.enlarged(image, 8, torch.zeros(1), right)
    assert_close_to_largest(moved[..., 1:], image[..., :-1].double(), RESAMPLED)
    assert not moved[..., 0].any()
    moved = digits.enlarged(image, 8, torch.zeros(1), down)
    assert_close_to_largest(moved[..., 1:, :], image[..., :-1, :].double(), RESAMPLED)
    turned = digits.enlarged(image, 8, torch.tensor([90.0]), none)
    assert_close_to_largest(turned, torch.rot90(image, 1, (2, 3)).double(), RESAMPLED)


def test_the_text_is_split_and_survives_float16(monkeypatch):
    for found in (text.characters(), text.words(), text.letters()):
        total = len(found.train) + len(found.held)
        assert len(found.held) == total // 10
        assert len(found.vocabulary) <= text.LARGEST
        every = torch.arange(len(found.vocabulary))
        assert torch.equal(every.half().long(), every)
        assert text.MASK not in found.train
    assert text.characters().vocabulary[2] == " "
    monkeypatch.setattr(text, "_topics", lambda: "aab" * 6 + "zz")
    few = text.characters()
    assert few.vocabulary == ["<unknown>", "<mask>", "a", "b"]
    assert few.held.tolist() == [text.UNKNOWN] * 2
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UsageError, match="pydoc_data"):
        text.characters()


def test_masked_words():
    rows = torch.full((200, 100), 7)
    tokens, labels = text.masked(rows, torch.Generator().manual_seed(0), 50)
    asked = labels != IGNORED
    assert torch.equal(tokens[~asked], rows[~asked])
    assert (labels[asked] == 7).all()
    assert abs(asked.double().mean() - 0.15) < 0.01
    masked, same = (tokens[asked] == text.MASK), (tokens[asked] == 7)
    assert abs(masked.double().mean() - 0.8) < 0.03
    assert abs(same.double().mean() - (0.1 + 0.1 / 48)) < 0.03


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "IN_FILE", 3)
    folder = tmp_path / cifar10.FOLDER
    folder.mkdir()
    for number, name in enumerate((*cifar10.TRAINING, *cifar10.TEST)):
        rows = np.zeros((3, cifar10.BYTES), np.uint8)
        rows[:, 0] = number
        rows[0, 1 + 1024 + 32 * 5 + 6] = 255  # green, row 5, column 6
        rows.tofile(folder / name)
    return folder


def test_cifar_is_read_as_bytes(cifar):
    data = cifar10.load(TaskOptions(CPU, data=cifar.parent))
    assert data.train_y.tolist() == [n for n in range(5) for _ in range(3)]
    assert data.test_y.tolist() == [5] * 3
    brightest = data.train_x[0] * torch.tensor(cifar10.DEVIATION).reshape(3, 1, 1)
    brightest += torch.tensor(cifar10.MEAN).reshape(3, 1, 1)
    assert brightest[1, 5, 6] == pytest.approx(1)
    assert brightest.sum() == pytest.approx(1, abs=1e-3)
    task = load("cifar10-resnet18", TaskOptions(CPU, quick=True, data=cifar))
    losses, _, models = _trained(task, "O0", batch=3, steps=1)
    assert np.isfinite(losses).all()
    assert _count(models[0]) == 11_173_962


def test_cifar_with_other_files_is_one_line(cifar):
    def refuse(match, **options):
        with pytest.raises(UsageError, match=match):
            load("cifar10-vgg16", TaskOptions(CPU, **options))

    refuse("needs --data; pass the folder with the unpacked files of https")
    refuse(r"there is no test_batch\.bin", data=cifar.parent / "nothing")
    (cifar / "data_batch_2.bin").write_bytes(b"short")
    refuse(r"data_batch_2\.bin: 5 bytes; CIFAR-10's files have 9219", data=cifar)
    (cifar / "data_batch_2.bin").unlink()
    refuse(r"data_batch_2\.bin: No such file", data=cifar)
    (cifar / "data_batch_2.bin").write_bytes(bytes([10]) * 9219)
    refuse("classes above 9", data=cifar)


def test_resnet50_on_random_images():
    task = load("resnet50", QUICK)
    assert task.accuracy is task.test_loss is task.test_size is None
    assert _count(task.model()) == 25_557_032
    batches = list(task.loader(2, 0))
    assert len(batches) == 5
    assert batches[0][0].shape == (2, 3, 224, 224)
    task.model = lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 1000))
    losses, _, _ = _trained(task, "O0", batch=2, steps=3)
    assert losses[-1] < losses[0]


def test_missing_packages_are_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UsageError, match=r"^task bert-tiny needs transformers: pip install transformers$"
    ):
        load("bert-tiny", QUICK)


def _count(model):
    return sum(p.numel() for p in model.parameters())


def test_large_networks_have_the_parameters_of_their_families():
    assert _count(load("digits-vgg16", QUICK).model()) == 922_842
    model = vgg16(3)
    assert _count(model) == 14_724_042
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


# --- the user's own -------------------------------------------------------------------------------

OWN = """
import torch
import {neighbour}

class Own:
    def model(self): return torch.nn.Linear(2, 1)
    def loss(self, model, batch): return model(batch).square().mean()
    def loader(self, batch_size, seed): return [torch.ones(batch_size, 2)] * 20
    {more}

def build(options):
    return {returned}
"""


@pytest.fixture
def write(tmp_path, monkeypatch, request):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name="own_task", *, returned="Own()", more="", neighbour="own_neighbour"):
        (tmp_path / "own_neighbour.py").write_text("")
        text = OWN.format(returned=returned, more=more, neighbour=neighbour)
        (tmp_path / f"{name}.py").write_text(text)
        return f"{tmp_path / name}.py:build"

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("own"):
            del sys.modules[name]


def test_a_task_of_the_users_has_defaults(write):
    task = load(write(more="epochs = 7"), QUICK)
    assert (task.optimizer, task.lr, task.epochs, task.losses) == ("sgd", None, 7, 1)
    assert task.accuracy is None
    assert task.step is None
    losses, _, _ = _trained(task, "O2")
    assert losses[-1] < losses[0]
    assert isinstance(task, Task)


STEP = """
    loss = None
    def step(self, precision, models, optimizers, batch):
        optimizers[0].zero_grad()
        with precision.forward():
            loss = models[0](batch).float().square().mean()
        precision.backward(loss, optimizers[0])
        precision.step(optimizers[0])
        return loss
"""


def test_a_task_with_a_step_of_its_own_needs_no_loss(write):
    losses, _, _ = _trained(load(write(more=STEP), QUICK), "O2")
    assert losses[-1] < losses[0]


def test_the_accuracy_of_guessing_is_that_of_the_most_frequent_label(write):
    x, asked = torch.ones(6, 1), torch.tensor([1, 2, 2, 2, IGNORED, 0])
    assert Classification(Split(x, asked, x, asked)).chance == pytest.approx(60.0)
    assert load(write(more="chance = 12.5"), QUICK).chance == 12.5


def test_a_module_can_be_a_task(write):
    task = load(write(returned="options.module"), types.SimpleNamespace(module=_module()))
    assert task.model() == 1
    assert task.test_size is None


def _module():
    module = types.ModuleType("functions")
    module.model, module.loss, module.loader = (
        (lambda: 1),
        (lambda model, batch: 2),
        (lambda b, s: []),
    )
    return module


OBJECT = (
    r"an object with model\(\), loss\(model, batch\) and loader\(batch_size, seed\) "
    r"\(docs/precision-report.md\)$"
)
WRITE = r"write build\(options\) that returns " + OBJECT
RETURN = "it must return " + OBJECT


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"returned": "None"}, "what build returned is None; " + RETURN),
        ({"returned": "object()"}, r"\(object\) has no function model and no loss and no loader"),
        ({"more": "loader = None"}, r"\(Own\) has no function loader; it must return an"),
        ({"more": "accuracy = 5"}, "has accuracy of type int; it must be a function"),
        ({"more": "test_size = 2.5"}, "has test_size of type float; it must be a whole number"),
        ({"more": "epochs = 2.5"}, "has epochs of type float; it must be a whole number"),
        ({"returned": "1 / 0"}, r"build raised ZeroDivisionError: division by zero \(own_task"),
        (
            {"returned": "0\ndef build(): 0"},
            r"apex calls build\(options\), and .*own_task.py defines build\(\); " + WRITE,
        ),
        ({"returned": "0\ndef build(a, b): 0"}, r"defines build\(a, b\); " + WRITE),
        ({"returned": "(torch.nn.Linear(1, 1), [])"}, r"returned \(tuple\) has .*; " + RETURN),
        ({"returned": "torch.nn.Linear(1, 1)"}, r"returned \(Linear\) has .*; " + RETURN),
        ({"returned": "exit('no data')"}, "build raised SystemExit: no data"),
        ({"neighbour": "own_missing"}, r"own_task\.py raised ModuleNotFoundError: .*own_missing"),
        ({"returned": ")"}, r"own_task\.py raised SyntaxError"),
        ({"name": "random"}, r"another module is called random .*; rename the file"),
    ],
)
def test_mistakes_in_the_users_file_are_one_line(write, options, match):
    with pytest.raises(UsageError, match=match) as caught:
        load(write(**options), QUICK)
    assert "own_task" in str(caught.value) or "random" in str(caught.value)


def test_a_name_that_is_no_task_is_one_line(write):
    for name, match in [
        ("digits", "use FILE.py:FUNCTION or one of digits-mlp"),
        (":build", "use FILE.py:FUNCTION"),
        ("nothing.py:build", "there is no Python file nothing.py"),
        ("a.ipynb:build", "a.ipynb is a notebook: .* `jupyter nbconvert --to script a.ipynb`"),
        (
            write().replace(":build", ":make"),
            "no function make in .*; " + WRITE.replace("build", "make"),
        ),
        ("train.py", "task train.py: use train.py:build or one of digits-mlp"),
        ("train.py:", "task train.py:: use train.py:build or one of digits-mlp"),
        (write().replace(":build", ":torch"), "there is no function torch in"),
    ]:
        with pytest.raises(UsageError, match=match):
            load(name, QUICK)
