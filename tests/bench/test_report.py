"""Table, file and pictures from made-up results: nothing is trained here."""

import dataclasses
import io
import json
import math
import sys

import pytest
from matplotlib.image import imread
from rich.console import Console

from apex.bench import plots, report, results
from apex.bench.training import LEVELS

# What the made-up device computes at each level: milliseconds, MiB, per cent right.
MADE_UP = {
    "O0": (4.0, 8.0, 98.0), "O1": (2.0, 6.0, 98.5), "O2": (1.0, 4.0, 97.5),
    "O3": (0.5, 3.0, 90.0), "O4": (2.5, 6.0, 98.0), "O5": (1.5, 4.0, 98.0),
}  # fmt: skip
HALF_TYPES = [
    {"dtype": "float16", "native": False, "why": "no such instructions"},
    {"dtype": "bfloat16", "native": True, "why": "avx512_bf16"},
]


def _run(level, batch=64, seed=0, **changes):
    ms, mib, accuracy = MADE_UP[level]
    made = results.Run(
        level=level,
        dtype=LEVELS[level],
        batch=batch,
        seed=seed,
        status="ok",
        error=None,
        step_ms=(1000.0, 1000.0, *(ms * batch / 64,) * 8),
        warm_up=2,
        losses=(2.0, 1.0, 0.5, 0.25, 0.125 + seed, 0.25 + seed),
        epoch_accuracy=(50.0, 80.0, accuracy + seed),
        steps_per_epoch=2,
        peak_bytes=int(mib * batch / 64 * 2**20),
        skipped=1,
        loss_scale=65536.0,
    )
    return dataclasses.replace(made, **changes)


def _report(runs, *, levels=tuple(LEVELS), batch=(64,), seeds=1, complete=True):
    return results.Report(
        environment={
            "versions": {"apex": "1.0", "torch": "2.0"},
            "device": {"name": "Thinking Machine", "half_types": HALF_TYPES},
        },
        options={
            "levels": {level: LEVELS[level] for level in levels},
            "epochs": 3,
            "batch": list(batch),
            "seeds": seeds,
        },
        planned=len(levels) * len(batch) * seeds,
        complete=complete,
        notes={"time": "by the sun"},
        runs=tuple(runs),
    )


@pytest.fixture
def whole():
    return _report([_run(level) for level in LEVELS])


def _rows(made):
    return {(row.level, row.batch): row for row in results.rows(made)}


def _text(made, width):
    console = Console(width=width, file=io.StringIO())
    for table in report.tables(made, narrow=width < report.WIDE_ENOUGH):
        console.print(table)
    return console.file.getvalue()


def _cells(made, level):
    [line] = [line for line in _text(made, 120).splitlines() if line.strip().startswith(level)]
    return line.split()


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (10, 1.3), (50, 2.5), (90, 3.7), (100, 4.0)]
)
def test_percentiles_interpolate(percent, value):
    assert results.percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_percentiles_of_one_value_and_of_none():
    assert results.percentile([7.0], 90) == 7.0
    assert results.percentile([], 50) is None


def test_warm_up_does_not_count(whole):
    assert _rows(whole)["O1", 64].ms_p90 == 2.0


def test_speed_and_memory_are_relative_to_o0_at_the_same_batch_size():
    made = _report([_run(level, batch) for batch in (64, 128) for level in LEVELS], batch=(64, 128))
    for batch in (64, 128):
        row = _rows(made)["O2", batch]
        assert (row.speed, row.memory) == (4.0, 0.5)


def test_without_o0_nothing_is_relative():
    row = _rows(_report([_run("O2")], levels=["O2"]))["O2", 64]
    assert (row.speed, row.memory) == (None, None)


def test_seeds_are_put_together():
    made = _report([_run("O0", seed=0), _run("O0", seed=2)], levels=["O0"], seeds=2)
    row = _rows(made)["O0", 64]
    assert row.accuracy == results.Spread(99.0, math.sqrt(2))
    assert row.loss.mean == 1.1875
    assert row.skipped == 2
    assert "99.00 ± 1.41" in _text(made, 120)


def test_final_loss_is_the_mean_of_the_last_epoch(whole):
    assert whole.runs[0].epoch_losses == (1.5, 0.375, 0.1875)
    assert _rows(whole)["O0", 64].loss == results.Spread(0.1875, None)


def test_a_failed_run_says_so_and_has_no_numbers():
    broken = _run("O1", status="failed", error="ValueError: no", epoch_accuracy=(), losses=())
    made = _report([_run("O0"), broken], levels=["O0", "O1"])
    row = _rows(made)["O1", 64]
    assert row.problem == "failed: ValueError: no"
    assert (row.ms_median, row.speed, row.accuracy, row.peak_bytes) == (None, None, None, None)
    assert _cells(made, "O1")[-1] == "failed"
    assert _cells(made, "O0")[-1] == "65536"


def test_a_diverged_run_keeps_its_time_and_shows_its_loss():
    wild = _run("O3", status="diverged", losses=(2.0, 1.0, 2.0, 3.0, math.nan, math.nan))
    made = _report([_run("O0"), wild], levels=["O0", "O3"])
    row = _rows(made)["O3", 64]
    assert (row.problem, row.speed) == ("diverged", 8.0)
    assert "nan" in _cells(made, "O3")


def test_how_many_seeds_went_wrong():
    runs = [_run("O0", seed=0), _run("O0", seed=1, status="diverged"), _run("O0", seed=2)]
    assert _rows(_report(runs, levels=["O0"], seeds=3))["O0", 64].problem == "diverged (1 of 3)"


