import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from apex.bench import digits, plots, results, training
from apex.bench.cli import main

CPU = torch.device("cpu")
QUICK = ("--device", "cpu", "--epochs", "1", "--batch", "256")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """On a busy machine, two threads that wait for each other make small steps 50 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data():
    return training.load(CPU)


def _bench(out, *options):
    return main(["bench", *QUICK, "--out", str(out), *options])


def _read(out):
    return results.read(out / "results.json")


def _poison(monkeypatch, calls, value):
    """Multiply the loss of these forward passes by a value that no gradient survives."""

    class Poisoned(nn.CrossEntropyLoss):
        seen = 0

        def forward(self, *inputs):
            self.seen += 1
            return super().forward(*inputs) * (value if self.seen in calls else 1)

    monkeypatch.setattr(training.nn, "CrossEntropyLoss", Poisoned)


# --- one training --------------------------------------------------------------------------------


def test_the_digits_are_always_split_alike(data):
    again = training.load(CPU)
    assert (len(data.train_x), len(data.test_x)) == (1198, 599)
    assert data.train_x.shape[1:] == (1, 8, 8)
    assert (data.train_x.min(), data.train_x.max()) == (0, 1)
    assert torch.equal(data.test_x, again.test_x)
    assert torch.equal(data.test_y, again.test_y)


def test_every_digit_has_its_share_in_both_parts(data):
    for labels in (data.train_y, data.test_y):
        share = labels.bincount(minlength=10) / len(labels)
        assert share.min() > 0.09
        assert share.max() < 0.11


def test_the_network_has_as_many_parameters_as_it_says():
    said = training.network.__doc__.split(": ")[1].split(" ")[0].replace(",", "")
    assert sum(p.numel() for p in training.network().parameters()) == int(said)


@pytest.mark.parametrize("level", training.LEVELS)
def test_every_level_learns(level, data):
    run = training.train(level, 64, 0, 2, data)
    assert (run.status, run.error) == ("ok", None)
    assert run.epoch_accuracy[-1] > 90
    assert run.losses[-1] < run.losses[0] / 4
    assert len(run.step_ms) == len(run.losses) == 2 * run.steps_per_epoch == 36
    assert len(run.counted_ms) == 36 - training.WARM_UP
    assert min(run.step_ms) > 0
    assert run.skipped == 0
    assert run.loss_scale == (65536 if level in ("O1", "O2") else 1)


@pytest.mark.parametrize("optimizer", training.OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_every_optimizer_learns(level, optimizer, data):
    run = training.train(level, 64, 0, 2, data, optimizer=optimizer)
    assert (run.status, run.error) == ("ok", None)
    assert sum(run.losses[-5:]) < 0.8 * sum(run.losses[:5])


@pytest.mark.parametrize(("ours", "twin"), [("FusedSGD", "sgd"), ("FusedAdam", "adamw")])
def test_a_fused_optimizer_trains_as_its_twin_does(ours, twin, data):
    assert training.OPTIMIZERS[ours] == training.OPTIMIZERS[twin]
    mine, theirs = (training.train("O0", 256, 0, 2, data, optimizer=name) for name in (ours, twin))
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-3)


def test_half_precision_needs_less_memory(data):
    peak = {level: training.train(level, 256, 0, 1, data).peak_bytes for level in training.LEVELS}
    assert all(peak[level] < 0.9 * peak["O0"] for level in peak if level != "O0")


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_the_same_seed_gives_the_same_training_whatever_ran_before(level, data):
    first = training.train(level, 256, 3, 1, data)
    training.train("O4", 256, 1, 1, data)
    second = training.train(level, 256, 3, 1, data)
    assert first.losses == second.losses
    assert first.epoch_accuracy == second.epoch_accuracy
    assert first.peak_bytes == second.peak_bytes


def test_another_seed_gives_another_training(data):
    assert (
        training.train("O0", 256, 0, 1, data).losses != training.train("O0", 256, 1, 1, data).losses
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_skipped_steps_are_counted(level, data, monkeypatch):
    _poison(monkeypatch, calls={2, 4}, value=float("inf"))
    run = training.train(level, 256, 0, 2, data)
    assert run.status == "ok"
    assert run.skipped == 2
    assert run.loss_scale == 65536 / 4


def test_a_training_that_diverges_is_reported(data, monkeypatch):
    _poison(monkeypatch, calls={2}, value=float("nan"))
    run = training.train("O0", 256, 0, 1, data)
    assert (run.status, run.error) == ("diverged", None)
    assert len(run.losses) == run.steps_per_epoch


def test_a_training_that_raises_is_reported_with_what_it_measured(data, monkeypatch):
    _poison(monkeypatch, calls={6}, value=torch.ones(2, 3))  # no scalar: backward refuses
    run = training.train("O0", 256, 0, 2, data)
    assert run.status == "failed"
    assert run.error.startswith("RuntimeError: ")
    assert "\n" not in run.error
    assert len(run.epoch_accuracy) == 1
    assert len(run.step_ms) == 5


def test_a_training_leaves_the_log_as_it_was_and_says_nothing(data, capfd):
    log = logging.getLogger("apex.amp")
    before = (log.level, log.propagate, list(log.handlers))
    training.train("O2", 256, 0, 1, data)
    assert (log.level, log.propagate, log.handlers) == before
    assert capfd.readouterr() == ("", "")


def test_a_training_leaves_no_casts_behind(data):
    training.train("O1", 256, 0, 1, data)
    assert not torch.is_autocast_enabled("cpu")


# --- the command ---------------------------------------------------------------------------------


def test_the_command_trains_shows_and_keeps_everything(tmp_path, capsys):
    assert _bench(tmp_path / "new", "--levels", "O0", "O5", "--seeds", "2") == 0
    report = _read(tmp_path / "new")
    assert report.complete
    assert [(run.level, run.seed) for run in report.runs] == [
        ("O0", 0), ("O5", 0), ("O0", 1), ("O5", 1),
    ]  # fmt: skip
    assert report.environment["versions"]["torch"] == torch.__version__
    assert report.environment["threads"] == torch.get_num_threads()
    assert report.options["batch"] == [256]
    files = {file.name for file in (tmp_path / "new").iterdir()}
    assert files == {"results.json", *plots.FILES}
    shown, told = capsys.readouterr()
    for level in ("O0", "O5"):
        assert sum(line.strip().startswith(level) for line in shown.splitlines()) == 1
    assert told.splitlines()[0].startswith("1/4  O0, batch 256, seed 0: ok, ")
    assert len(told.splitlines()) == 4


def test_the_optimizer_is_the_user_s_choice(tmp_path, capsys):
    assert _bench(tmp_path, "--levels", "O0", "--optimizer", "FusedAdam") == 0
    told = "FusedAdam, lr 0.005, weight decay 0.01"
    assert _read(tmp_path).options["optimizer"] == told
    assert told in " ".join(capsys.readouterr().out.split())


def test_the_optimizer_is_torch_s_sgd_by_default(tmp_path):
    assert _bench(tmp_path, "--levels", "O0") == 0
    assert _read(tmp_path).options["optimizer"] == "SGD, lr 0.05, momentum 0.9"


def test_several_batch_sizes_and_repeated_values(tmp_path):
    assert _bench(tmp_path, "--levels", "O0", "O0", "--batch", "256", "512", "256") == 0
    assert [(run.level, run.batch) for run in _read(tmp_path).runs] == [("O0", 256), ("O0", 512)]


def test_the_largest_batch_is_all_training_digits(tmp_path):
    assert _bench(tmp_path, "--levels", "O0", "--batch", "1198") == 0
    [run] = _read(tmp_path).runs
    assert (len(run.step_ms), run.warm_up) == (1, 0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--levels", "O7"], "O7"),
        (["--levels", "o1"], "o1"),
        (["--levels"], "--levels"),
        (["--optimizer", "Adam"], "invalid choice: 'Adam'"),
        (["--epochs", "0"], "'0' is not a whole number of 1 or more"),
        (["--epochs", "many"], "'many' is not a whole number of 1 or more"),
        (["--seeds", "0"], "'0' is not a whole number of 1 or more"),
        (["--batch", "64", "1"], "'1' is not a whole number of 2 or more"),
        (["--batch", "1199"], "there are only 1198 training digits"),
        (["--device", "toaster"], "unknown; use cpu, cuda or cuda:N"),
        (["--device", "meta"], "unknown; use cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--out", "FILE"], "is a file"),
        (["--out", "FILE/below"], "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_line_before_anything_is_trained(
    options, complaint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(training, "train", pytest.fail)
    file = tmp_path / "file"
    file.write_text("precious")
    options = [option.replace("FILE", str(file)) for option in options]
    try:
        code = main(["bench", "--out", str(tmp_path / "new"), *options])
    except SystemExit as exit_:
        code = exit_.code
    shown, told = capsys.readouterr()
    assert code == 2
    assert shown == ""
    assert len(told.splitlines()) == 1
    assert complaint in told
    assert file.read_text() == "precious"
    assert not (tmp_path / "new" / "results.json").exists()


@pytest.mark.parametrize("package", ["matplotlib", "rich", "sklearn"])
def test_a_missing_package_names_the_extra_before_anything_is_trained(
    package, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(training, "train", pytest.fail)
    monkeypatch.setitem(sys.modules, package, None)
    assert _bench(tmp_path) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert f"{package} is missing: pip install" in told
    assert "[bench]'" in told


def test_a_level_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    initialize = training.amp.initialize

    def broken(model, optimizer, opt_level, verbosity):
        if opt_level == "O2":
            raise RuntimeError("the second level\nis closed")
        return initialize(model, optimizer, opt_level=opt_level, verbosity=verbosity)

    monkeypatch.setattr(training.amp, "initialize", broken)
    assert _bench(tmp_path, "--levels", "O0", "O2", "O5") == 1
    assert [run.status for run in _read(tmp_path).runs] == ["ok", "failed", "ok"]
    shown = capsys.readouterr().out
    assert "O2, batch 256: failed: RuntimeError: the second level is closed" in shown


def test_a_level_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.OPTIMIZERS, "sgd", {"lr": 1e30})
    assert _bench(tmp_path, "--levels", "O0", "O4") == 1
    assert [run.status for run in _read(tmp_path).runs] == ["diverged", "diverged"]
    assert "O4, batch 256: diverged" in capsys.readouterr().out


def test_an_interruption_before_the_first_result_leaves_former_results_alone(
    tmp_path, monkeypatch, capsys
):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    (tmp_path / "results.json").write_text("former")
    monkeypatch.setattr(training, "train", interrupted)
    assert _bench(tmp_path) == 130
    assert (tmp_path / "results.json").read_text() == "former"
    assert "nothing to show" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_an_interrupted_bench_keeps_and_shows_what_it_finished(number, tmp_path):
    # A process in the background may have inherited a SIGINT that is ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from apex.bench.cli import main; sys.exit(main())"
    )
    options = [*QUICK, "--levels", "O0", "--seeds", "100000", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", code, "bench", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            _wait_for_runs(tmp_path, 2, process)
            process.send_signal(number)
            shown, told = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    report = _read(tmp_path)
    assert not report.complete
    assert len(report.runs) >= 2
    assert f"INCOMPLETE: {len(report.runs)} of 100000 runs" in shown
    assert {file.name for file in tmp_path.iterdir()} == {"results.json", *plots.FILES}


def _wait_for_runs(out, least, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "results.json").exists() and len(_read(out).runs) >= least:
            return
        time.sleep(0.05)
    pytest.fail("the bench finished no run in time")


def test_the_termination_signal_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    _bench(tmp_path, "--levels", "O0")
    assert signal.getsignal(signal.SIGTERM) == before


def test_help_shows_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--help"])
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in (
        "--levels",
        "--epochs",
        "--batch",
        "--seeds",
        "--optimizer",
        "--device",
        "--out",
    ):
        assert option in shown
    assert f"(default: {digits.EPOCHS})" in shown
    assert f"(default: {digits.BATCH})" in shown


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    assert main(["bench", "--device", "cuda", "--epochs", "3", "--out", str(tmp_path)]) == 0
    for run in _read(tmp_path).runs:
        assert run.peak_bytes > 0
        assert min(run.step_ms) > 0
