"""``./dev gpu --tune``, with planted times: what becomes a row of the table, and the file."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
tools = pytest.importorskip("tools.gpu.__main__", reason="not in a checkout")

from apex.kernels import _settings  # noqa: E402  after the check that there are tools
from apex.kernels._plans import Family  # noqa: E402
from tests.kernels import launches  # noqa: E402
from tests.test_dev import ROOT  # noqa: E402
from tools.gpu import checking, part, tune  # noqa: E402

PLACE = ("a card", "3.7.1", "2.13.0")
FORMULA = {"elements": 1024, "warps": 4}
PLANTED = {"elements": 512, "warps": 8}
ASKED = ("swiglu_forward", "float32", ())


class Asking:
    """A case whose launchers ask for settings, and launch nothing."""

    def __init__(self, *ops, result=lambda chosen: torch.ones(3)):
        self.ops, self.result = ops or ("swiglu_forward",), result

    def __str__(self):
        return "a case"

    def work(self):
        def run():
            chosen = [_settings.setting(op, torch.float32, (), **FORMULA) for op in self.ops]
            return [self.result(dict(zip(FORMULA, one, strict=True))) for one in chosen]

        return run


class Times:
    """A stand-in for the clock: one time after the other for each choice, the last again."""

    def __init__(self, planted=(), formula=(1.0,)):
        self.planted = {json.dumps(PLANTED): [*planted], json.dumps(FORMULA): [*formula]}
        self.calls = 0

    def __call__(self, choice, work):
        self.calls += 1
        times = self.planted.get(json.dumps(choice)) or [1.0]
        return times.pop(0) if len(times) > 1 else times[0]


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "settings.json"
    made.write_text("[\n]\n")
    return made


def tuned(file, times, case=None):
    said = tune.tune_case(case or Asking(), times, file, PLACE)
    return said, json.loads(file.read_text())


# -- what becomes a row --------------------------------------------------------------------------


def test_a_planted_faster_candidate_becomes_a_row_that_launchers_take(file):
    said, (row,) = tuned(file, Times([0.9]))
    assert said == (
        "swiglu_forward []: 8 candidates, 0 cannot run; {'elements': 512, 'warps': 8} takes 0.90 "
        "of the formula's time"
    )
    assert (row["card"], row["triton"], row["torch"]) == PLACE
    assert (row["op"], row["dtype"], row["size"], row["choice"]) == (*ASKED[:2], [], PLANTED)
    assert row["ms"] == {"formula": [1.0] * 3, "choice": [0.9] * 3}
    assert (row["formula"], row["shape"]) == (FORMULA, "a case")
    with _settings.use([row]):
        assert _settings.setting("swiglu_forward", torch.float32, (), **FORMULA) == (512, 8)


@pytest.mark.parametrize(
    ("times", "rows"),
    [
        ([0.9, 0.95, 0.95, 0.95], 1),  # the first time only chooses who takes turns
        ([0.9, 0.9, 0.9, 0.96], 0),  # in two of three turns
        ([0.9, 0.96, 0.9, 0.9], 0),
        ([0.5, 1.2, 0.6, 1.3], 0),  # noise, with the smallest time of all
        ([1.0, 0.951, 0.951, 0.951], 0),
    ],
)
def test_a_candidate_has_to_be_5_percent_faster_in_each_of_three_turns(times, rows, file):
    said, found = tuned(file, Times(times))
    assert len(found) == rows
    assert said.endswith("of the formula's time" if rows else "none is faster")


def test_the_smaller_of_the_formulas_times_counts(file):
    """They are within 10 %: 1.0 and 0.98 in each turn, and the candidate takes 0.94."""
    _, found = tuned(file, Times([0.94], formula=[1.0, 0.98] * 3))
    assert found == []


@pytest.mark.parametrize(("again", "rows"), [(1.09, 1), (1.11, 0), (0.89, 0)])
def test_controls_that_differ_give_no_row_and_leave_one_that_is_there(again, rows, file):
    formula = [1.0, 1.0, 1.0, 1.0, 1.0, again]  # first and last of the three turns
    said, found = tuned(file, Times([0.5], formula))
    assert len(found) == rows
    assert ("unsteady" in said) == (not rows)
    before = tuned(file, Times([0.9]))[1]
    assert (tuned(file, Times([0.5], formula))[1] == before) == (not rows)


def test_the_formula_is_first_and_last_in_each_turn(file):
    order = []

    def clock(choice, work):
        order.append(choice == FORMULA)
        return 1.0

    tuned(file, clock)
    assert order == [False] * 8 + [True, *[False] * 4, True] * 3


def test_numbers_of_a_launcher_are_varied_one_set_at_a_time(file):
    """While another is timed each set is the formula's."""
    seen = []
    both = Asking("swiglu_forward", "swiglu_backward")

    def clock(choice, work):
        key = [
            _settings.setting(op, torch.float32, (), **FORMULA) == (*FORMULA.values(),)
            for op in both.ops
        ]
        seen.append(tuple(key))
        return 0.5 if choice == PLANTED else 1.0

    _, rows = tuned(file, clock, both)
    assert [row["op"] for row in rows] == ["swiglu_backward", "swiglu_forward"]
    assert {*seen} == {(True, True), (False, True), (True, False)}


