"""amp.capture in programs of other kinds: what they pass, keep, copy, and do between calls.

The graph is recorded on a CPU (:mod:`tests.recorded_graph`), which apex takes for a GPU here.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import random
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

from apex import amp, optimizers
from apex.amp.graphs.probe import Probe
from tests.amp.captures import MAKERS, Program, batch, equal, repeat
from tests.recorded_graph import like_a_gpu

KIND = MAKERS["FusedAdam"]


@pytest.fixture(autouse=True)
def _gpu():
    with like_a_gpu():
        yield


def both_ways(work, call, level="O2", steps=12, **options):
    """What calls return and leave without a graph and with one, and the captured step.

    ``work(program)`` makes the function; ``call(program, step, number)`` calls it.
    """
    found, step = [], None
    for captured in (False, True):
        program = Program(level, KIND, "dynamic", **options)
        step = amp.capture(work(program)) if captured else work(program)
        found.append([*(call(program, step, number) for number in range(steps)), program.seen()])
        amp.reset()
    return (*found, step)


def is_equal(work, call, replays, **options):
    single, replayed, step = both_ways(work, call, **options)
    assert equal(single, replayed)
    assert step.replays == replays


def x_of(number):
    return batch(number, overflows=False)


# -- arguments and results -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str = "a"


class Pair(NamedTuple):
    x: torch.Tensor
    on: bool = True


@pytest.mark.parametrize("made", [
    Batch, Pair, lambda x: collections.UserDict(x=x), lambda x: {"x": x, "more": [None, "b", 1.5]},
    lambda x: Batch(nn.Parameter(x, requires_grad=False)),
])  # fmt: skip
def test_containers_are_looked_into(made):
    def work(program):
        return lambda one: program.step(
            one["x"] if isinstance(one, collections.abc.Mapping) else one.x
        )

    is_equal(work, lambda program, step, n: step(made(x_of(n)))["loss"], 9)


def test_tensors_of_inference_mode_are_arguments():
    def call(program, step, number):
        with torch.inference_mode():
            x = x_of(number).clone()
        return step(x)["loss"]

    is_equal(lambda program: program.step, call, 9)


def test_objects_among_arguments_are_told_apart():
    """A bound method is a new object each time, which may be where another one was."""
    calls = []

    class Losses:
        def square(self, out):
            return out.square().mean()

        def absolute(self, out):
            return out.abs().mean()

    losses, program = Losses(), Program("O1", KIND)

    def function(x, loss_of):
        calls.append(loss_of.__name__)
        program.optimizer.zero_grad()
        with amp.scale_loss(loss_of(program.model(x)), program.optimizer) as scaled:
            scaled.backward()
        program.optimizer.step()

    step = amp.capture(function)
    for number in range(8):
        step(x_of(1), losses.square if number < 6 else losses.absolute)
    assert calls == ["square"] * 4 + ["absolute"] * 2


def test_results_stay_as_they_were_returned():
    """Those that are weights or arguments, too, in calls without a graph as in replays."""
    program = Program("O1", KIND)

    def function(x):
        return program.step(x)["loss"], program.model[0].weight, x, x[0]

    step, kept, wanted = amp.capture(function), [], []
    for number in range(8):
        kept.append(step(x_of(number)))
        wanted.append(copy.deepcopy(kept[-1]))
        assert torch.equal(kept[-1][2], x_of(number))
    assert step.replays == 5
    assert equal(kept, wanted)


# -- gradients from elsewhere ----------------------------------------------------------------------


def backward(program, x):
    loss = program.model(x).float().square().mean()
    with amp.scale_loss(loss, program.optimizer) as scaled:
        scaled.backward()
    return loss


def clears_first(program, x):
    program.optimizer.zero_grad()
    loss = backward(program, x)
    program.optimizer.step()
    return loss


def clears_last(program, x):
    loss = backward(program, x)
    program.optimizer.step()
    program.optimizer.zero_grad()
    return loss


def never_clears(program, x):
    loss = backward(program, x)
    program.optimizer.step()
    return loss


def writes_zeros(program, x):
    program.optimizer.zero_grad(set_to_none=False)
    return never_clears(program, x)


def always(program, number):
    backward(program, x_of(number + 20))


def sometimes(program, number):
    if number in (3, 7):
        backward(program, x_of(number + 20))


def clear(program, number):
    if number % 5 == 0:
        program.optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("function", "before", "replays"), [
    (clears_first, sometimes, 12), (clears_first, clear, 12), (clears_last, always, 0),
    (clears_last, sometimes, None), (never_clears, clear, None), (writes_zeros, clear, None),
    (clears_last, lambda program, number: None, 12),
    (writes_zeros, lambda program, number: None, 12),
])  # fmt: skip
def test_gradients_that_the_program_gives_or_clears(function, before, replays, level):
    def call(program, step, number):
        before(program, number)
        return step(x_of(number))

    def work(program):
        return functools.partial(function, program)

    single, replayed, step = both_ways(work, call, level=level, steps=16)
    assert equal(single, replayed)
    assert replays is None or step.replays == replays


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("odd", [(), (7, 8), (6, 8, 12)])
@pytest.mark.parametrize("function", [never_clears, clears_last])
def test_a_skipped_steps_gradients_are_dropped(function, odd, level):
    """Of a replay and of a call without the graph (``odd``), in the next call of either kind."""

    def call(program, step, number):
        if number % 5 == 0:
            program.optimizer.zero_grad()
        x = batch(number + 20, overflows=False)[: 4 if number in odd else 6]
        if number in (6, 7, 11, 12):
            x[0, 0] = float("inf")
        return step(x)

    def work(program):
        return functools.partial(function, program)

    single, replayed, step = both_ways(work, call, level=level, steps=16)
    assert equal(single, replayed)
    assert step.replays > 2


def test_two_steps_of_one_model():
    """As a generator and a discriminator have: each leaves gradients that the other clears."""
    found = []
    for captured in (False, True):
        program = Program("O2", KIND, "dynamic")

        def other(x, program=program):
            program.optimizer.zero_grad()
            loss = program.model(x).float().abs().mean()
            with amp.scale_loss(loss, program.optimizer) as scaled:
                scaled.backward()
            program.optimizer.step()

        steps = [program.step, other]
        if captured:
            steps = [*map(amp.capture, steps)]
        for number in range(16):
            steps[number % 2](batch(number, overflows=True))
        found.append(program.seen())
        amp.reset()
    assert equal(*found)
    assert [step.replays for step in steps] == [4, 5]


# -- what the function does itself -----------------------------------------------------------------


def writes_betas(program, x):
    group = program.optimizer.param_groups[0]
    group["betas"] = (group["betas"][0] * 0.99, 0.999)
    return program.step(x)["loss"]


def replaces_a_buffer(program, x):
    program.model.scale = program.model.scale * 0.9
    return program.step(x * program.model.scale)["loss"]


@pytest.mark.parametrize(("function", "text"), [
    (writes_betas, "it changes betas"), (replaces_a_buffer, "it replaces a buffer.*copy_"),
])  # fmt: skip
def test_what_the_function_changes_is_named(function, text):
    def work(program):
        program.model.register_buffer("scale", torch.ones(()))
        return functools.partial(function, program)

    with pytest.warns(UserWarning, match=text):
        is_equal(work, lambda program, step, n: step(x_of(n)), 0, level="O1")


class Carries(nn.Module):
    """A recurrent layer that keeps its hidden state from call to call."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(8, 8), torch.zeros(6, 8)

    def forward(self, x):
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return hidden


