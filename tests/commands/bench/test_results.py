"""The file of results, the columns made of it, the terminal, and `apex bench plot`."""

import csv
import dataclasses
import json
import math

import pytest

from apex.commands import command_line as cli
from apex.commands.bench.training import report, results, table
from apex.commands.bench.training.answer import answers
from apex.commands.bench.training.rows import rows
from apex.commands.bench.training.sentences import sentences
from apex.commands.bench.training.verdict import verdicts
from apex.commands.tables import three, write_csv
from tests.commands.bench import made


@pytest.fixture
def no_files(monkeypatch):
    """Leave plots and page to their own tests."""
    monkeypatch.setattr(report, "write_all", lambda *args: None)


def _shown(of, folder, capsys, monkeypatch, columns=120):
    if columns is None:  # a pipe
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    report.show(of, folder)
    return capsys.readouterr().out


def _lines(of):
    return {(x.row.label, x.row.batch): x for x in table.lines(of, verdicts(of))}


def _csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [made.report, made.troubled, made.on_gpu])
def test_every_number_comes_back_to_the_last_bit(world, tmp_path):
    of = world()
    results.write(of, tmp_path / "results.json")
    assert repr(results.read(tmp_path / "results.json")) == repr(of)  # nan is not equal to itself
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_an_interruption_leaves_the_former_file(tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    results.write(made.report(), file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        results.write(dataclasses.replace(made.report(), environment={"x": object()}), file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


BAD = {
    "missing": (None, "cannot be read (No such file or directory)"),
    "foreign": ('{"format": "something else"}', "is not a report that apex bench writes"),
    "cut off": ('{"format": "apex bench 4", "pl', "is not a report that apex bench writes"),
    "not text": ("\0\1", "is not a report that apex bench writes"),
    "too deep": ("[" * 100_000, "is not a report that apex bench writes"),
    "a list": ("[]", "is not a report that apex bench writes"),
    "damaged": (
        '{"format": "apex bench 4", "plan": [{"task": 1}]}',
        "Expected `str`, got `int` - at `$.plan[0].task`",
    ),
    "of no machine": (
        '{"format": "apex bench 4", "environment": {}, "plan": [], "runs": []}',
        "it names no machine",
    ),
}


@pytest.fixture
def files(tmp_path):
    """Two results files of different machines."""
    cells = [made.cell(level, batch) for level in ("O0", "O4") for batch in (128, 256)]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, environment in zip(paths, (made.CPU, made.GPU), strict=True):
        results.write(made.report(cells, environment=environment), path)
    return paths


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_line_and_nothing_is_written(kind, files, tmp_path, capsys):
    content, message = BAD[kind]
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    out = tmp_path / "out"
    assert cli.main(["bench", "plot", str(files[0]), str(bad), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert str(bad) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "value"), [("batch", "x"), ("epochs", [1]), ("seed", None), ("compile", "perhaps")]
)
def test_values_of_another_kind_are_named(files, tmp_path, capsys, name, value):
    content = json.loads(files[0].read_text())
    content["plan"][0][name] = value
    files[1].write_text(json.dumps(content))
    assert cli.main(["bench", "plot", str(files[1]), "--out", str(tmp_path / "out")]) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- apex bench plot -----------------------------------------------------------------------------


def test_each_file_is_drawn_again_in_a_folder_of_its_own(files, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "write_all", lambda *args: seen.append(args))
    out = tmp_path / "out"
    assert cli.main(["bench", "plot", str(files[0]), "--out", str(out)]) == 0
    assert cli.main(["bench", "plot", *map(str, [files[0], *files]), "--out", str(out)]) == 0
    names = [folder.name for *_, folder in seen]
    assert names[0] == "out"
    assert len(set(names[1:])) == 3
    assert seen[0][0] == results.read(files[0])


def test_levels_and_batch_sizes_can_be_chosen(files, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "write_all", lambda *args: seen.append(args))
    words = ["--levels", "O4", "--batch", "256", "--out", str(tmp_path / "out")]
    assert cli.main(["bench", "plot", str(files[0]), *words]) == 0
    ((of, *_),) = seen
    assert [(cell.level, cell.batch) for cell in of.plan] == [("O4", 256)]
    assert [run.cell for run in of.runs] == list(of.plan)


def test_a_folder_that_cannot_be_written_is_one_line(files, capsys):
    assert cli.main(["bench", "plot", str(files[0]), "--out", str(files[1])]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


# --- the terminal --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_files")
def test_the_answer_stands_first_and_the_table_has_the_numbers_of_the_rows(
    tmp_path, capsys, monkeypatch
):
    of = made.report()
    shown = _shown(of, tmp_path, capsys, monkeypatch, 250)
    assert shown.startswith(answers(of, verdicts(of))[0])
    line = _lines(of)["O4", 128]
    found = next(text for text in shown.splitlines() if text.startswith(" O4 "))
    for text in (three(line.row.ms), f"{line.ratio:.2f}", three(line.row.peak_bytes / 2**20),
                 f"{line.verdict.memory:.2f}"):  # fmt: skip
        assert text in found.split()
    for text in (f"({line.verdict.speed.low:.2f}–{line.verdict.speed.high:.2f})", "98."):
        assert text in found
    base = next(text for text in shown.splitlines() if text.startswith(" O0 "))
    assert "1.00" in base.split()


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("columns", [None, 100, 120])
@pytest.mark.parametrize("world", [made.troubled, made.on_gpu, made.report])
def test_tables_fit_and_nothing_is_cut_off(world, columns, tmp_path, capsys, monkeypatch):
    shown = _shown(world(), tmp_path, capsys, monkeypatch, columns)
    assert max(map(len, shown.splitlines()[:-1])) <= (columns or 80)  # the last is a path, whole
    assert "…" not in shown
    for line in table.lines(world(), verdicts(world())):  # whole in one line
        if line.row.ms is not None:
            found = [text for text in shown.splitlines() if text.startswith(f" {line.row.label} ")]
            assert any(three(line.row.ms) in text.split() for text in found), line.row.label


@pytest.mark.usefixtures("no_files")
def test_columns_without_a_number_are_left_out(tmp_path, capsys, monkeypatch):
    assert "host" not in _shown(made.report(), tmp_path, capsys, monkeypatch, 250)
    assert "host" in _shown(made.on_gpu(), tmp_path, capsys, monkeypatch, 250)


@pytest.mark.usefixtures("no_files")
def test_sentences_and_problems_are_printed(tmp_path, capsys, monkeypatch):
    of = made.troubled()
    shown = " ".join(_shown(of, tmp_path, capsys, monkeypatch).split())
    for verdict in verdicts(of):
        if verdict.other.level == "O0":
            assert f"- {' '.join(sentences(verdict))}" in shown
    assert "O3 (digits-cnn, batch size 512): diverged (3 of 3)" in shown
    assert "FP16 (digits-cnn, batch size 128, 512): failed (3 of 3): TypeError" in shown
    assert shown.endswith(str(tmp_path / "report.html"))
    assert "INCOMPLETE" not in shown
    assert "QUICK" not in shown
    assert "\x1b" not in shown  # not a terminal: no colours


@pytest.mark.usefixtures("no_files")
def test_what_is_incomplete_or_quick_or_of_a_busy_machine_is_marked(tmp_path, capsys, monkeypatch):
    cells = [made.cell(level, quick=True) for level in ("O0", "O1", "O4")]
    of = made.report(cells, [made.run(cells[0], waited=0.3)])
    shown = " ".join(_shown(of, tmp_path, capsys, monkeypatch).split())
    assert "INCOMPLETE: 1 of 3 runs" in shown
    assert "QUICK: less data" in shown
    assert "BUSY MACHINE: other programs had the processor for 30% of the time" in shown
    assert "O4 (digits-cnn, batch size 128): 0 of 1 runs" in shown


@pytest.mark.usefixtures("no_files")
def test_nothing_measured_is_nothing_shown(tmp_path, capsys, monkeypatch):
    shown = _shown(made.report([made.cell()], []), tmp_path, capsys, monkeypatch)
    assert "nothing to show" in shown


@pytest.mark.usefixtures("no_files")
def test_square_brackets_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    of = made.report([made.cell(task="a[red].py:b[/c]")])
    assert "a[red].py:b[/c], batch size 128" in _shown(of, tmp_path, capsys, monkeypatch)


# --- CSV -----------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_row_with_plain_numbers(tmp_path):
    of = made.troubled()
    write_csv(table.COLUMNS, table.lines(of, verdicts(of)), tmp_path / "results.csv")
    found = _csv(tmp_path / "results.csv")
    lines = _lines(of)
    assert len(found) == len(lines) == len(rows(of))
    for record in found:
        line = lines[record["label"], int(record["batch_size"])]
        row, verdict = line.row, line.verdict
        for name, value in {
            "step_median_ms": row.ms,
            "speed_vs_O0": line.ratio,
            "speed_vs_O0_high": verdict.speed.high if verdict and verdict.speed else None,
            "peak_tensor_bytes": row.peak_bytes,
            "seconds_to_target": row.seconds_to_target,
            "scale_highest": max(row.scale_ends, default=None),
            "skipped_steps": row.skipped,
        }.items():
            assert record[name] == ("" if value is None else str(value)), name
        assert record["problem"] == (row.problem or "")


def test_the_time_to_a_target_is_the_median_over_seeds_that_all_reached_it():
    runs = [
        made.run(made.cell(seed=s), accuracy=(90.0, 97.5), epoch_seconds=(1.0, second))
        for s, second in enumerate((2.0, 5.0, 3.0))
    ]
    (row,) = rows(made.of_runs(*runs, target=97.0))
    assert row.seconds_to_target == 4.0
    (row,) = rows(made.of_runs(*runs, target=90.0))
    assert row.seconds_to_target == 1.0
    (row,) = rows(
        made.of_runs(*runs[:2], made.without(runs[2], accuracy=(90.0, 96.0)), target=97.0)
    )
    assert row.seconds_to_target is None
    assert math.isclose(row.ms, 3.84, rel_tol=0.1)