def test_a_candidate_that_cannot_run_is_left_out(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def clock(choice, work):
        if choice["warps"] == 8:
            raise RuntimeError("out of resources: shared memory")
        return 0.9 if choice["elements"] == 2048 else 1.0

    said, (row,) = tuned(file, clock)
    assert said.startswith("swiglu_forward []: 5 candidates, 3 cannot run; ")
    assert row["choice"]["elements"] == 2048


def test_a_candidate_with_another_result_is_an_error(file):
    wrong = Asking(result=lambda chosen: torch.ones(3) + (chosen == PLANTED) * 1e-4)
    with pytest.raises(AssertionError, match=r"'warps': 8}: off the formula's result by \d+ eps"):
        tuned(file, Times([0.5]), wrong)
    near = Asking(result=lambda chosen: torch.ones(3) + (chosen == PLANTED) * 1e-6)
    assert len(tuned(file, Times([0.5]), near)[1]) == 1


# -- the file ------------------------------------------------------------------------------------


def test_rerun_replaces_rows_of_the_same_key_or_removes_them(file):
    both = Asking("swiglu_forward", "swiglu_backward")
    first = tuned(file, Times([0.9]), both)[1]
    _, second = tuned(file, Times([0.8]))
    assert [row["ms"]["choice"][0] for row in second] == [0.9, 0.8]  # backward, forward
    assert second[0] == first[0]
    assert tuned(file, Times())[1] == second[:1]  # no longer faster


def test_the_file_is_sorted_with_a_line_for_each_row_whatever_the_order(file):
    places = [PLACE, ("another card", *PLACE[1:]), (PLACE[0], "3.8.0", PLACE[2])]
    keys = [ASKED, ("swiglu_backward", *ASKED[1:]), ("rms_norm_forward", "float32", (768,))]
    choices = [PLANTED, PLANTED, {"whole": 1, "elements": 1024, "warps": 2}]
    made = [
        (place, key, tune.row_of(place, key, choice))
        for place in places
        for key, choice in zip(keys, choices, strict=True)
    ]
    texts = set()
    for order in (made, made[::-1], [*made[4:], *made]):
        file.write_text("[\n]\n")
        for one in order:
            tune.store(file, *one)
        texts.add(file.read_text())
    (text,) = texts
    lines = text.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("[", "]", 2 + len(made))
    assert [json.loads(line.rstrip(","))["op"] for line in lines[1:4]] == sorted(
        key[0] for key in keys
    )
    for place, key, _ in made:
        tune.store(file, place, key, None)
    assert file.read_text() == _settings.FILE.read_text() == "[\n]\n"  # as it is shipped


def test_a_killed_run_keeps_the_rows_that_were_found(file, monkeypatch):
    both = Asking("swiglu_forward", "swiglu_backward")
    times = Times([0.9])

    def killed(choice, work):
        if times.calls == 30:
            raise KeyboardInterrupt
        return times(choice, work)

    with pytest.raises(KeyboardInterrupt):
        tuned(file, killed, both)
    (row,) = json.loads(file.read_text())
    assert row["op"] == "swiglu_forward"

    def dies(*paths):
        raise KeyboardInterrupt

    before = file.read_text()
    monkeypatch.setattr(os, "replace", dies)  # while it writes
    with pytest.raises(KeyboardInterrupt):
        tuned(file, Times([0.8]), both)
    assert file.read_text() == before


def test_a_bad_row_ends_the_run_before_anything_is_timed(file):
    times, bad = Times([0.9]), {"op": "swiglu", "card": "a card"}
    file.write_text(json.dumps([bad]))
    with pytest.raises(ValueError, match=r"settings.json: There is no operation 'swiglu': choose"):
        tuned(file, times)
    assert times.calls == 0
    assert json.loads(file.read_text()) == [bad]


# -- the run -------------------------------------------------------------------------------------


def test_no_two_cases_measure_the_same_row(monkeypatch):
    """At their real sizes. The row of one would replace that of the other."""
    monkeypatch.setattr(tune, "_random", lambda dtype, *shape: launches.meta(*shape, dtype=dtype))
    monkeypatch.setattr(checking, "DEVICE", torch.device("meta"))
    monkeypatch.setattr(Family, "launch", lambda *arguments: None)
    keys = []
    for case in tune.CASES:
        work = case.work()
        with _settings.use() as asked:
            work()
        assert asked
        keys += asked
        assert all(_settings.around(key, formula) for key, formula in asked.items())
    assert len(keys) == len({*keys})
    assert {op for op, _, _ in keys} | {
        f"{kind}_norm_backward_from_output" for kind in ("layer", "rms")
    } == {*_settings.OPS}


def test_tune_is_run_alone_and_only_where_it_is_named():
    def named(*words, dry=False):
        return tools.choose(words, None, dry, pytest.fail)

    assert tools.choose([], [], False, pytest.fail) == {"tune": tools.PARTS["tune"]}
    assert "tune" not in named()
    assert "tune" in named(dry=True)
    assert tools.choose(["steps"], [], False, pytest.fail).keys() == {"steps", "tune"}
    words = tools.choose([], ["rms_norm", "gated"], False, pytest.fail)["tune"].words
    assert words == ["tools.gpu.part", "tune", "--only", "rms_norm", "gated"]


def test_checks_are_chosen_by_any_of_the_words(tmp_path, monkeypatch):
    words = ["part", "tune", "--out", str(tmp_path / "part.json"), "--only", "gated", "no such"]
    ran = []
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(part, "run_checks", lambda checks, rows: ran.extend(checks))
    part.main()
    assert {name.partition(",")[0] for name in ran} == {"tune[gated forward", "tune[gated backward"}
    monkeypatch.setattr(sys, "argv", [*words[:-2], "no such"])
    part.main()
    (row,) = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert (row["status"], row["said"]) == ("wrong", "no check has one of no such in its name")


@pytest.mark.slow
def test_a_dry_run_of_some(tmp_path):
    """Kernels run in the interpreter, times are the stand-in's, and the package keeps its file."""
    before = _settings.FILE.read_text()
    words = ["--dry", "--out", str(tmp_path), "--tune", "gated", "rotated"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu", *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*-tune.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["status"] for row in rows] == ["right"] * 3
    assert all(row["said"].endswith("takes 0.83 of the formula's time") for row in rows)
    assert _settings.FILE.read_text() == before