def keeps_a_hidden_state(program):
    program.model = nn.RNNCell(8, 4)
    program.model, program.optimizer = amp.initialize(
        program.model, KIND(program.model.parameters()), opt_level="O1", verbosity=0
    )
    hidden = [torch.zeros(6, 4)]

    def step(x):
        program.optimizer.zero_grad()
        new = program.model(x, hidden[0])
        hidden[0] = new.detach()
        loss = new.float().square().mean()
        with amp.scale_loss(loss, program.optimizer) as scaled:
            scaled.backward()
        program.optimizer.step()
        return loss

    return step


def keeps_it_in_a_module(program):
    carries = Carries()

    def step(x):
        with torch.no_grad():
            carries(x)
        return program.step(x * (1 + carries.hidden.mean()))["loss"]

    return step


def averages_weights(program):
    averages = [weight.data.clone() for weight in program.model.parameters()]
    program.averages = averages

    def step(x):
        loss = program.step(x)["loss"]
        for place, weight in enumerate(program.model.parameters()):
            averages[place] = averages[place] * 0.9 + weight.data * 0.1
        return loss, averages[0]

    return step


@pytest.mark.parametrize("work", [
    keeps_a_hidden_state, keeps_it_in_a_module, averages_weights,
])  # fmt: skip
def test_what_each_call_replaces_is_named(work):
    text = r"test_capture_programs.py:\d+ .* reads a tensor from the call before"
    with pytest.warns(UserWarning, match=text):
        is_equal(work, lambda program, step, n: step(x_of(n)[:6]), 0, level="O1")


