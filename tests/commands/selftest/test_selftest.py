"""``apex selftest``: its formulas, what it does with wrong numbers and errors, and the command."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
import warnings

import pytest
import torch

from apex.catalogue import ops as catalogue
from apex.catalogue import optimizers as formulas
from apex.catalogue.optimizers import OPTIMIZERS, Step
from apex.commands.command_line import main
from apex.commands.selftest import check as checks
from apex.commands.selftest import command, gpu, ops, record, spread
from apex.commands.selftest.check import Check, Measured, Setting
from apex.commands.selftest.optimizers import AREA
from apex.ops.lists import multi_tensor, storage
from tests.commands import ENDED_BY_CTRL_C
from tests.tolerance import TORCH_IN_FLOAT64, assert_close_to_largest

CPU = torch.device("cpu")
DEFINITION = Setting(CPU, "definition")


def _selftest(file, *options):
    words = ["selftest", "--device", "cpu", "--processes", "0", "--json", str(file)]
    return main([*words, *options])


def _read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def _named(checks, name):
    return next(check for check in checks if check.name == name)


# --- formulas -------------------------------------------------------------------------------------

NUMBERS = {"lr": 0.02, "weight_decay": 0.1}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
SGD = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}


@pytest.mark.parametrize(
    ("formula", "theirs", "options"),
    [
        (formulas.adam, torch.optim.AdamW, ADAM),
        (formulas.adam, torch.optim.Adam, {**ADAM, "adam_w_mode": False}),
        (formulas.sgd, torch.optim.SGD, SGD),
        (formulas.sgd, torch.optim.SGD, {**SGD, "momentum": 0.0}),
        (formulas.sgd, torch.optim.SGD, {**SGD, "dampening": 0.3}),
        (formulas.sgd, torch.optim.SGD, {**SGD, "nesterov": True}),
        (formulas.adagrad, torch.optim.Adagrad, {"eps": 1e-10}),
    ],
)
def test_formulas_are_torch_s(formula, theirs, options):
    param = torch.randn(50, dtype=torch.float64)
    twin = param.clone().requires_grad_()
    known = {name: value for name, value in options.items() if name != "adam_w_mode"}
    optimizer = theirs([twin], **NUMBERS, **known)
    state = {}
    for number in range(1, 6):
        twin.grad = torch.randn_like(param)
        optimizer.step()
        param, state = formula(Step(number, {**NUMBERS, **options}, twin.grad, param, state))
    assert_close_to_largest(param, twin.detach(), TORCH_IN_FLOAT64)


# --- checks ---------------------------------------------------------------------------------------


def test_names_are_different():
    names = [(check.area, check.name) for check in command.every_check()]
    assert len({*names}) == len(names)


def test_every_optimizer_of_the_package_is_checked():
    from apex import optimizers as package

    made = {optimizer.make for optimizer in OPTIMIZERS}
    assert {getattr(package, name) for name in package.__all__ if name.startswith("Fused")} <= made


def test_every_op_of_the_catalogue_is_checked_in_some_variant():
    """But for products of matrices, whose functions are torch's."""
    checked = {op.name.partition(",")[0] for op in ops.CHECKED}
    others = {op.name for op in catalogue.OPS if "," not in op.name} - checked
    assert others == {"attention", "dense_gelu_dense", "mlp"}