def test_an_interrupted_bench_says_what_is_missing():
    made = _report([_run("O0", seed=0), _run("O0", seed=1), _run("O1")], seeds=2, complete=False)
    problems = {level: row.problem for (level, _), row in _rows(made).items()}
    assert problems["O0"] is None
    assert problems["O1"] == "1 of 2 runs"
    assert problems["O2"] == "not run"


def test_the_table_shows_every_number(whole):
    expected = "O2 fp16 1.00 1.00–1.00 4.00× 4.00 0.50× 0.1875 97.50 1 65536"
    assert _cells(whole, "O2") == expected.split()


def test_what_was_not_measured_is_a_dash_not_a_number():
    made = _report([_run("O0", peak_bytes=None), _run("O1", peak_bytes=None)], levels=["O0", "O1"])
    assert _cells(made, "O1")[5:7] == ["—", "—"]


def test_different_final_loss_scales_are_a_range():
    scales = [65536.0, 32768.0, 16384.0]
    runs = [_run("O0", seed=seed, loss_scale=scale) for seed, scale in enumerate(scales)]
    assert _cells(_report(runs, levels=["O0"], seeds=3), "O0")[-1] == "16384–65536"


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_table_fits_into_80_columns_with_nothing_cut_off(seeds):
    runs = [
        _run(level, seed=seed, step_ms=(123.4,) * 9) for level in LEVELS for seed in range(seeds)
    ]
    text = _text(_report(runs, seeds=seeds), 80)
    assert "…" not in text
    assert text.count("123–123") == len(LEVELS)


def test_a_busy_machine_and_a_type_that_is_not_native_are_pointed_out(tmp_path, capsys):
    busy = _run("O1", step_ms=(1.0,) * 8 + (9.0,) * 4)
    report.show(_report([_run("O0"), busy], levels=["O0", "O1"]), tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    assert "vary a lot at O1 (batch 64)" in shown
    assert "fp16 is not native to this device: no such instructions." in shown
    assert "bf16" not in shown


def test_what_is_shown(whole, tmp_path, capsys):
    report.show(whole, tmp_path)
    shown = capsys.readouterr().out
    assert "Thinking Machine, torch 2.0, 3 epochs, 1 seed\n" in shown
    assert "time: by the sun." in shown
    assert "INCOMPLETE" not in shown
    assert "\x1b" not in shown  # not a terminal: no colours


def test_an_incomplete_bench_is_marked(tmp_path, capsys):
    report.show(_report([_run("O0")], complete=False), tmp_path)
    shown = capsys.readouterr().out
    assert "INCOMPLETE: 1 of 6 runs" in shown
    assert "O5, batch 64: not run" in shown


def test_square_brackets_in_a_message_are_shown_as_they_are(tmp_path, capsys):
    broken = _run("O0", status="failed", error="RuntimeError: size [red] of a[/b]", losses=())
    report.show(_report([broken], levels=["O0"]), tmp_path)
    assert "RuntimeError: size [red] of a[/b]" in capsys.readouterr().out


def test_the_file_gives_back_the_same_report(tmp_path):
    wild = _run("O3", status="diverged", losses=(0.1, math.inf, -math.inf, 1 / 3, 1e-320, 2.0))
    made = _report([_run("O0"), wild, _run("O1", peak_bytes=None, loss_scale=None)])
    results.write(made, tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == made


def test_the_file_is_json_to_the_letter_and_has_the_table_in_it(tmp_path):
    wild = _run("O0", losses=(math.nan,) * 6, loss_scale=math.inf)
    results.write(_report([wild], levels=["O0"]), tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=pytest.fail)
    assert content["runs"][0]["losses"] == ["nan"] * 6
    assert content["rows"][0]["loss"]["mean"] == "nan"
    assert content["rows"][0]["ms_median"] == 4.0
    assert results.read(tmp_path / "results.json").runs[0].loss_scale == math.inf


def test_a_file_that_cannot_be_replaced_leaves_the_former_one_and_no_litter(
    whole, tmp_path, monkeypatch
):
    file = tmp_path / "results.json"
    results.write(whole, file)
    before = file.read_bytes()

    def interrupted(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write(dataclasses.replace(whole, runs=()), file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ['{"format": "something else"}', "[]"])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="is not a report that apex bench writes"):
        results.read(tmp_path / "results.json")


WORLDS = {
    "whole": lambda: _report([_run(level) for level in LEVELS]),
    "batches": lambda: _report(
        [_run(level, batch) for batch in (32, 64, 256) for level in LEVELS], batch=(32, 64, 256)
    ),
    "seeds": lambda: _report([_run("O0", seed=s) for s in (0, 1)], levels=["O0"], seeds=2),
    "one level, not O0": lambda: _report([_run("O4")], levels=["O4"]),
    "interrupted": lambda: _report([_run("O0")], complete=False),
    "no memory": lambda: _report([_run("O0", peak_bytes=None)], levels=["O0"]),
    "one epoch": lambda: _report(
        [_run("O0", losses=(1.0, 2.0), epoch_accuracy=(9.0,))], levels=["O0"]
    ),
    "not finite": lambda: _report(
        [_run("O0", status="diverged", losses=(1.0, math.inf) + (math.nan,) * 4)], levels=["O0"]
    ),
    "only failures": lambda: _report(
        [_run("O0", status="failed", error="no", losses=(), epoch_accuracy=(), step_ms=())],
        levels=["O0"],
    ),
}


@pytest.mark.parametrize("world", WORLDS)
def test_every_plot_is_drawn_whatever_the_results_are(world, tmp_path):
    plots.draw(WORLDS[world](), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(plots.FILES)
    for file in plots.FILES:
        image = imread(tmp_path / file)
        assert min(image.shape[:2]) >= 600
        assert image[..., :3].std() > 0  # not blank


def test_plots_leave_pyplot_alone(whole, tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plots.draw(whole, tmp_path)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
