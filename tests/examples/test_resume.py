"""The example that may be killed at any moment, killed at its worst ones.

``SITTER`` has imported torch and then, for each line of orders, forks a child that runs the
example and kills itself with SIGKILL at the moment ordered. No moment is a matter of luck: it is
the n-th call of a function, or the n-th byte of a file.
"""

import functools
import json
import os
import pathlib
import signal
import sys

import pytest
import torch

from tests.checkpoints import assert_equal
from tests.ranks import processes

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "resume" / "train.py"
STEPS, EVERY = 12, 4
DONE, KILLED = 0, -signal.SIGKILL  # how a child ends
SHORT = ["--steps", str(STEPS), "--save-every", str(EVERY)]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills by SIGKILL, sits by fork")

SITTER = """
import importlib.util, io, json, os, signal, sys, traceback
import torch
import torch._dynamo  # which the first step of an optimizer would import in each child
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Torn(io.FileIO):
    left = 0
    def write(self, data):
        done = super().write(bytes(data)[:Torn.left])
        Torn.left -= done
        if Torn.left == 0:
            die()
        return done

def at_call(name, number):
    def profile(frame, event, arg):
        nonlocal number
        if event in ("call", "return"):
            code = frame.f_code
            who = f"{os.path.basename(code.co_filename)[:-3]}.{code.co_name}"
        else:
            who = f"{arg.__module__}.{arg.__name__}"
        if "return" in event:
            who += " done"
        if name in ("", who):
            number -= 1
            if number == 0:
                die()
    sys.setprofile(profile)

def child(arguments, moment):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if moment and moment[0] == "byte":
        _, save, Torn.left = moment
        saves = iter(range(1, 1000))
        example.open = lambda path, mode: (
            Torn(path, "w") if next(saves) == save else open(path, mode)
        )
    elif moment:
        at_call(*moment)
    example.main(arguments)

print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            child(*json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _sit(pipe):
    for stream in (0, 1):
        os.dup2(pipe.fileno(), stream)
    sys.stdin, sys.argv = os.fdopen(0), ["", str(EXAMPLE)]
    exec(SITTER, {"__name__": "__main__"})


@pytest.fixture(scope="module")
def run():
    """Run the example in a child that dies at ``moment``; give back how it ended."""
    context = processes()
    pipe, theirs = context.Pipe()
    sitter = context.Process(target=_sit, args=(theirs,))
    sitter.start()
    theirs.close()
    said, orders = (os.fdopen(pipe.fileno(), mode, closefd=False) for mode in ("r", "w"))
    assert said.readline() == "ready\n"

    def order(path, level, moment=None):
        words = [str(path), "--opt-level", level, *SHORT]
        orders.write(json.dumps([words, moment]) + "\n")
        orders.flush()
        return int(said.readline())

    yield order
    pipe.close()
    sitter.join()


def load(path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def untouched(run, tmp_path_factory):
    """The last checkpoint of a run that nobody killed."""

    @functools.cache
    def checkpoint(level):
        path = tmp_path_factory.mktemp("untouched") / "checkpoint.pt"
        assert run(path, level) == DONE
        return load(path)

    return checkpoint


def step_of(path):
    """The step that was saved last; reading it shows that the file is whole."""
    return load(path)["step"] if path.exists() else 0


MOMENTS = {  # what happens, and the step of the checkpoint that must be there then
    "as a block ends": (["scaling.__exit__", 7], 4),
    "in backward": (["_tensor.backward", 10], 8),
    "in a step": (["ledger.after_step", 3], 0),
    "at the first byte": (["byte", 2, 1], 4),
    "in the middle of the file": (["byte", 2, 20_000], 4),
    "before the flush to disk": (["posix.fsync", 3], 8),
    "before the renaming": (["posix.replace", 2], 4),
    "after the renaming": (["posix.replace done", 2], 8),
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.slow
def test_killed_at_a_moment_and_resumed(run, untouched, moment, tmp_path):
    path = tmp_path / "checkpoint.pt"
    moment, saved = moment
    assert run(path, "O2", moment) == KILLED
    assert step_of(path) == saved
    assert run(path, "O2") == DONE
    assert_equal(load(path), untouched("O2"))
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.slow
def test_killed_again_and_again(run, untouched, level, tmp_path):
    """Each life ends at its 9,000th event, whatever that is, or at its second save."""
    path = tmp_path / "checkpoint.pt"
    lives = [["", 9_000 + 613 * life] for life in range(3)] + [
        ["posix.replace", 2],
        ["posix.fsync", 2],
    ]
    steps = []
    for moment in lives:
        if run(path, level, moment) == KILLED:
            steps.append(step_of(path))
    assert steps == sorted(steps)
    assert len(steps) > 3
    assert run(path, level) == DONE
    assert_equal(load(path), untouched(level))
