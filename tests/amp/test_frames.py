"""How many Python calls amp adds to a training step.

Two linear layers are so small that nearly all of a step is Python. A count does not depend on the
machine, so a budget for it can be a test. ``python -m tests.amp.test_frames O2 [--fused]`` prints
every call that a level adds.
"""

import collections
import pathlib
import sys

import pytest
import torch

from apex import _compat, amp
from apex.optimizers import FusedAdam

# Python 3.10 and 3.11 give comprehensions a frame, 3.12 and later do not.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}
WARM_UP = 5  # the first steps make state, fill caches and skip at the initial loss scale


def make_step(level, optimizer_class):
    """A training step; without amp where ``level`` is ``None``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(4, 8)

    def step():
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()

    return step


def frames_of(call):
    """Count the Python frames that ``call()`` starts, by file and function."""
    frames = collections.Counter()

    def count(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS:
            frames[code.co_filename, code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
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
        ("O0", torch.optim.SGD, 70),
        ("O1", torch.optim.SGD, 210),
        ("O2", torch.optim.SGD, 210),
        ("O4", torch.optim.SGD, 130),
        ("O5", torch.optim.SGD, 200),
        ("O2", FusedAdam, 250),
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


def test_frames_are_counted_with_those_of_nested_calls_and_without_comprehensions():
    def inner():
        return [0 for _ in range(3)]

    def outer():
        return {inner()[0] for _ in range(2)}

    assert sorted(frames_of(outer).items()) == [
        ((__file__, "inner"), 2),
        ((__file__, "outer"), 1),
    ]


if __name__ == "__main__":
    optimizer_class = FusedAdam if "--fused" in sys.argv else torch.optim.SGD
    added = frames_of_amp(sys.argv[1], optimizer_class)
    print(f"{table(added)}\n{added.total():5}  in all")  # noqa: T201
