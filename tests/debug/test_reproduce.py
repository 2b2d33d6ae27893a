"""The file that shows a fault again: it does for every planted fault, and executes nothing else."""

import io
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn
from torch.nn import functional

from apex import debug
from apex.debug import reproduce
from tests.debug.planted import LEVELS, MODELS, Training, explained, plant
from tests.debug.table import Block, Middle
from tests.debug.test_planted import HALF


def shows(path):
    """Whether a file shows its fault again."""
    return any(one["nan"] or one["inf"] for one in reproduce.run(reproduce.load(path)))


def once(function, x=None, dtype=torch.float32, loss_of=None):
    """The report of one bad step of a small model."""
    model = Block(Middle(function)).to(dtype)
    loss_of = loss_of or (lambda out: out.float().square().mean())
    x = (torch.randn(4, 8) if x is None else x).to(dtype)
    return explained(model, lambda: loss_of(model(x)))


# -- every fault reproduces ------------------------------------------------------------------------


def planted_cases():
    """One of each model, direction and value, the levels in turn; more of them under --all."""
    number = 0
    for name in MODELS:
        paths = [path for path, _ in MODELS[name]()[0].named_modules()]
        for place, path in enumerate(paths):
            for direction in ("forward", "backward"):
                for value in ("nan", "inf", "beyond"):
                    number += 1
                    level = LEVELS[number % len(LEVELS)]
                    if value == "beyond" and level not in HALF:
                        level = "O2"
                    if (name, path, direction) == ("GAN", "3", "forward") and value != "nan":
                        continue  # tanh makes 1 of it
                    yield pytest.param(
                        *(name, path, direction, value, level),
                        id=f"{name}-{path or 'itself'}-{direction}-{value}-{level}",
                        marks=[] if place == 1 else pytest.mark.exhaustive,
                    )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("name", "path", "direction", "value", "level"), list(planted_cases()))
def test_planted_fault_reproduces(name, path, direction, value, level, tmp_path):
    def prepare(models):
        plant(models[0].get_submodule(path), direction, value, "one", HALF.get(level))

    training = Training(name, level, prepare)
    report = training.explain_first()

    saved = report.save(tmp_path / "nan.pt")

    assert saved == tmp_path / "nan.pt"
    assert shows(saved)
    assert [one.name for one in tmp_path.iterdir()] == ["nan.pt"]


