"""Tables in the terminal, CSV files, and `apex bench plot`, from reports made by hand."""

import csv
import dataclasses
import json
import sys
import types

import pytest

from apex.bench import cli
from apex.bench.output.columns import three, write_csv
from apex.bench.training import plot_command, remarks, report, results, table, tensorboard
from apex.bench.training.rows import rows
from tests.bench import made


@pytest.fixture
def no_files(monkeypatch):
    """Leave plots and page to their own tests."""
    monkeypatch.setattr(report, "write_all", lambda *args: ["report.html"])


@pytest.fixture(autouse=True)
def sentences(monkeypatch):
    """Take verdicts made by hand."""
    monkeypatch.setattr(plot_command, "verdicts", made.verdicts)


def _shown(of, folder, capsys, monkeypatch, columns=120):
    monkeypatch.setenv("COLUMNS", str(columns))
    report.show(of, made.verdicts(of), folder)
    return capsys.readouterr().out


def _cells(shown, level):
    [line] = [line for line in shown.splitlines() if line.strip().startswith(f"{level} ")]
    return line.split()


def _lines(of):
    return {(x.row.label, x.row.batch): x for x in table.lines(of, made.verdicts(of))}


def _csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the terminal --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_files")
def test_the_table_has_the_numbers_of_the_rows(tmp_path, capsys, monkeypatch):
    of = made.report([made.cell(level) for level in ("O0", "O4")])
    row = rows(of)[1]
    shown = _cells(_shown(of, tmp_path, capsys, monkeypatch, 250), "O4")
    for text in ("bf16", f"{row.ms_median:.2f}", f"{row.speed:.2f}×", f"{row.peak_mib:.1f}",
                 f"{row.accuracy.mean:.2f}", f"{row.loss.mean:.4f}", "1/1"):  # fmt: skip
        assert text in shown


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("world", [made.troubled, made.on_gpu, made.report])
def test_tables_fit_and_nothing_is_cut_off(world, columns, tmp_path, capsys, monkeypatch):
    shown = _shown(world(), tmp_path, capsys, monkeypatch, columns)
    assert max(map(len, shown.splitlines()[:-1])) <= columns  # the last is a path, whole
    assert "…" not in shown
    for row in rows(world()):  # whole in one line
        if row.speed is not None:
            values = (three(row.ms_median), f"{row.speed:.2f}×", three(row.peak_mib))
            found = [line for line in shown.splitlines() if line.startswith(f" {row.label} ")]
            assert any(set(values) <= set(line.split()) for line in found), row.label


@pytest.mark.usefixtures("no_files")
def test_columns_without_a_number_are_left_out(tmp_path, capsys, monkeypatch):
    shown = _shown(made.report(), tmp_path, capsys, monkeypatch, 250)
    assert "data" in shown
    assert "replay" not in shown
    assert "replay" in _shown(made.on_gpu(), tmp_path, capsys, monkeypatch, 250)


@pytest.mark.usefixtures("no_files")
def test_sentences_and_problems_are_printed(tmp_path, capsys, monkeypatch):
    of = made.troubled()
    shown = " ".join(_shown(of, tmp_path, capsys, monkeypatch).split())
    for verdict in made.verdicts(of):
        assert f"- {verdict.sentence}" in shown
    assert "O3 (digits-cnn, batch size 512): diverged (3 of 3)" in shown
    assert "FP16 (digits-cnn, batch size 128, 256, 512): failed (3 of 3): TypeError" in shown
    assert shown.endswith(str(tmp_path / "report.html"))  # which has the notes
    assert "float16 is not native to this device (no such instructions)." in shown
    assert "INCOMPLETE" not in shown
    assert "QUICK" not in shown
    assert "\x1b" not in shown  # not a terminal: no colours


@pytest.mark.usefixtures("no_files")
def test_what_is_incomplete_or_quick_is_marked(tmp_path, capsys, monkeypatch):
    cells = [made.cell(level, quick=True) for level in ("O0", "O1", "O4")]
    of = made.report(cells, [made.run(cells[0])])
    shown = _shown(of, tmp_path, capsys, monkeypatch)
    assert "INCOMPLETE: 1 of 3 runs" in shown
    assert "QUICK" in shown
    assert "leave out what differs from process to process" in " ".join(shown.split())
    assert "O4 (digits-cnn, batch size 128): not run" in shown


def test_nothing_measured_is_nothing_shown(tmp_path, capsys, monkeypatch):
    shown = _shown(made.report([made.cell()], []), tmp_path, capsys, monkeypatch)
    assert "nothing to show" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_files")
def test_square_brackets_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    of = made.report([made.cell(task="a[red].py:b[/c]")])
    assert "a[red].py:b[/c], batch size 128" in _shown(of, tmp_path, capsys, monkeypatch)


def test_a_busy_machine_is_pointed_out():
    cell = made.cell()
    of = made.report([cell], [made.run(cell, step_ms=(1.0,) * 8 + (9.0,) * 4)])
    [busy] = [notice for notice in remarks.notices(of) if "vary a lot" in notice]
    assert "O0 (digits-cnn, batch size 128)" in busy
    assert not [notice for notice in remarks.notices(made.report()) if "vary" in notice]


