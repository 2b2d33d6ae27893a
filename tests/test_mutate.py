"""``tools.mutate``: what it changes, which tests it repeats, what it says of surviving bugs."""

import os
import signal
import subprocess
import time

import pytest

from tests.trees import small_repository

mutate = pytest.importorskip("tools.mutate", reason="not in a checkout")
copies = pytest.importorskip("tools.copies")

SOURCE = '''def worst(xs: "list[float] | None" = None, far=False) -> float:
    """Docstring."""
    if not xs:
        raise ValueError(f"{len(xs) + 1} is too few")
    xs.sort()
    é = "é" if (
        far and xs[0] < 0  # and * more
    ) else -xs[0] * max(1, xs[-1])
    é += abs(é).clone()
    return [x for x in é if x is not None]
'''
CHANGED = [
    "far=True) ->",
    "if False:",
    "if (xs):",
    "    pass\n    é =",
    "if (\n        False  # and",
    "far or xs[0] < 0",
    "xs[0] <= 0",
    "else (xs[0]) * max",
    "else -xs[0] / max",
    "* min(1, xs[-1])",
    "é -= abs",
    "(abs(é))\n",
    "é += (é).clone()",
    "if True]",
    "if x is None]",
]


def test_operators_conditions_and_calls_are_changed_and_texts_and_types_are_not():
    bugs = mutate.Finder("file.py", SOURCE).found.values()
    planted = [bug.planted(SOURCE) for bug in bugs]
    assert len({*planted}) == len(planted) == len(CHANGED) + 3  # True and False of each condition
    for text in CHANGED:
        assert sum(text in one for one in planted) == 1, text
    for bug, text in zip(bugs, planted, strict=True):
        compile(text, "planted", "exec")
        assert bug.called == (bug.line > 1)


MODULE = """\
def clipped(x, most):
    if x > most:
        return most
    return x + 0


def of_a_child(x):
    return x * 2


def unused(x):
    return x - 1
"""
TESTS = """\
import subprocess, sys, module
def test_clipped():
    assert [module.clipped(x, 2) for x in (1, 3)] == [1, 2]
def test_child():
    command = [sys.executable, "-c", "import module; print(module.of_a_child(3))"]
    assert subprocess.run(command, capture_output=True).stdout.strip() == b"6"
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    folder = small_repository(tmp_path / "tree", MODULE, TESTS)
    monkeypatch.setattr(mutate, "ROOT", folder)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def _git(folder, *words):
    identity = ["-c", "user.name=name", "-c", "user.email=mail"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True)


def test_a_bug_is_seen_or_survives(tree, tmp_path, capsys):
    words = ["module.py", "--bugs", "9", "--copies", "2"]
    assert mutate.main(words) == 1
    found = capsys.readouterr().out
    first, last = found.split("\n3 of 6 bugs survived\n")
    assert first.startswith("6 of 6 possible bugs, seed 0\nwithout a bug: 2 passed")
    assert last.splitlines() == [
        "module.py:2  SURVIVED 2 tests; 1 run the line",
        "    -     if x > most:",
        "    +     if x >= most:",
        "module.py:4  SURVIVED 2 tests; 1 run the line",
        "    -     return x + 0",
        "    +     return x - 0",
        "module.py:12  SURVIVED: no test runs the line",
        "    -     return x - 1",
        "    +     return x + 1",
    ]
    assert "module.py:8  seen by test_it.py::test_child\n" in first
    assert first.count("  seen by ") == 3
    assert (tree / "module.py").read_text() == MODULE
    assert [*tmp_path.iterdir()] == [tree]


def test_lines_that_changed(tree):
    _git(tree, "add", ".")
    _git(tree, "commit", "--quiet", "--message", "first")
    (tree / "module.py").write_text(MODULE.replace("x * 2", "2 * x").replace("x - 1\n", ""))
    (bug,) = mutate.candidates(["."], "HEAD")
    assert (bug.line, bug.new) == (8, "/")


def test_the_fastest_case_of_each_function_comes_first():
    text = "test passed {} a.py::test_{}\n"
    seconds = {"b[1]": 3, "b[2]": 2, "b[3]": 1, "c": 2, "fixture": 5, "red": 0}
    log = "".join(text.format(value, name) for name, value in seconds.items())
    log += "test failed 0 a.py::test_red\ntest passed 1 b.py::test_other\n"
    measured = mutate.Measured(log)
    runners = {f"a.py::test_{name}" for name in ("b[1]", "b[2]", "b[3]", "c")}
    order = ["b[3]", "c", "b[2]", "b[1]", "fixture"]
    assert measured.affordable(runners, 99) == [f"a.py::test_{name}" for name in order]
    assert measured.affordable(runners, 6) == [f"a.py::test_{name}" for name in order[:3]]
    assert measured.affordable(runners, 0.5) == ["a.py::test_b[3]"]


@pytest.mark.slow
def test_what_runs_is_ended_at_a_signal(tree, tmp_path):
    (tree / "test_it.py").write_text("import time\ndef test_one():\n    time.sleep(600)\n")
    began = time.monotonic()

    def interrupted():
        with copies.Copies(tree, 1) as some:
            some.each(lambda copy, _: copy.run([], 600), [None])
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        interrupted()
    assert time.monotonic() - began < 60
    assert [*tmp_path.iterdir()] == [tree]