HALF_SUM = torch.full((64, 8), 2000.0)
OPERATIONS = {
    "mul": lambda: once(lambda x: x * 3e4 * 3e4, dtype=torch.float16),
    "sum": lambda: once(lambda x: x + HALF_SUM.half().sum(), dtype=torch.float16),
    "exp": lambda: once(lambda x: (x.abs() + 12).exp(), dtype=torch.float16),
    "addmm": lambda: once(lambda x: x * 0 + 6e4, dtype=torch.float16),
    "pow": lambda: once(lambda x: (x.abs() * 1e25).pow(4), dtype=torch.bfloat16),
    "log, in place": lambda: once(lambda x: (x - x.detach()).clone().log_()),
    "out=": lambda: once(
        lambda x: x + torch.div(torch.ones(8), torch.zeros(8), out=torch.empty(8))
    ),
    "a cast": lambda: once(lambda x: (x.float() * 1e6).half(), dtype=torch.float16),
    "float64": lambda: once(lambda x: (x - x.detach()).log(), dtype=torch.float64),
    "a masked softmax": lambda: once(
        lambda x: x.masked_fill(torch.ones_like(x).bool(), -torch.inf).softmax(-1)
    ),
    "layer norm": lambda: once(
        lambda x: functional.layer_norm(x * 0, (8,), eps=0.0)
    ),
    "root, backward": lambda: once(lambda x: (x - x.detach()).sqrt()),
    "norm, backward": lambda: once(lambda x: (x * 0).square().sum(-1, keepdim=True).sqrt() + x),
    "pow, backward": lambda: once(lambda x: (x - x.detach()).abs().pow(0.3)),
    "group norm": lambda: once(lambda x: functional.group_norm(x * 0, 2, eps=0.0)),
    "convolution": lambda: once(
        lambda x: functional.conv1d(
            (x * 0 + 6e4)[:, None], torch.ones(1, 1, 3).half(), padding=1
        )[:, 0],
        dtype=torch.float16,
    ),
    "cat": lambda: once(lambda x: torch.cat([x, x / (x - x)])[:4]),
    "random numbers": lambda: once(lambda x: x / torch.bernoulli(torch.full_like(x, 0.5))),
    "std of a list of axes": lambda: once(lambda x: x / (x * 0).std((0, 1))),
    "a loss": lambda: once(
        torch.relu, loss_of=lambda out: (out - out.detach()).log().mean()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_reproduces(name, tmp_path):
    report = OPERATIONS[name]()
    if name == "a loss":  # without step= it has no operation
        with pytest.raises(ValueError, match="a report with the cause 'loss' has no operation"):
            report.save(tmp_path / "nan.pt")
        assert list(tmp_path.iterdir()) == []
        return

    saved = report.save(tmp_path / "folder" / "nan.pt")

    entry = torch.load(saved, weights_only=True)
    assert entry["operation"] == report.operation
    assert entry["report"]["sentence"] == report.sentence
    assert shows(saved)


def test_what_has_no_operation_is_not_saved(tmp_path):
    x = torch.full((4, 8), float("nan"))
    report = once(torch.relu, x)
    with pytest.raises(ValueError, match="a report with the cause 'data' has no operation to save"):
        report.save(tmp_path / "nan.pt")


# -- cropping --------------------------------------------------------------------------------------


BIG = torch.ones(400_000, 8)  # 13 MB
BIG[200_000] = 0


@pytest.mark.slow
def test_large_inputs_are_cropped(tmp_path):
    report = once(lambda x: x[:1] * 0 + 1 / BIG)
    assert report.operation == "aten.reciprocal.default"

    saved = report.save(tmp_path / "nan.pt")

    assert saved.stat().st_size < 1e6
    assert shows(saved)


def test_a_product_is_cropped(tmp_path):
    """The left operand has the rows of the result; the right one has to stay whole."""
    left = torch.zeros(400_000, 8)
    left[77] = 3e38
    call = (torch.ops.aten.mm.default, (left, torch.full((8, 4), 10.0)), {})

    saved = reproduce.save(tmp_path / "nan.pt", call, {"sentence": ""})

    assert saved.stat().st_size < 100_000
    assert shows(saved)


def test_what_cannot_be_cropped_is_refused(tmp_path):
    vast = torch.full((1500, 1500, 2), 1e38)
    call = (torch.ops.aten.sum.default, (vast,), {})
    with pytest.raises(ValueError, match=r"are 18 MB and cannot be cropped to 10; use a smaller"):
        reproduce.save(tmp_path / "nan.pt", call, {"sentence": ""})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "nan.pt"
    call = (torch.ops.aten.log.default, (torch.zeros(3),), {})
    reproduce.save(path, call, {"sentence": "old"})

    def fail(_, file):
        file.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        reproduce.save(path, call, {"sentence": "new"})
    assert [one.name for one in tmp_path.iterdir()] == ["nan.pt"]
    assert reproduce.load(path)["report"]["sentence"] == "old"


# -- the script ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_script_runs_without_apex(tmp_path):
    """One process for several files."""
    reports = [
        once(lambda x: (x.float() * 1e6).half(), dtype=torch.float16),  # a dtype as an argument
        once(lambda x: (x - x.detach()).clone().log_()),  # writes to its argument
        once(lambda x: (x - x.detach()).sqrt()),
        once(lambda x: x / (x * 0).std((0, 1))),
    ]
    texts = []
    for number, report in enumerate(reports):
        text = reproduce.script(report.save(tmp_path / f"nan{number}.pt"))
        assert len(text.splitlines()) <= 10
        assert "import apex" not in text
        texts.append(f"{text}print('---')\n")
    code = "import sys; sys.modules['apex'] = None\n" + "".join(texts)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )

    assert done.stderr == ""
    assert done.returncode == 0
    outputs = done.stdout.split("---\n")[:-1]
    assert len(outputs) == len(reports)
    assert all("inf" in one or "nan" in one for one in outputs)


# -- hostile files ---------------------------------------------------------------------------------


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def entry(**changes):
    good = {
        "format": reproduce.FORMAT,
        "operation": "aten.log.default",
        "args": [torch.zeros(3)],
        "kwargs": {},
        "random": torch.get_rng_state(),
        "torch": str(torch.__version__),
        "report": {"sentence": "It is."},
    }
    return good | changes


def saved(value, path):
    torch.save(value, path)
    return path


REFUSED = {
    "another operation": {"operation": "prims.log.default"},
    "an operation of files": {"operation": "aten.from_file.default"},
    "of memory": {"operation": "aten.set_.source_Tensor"},
    "an attribute": {"operation": "aten.__class__.__init__"},
    "a path": {"operation": "aten.log.default.__call__"},
    "code": {"operation": "aten.log.default; import os"},
    "no operation": {"operation": "aten.logg.default"},
    "no overload": {"operation": "aten.log.nothing"},
    "an overload of Python": {"operation": "aten.log.__call__"},
    "a method": {"operation": "aten.log.overloads"},
    "operation is no text": {"operation": 3},
    "operation of a list": {"operation": ["aten.log.default"]},
    "args are a tensor": {"args": torch.zeros(3)},
    "args are missing": {"args": None},
    "kwargs are a list": {"kwargs": []},
    "another format": {"format": "apex.debug 0"},
    "no random state": {"random": None},
    "a random state of text": {"random": "0"},
    "a report of text": {"report": "text"},
    "no report": {"report": None},
    "a version of a list": {"torch": [3]},
}


def test_good_entry_is_taken(tmp_path):
    assert shows(saved(entry(), tmp_path / "nan.pt"))


@pytest.mark.parametrize("name", REFUSED)
def test_other_entries_are_refused(name, tmp_path):
    path = saved(entry(**REFUSED[name]), tmp_path / "nan.pt")
    with pytest.raises(debug.FileError, match=r"nan.pt: "):
        reproduce.run(reproduce.load(path))


@pytest.mark.parametrize("name", ["!torch.load", "!torch.hub", "!torch.__dict__", "!torch.save"])
def test_tagged_names_are_of_dtypes_alone(name, tmp_path):
    path = saved(entry(operation="aten._to_copy.default", kwargs={"dtype": name}), tmp_path / "x")
    with pytest.raises(debug.FileError):
        reproduce.run(reproduce.load(path))


def test_code_is_not_executed(tmp_path):
    trap = tmp_path / "written"
    files = {
        "of torch": saved(entry(args=[Code(trap)]), tmp_path / "a.pt"),
        "of pickle": tmp_path / "b.pt",
        "text": tmp_path / "c.pt",
        "empty": tmp_path / "d.pt",
        "zip": tmp_path / "e.pt",
        "truncated": tmp_path / "f.pt",
        "another": saved([1, 2], tmp_path / "g.pt"),
        "a module": tmp_path / "h.pt",
        "folder": tmp_path,
        "missing": tmp_path / "none.pt",
    }
    files["of pickle"].write_bytes(pickle.dumps(Code(trap)))
    files["text"].write_text("import os")
    files["empty"].write_bytes(b"")
    with zipfile.ZipFile(files["zip"], "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Code(trap)))
    whole = io.BytesIO()
    torch.save(entry(), whole)
    files["truncated"].write_bytes(whole.getvalue()[:-100])
    torch.save(nn.Linear(2, 2), files["a module"])
    for path in files.values():
        with pytest.raises(debug.FileError, match=r"not a file of apex.debug|no such file"):
            reproduce.load(path)
    assert not trap.exists()


def test_a_wrong_call_is_one_error(tmp_path):
    for args in ([], [torch.zeros(3), 4], ["text"], [None], [torch.zeros(3).long() > 0, {}]):
        path = saved(entry(args=args), tmp_path / "nan.pt")
        with pytest.raises(debug.FileError):
            reproduce.run(reproduce.load(path))
