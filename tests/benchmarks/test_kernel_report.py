"""Tables and CSV of `python -m benchmarks.kernels`, from rows made by hand."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from apex.commands import tables as files
from benchmarks.kernels import command
from benchmarks.kernels.command import Timings
from benchmarks.kernels.timing import Timing
from tests.commands.bench import made

SPEEDS = {"torch fused": 1.25, "torch foreach": 3.2, "torch foreach, no check": 0.5}
OPS = ("adam", "sgd", "axpby", "layer_norm_both")


def _row(op="adam", provider="apex", shapes="tiny", **changes):
    speed = SPEEDS.get(provider)
    ms = 2.0 * (speed or 1) * (1 + OPS.index(op))
    turns = np.linspace(0.9, 1.1, 5)
    values = {
        "op": op, "provider": provider, "ours": speed is None, "shapes": shapes,
        "dtype": "float32", "tensors": 1000, "elements": 50500, "times": tuple(ms * turns),
        "our_times": tuple(ms / speed * turns[::-1]) if speed else (), "bytes_per_element": 28.0,
    }  # fmt: skip
    return Timing(**{**values, **changes})


def _report(rows=None, **changes):
    if rows is None:
        rows = [
            _row(op, name, shapes)
            for shapes in ("tiny", "small")
            for op in OPS
            for name in ("apex", *SPEEDS)
        ]
        rows[2] = dataclasses.replace(rows[2], times=(), problem="RuntimeError: not today")
    values = {
        "environment": {
            **made.CPU,
            "versions": {**made.CPU["versions"], "platform": "Linux", "liger_kernel": None},
            "huge_pages": False,
        },
        "options": {"op": [*OPS], "shapes": ["tiny", "small"], "dtype": ["float32"],
                    "repeats": 30, "full": False, "device": "cpu"},
        "complete": True,
        "missing": {"liger_kernel": ["layer_norm_both: Liger-Kernel"]},
        "notes": {"ms": "by the host clock"},
    }  # fmt: skip
    return Timings(**{**values, **changes}, rows=rows)


def _show(of, folder, name="kernels.json"):
    files.save(command.content(of), folder / name)
    command.show(of, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    _show(_report(), folder)
    return folder


# --- statistics ----------------------------------------------------------------------------------


def test_the_ratio_and_its_interval_are_of_the_logarithms_of_paired_turns():
    random = np.random.default_rng(0)
    busy = np.exp(random.standard_normal(11))  # the machine: the same for both of a turn
    ours, theirs = busy, 3 * busy * np.exp(0.01 * random.standard_normal(11))
    row = _row(provider="torch fused", times=tuple(theirs), our_times=tuple(ours))
    logs = np.log(ours / theirs)
    low, high = stats.t.interval(0.95, 10, logs.mean(), stats.sem(logs))
    assert row.ratio == pytest.approx(math.exp(logs.mean()))
    assert (row.bounds.low, row.bounds.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert row.bounds.high / row.bounds.low < 1.05  # unpaired it would be 3


def test_fewer_than_three_turns_have_a_ratio_and_no_interval():
    row = _row(provider="torch fused", times=(2.0, 2.0), our_times=(1.0, 4.0))
    assert (row.ratio, row.bounds) == (pytest.approx(1.0), None)
    failed = dataclasses.replace(row, our_times=())
    assert (failed.ratio, failed.bounds, failed.p50_ms) == (None, None, 2.0)


# --- table, CSV ---------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 250])
def test_tables_fit_the_terminal(columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    _show(_report(), tmp_path)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    for part in ("tiny: 1,000 tensors, 50,500 elements, float32", "2.00×", "8.00"):
        assert part in " ".join(shown.split())
    assert ("Columns left out" in shown) == (columns < 250)
    assert ("1.64–2.44" in shown) == (columns > 60)
    for part in (
        "adam, tiny, float32, torch foreach: RuntimeError: not today.",
        "liger_kernel: not inst",
    ):
        assert part in " ".join(shown.split())


def test_csv_and_json_have_a_record_of_plain_numbers_for_each_row(folder):
    with (folder / "kernels.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    content = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    assert content["format"] == "python -m benchmarks.kernels 4"
    assert content.keys() - {"format"} == {field.name for field in dataclasses.fields(Timings)}
    assert len(found) == len(content["rows"]) == len(_report().rows)
    for record, written, row in zip(found, content["rows"], _report().rows, strict=True):
        assert record == {n: "" if v is None else str(v) for n, v in written.items()}
        for name in written.keys() - {"ratio_low", "ratio_high"}:
            assert written[name] == getattr(row, name)
        ends = [written["ratio_low"], written["ratio_high"]]
        assert ends == ([row.bounds.low, row.bounds.high] if row.bounds else [None, None])
    unwritten = {"ours", "times", "our_times", "our_wall_ms"}
    assert {*vars(row)} - {*written} == unwritten


def test_on_a_gpu_what_is_faster_is_told_by_the_larger_of_host_and_gpu(
    tmp_path, capsys, monkeypatch
):
    """By the GPU alone ours takes 0.8 of torch's time, and by the clock twice as long."""
    monkeypatch.setenv("COLUMNS", "200")
    ours = _row("layer_norm_both", host_ms=50.0)
    other = _row("layer_norm_both", "torch fused", host_ms=2.0, our_wall_ms=ours.wall_ms)
    slow = _row("layer_norm_both", "torch foreach", host_ms=2.0, our_wall_ms=ours.wall_ms)
    assert (ours.wall_ms, other.wall_ms) == (50.0, pytest.approx(10.0))
    assert other.ratio == pytest.approx(0.8, rel=0.01)
    assert other.wall_ratio == other.faster == pytest.approx(5.0)
    _show(_report([ours, other, _row("adam", host_ms=0.1)]), tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Faster than apex: layer_norm_both, tiny, float32: torch fused 5.00 times." in shown
    assert slow.faster == pytest.approx(50.0 / slow.wall_ms)
    (first, second, _) = csv.DictReader((tmp_path / "kernels.csv").read_text().splitlines())
    assert (first["wall_ms"], float(second["wall_ratio"])) == ("50.0", pytest.approx(5.0))


def test_on_a_cpu_what_is_surely_faster_is_listed(folder, capsys):
    found = command._faster(_report())
    assert found.count("torch foreach, no check 2.0") == 8
    assert "torch fused" not in found
    assert command._faster(_report([_row()])) == "Faster than apex: nothing."


def test_files_are_named_after_the_json_file(tmp_path):
    _show(_report([_row(), _row(provider="torch fused")]), tmp_path, "epyc.json")
    assert {path.name for path in tmp_path.iterdir()} == {"epyc.json", "epyc.csv"}


def test_an_interrupted_run_is_marked(tmp_path, capsys):
    _show(_report([_row()], complete=False), tmp_path)
    assert "INCOMPLETE" in capsys.readouterr().out


def test_hostile_texts_are_only_text(tmp_path, capsys):
    rows = [_row(), _row(provider="torch fused", problem="ValueError: [bold]loud[/bold]")]
    _show(_report(rows, missing={"[red]": ["[/red]"]}), tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    assert "ValueError: [bold]loud[/bold]" in shown
    assert "[red]: not installed" in shown