_MASKS = [torch.full((6, 1), 1.0 + place, device="cpu") for place in range(12)]
_mask = _MASKS[0]


class Holder:
    """Has a mask in an attribute."""

    def __init__(self):
        self.mask = _MASKS[0]


def reads_a_global(program):
    return lambda x: program.step(x * _mask)["loss"], lambda mask: globals().update(_mask=mask)


def reads_a_variable(program):
    mask = _MASKS[0]

    def put(other):
        nonlocal mask
        mask = other

    return lambda x: program.step(x * mask)["loss"], put


def reads_a_key(program):
    kept = {"mask": _MASKS[0]}
    return lambda x: program.step(x * kept["mask"])["loss"], lambda mask: kept.update(mask=mask)


def reads_an_attribute(program):
    holder = Holder()
    return (
        lambda x: program.step(x * holder.mask)["loss"],
        lambda mask: setattr(holder, "mask", mask),
    )


def reads_in_a_method(program):
    class Step(Holder):
        def __call__(self, x):
            return self.masked(x)

        def masked(self, x):
            return program.step(x * self.mask)["loss"]

    step = Step()
    return step, lambda mask: setattr(step, "mask", mask)


def reads_in_another_function(program):
    mask = _MASKS[0]

    def put(other):
        nonlocal mask
        mask = other

    def masked(x):
        return x * mask

    return functools.partial(lambda x, times: program.step(masked(x) * times)["loss"], times=1), put


