import math

import pytest

from apex.bench import cli
from apex.bench.intervals import difference_interval
from apex.bench.training.compare import changes, differences
from apex.bench.training.results import write
from tests.bench.made import CPU, level, of_runs, without

STEADY = (1.0, 1.01, 0.99)


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """Run the command on two reports; returns the exit code, standard output and errors."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(before, after, *options):
        for name, content in (("before.json", before), ("after.json", after)):
            if content is not None:
                write(content, tmp_path / name)
        code = cli.main(
            ["bench", "compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]
            + list(options)
        )
        return code, *capsys.readouterr()

    return call


def _change(before, after):
    (found,) = changes(of_runs(*before), of_runs(*after))
    return found


def _times(ms):
    return [*level("O0", STEADY), *level("O4", ms)]


def test_the_ratio_is_of_medians_and_its_interval_is_welchs():
    later = (1.5, 1.6, 1.4, 1.55)
    found = _change(level("O4", STEADY), level("O4", later))
    logs = [[math.log(ms) for ms in times] for times in (STEADY, later)]
    expected = difference_interval(*logs).exp
    assert found.time_interval == expected
    assert found.time == pytest.approx(expected.value)
    assert expected.low > 1.3


def test_slower_past_the_threshold_exits_with_1_and_names_the_row(compare):
    code, out, errors = compare(of_runs(*_times(STEADY)), of_runs(*_times((1.2, 1.21, 1.19))))
    assert code == 1
    assert errors == ""
    assert [line for line in out.splitlines() if "slower by 20" in line] == [
        "digits-cnn O4 at batch 128: slower by 20 %."
    ]
    assert "O0 at batch 128:" not in out
    assert "1 of 2 rows slower by more than 10 %." in out


@pytest.mark.parametrize(
    ("later", "options", "code"),
    [
        (STEADY, (), 0),
        ((0.5, 0.51, 0.49), (), 0),  # faster
        ((1.08, 1.09, 1.07), (), 0),  # slower beyond doubt, and below the threshold
        ((1.08, 1.09, 1.07), ("--threshold", "5"), 1),
        ((1.2, 1.21, 1.19), ("--threshold", "25"), 0),
        ((0.8, 1.2, 2.4), (), 0),  # 32 % slower, and the interval contains 1
    ],
)
def test_the_threshold_and_the_interval_decide(compare, later, options, code):
    assert compare(of_runs(*_times(STEADY)), of_runs(*_times(later)), *options)[0] == code


@pytest.mark.parametrize(("later", "code"), [(1.05, 0), (1.2, 1)])
def test_with_too_few_seeds_the_threshold_alone_decides(compare, later, code):
    before, after = of_runs(*_times(STEADY[:2])), of_runs(*_times((later, later)))
    assert compare(before, after)[0] == code
    assert changes(before, after)[1].time_interval is None


def test_more_memory_and_less_accuracy_are_said_and_do_not_fail(compare):
    before = level("O4", STEADY, (98.0, 98.1, 97.9), others={"peak_bytes": 2**22})
    after = level("O4", STEADY, (97.0, 97.1, 96.9), others={"peak_bytes": 3 * 2**21})
    code, out, _ = compare(of_runs(*before), of_runs(*after))
    assert (
        "digits-cnn O4 at batch 128: 50 % more memory; accuracy -1.00 points." in out.splitlines()
    )
    assert code == 0
    code, out, _ = compare(of_runs(*after), of_runs(*before))  # the other way round all is better
    assert "0 of 1 rows slower by more than 10 %." in out
    assert "points" not in out
    unsure = level(
        "O4", STEADY, (98.0, 98.3, 97.1), others={"peak_bytes": 2**22}
    )  # 0.2 points less, +-1.1
    assert "points" not in compare(of_runs(*before), of_runs(*unsure))[1]


@pytest.mark.parametrize("status", ["failed", "diverged", "out of memory"])
def test_a_level_that_no_longer_trains_exits_with_1(compare, status):
    lost = of_runs(*level("O4", STEADY, others={"status": status, "error": "[no]\nluck"}))
    code, out, _ = compare(of_runs(*level("O4", STEADY)), lost)
    assert code == 1
    why = ": [no] luck" if status == "failed" else ""
    assert f"digits-cnn O4 at batch 128: {status} (3 of 3){why}." in out.splitlines()
    assert "0 of 1 rows slower by more than 10 %, 1 no longer trained as before." in out
    assert compare(lost, lost)[0] == 0
    assert compare(lost, of_runs(*level("O4", STEADY)))[0] == 0


def test_a_matrix_that_was_interrupted_is_compared_as_far_as_it_came(compare):
    whole = of_runs(*_times(STEADY))
    begun = of_runs(*whole.runs[:4])
    begun = without(begun, plan=whole.plan)
    assert compare(whole, begun)[0] == 0


def test_trainings_that_a_budget_cut_have_no_accuracy_to_compare():
    runs = [level("O4", STEADY, (right,) * 3) for right in (98.0, 90.0)]
    cut = [without(run, planned_steps=600) for run in runs[1]]
    assert _change(*runs).accuracy == -8.0
    assert _change(runs[0], cut).accuracy is None
    assert differences(of_runs(*runs[0]), of_runs(*cut, budget_s=60.0)) == [
        "Not the same: budget none and 60 s."
    ]


def test_rows_of_one_file_alone_are_named(compare):
    before = of_runs(*level("O0", STEADY), *level("O1", STEADY, batch=16))
    after = of_runs(*level("O0", STEADY), *level("O5", STEADY, task="[text]"))
    code, out, _ = compare(before, after)
    assert code == 0
    assert "Only before: digits-cnn O1 at batch 16." in out
    assert "Only after: [text] O5 at batch 128." in out


def test_other_machines_versions_and_options_are_one_line(compare):
    before = of_runs(*level("O0", STEADY))
    there = CPU | {
        "date": "2027",
        "device": CPU["device"] | {"name": "Another CPU"},
        "versions": CPU["versions"] | {"torch": "2.14"},
        "cuda": {"torch": "13.0"},
    }
    after = of_runs(*level("O0", STEADY, epochs=3, lr=0.2), environment=there)
    assert differences(before, before) == []
    (line,) = differences(before, after)
    assert line == (
        "Not the same: torch 2.13.0 and 2.14; device cpu Thinking Machine CM-5 and cpu Another "
        "CPU; lr 0.1 and 0.2; epochs 2 and 3; cuda torch none and 13.0."
    )
    assert line in compare(before, after)[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "after.json: cannot be read (No such file or directory)"),
        ("{", "after.json is not a report that apex bench writes ("),
        ('{"format": "apex bench 2"}', "(no format 'apex bench 4')"),
        ('{"format": "apex bench 4"}', "missing required field `environment`"),
    ],
)
def test_a_bad_file_gets_one_line_and_2(compare, tmp_path, content, said):
    if content is not None:
        (tmp_path / "after.json").write_text(content)
    code, out, errors = compare(of_runs(*level("O0")), None)
    assert (code, out) == (2, "")
    assert errors.startswith("apex bench compare: ")
    assert said in errors
    assert errors.count("\n") == 1


def test_files_without_a_common_row_and_a_bad_threshold_get_one_line_and_2(compare, capsys):
    code, out, errors = compare(of_runs(*level("O0")), of_runs(*level("O1")))
    assert (code, out) == (2, "")
    assert errors.endswith("have no row in common\n")
    for bad in ("-1", "much", "nan", "inf"):
        with pytest.raises(SystemExit, match="2"):
            compare(of_runs(*level("O0")), of_runs(*level("O0")), f"--threshold={bad}")
        assert "is not a number above 0" in capsys.readouterr().err