# --- CSV -----------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_row_with_plain_numbers(tmp_path):
    of = made.troubled()
    write_csv(table.COLUMNS, table.lines(of, made.verdicts(of)), tmp_path / "results.csv")
    found = _csv(tmp_path / "results.csv")
    lines = _lines(of)
    assert len(found) == len(lines)
    for record in found:
        row, verdict = lines[record["label"], int(record["batch_size"])]
        for name, value in {
            "step_median_ms": row.ms_median,
            "speed_vs_O0": row.speed,
            "speed_vs_O0_high": verdict.speed.high if verdict and verdict.speed else None,
            "peak_tensor_bytes": row.peak_bytes,
            "accuracy_sd_percent": row.accuracy.sd if row.accuracy else None,
            "joules_per_sample": row.joules_per_sample,
            "scale_highest": max(row.scale_ends, default=None),
        }.items():
            assert record[name] == ("" if value is None else repr(value))
        assert record["problem"] == (row.problem or "")


def test_the_other_csv_has_a_line_for_each_run(tmp_path):
    of = made.troubled()
    table.write_runs_csv(of, tmp_path / "runs.csv")
    found = _csv(tmp_path / "runs.csv")
    assert [record["status"] for record in found] == [run.status for run in of.runs]
    assert found[0]["accuracy_percent"] == repr(of.runs[0].accuracy[-1])
    assert found[0]["seed"] == "0"


# --- apex bench plot -----------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Two results files of different machines."""
    cells = [made.cell(level, batch) for level in ("O0", "O4") for batch in (128, 256)]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, environment in zip(paths, (made.CPU, made.GPU), strict=True):
        results.write(made.report(cells, environment=environment), path)
    return paths


def test_compare_overlays_machines_by_name(files, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["bench", "plot", *map(str, files), "--compare", "--out", str(out)]
    assert cli.main(words) == 0
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{suffix}"
        for name in ("speed", "time", "memory", "accuracy")
        for suffix in ("png", "svg")
    }
    drawn = (out / "time.svg").read_text()
    assert "O4, Thinking Machine CM-5" in drawn
    assert "O4, Graphics Engine 9" in drawn
    assert cli.main([*words, "--names", "V100", "RTX"]) == 0
    assert "O4, RTX" in (out / "time.svg").read_text()


def test_each_file_is_drawn_again_in_a_folder_of_its_own(files, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plot_command, "write_all", lambda *args: seen.append(args) or ["x"])
    out = tmp_path / "out"
    assert cli.main(["bench", "plot", str(files[0]), "--out", str(out)]) == 0
    assert cli.main(["bench", "plot", *map(str, [files[0], *files]), "--out", str(out)]) == 0
    assert [folder.name for *_, folder in seen] == [
        "out",
        "1-Thinking-Machine-CM-5-1-",
        "2-Thinking-Machine-CM-5-2-",
        "3-Graphics-Engine-9",
    ]
    assert seen[0][0] == results.read(files[0])


BAD = {
    "missing": (None, "cannot be read (No such file or directory)"),
    "foreign": ('{"format": "something else"}', "is not a report that apex bench writes"),
    "cut off": ('{"format": "apex bench 2", "pl', "is not a report that apex bench writes"),
    "not text": ("\0\1", "is not a report that apex bench writes"),
    "damaged": ('{"format": "apex bench 2", "plan": [{"task": 1}]}', "damaged"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("compare", [[], ["--compare"]])
def test_a_bad_file_is_one_line_and_nothing_is_written(kind, compare, files, tmp_path, capsys):
    content, message = BAD[kind]
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    out = tmp_path / "out"
    words = ["bench", "plot", str(files[0]), str(bad), "--out", str(out), *compare]
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert str(bad) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not out.exists()


def test_values_of_another_kind_are_damage(files, tmp_path, capsys):
    for name, value in (("batch", "x"), ("level", "O9"), ("epochs", [1])):
        content = json.loads(files[0].read_text())
        for cell in (content["plan"][0], content["runs"][0]["cell"]):
            cell[name] = value
        files[1].write_text(json.dumps(content))
        assert cli.main(["bench", "plot", str(files[1]), "--out", str(tmp_path / "out")]) == 2
        assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_without_its_machine_is_damaged(files, tmp_path, capsys):
    of = dataclasses.replace(results.read(files[0]), environment={})
    results.write(of, files[1])
    assert cli.main(["bench", "plot", str(files[1]), "--out", str(tmp_path / "out")]) == 2
    assert "damaged" in capsys.readouterr().err


def test_names_are_one_for_each_file(files, tmp_path, capsys):
    words = ["bench", "plot", *map(str, files), "--names", "RTX", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "--names: 1 for 2 results files" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(files, capsys):
    assert cli.main(["bench", "plot", str(files[0]), "--out", str(files[1])]) == 2
    assert "is a file, and a folder is needed" in capsys.readouterr().err


# --- TensorBoard ---------------------------------------------------------------------------------


def test_tensorboard_gets_every_step(tmp_path, monkeypatch):
    written = {}

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, step):
            written[self.folder, name, step] = value

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    of = made.report([made.cell(task="my/file.py:build", seed=1)])
    tensorboard.write(of, tmp_path)
    [run] = of.runs
    folder = str(tmp_path / "my_file.py_build_O0_batch_128_seed_1")
    assert written[folder, "loss", 60] == run.losses[-1]
    assert written[folder, "accuracy %", 60] == run.accuracy[-1]
    assert len(written) == 3 * 60 + 2


def test_without_tensorboard_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(cli.UsageError, match="pip install tensorboard"):
        tensorboard.check(tmp_path)
