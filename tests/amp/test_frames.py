"""How many Python calls amp adds to a training step, and in how many files a reader finds them.

Two linear layers are so small that nearly all of a step is Python. A count does not depend on the
machine, so a budget for it can be a test. ``python -m tests.amp.test_frames O2 [--fused]`` prints
every call that a level adds, and ``python -m tests.amp.test_frames`` for each level what is counted
below of apex's own files.
"""

import collections
import gc
import pathlib
import sys

import pytest
import torch

from apex import _compat, amp
from apex.optimizers import FusedAdam
from tests.trees import SRC

# Python 3.10 and 3.11 give comprehensions a frame, 3.12 and later do not.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}
# Takes part in a product where the processor has no float16 instructions: it is not counted.
OF_SOME_PROCESSORS = SRC / "amp" / "casting" / "cpu_float16.py"
WARM_UP = 5  # the first steps make state, fill caches and skip at the initial loss scale


def make_step(level, optimizer_class, *layers):
    """A training step; without amp where ``level`` is ``None``. ``layers`` are after the first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), *layers, torch.nn.Linear(8, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(4, 8)

    def step(take=lambda step: step()):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        take(optimizer.step)

    return step


def frames_of(call):
    """Count the Python frames that ``call()`` starts on every processor, by file and function."""
    frames, left_out = collections.Counter(), str(OF_SOME_PROCESSORS)

    def count(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS and code.co_filename != left_out:
            frames[code.co_filename, code.co_name] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # finalizers of what other tests left are no frames of the call
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return frames


def frames_of_amp(level, optimizer_class=torch.optim.SGD):
    """Count the frames of a step at ``level`` above those of the same step without amp.

    Functions that amp's step calls less often than the plain step count below zero.
    """
    steps = [frames_of_step(name, optimizer_class) for name in (level, None)]
    added = steps[0]
    added.subtract(steps[1])
    return added


def frames_of_step(level, optimizer_class):
    amp.reset()
    step = make_step(level, optimizer_class)
    for _ in range(WARM_UP):
        step()
    frames = frames_of(step)
    amp.reset()
    return frames


def table(frames, rows=None):
    """The most frequent ``frames`` as text, or all of them."""
    lines = []
    for (file, function), count in frames.most_common(rows):
        if count:
            lines.append(f"{count:5}  {'/'.join(pathlib.Path(file).parts[-3:])}  {function}")
    return "\n".join(lines)


@pytest.mark.skipif(not _compat.TRACES_SET_AUTOCAST, reason="torch 2.9 takes some 20 more")
@pytest.mark.parametrize(
    ("level", "optimizer_class", "budget"),
    [
        ("O0", torch.optim.SGD, 60),
        ("O1", torch.optim.SGD, 120),
        ("O2", torch.optim.SGD, 135),
        ("O4", torch.optim.SGD, 70),
        ("O5", torch.optim.SGD, 125),
        ("O2", FusedAdam, 175),
    ],
)
def test_a_step_stays_within_its_budget_of_frames(level, optimizer_class, budget):
    frames = frames_of_amp(level, optimizer_class)
    assert frames.total() > 0
    if frames.total() > budget:
        fused = " --fused" if optimizer_class is FusedAdam else ""
        pytest.fail(
            f"A step at {level} with {optimizer_class.__name__} starts {frames.total()} Python "
            f"frames more than without amp, allowed are {budget}. `python -m "
            f"tests.amp.test_frames {level}{fused}` prints all of them; the most frequent:\n"
            f"{table(frames, 15)}"
        )


@pytest.mark.parametrize(
    ("level", "optimizer_class"), [("O1", torch.optim.SGD), ("O2", FusedAdam)], ids=str
)
def test_a_step_does_not_look_for_gpus(level, optimizer_class):
    """With torch for CUDA, ``is_available`` reads the environment and counts devices."""
    asked = {function for _, function in frames_of_step(level, optimizer_class)}
    assert "capturing" in asked
    assert "is_available" not in asked


def test_frames_are_counted_with_those_of_nested_calls_and_without_comprehensions():
    def inner():
        return [0 for _ in range(3)]

    def outer():
        return {inner()[0] for _ in range(2)}

    assert sorted(frames_of(outer).items()) == [
        ((__file__, "inner"), 2),
        ((__file__, "outer"), 1),
    ]


# -- the corridor: frames of apex's own files ------------------------------------------------------


class Corridor:
    """What a step with torch's LayerNorm and AdamW calls.

    Attributes:
        calls: Files under ``src/apex`` with the functions in them that were called, in order. Names
            with a ``<`` are left out: comprehensions, generators and lambdas.
        in_step: Those of ``optimizer.step()``.
        python: How many calls of Python functions there were, of torch's too.
        c: How many of C functions.
    """

    def __init__(self, level):
        amp.reset()
        self.calls, self.in_step, self.python, self.c = [], [], 0, 0
        step = make_step(level, torch.optim.AdamW, torch.nn.LayerNorm(8))
        for _ in range(WARM_UP):
            step()
        before = sys.getprofile()
        sys.setprofile(self._count)
        try:
            step(self._take)
        finally:
            sys.setprofile(before)
        amp.reset()

    def _count(self, frame, event, arg):
        if frame.f_code.co_filename == str(OF_SOME_PROCESSORS):
            return
        self.python += event == "call"
        self.c += event == "c_call"
        file, name = pathlib.Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and file.is_relative_to(SRC) and "<" not in name:
            self.calls.append((str(file.relative_to(SRC)), name))

    def _take(self, step):
        begun = len(self.calls)
        step()
        self.in_step = self.calls[begun:]

    def numbers(self):
        """Frames, files, and how often ``optimizer.step()`` goes on in another file."""
        both = zip(self.in_step, self.in_step[1:], strict=False)
        changes = sum(one[0] != other[0] for one, other in both)
        return len(self.calls), len({file for file, _ in self.calls}), changes


@pytest.mark.skipif(not _compat.IS_2_13, reason="other releases take other ways through torch")
@pytest.mark.parametrize(("level", "most"), [("O1", (98, 14, 8)), ("O2", (104, 14, 8))])
def test_a_step_can_be_followed(level, most):
    corridor = Corridor(level)
    assert len(corridor.in_step) > 10
    numbers = corridor.numbers()
    if any(map(int.__gt__, numbers, most)):
        pytest.fail(
            f"A step at {level} runs (frames, files, changes of file in optimizer.step()) "
            f"{numbers} of apex, allowed are {most}. They are, in order:\n"
            + "\n".join(f"  {file}  {name}" for file, name in corridor.calls)
        )


def test_unscaling_goes_through_no_cast():
    calls = Corridor("O1").calls
    end = calls.index(("amp/scaling.py", "__exit__"))
    kernel = ("amp/casting/dispatcher.py", "kernel")
    assert kernel in calls[:end]
    assert kernel not in calls[end:]


if __name__ == "__main__":
    if not sys.argv[1:]:
        for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
            corridor = Corridor(level)
            frames, files, changes = corridor.numbers()
            print(  # noqa: T201
                f"{level}: {frames} frames of apex in {files} files, {changes} changes of file in "
                f"step(); {corridor.python} Python and {corridor.c} C calls in all"
            )
        sys.exit()
    optimizer_class = FusedAdam if "--fused" in sys.argv else torch.optim.SGD
    added = frames_of_amp(sys.argv[1], optimizer_class)
    print(f"{table(added)}\n{added.total():5}  in all")  # noqa: T201