@pytest.mark.parametrize("makes", [
    reads_a_global, reads_a_variable, reads_a_key, reads_an_attribute, reads_in_a_method,
    reads_in_another_function,
])  # fmt: skip
def test_another_tensor_in_the_place_of_one_that_is_held(makes):
    """The list holds all masks: no memory is freed when the program takes the next one."""

    def work(program):
        function, program.put = makes(program)
        return function

    def call(program, step, number):
        program.put(_MASKS[number // 6])
        return step(x_of(number)[:6])

    try:
        is_equal(work, call, 8, level="O1")
    finally:
        globals()["_mask"] = _MASKS[0]


_place = 0


def by_a_global(program):
    return lambda x: x * _MASKS[_place], lambda place: globals().update(_place=place)


class Places:
    """Has masks and a place."""

    def __init__(self, masks):
        self.masks, self.place, self.more = masks, 0, self

    def put(self, place):
        self.place = place

    def masked(self, x):
        return x * self.masks[self.place]


def by_a_variable(masks, place_of=lambda place: place):
    """In a list, a tuple or a dict of tensors."""

    def makes(program):
        place = place_of(0)

        def put(other):
            nonlocal place
            place = place_of(other)

        return lambda x: x * masks[place], put

    return makes


def by_an_attribute(program):
    holder = Places(_MASKS)
    return holder.masked, holder.put


def by_an_attribute_further_in(program):
    holder = Places(_MASKS)
    return lambda x: x * holder.more.masks[holder.more.place], holder.put


def in_a_nested_list(program):
    kept, place = {"masks": [[_MASKS[:3]], 1]}, [0]
    return lambda x: x * kept["masks"][0][0][place[0]], lambda other: place.__setitem__(0, other)


def by_a_place_that_is_computed(program):
    place = 0

    def put(other):
        nonlocal place
        place = other + 12

    return lambda x: x * _MASKS[place % 12], put


def in_a_module(program):
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.masks[self.place]

    layer = program.model[-1]
    layer.__class__, layer.masks, layer.place = Masked, [one[:, :1] for one in _MASKS], 0
    return lambda x: x, lambda place: setattr(layer, "place", place)


@pytest.mark.parametrize("makes", [
    by_a_global, by_a_variable(_MASKS[:3]), by_a_variable(tuple(_MASKS[:3])),
    by_a_variable(dict(zip("abc", _MASKS, strict=False)), "abc".__getitem__),
    by_a_variable(torch.stack(_MASKS).unbind()), by_an_attribute, by_an_attribute_further_in,
    in_a_nested_list, by_a_place_that_is_computed, in_a_module,
], ids=[
    "global", "list", "tuple", "dict", "views", "attribute", "attribute further in", "nested",
    "computed", "module",
])  # fmt: skip
def test_another_tensor_of_a_list(makes):
    """What says which one changes between calls: a new capture."""

    def work(program):
        masked, program.put = makes(program)
        return lambda x: program.step(masked(x))["loss"]

    def call(program, step, number):
        program.put(number // 6)
        return step(x_of(number)[:6])

    is_equal(work, call, 8, level="O1")


@pytest.mark.parametrize("how", ["choice", "next"])
def test_a_choice_between_tensors_that_cannot_be_followed_is_said_once(how):
    masks, many = _MASKS[:3], itertools.cycle(_MASKS[:3])

    def work(program):
        if how == "next":
            return lambda x: program.step(x * next(many) * masks[0])["loss"]
        return lambda x: program.step(x * random.choice(masks))["loss"]

    step = amp.capture(work(Program("O1", KIND)))
    for number in range(2):
        step(x_of(number)[:6])
    with pytest.warns(UserWarning, match="reads one of several tensors in `masks`, and a replay"):
        step(x_of(2)[:6])
    for number in range(3, 8):
        step(x_of(number)[:6])


def test_tensors_that_are_the_same_in_each_call_are_no_choice():
    """The number that is written between the calls has nothing to do with them."""
    masks, named, count = _MASKS[:3], {"first": _MASKS[0], "second": _MASKS[1]}, 0

    def work(program):
        def step(x):
            first, _, last = masks
            x = x * first * last * masks[0] * named["first"]
            return program.step(x * (count >= 0))["loss"]

        return step

    def call(program, step, number):
        nonlocal count
        count = number
        return step(x_of(number)[:6])

    is_equal(work, call, 9, level="O1")


def test_a_place_that_is_an_argument_is_no_choice():
    """Calls with another one are of another kind: no graph has both."""

    def work(program):
        return lambda x, place: program.step(x * _MASKS[place])["loss"]

    is_equal(work, lambda program, step, n: step(x_of(n)[:6], n // 6), 3, level="O1")


def test_another_thread_steps_an_optimizer_of_its_own():
    own = nn.Linear(4, 1)
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    own(torch.ones(2, 4, device="cpu")).sum().backward()

    def work(program):
        def step(x):
            thread = threading.Thread(target=sgd.step)
            thread.start()
            thread.join()
            return program.step(x)["loss"]

        return step

    def call(program, step, number):
        return step(x_of(number))

    both_ways(work, call, steps=3)


@pytest.mark.parametrize(("device", "named"), [("cpu", True), ("meta", False)])
def test_what_is_replaced_on_the_host_is_no_concern_of_a_graph(device, named):
    state = [torch.ones(2)]
    with Probe(torch.device(device)) as probe:
        state[0] = state[0] * 2
    assert ("from the call before" in probe.found) == named


def test_what_a_call_keeps_or_writes_in_place_is_captured():
    """A cache made once, an average in place, a log of losses, the last result."""

    def work(program):
        kept = {"average": [weight.data.clone() for weight in program.model.parameters()]}
        losses = []

        def step(x):
            if "mask" not in kept:
                kept["mask"] = torch.ones(8)
            loss = program.step(x * kept["mask"] * torch.tensor(0.5))["loss"]
            for average, weight in zip(kept["average"], program.model.parameters(), strict=True):
                average.mul_(0.9).add_(weight.data, alpha=0.1)
            losses.append(loss.detach())
            kept["last"] = loss.detach()
            return loss, kept["average"][0].clone()

        return step

    is_equal(work, lambda program, step, n: step(x_of(n)), 9)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_graph_has_memory_of_its_own_for_gradients_of_masters(level):
    """With two passes, and a step of the program's that holds what the one before it had."""

    def work(program):
        program.busy = True
        return lambda x: program.step(x)["loss"]

    def call(program, step, number):
        if number in (5, 9):
            held = [master.grad for master in amp.master_params(program.optimizer)]
            program.step(x_of(number + 20))
            del held
        return step(x_of(number))

    is_equal(work, call, 9, level=level)


def test_a_tensor_that_the_program_replaces_is_followed():
    """By a new capture: the graph would read memory that others may have."""

    def work(program):
        program.factor = torch.ones(())
        return lambda x: program.step(x * program.factor)["loss"]

    def call(program, step, number):
        if number == 6:
            program.factor = torch.full((), 0.5)
        return step(x_of(number))

    is_equal(work, call, 8)


def test_other_optimizers_in_other_calls_are_named():
    program, other = Program("O1", KIND), nn.Parameter(torch.ones(2))
    calls, (_, second) = (
        [],
        amp.initialize(
            nn.Linear(2, 2), optimizers.FusedSGD([other], lr=0.1), opt_level="O1", verbosity=0
        ),
    )

    def function(x):
        calls.append(x)
        if len(calls) % 4 == 0:
            second.step()
        return program.step(x)["loss"]

    step = amp.capture(function)
    with pytest.warns(UserWarning, match="step different optimizers"):
        repeat(step, [x_of(1)] * 6)
    assert (step.replays, len(calls)) == (0, 7)


def test_only_a_part_of_a_step_is_refused():
    program = Program("O1", KIND)
    with pytest.raises(RuntimeError, match="the function stepped no optimizer"):
        amp.capture(functools.partial(backward, program))(x_of(1))


def test_a_number_that_counts_is_warned_of():
    program = Program("O1", KIND)
    step = amp.capture(lambda x, number: program.step(x)["loss"])
    with pytest.warns(UserWarning, match="arguments had 64 combinations of shapes and numbers"):
        repeat(lambda number: step(x_of(1), number), range(70))
    assert step.replays == 0


def test_a_capture_that_is_interrupted_is_put_back():
    found = []
    for interrupted in (False, True):
        program = Program("O2", KIND, "dynamic")
        calls = []

        def function(x, program=program, calls=calls, interrupted=interrupted):
            calls.append(x)
            loss = backward(program, x)
            if interrupted and len(calls) == 4:
                raise KeyboardInterrupt
            program.optimizer.step()
            program.optimizer.zero_grad()
            return loss

        step = amp.capture(function)
        for number in range(3):
            step(x_of(number))
        with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
            step(x_of(3))
        if interrupted:
            step(x_of(3))
        step(x_of(4))
        found.append(program.seen())
        amp.reset()
    assert equal(*found)


# -- the step as an object -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))]
)
def test_a_step_is_not_copied(copied):
    step = amp.capture(Program("O1", KIND).step)
    with pytest.raises(TypeError, match="cannot be copied or pickled.*call amp.capture again"):
        copied(step)


def test_two_threads_have_a_step_each():
    """While one is in its function, the other takes its step."""
    programs, ends = [Program("O1", KIND), Program("O1", KIND)], threading.Barrier(2, timeout=20)
    failed = []

    def train(program):
        def function(x):
            ends.wait()
            loss = program.step(x)["loss"]
            ends.wait()
            return loss

        try:
            repeat(amp.capture(function), [x_of(1)] * 2)
        except RuntimeError as error:
            failed.append(error)
            ends.abort()

    threads = [threading.Thread(target=train, args=[program]) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# -- schedules -------------------------------------------------------------------------------------

LR = torch.optim.lr_scheduler


@pytest.mark.parametrize("schedule", [
    lambda o: LR.LambdaLR(o, lambda number: 0.5**number),
    lambda o: LR.ReduceLROnPlateau(o, patience=1, factor=0.5),
    lambda o: LR.SequentialLR(o, [LR.ConstantLR(o, 0.5, 3), LR.StepLR(o, 2, 0.5)], [5]),
])  # fmt: skip
def test_schedules_are_followed(schedule):
    def work(program):
        program.schedule = schedule(program.optimizer)
        return program.step

    def call(program, step, number):
        loss = step(x_of(number))["loss"]
        has_metric = isinstance(program.schedule, LR.ReduceLROnPlateau)
        program.schedule.step(*[loss.item()] * has_metric)
        return loss

    is_equal(work, call, 9)


def test_rates_in_tensors_are_followed(monkeypatch):
    monkeypatch.setitem(
        globals(), "KIND", lambda p: optimizers.FusedAdam(p, lr=torch.tensor(2**-7))
    )

    def call(program, step, number):
        group = program.optimizer.param_groups[0]
        if number in (5, 9):
            group["lr"].fill_(2**-9 * number)
        if number == 6:
            group["lr"] = torch.tensor(2**-6)
        if number == 10:
            group["lr"] = 2**-8
        return step(x_of(number))["loss"]

    is_equal(lambda program: program.step, call, 9)


# -- hooks and models that come and go -------------------------------------------------------------


def double(module, args, out):
    return out * 2 if isinstance(module, nn.Linear) else None


def triple(module, args, out):
    return out * 3


def halve(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(0.5)


def forward_hook(program):
    return program.model[0].register_forward_hook(double)


def another_hook(program):
    return program.model[0].register_forward_hook(triple)


def gradient_hook(program):
    return program.model[0].weight.register_hook(lambda grad: grad * 2)


def step_hook(program):
    return program.optimizer.register_step_post_hook(halve)


def hook_of_all(program):
    return nn.modules.module.register_module_forward_hook(double)


@pytest.mark.parametrize(("first", "later"), [
    (forward_hook, None), (gradient_hook, None), (forward_hook, another_hook),
    (None, step_hook), (step_hook, None), (None, hook_of_all),
])  # fmt: skip
def test_hooks_that_are_put_on_or_taken_off_are_followed(first, later):
    def work(program):
        program.hook = None if first is None else first(program)
        return program.step

    def call(program, step, number):
        if number == 6 and program.hook is not None:
            program.hook.remove()
        if number == 6 and later is not None:
            program.hook = later(program)
        loss = step(x_of(number))["loss"]
        if number == 11 and later is not None:
            program.hook.remove()
        return loss

    is_equal(work, call, 8, level="O1")


def with_another(program, *layers):
    """A step through a model of another ``initialize``, which it does not train."""
    torch.manual_seed(1)
    other = nn.Sequential(*layers)
    program.other, program.others = amp.initialize(
        other, optimizers.FusedSGD(other.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )

    def step(x):
        program.optimizer.zero_grad()
        loss = program.other(program.model(x)).float().square().mean()
        with amp.scale_loss(loss, program.optimizer) as scaled:
            scaled.backward()
        program.optimizer.step()
        return loss

    return step


def test_the_mode_of_a_model_of_another_initialize_is_followed():
    def work(program):
        return with_another(program, nn.Linear(4, 4), nn.Dropout(0.5))

    def call(program, step, number):
        program.other.train(number not in (6, 7))
        return step(x_of(number))

    is_equal(work, call, 7, level="O1")


def test_memory_of_a_model_of_another_initialize_is_looked_at():
    program = Program("O1", KIND)
    step = amp.capture(with_another(program, nn.Linear(4, 4)))
    repeat(step, map(x_of, range(5)))
    weights = {name: one * 2 for name, one in program.other.state_dict().items()}
    program.other.load_state_dict(weights, assign=True)
    with pytest.raises(RuntimeError, match="the memory of a weight"):
        step(x_of(5))


def test_a_model_that_the_function_does_not_use_may_do_as_it_likes():
    def work(program):
        with_another(program, nn.Linear(4, 4))
        return program.step

    def call(program, step, number):
        if number == 6:
            program.other.eval().double()
        return step(x_of(number))["loss"]

    is_equal(work, call, 9, level="O1")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_function_may_freeze_another_model(level):
    """As that of a generator freezes the discriminator, which its own function lets train again."""
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 1))]
        models, both = amp.initialize(
            models, [KIND(model.parameters()) for model in models], opt_level=level, verbosity=0
        )

        def train(number, x, models=models, both=both):
            models[1].requires_grad_(number == 1)
            both[number].zero_grad()
            out = models[1](models[0](x) if number == 0 else models[0](x).detach())
            loss = (out.float() - number).square().mean()
            with amp.scale_loss(loss, both[number]) as scaled:
                scaled.backward()
            both[number].step()
            return loss

        steps = [functools.partial(train, number) for number in (1, 0)]
        if captured:
            steps = [*map(amp.capture, steps)]
        found.append([steps[number % 2](x_of(number)[: 2 + number // 18]) for number in range(24)])
        found[-1] += [weight for model in models for weight in model.parameters()]
        amp.reset()
    assert equal(*found)
    # At O2 the generator's forward clears gradients of the discriminator, which keeps it from one.
    assert [step.replays for step in steps] == ([6, 6] if level == "O1" else [0, 0])


# -- kinds of arguments ----------------------------------------------------------------------------


def test_what_calls_of_each_kind_read_is_followed():
    """The one that is captured is not always the kind of the last warm-up call."""

    def work(program):
        program.masks = {2: torch.ones(8), 6: torch.ones(8)}
        return lambda x: program.step(x * program.masks[len(x)])["loss"]

    def call(program, step, number):
        if number == 8:
            program.masks[2] = torch.full((8,), 0.5)
        return step(x_of(number)[: 6 if number == 2 else 2])

    single, replayed, step = both_ways(work, call)
    assert equal(single, replayed)
    assert step.replays > 4


def test_arguments_of_another_device_are_named():
    """Of a CPU, for instance: what a program reads of them on the host a replay would repeat."""
    program = Program("O1", KIND)
    step = amp.capture(lambda x, length: program.step(x)["loss"])
    with pytest.warns(UserWarning, match="an argument is on meta, whose values"):
        repeat(lambda x: step(x, torch.ones(2, device="meta")), [x_of(1)] * 6)
    assert step.replays == 0


def test_masters_that_the_function_takes_itself_may_be_written():
    def work(program):
        def step(x):
            program.optimizer.zero_grad()
            loss = backward(program, x)
            nn.utils.clip_grad_norm_(list(amp.master_params(program.optimizer)), 0.5)
            program.optimizer.step()
            return loss

        return step

    def call(program, step, number):
        if number == 7:
            with torch.no_grad():
                for master in amp.master_params(program.optimizer):
                    master.mul_(0.5)
        return step(x_of(number))

    is_equal(work, call, 9)


def test_masters_keep_their_bits_where_an_average_is_evaluated_between_replays():
    def call(program, step, number):
        if number in (6, 9):
            weights = [*program.model.parameters()]
            own = [weight.detach().clone() for weight in weights]
            for factor in (2.0, 1.0):
                with torch.no_grad():
                    for weight, value in zip(weights, own, strict=True):
                        weight.copy_(value * factor)
                    program.model(x_of(number))
        return step(x_of(number))

    is_equal(lambda program: program.step, call, replays=9)
