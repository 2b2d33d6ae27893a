"""Standard streams that are closed (``2>&-``), and pipes whose reader has gone (``| head -1``)."""

import logging
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch

from apex import amp
from apex.commands import command_line as cli
from apex.commands import streams, tables
from apex.contrib.sparsity._pruned import PrunedModel
from apex.parallel import multiproc

ROOT = pathlib.Path(__file__).parents[2]
CLOSED = """
import os, runpy, subprocess, sys
before = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
runpy.run_path(sys.argv[1])["open_closed"]()
print("output")
print("error", file=sys.stderr)
read = sys.stdin.read()
numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
child = "import os, sys; [os.fstat(n) for n in (0, 1, 2)]; print(file=sys.stderr)"
code = subprocess.run([sys.executable, "-S", "-c", child]).returncode
with open("found.txt", "w") as file:  # it would have the number of a closed stream
    os.write(2, b"of a C library")
    file.write(f"{before} {numbers} {read!r} {code}")
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_closed_streams_are_open_for_the_command_and_what_it_starts(tmp_path, closed):
    """No torch is imported: the file alone."""
    redirections = " ".join("<&-" if one == "0" else f"{one}>&-" for one in closed)
    words = [sys.executable, "-S", "-c", CLOSED, streams.__file__]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirections}', "sh", *words],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before = [str(one) in closed for one in range(3)]
    assert (tmp_path / "found.txt").read_text() == f"{before} [0, 1, 2] '' 0"
    assert done.stdout.startswith("output") == ("1" not in closed)
    assert done.stderr.startswith("error") == ("2" not in closed)


@pytest.fixture
def hello(monkeypatch):
    """Install a command that runs a function."""

    def put(run):
        parts = types.SimpleNamespace(HELP="", add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(sys.modules, "apex_hello", parts)
        monkeypatch.setitem(cli.COMMANDS, "hello", cli.Command("apex_hello", "says hello"))

    return put


def _speak(args):
    sys.stdout.write("output")
    sys.stderr.write("error")
    return 3


@pytest.mark.parametrize("names", [("stdout",), ("stderr",), ("stdin", "stdout", "stderr")])
def test_the_command_line_opens_what_is_closed(hello, monkeypatch, names):
    hello(_speak)
    for name in names:
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["hello"]) == 3


def test_a_script_may_close_standard_output(hello, monkeypatch):
    hello(lambda args: sys.stdout.close() or 0)
    with open(os.devnull, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(["hello"]) == 0


def _rich(stderr):
    def run(args):
        tables.console(stderr=stderr).print("line")
        return 0

    return run


def _fail(args):
    raise cli.UsageError("said on standard error")


WITHOUT_READER = {
    "print": (["hello"], lambda args: sys.stdout.write("line\n") * 0),
    "standard error": (["hello"], lambda args: sys.stderr.write("line\n") * 0),
    "rich": (["hello"], _rich(stderr=False)),
    "rich on standard error": (["hello"], _rich(stderr=True)),
    "usage error": (["hello"], _fail),
    "help": (["hello", "--help"], None),
    "version": (["--version"], None),
}


@pytest.mark.parametrize("name", WITHOUT_READER)
def test_a_reader_that_has_gone_ends_the_command_quietly(hello, monkeypatch, name):
    """And afterwards nothing is left for the end of the process to complain of."""
    words, run = WITHOUT_READER[name]
    if "rich" in name:
        pytest.importorskip("rich")
    hello(run)
    opened = []
    for stream in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        buffering = 1 if stream == "stderr" else -1
        opened.append(os.fdopen(writer, "w", buffering))
        monkeypatch.setattr(sys, stream, opened[-1])
    assert cli.main(words) == cli.BROKEN_PIPE
    for stream in opened:
        stream.close()  # flushes: BrokenPipeError, if it still led to the pipe


def test_what_a_program_imports_speaks_to_closed_streams_without_an_error(monkeypatch):
    """amp, ASP and multiproc write lines as Apex did; Python's `print` passes over None, too."""
    for name in ("apex.amp", "apex.sparsity"):  # as without pytest's handlers
        monkeypatch.setattr(logging.getLogger(name), "hasHandlers", lambda: False)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    model = torch.nn.Linear(4, 4, device="cpu", dtype=torch.float32)
    amp.initialize(model, opt_level="O2", verbosity=1)
    amp.reset()
    PrunedModel(model, torch.ones_like, verbosity=3, permute=False).log("line", 2)
    multiproc._say("line")


@pytest.mark.skipif(not (ROOT / "tools").exists(), reason="not in a checkout")
def test_programs_of_developers_end_quietly_too():
    command = f'"{sys.executable}" -S -m tools.size tools'
    shell = f"set -o pipefail; {command} | true; echo $?"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
    programs = [*ROOT.glob("benchmarks/*.py"), ROOT / "tools/kernels/__main__.py"]
    mains = [
        re.search(r'^if __name__ == "__main__":\n(.*)', one.read_text(), re.M) for one in programs
    ]
    assert {found[1] for found in mains if found} == {"    with quiet_without_reader():"}
