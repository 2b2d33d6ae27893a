"""The lines of code that `.ci/run` prints, counted for a small tree by hand."""

import pytest

size = pytest.importorskip("tools.size", reason="not in a checkout")

SOURCE = '''"""A docstring
of two lines."""

import os  # counted; the comment is not

# not counted


def double(text: str) -> str:
    """Not counted."""
    long = """counted

    with its blank line"""
    return (
        text + long
    )


class Empty:
    """Not counted; the class is."""
'''


def test_comments_docstrings_and_blank_lines_are_no_code(tmp_path, capsys, monkeypatch):
    assert size.code_lines(SOURCE) == 9
    assert size.code_lines("") == size.code_lines("\n# nothing\n") == 0
    (tmp_path / "src/apex/amp").mkdir(parents=True)
    (tmp_path / "src/apex/amp/step.py").write_text(SOURCE)
    (tmp_path / "src/apex/__init__.py").write_text('"""Only words."""\n')
    found = size.by_folder(tmp_path, ["src"])
    assert found == {"src": (2, 9), "src/apex": (2, 9), "src/apex/amp": (1, 9)}
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert size.main(["src"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  files     code  folder",
        "      2        9  src",
        "      2        9    apex",
        "      1        9      amp",
    ]
    assert size.main(["sources"]) == 2
    assert capsys.readouterr().err == f"size: sources is no folder of {tmp_path}\n"
