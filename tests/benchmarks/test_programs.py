"""What the timing programs share; their numbers are no test's."""

import importlib
import os
import pathlib
import types

import pytest

from apex.commands.info import clocks

turns = pytest.importorskip("benchmarks.turns", reason="not in a checkout")

ROOT = pathlib.Path(turns.__file__).parent.parent
PROGRAMS = sorted(file.stem for file in pathlib.Path(turns.__file__).parent.glob("[!_]*.py"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "compiled_bytes" else []) for n in PROGRAMS],
)
def test_a_program_imports(name):
    if name == "launch_cost":
        pytest.importorskip("triton")
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_what_a_program_prints_is_kept(tmp_path, monkeypatch):
    """It takes 2 s: the program imports torch."""
    from benchmarks.keep import keep

    monkeypatch.chdir(ROOT)
    file = tmp_path / "output.txt"
    assert keep("keep", ["--help"], file) == 0
    lines = file.read_text().splitlines()
    assert lines[0] == "$ python -m benchmarks.keep --help"
    assert [line.split(":")[0] for line in lines[1:4]] == ["commit", "date", "versions"]
    assert any(line.startswith("usage: ") for line in lines)
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.slow
def test_a_program_of_another_folder_is_kept_with_all_columns(tmp_path, monkeypatch):
    """It takes 1 s."""
    from benchmarks.keep import keep

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "wide.py").write_text(
        "import shutil\nprint('columns', shutil.get_terminal_size().columns, '   ')"
    )
    file = tmp_path / "output.txt"
    assert keep("other.wide", [], file) == 0
    lines = file.read_text().splitlines()
    assert lines[0] == "$ ONEDNN_MAX_CPU_ISA=AVX2 python -m other.wide"
    assert "columns 250" in lines
    (tmp_path / "other" / "wide.py").write_text("print('spills')\nraise SystemExit(1)")
    assert keep("other.wide", [], file, found=True) == 1
    assert "spills" in file.read_text().splitlines()


def test_a_program_that_fails_leaves_the_results_as_they_were(tmp_path, monkeypatch, capfd):
    from benchmarks.keep import keep

    monkeypatch.chdir(ROOT)
    file = tmp_path / "output.txt"
    file.write_text("before")
    assert keep("no_such_program", [], file) != 0
    assert file.read_text() == "before"
    assert (tmp_path / "output.txt.part").exists()
    assert "no_such_program" in capfd.readouterr().err


def test_ways_take_turns_and_every_other_round_is_reversed():
    order = []

    def way(name):
        return lambda: order.append(name) or float(len(order))

    ways = {name: way(name) for name in "abc"}
    assert turns.take_turns(ways, 3, warm_up=1) == {
        "a": [4, 9, 10],
        "b": [5, 8, 11],
        "c": [6, 7, 12],
    }
    assert "".join(order) == "abcabccbaabc"


def test_turns_go_on_until_the_seconds_have_passed(monkeypatch):
    times = iter(range(100))  # read at the beginning, and before each round but the first two
    clock = types.SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(clocks, "time", clock)
    assert turns.take_turns({"a": lambda: 0.5}, 2, seconds=6.0) == {"a": [0.5] * 7}


def test_a_call_is_timed_on_the_average_of_several():
    clock = iter([10.0, 16.0])
    made = []
    assert turns.timed(lambda: made.append(0), 3, lambda: next(clock)) == 2.0
    assert len(made) == 3


def test_the_spread_of_ratios_by_hand():
    found = turns.ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert found == turns.Spread(median=2.0, low=1.0, high=3.0, q1=1.0, q3=3.0)
    assert str(found) == "2.00 [1.00 3.00]"
    assert turns.spread([2.0]) == (2.0,) * 5
    hundred = turns.spread(range(100))  # of 100 numbers the 41st and the 60th, which hold 95 %
    assert (hundred.low, hundred.high) == (40, 59)


@pytest.mark.slow
def test_bytes_of_compiled_code_are_counted_for_a_definition_that_slices(capsys):
    """It takes 7 s: torch's compiler, twelve times. A fake GPU's `x[..., :n]` needs CUDA."""
    pytest.importorskip("triton")
    counting = importlib.import_module("benchmarks.compiled_bytes")
    counting.main(["focal"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [
        [dtype, columns]
        for dtype in ("bfloat16", "float16", "float32")
        for columns in ("1024", "8192")
    ]
