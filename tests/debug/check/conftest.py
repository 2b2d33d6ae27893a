"""Programs run plainly and under ``apex check``, in this process."""

import contextlib
import json
import runpy
import warnings

import pytest
import torch

from apex import amp
from apex.debug.check.mistakes import KINDS
from tests.debug.in_process import main


class Check:
    """Runs ``apex check`` on a text; ``code``, ``out`` and ``err`` are those of the last run."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.code, self.out, self.err = None, "", ""

    def write(self, text, name="script.py"):
        path = self.folder / name
        path.write_text(text)
        return path

    def __call__(self, text, *options, arguments=()):
        """Run a script; return what the JSON says."""
        return self.main(*options, str(self.write(text)), *arguments)

    def main(self, *words):
        """Run the command with ``--json``; return what that says."""
        file = self.folder / "found.json"
        file.unlink(missing_ok=True)
        with _clean(self.capsys):
            self.code = main(["check", "--json", str(file), *words])
            self.out, self.err = self.capsys.readouterr()
        return json.loads(file.read_text()) if file.exists() else None

    def finds(self, planted):
        """Check that a mistake alone is found, at its line and with its number."""
        true, output = self.plainly(planted.program(true=True))
        found = self(planted.program())
        assert [(one["kind"], one["line"]) for one in found["found"]] == [
            (planted.kind, planted.line())
        ]
        (one,) = found["found"]
        true = true[one["first_step"]] if isinstance(true, dict) else true
        assert planted.measured.format(*true) in one["measured"]
        if planted.fix:
            assert one["fix"][0] == planted.fix
        else:
            assert one["fix"] == KINDS[planted.kind].fix
        assert (self.code, found["status"]) == (3, "found")
        assert (found["exit"], self.out) == ((1, "") if planted.fails else (0, output))

    def is_silent(self, text):
        """Check that nothing is found in a script; return what it prints, as in a plain run."""
        _, output = self.plainly(text)
        found = self(text)
        assert (found["found"], self.code, found["failed_rules"]) == ([], 0, [])
        assert self.out == output
        return output

    def plainly(self, text):
        """Run a script as it is, up to its error; return its ``true`` and stdout."""
        script = self.write(text)
        with _clean(self.capsys):
            try:
                true = runpy.run_path(str(script), run_name="__main__")["true"]
            except ValueError:
                true = []
            return true, self.capsys.readouterr().out


@contextlib.contextmanager
def _clean(capsys):
    """As a new process: no warnings that are errors, no amp, no random numbers drawn."""
    capsys.readouterr()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        amp.reset()
        try:
            yield
        finally:
            amp.reset()


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Check(tmp_path, capsys)