@pytest.mark.exhaustive
def test_every_kernel_is_launched_by_a_check(monkeypatch):
    """In the interpreter; by the functions that the compiled cases name."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from tools.kernels import finding

    def functions(values):
        made = [getattr(value, "fn", None) for value in values]
        return {one.__name__ for one in made if one is not None}

    launched, launch = set(), interpreter.GridExecutor.__call__

    def noted(self, *args, **more):
        launched.update(functions([self, *args, *more.values()]))
        return launch(self, *args, **more)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    for planned in command.plan(CPU, kernels=True):
        if planned[1].path == "kernels":
            assert checks.carry_out(*planned).status == "right"
    cases = [*finding.cases()]
    assert (
        functions(v for case in cases for v in (case.kernel, *case.constants.values())) <= launched
    )


def _raising(*args):
    raise RuntimeError("the kernel is on strike")


def _plant(monkeypatch, tmp_path, kernel, was, becomes):
    """Put a kernel with a changed line instead of the kernel of that name."""
    module = pytest.importorskip(f"apex.kernels.{kernel}")
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    assert was in source
    file = tmp_path / f"planted_{kernel}.py"
    file.write_text(source.replace(was, becomes), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    monkeypatch.setattr(module, kernel, getattr(planted, kernel))


@pytest.mark.slow
def test_a_wrong_kernel_is_exit_code_1(tmp_path, monkeypatch, capsys):
    _plant(monkeypatch, tmp_path, "adagrad", "total * total", "grad * grad")
    assert _selftest(tmp_path / "f.json", "--only", "Adagrad, bf16") == 1
    content = _read(tmp_path / "f.json")
    assert content["complete"]
    assert {c["path"]: c["status"] for c in content["checks"]} == {
        "as called": "right",
        "definition": "right",
        "kernels": "wrong",
    }
    measured = content["checks"][2]["measured"]
    assert any(one["value"] > one["allowed"] == 1.05 and not one["right"] for one in measured)
    shown, told = capsys.readouterr()
    for text in (shown, told):
        assert "WRONG  optimizers: FusedAdagrad, bf16 (kernels): weights, step 1: " in text


@pytest.mark.slow
def test_a_check_that_raises_is_a_failed_check_and_not_the_end(tmp_path, monkeypatch, capsys):
    names = {op.name: op for op in ops.CHECKED}
    failing = dataclasses.replace(names["cross_entropy"], ours=_raising, dtypes=("fp32",))
    linear = dataclasses.replace(names["linear_cross_entropy, in chunks"], dtypes=("fp32",))
    monkeypatch.setattr(ops, "CHECKED", [failing, linear])
    assert _selftest(tmp_path / "f.json", "--only", "cross entropy") == 1
    content = _read(tmp_path / "f.json")
    raised = [check for check in content["checks"] if check["status"] == "raised"]
    assert content["complete"]
    assert len(content["checks"]) > len(raised) == 6  # the linear one goes on
    assert "on strike" in raised[0]["error"]
    assert "Traceback" in raised[0]["error"]
    assert "RuntimeError: the kernel is on strike" in capsys.readouterr().out


class _Errors(io.StringIO):
    """Standard error; `lines` waits for so many, each of which ends in ``end``, but no minute."""

    def __init__(self, terminal, end):
        super().__init__()
        self.isatty, self._end = lambda: terminal, end

    def lines(self, many):
        for _ in range(60_000):
            if self.getvalue().count(self._end) < many:
                time.sleep(0.001)
        return self.getvalue().split(self._end)[:many]


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_lines_say_what_runs_while_one_check_takes_longer_than_the_pause(
    terminal, monkeypatch, tmp_path
):
    assert record.PAUSE == 5.0
    monkeypatch.setattr(record, "PAUSE", 0.002)
    monkeypatch.setattr(record, "REDRAW", 0.002)
    errors = _Errors(terminal, " and 1 more" if terminal else "\n")
    monkeypatch.setattr(sys, "stderr", errors)
    planned = [(Check("area", f"{n}", _raising), DEFINITION) for n in range(3)]
    of = record.Record(planned, {}, tmp_path / "f.json")
    with record.Progress(of):
        of.begin(0)
        of.begin(1)
        found = errors.lines(3)
    assert found[-1].removeprefix(record.CLEAR).startswith("0/3  area: 0 (definition), 0 s")
    assert errors.getvalue().endswith(record.CLEAR) == terminal


def test_nan_is_wrong_and_nothing_measured_proves_nothing():
    assert not Measured("nan", float("nan"), 1.0, "").right
    empty = Check("area", "nothing", lambda setting: [])
    assert checks.carry_out(empty, DEFINITION).status == "wrong"


def test_warnings_are_kept_beside_the_result():
    def warn(setting):
        warnings.warn("lukewarm", stacklevel=1)
        yield Measured("fine", 0, 0, "")

    assert checks.carry_out(Check("area", "warns", warn), DEFINITION).warnings == ("lukewarm",)


def test_a_gpu_that_is_lost_ends_the_run(tmp_path, monkeypatch):
    planned = [(Check("area", f"{n}", _raising), DEFINITION) for n in range(3)]
    monkeypatch.setattr(command, "plan", lambda device, **options: planned)
    monkeypatch.setattr(spread, "is_lost", lambda device: True)
    assert _selftest(tmp_path / "f.json") == 1
    content = _read(tmp_path / "f.json")
    assert [check["name"] for check in content["checks"]] == ["0"]
    assert not content["complete"]


# --- what only a GPU can show, with stand-ins -----------------------------------------------------


@pytest.fixture
def stand_ins(monkeypatch):
    """A graph that is no graph, and waits that nobody notices."""

    def captured(work, device):
        for _ in range(gpu.WARM_UP):
            work()
        return work  # a capture itself computes nothing

    monkeypatch.setattr(gpu, "captured", captured)
    monkeypatch.setattr(gpu, "waits_refused", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize("check", [*gpu.checks()], ids=lambda check: f"{check.area}, {check.name}")
def test_checks_for_a_gpu(check, stand_ins):
    result = checks.carry_out(check, Setting(CPU, "as called"))
    assert result.status == "right", result


@pytest.mark.parametrize(
    "replay",
    [lambda work: lambda: None, lambda work: lambda: (work(), work())],
    ids=["none", "twice"],
)
@pytest.mark.slow
def test_replays_that_do_something_else_are_wrong(replay, stand_ins, monkeypatch):
    honest = gpu.captured
    monkeypatch.setattr(gpu, "captured", lambda work, device: replay(honest(work, device)))
    graphs = [check for check in gpu.checks() if check.area == gpu.GRAPHS]
    assert len(graphs) > 10
    for check in graphs:
        assert checks.carry_out(check, Setting(CPU, "as called")).status == "wrong", check.name


def test_a_wait_is_a_failed_check(stand_ins, monkeypatch):
    @contextlib.contextmanager
    def refused(device):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", _raising)
            yield

    monkeypatch.setattr(gpu, "waits_refused", refused)
    work = lambda: torch.ones(1).item()  # noqa: E731
    waits = Check("waits", "item", lambda setting: gpu._without_waits(lambda _: work, setting))
    assert "on strike" in checks.carry_out(waits, DEFINITION).error


class _Noting:
    """Stands for `torch.cuda`, and notes what is done on which stream and device."""

    def __init__(self):
        self.done, self.streams, self.devices = [], ["current"], [0]

    @contextlib.contextmanager
    def device(self, device):
        self.devices.append(device.index)
        yield
        self.devices.pop()

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def Stream(self, device):
        assert device.index == self.devices[-1]
        return self._stream("side")

    def current_stream(self, device):
        return self._stream("current")

    def _stream(self, name):
        wait = lambda other: self.done.append(f"{name} waits for {other.name}")  # noqa: E731
        return types.SimpleNamespace(name=name, wait_stream=wait)

    def CUDAGraph(self):
        return types.SimpleNamespace(replay=lambda: self.note("replay"))

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.done.append("begin")
        with self.stream(stream):
            yield
        self.done.append("end")

    def note(self, what):
        self.done.append(f"{what} on {self.streams[-1]} of {self.devices[-1]}")


def test_a_capture_is_made_as_torch_asks_for_on_the_device_of_the_tensors(monkeypatch):
    noting = _Noting()
    monkeypatch.setattr(torch, "cuda", noting)
    replay = gpu.captured(lambda: noting.note("work"), torch.device("cuda:1"))
    replay()
    assert noting.done == [
        "side waits for current",
        *["work on side of 1"] * 3,
        "current waits for side",
        "begin",
        "work on side of 1",
        "end",
        "replay on current of 1",
    ]


@pytest.mark.parametrize("before", [0, 1])
def test_the_mode_in_which_waits_raise_is_given_back(before, monkeypatch):
    modes = [before]

    def chosen(mode):
        modes.append(mode)
        warnings.warn(f"{gpu.WARNED} feature", stacklevel=2)

    noting = types.SimpleNamespace(
        synchronize=lambda device: None,
        get_sync_debug_mode=lambda: modes[-1],
        set_sync_debug_mode=chosen,
    )
    monkeypatch.setattr(torch, "cuda", noting)
    with pytest.raises(RuntimeError, match="waited"), gpu.waits_refused(torch.device("cuda:1")):
        raise RuntimeError("waited")
    assert modes == [before, "error", before]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_and_keeps_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    file = tmp_path / "new" / "f.json"
    assert _selftest(file, "--only", "rms norm, bf16") == 0
    content = _read(file)
    assert content["format"] == "apex selftest 1"
    assert content["complete"]
    assert content["next"] is None
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert content["environment"]["variables"]["TRITON_INTERPRET"] == "1"
    assert {"driver", "torch_cuda", "why_not"} <= content["environment"]["tools"].keys()
    assert [(c["name"], c["path"]) for c in content["checks"]] == [
        (f"rms norm, bf16, {way}", path)
        for way in ("forward", "backward")
        for path in ("as called", "definition", "kernels")
    ]
    for check in content["checks"]:
        assert check["status"] == "right"
        assert check["error"] is None
        for one in check["measured"]:
            assert one["right"]
            assert one["value"] <= one["allowed"]
    shown = capsys.readouterr().out
    assert "kernels, interpreted" in shown
    assert "6 checks in" in shown
    assert "0 failed" in shown
    assert "No GPU was used" in shown


def test_without_triton_it_says_that_kernels_were_not_run(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "triton" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert _selftest(tmp_path / "f.json", "--only", "FusedSGD, fp32") == 0
    content = _read(tmp_path / "f.json")
    assert {check["path"] for check in content["checks"]} == {"as called", "definition"}
    assert "not run: triton not installed: pip install triton" in content["kernels"]
    assert "Kernels: not run: triton not installed" in capsys.readouterr().out


def test_an_interruption_keeps_and_shows_what_is_finished(tmp_path, monkeypatch, capsys):
    def interrupted(check, setting):
        if setting.path == "kernels":
            raise KeyboardInterrupt
        return carry_out(check, setting)

    carry_out = spread.carry_out
    monkeypatch.setattr(spread, "carry_out", interrupted)
    assert _selftest(tmp_path / "f.json", "--only", "rms norm, bf16") == 130
    content = _read(tmp_path / "f.json")
    assert not content["complete"]
    assert len(content["checks"]) == 2
    assert content["next"] == "rms norm, bf16, forward (kernels)"
    assert "INCOMPLETE: 2 of 6 checks" in capsys.readouterr().out


def _in_a_process(file, *options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET")
    return subprocess.Popen(
        [sys.executable, "-m", "apex", "selftest", "--json", str(file), *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_interpreter_is_chosen_where_there_is_no_gpu(tmp_path):
    """It takes 2.5 s: only a process that has not imported Triton can choose it."""
    process = _in_a_process(tmp_path / "f.json", "--only", "rms norm, fp32, forward")
    shown, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert "Kernels: in Triton's interpreter, on the CPU." in shown
    assert [check["path"] for check in _read(tmp_path / "f.json")["checks"]][-1] == "kernels"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_it_like_ctrl_c(number, tmp_path):
    """It takes 2 s: a real process, which a signal could end otherwise, imports torch."""
    file = tmp_path / "f.json"
    process = _in_a_process(file)
    while not file.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    shown, told = process.communicate(timeout=300)
    assert process.returncode in ENDED_BY_CTRL_C, told
    assert "INCOMPLETE" in shown
    assert not _read(file)["complete"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--only", "nonsense"], "--only 'nonsense': no check has this in its name"),
        (["--device", "toaster"], "unknown; use cpu, cuda or cuda:N"),
        (["--json", "FOLDER"], "is a folder"),
        (["--json", "FOLDER/file/f.json"], "is a file; name a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_line(options, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(spread, "carry_out", pytest.fail)
    (tmp_path / "file").write_text("precious")
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    assert _selftest(tmp_path / "f.json", *options) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert len(told.splitlines()) == 1
    assert told.startswith("apex selftest: ")
    assert complaint in told


def test_the_interpreter_is_refused_on_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "pick_device", lambda asked: torch.device("cuda:1"))
    assert _selftest(tmp_path / "f.json") == 2
    assert "TRITON_INTERPRET=1 is set: kernels would not run on the GPU" in capsys.readouterr().err


def test_triton_that_is_imported_already_cannot_be_interpreted(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert _selftest(tmp_path / "f.json") == 2
    assert "set TRITON_INTERPRET=1 before Python starts" in capsys.readouterr().err
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    file = tmp_path / "f.json"
    assert main(["selftest", "--device", "cuda", "--json", str(file)]) == 0


@pytest.mark.parametrize("what", ["state=bfloat16", "storage=stochastic"])
def test_rounding_to_the_nearest_is_not_stochastic_rounding(what, monkeypatch):
    name = f"FusedAdam, {what}, bf16"
    (check,) = [one for one in command.every_check() if (one.area, one.name) == (AREA, name)]
    assert checks.carry_out(check, Setting(CPU, "as called")).status == "right"
    nearest = lambda value, *random: value.bfloat16().float()  # noqa: E731
    monkeypatch.setattr(multi_tensor, "dithered", nearest)
    monkeypatch.setattr(storage, "round_stochastically", nearest)
    result = checks.carry_out(check, Setting(CPU, "as called"))
    assert result.status == "wrong"
    assert "spread lost" in str(result.worst)
