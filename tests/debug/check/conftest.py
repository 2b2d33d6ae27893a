"""Programs run plainly and under ``apex check``, in this process."""

import contextlib
import json
import runpy
import warnings

import pytest
import torch

from apex import amp
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
