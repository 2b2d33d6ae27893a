"""Each cause, in cases that differ in what makes the fault, in the model and in the program."""

import ctypes
import itertools
import math
import re
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from apex import amp, debug
from tests.debug.planted import explained, watching
from tests.debug.table import Block, Middle


def once(model, loss_of=None, x=None, *, optimizer=None, step=False, before_step=None, **options):
    """One step with a watch; its report."""
    loss_of = loss_of or (lambda out: out.float().square().mean())
    x = torch.randn(4, 8) if x is None else x

    def compute():
        return loss_of(model(x))

    options |= {"before_step": before_step, "repeat": compute if step else None}
    return explained(model, compute, optimizer, told=True, **options)


def steps(model, optimizer, number=6, loss_of=None, x=None, between=None):
    """Steps with a watch until one has a fault; its report."""
    loss_of = loss_of or (lambda out: out.float().square().mean())
    x = torch.randn(4, 8, dtype=next(model.parameters()).dtype) if x is None else x
    with debug.watch(model, optimizer, on_fault="keep", patience=0) as watch:
        for _ in range(number):
            optimizer.zero_grad()
            loss = loss_of(model(x))
            if hasattr(optimizer, "_amp_stash"):
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
            if watch.fault:
                return watch.explain()
            if between is not None:
                between(watch.steps)
    raise AssertionError("no step had a fault")


def block(function):
    return Block(Middle(function))


def half(function):
    """A float16 model with a float16 input."""
    return block(function).half(), None, torch.randn(4, 8).half()


# -- scale -----------------------------------------------------------------------------------------


def at_level(level, model, scale, x=None, loss_of=None):
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.01),
        opt_level=level, verbosity=0, loss_scale=scale,
    )  # fmt: skip
    return steps(model, optimizer, x=torch.randn(4, 8) if x is None else x, loss_of=loss_of)


def with_scaler(model, scale, x=None, loss_of=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    watch = debug.watch(model, optimizer, scaler=scaler, on_fault="keep", patience=0)
    with watch:
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8) if x is None else x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return watch.explain()


def large_batch_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


SCALE = {
    "static, masters": lambda: at_level("O2", block(torch.relu), 2.0**22),
    "static, function casts": lambda: at_level("O1", block(torch.tanh), 2.0**22),
    "dynamic": lambda: at_level("O2", block(torch.relu), "dynamic", torch.randn(4, 8) * 1e3),
    "GradScaler": lambda: with_scaler(block(torch.relu), 2.0**23),
    "steep layer": lambda: with_scaler(block(lambda x: torch.sin(x * 1000)), 2.0**12),
    "convolution": lambda: at_level("O2", large_batch_norm(), 2.0**22, torch.randn(4, 1, 8, 8)),
}

# -- range -----------------------------------------------------------------------------------------


class Steep(nn.Module):
    """Its gradient alone leaves float16: ``y = 0 * x`` forward, ``1e6`` backward."""

    def forward(self, x):
        steep = x.float() * 1e6
        return x + (steep - steep.detach()).half()


RANGE = {
    "exp": lambda: once(*half(lambda x: (x.abs() + 12).exp())),
    "power": lambda: once(*half(lambda x: (x.abs() + 50) ** 4)),
    "sum": lambda: once(*half(lambda x: x + x.new_full((8, 9000), 1.0).sum())),
    "product in a linear": lambda: once(
        nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).half(),
        None,
        torch.full((4, 8), 6e4, dtype=torch.float16),
    ),
    "cast": lambda: once(*half(lambda x: (x.float() * 1e6).half())),
    "masters": lambda: at_level("O2", block(lambda x: x * 3e4 * 3e4), 1.0),
    "scores of attention": lambda: once(*half(lambda x: functional.softmax(
        (x * 300) @ (x * 300).T, -1) @ x)),
    "autocast": lambda: with_scaler(block(lambda x: (x * 3e4) @ torch.eye(8) * 3e4), 1.0),
}  # fmt: skip

# -- model -----------------------------------------------------------------------------------------

MODEL = {
    "1 / 0": lambda: once(block(lambda x: 1 / (x - x.detach()))),
    "log(0)": lambda: once(block(lambda x: torch.relu(x - 1e9).log())),
    "norm at 0": lambda: once(block(lambda x: (x * 0).pow(2).sum(-1, keepdim=True).sqrt() * x)),
    "0 / 0": lambda: once(block(lambda x: (x * 0) / (x * 0).sum(-1, keepdim=True))),
    "std of one row": lambda: once(
        block(lambda x: x / x.std(0, correction=0)), x=torch.randn(1, 8)
    ),
    "a row all masked": lambda: once(
        block(lambda x: x.masked_fill(torch.ones_like(x).bool(), -torch.inf).softmax(-1))
    ),
    "exp in float32": lambda: once(block(lambda x: (x.abs() * 1e3 + 100).exp())),
    "acos at 1": lambda: once(block(lambda x: torch.acos(torch.ones_like(x) + x * 0))),
    "log in bfloat16": lambda: at_level("O5", block(lambda x: (x - x).log()), 1.0),
    "log under a scale": lambda: with_scaler(block(lambda x: (x - x).log()), 2.0**10),
}

# -- loss ------------------------------------------------------------------------------------------

TARGET = torch.tensor([[1.0, float("nan"), 0.0, 2.0]]).expand(4, 4)


def of_loss(loss_of, **options):
    return once(block(torch.relu), loss_of, **options)


def log_of_zero(out):
    return (out - out.detach()).log().mean()


def of_target(out):
    return (out - TARGET).square().mean()


def ignored(out):
    return functional.cross_entropy(out, torch.full((4,), -100))


def of_nothing(out):
    return out.square()[out > 1e9].sum() / (out > 1e9).sum()


def root(out):
    return (out - out.detach()).square().sum().sqrt()


LOSS = {
    "log(0), with the step": lambda: of_loss(log_of_zero, step=True),
    "log(0), without": lambda: of_loss(log_of_zero),
    "a target that is NaN": lambda: of_loss(of_target, step=True),
    "a target, without the step": lambda: of_loss(of_target),
    "a mean of nothing": lambda: of_loss(of_nothing, step=True),
    "all labels ignored": lambda: of_loss(ignored, step=True),
    "labels ignored, without the step": lambda: of_loss(ignored),
    "root": lambda: of_loss(root, step=True),
    "under masters": lambda: at_level("O2", block(torch.relu), 8.0, loss_of=log_of_zero),
}

# -- data ------------------------------------------------------------------------------------------


def bad_row(shape=(4, 8), value=float("nan")):
    x = torch.randn(shape)
    x[2, 5] = value
    return x


class Takes(nn.Module):
    """Takes its inputs as a dictionary, an object, a keyword, or in second place."""

    def __init__(self, take):
        super().__init__()
        self.first, self.take = nn.Linear(8, 4), take

    def forward(self, *args, **kwargs):
        return self.first(self.take(*args, **kwargs))


def called(take, *args, **kwargs):
    model = Takes(take)
    return explained(model, lambda: model(*args, **kwargs).square().mean())


GOOD = torch.zeros(4, 8)
DATA = {
    "NaN": lambda: once(block(torch.relu), x=bad_row()),
    "inf": lambda: once(block(torch.relu), x=bad_row(value=float("inf"))),
    "second input": lambda: called(lambda a, b: a + b, GOOD, bad_row()),
    "dictionary": lambda: called(lambda batch: batch["x"], {"x": bad_row(), "y": GOOD}),
    "keyword": lambda: called(lambda x, scale: x * scale, GOOD, scale=bad_row()),
    "object": lambda: called(lambda batch: batch.x, types.SimpleNamespace(x=bad_row())),
    "16 bits": lambda: once(block(torch.relu).half(), x=bad_row().half()),
    "masters": lambda: at_level("O2", block(torch.relu), 8.0, bad_row()),
    "images": lambda: once(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)), x=bad_row((4, 8))
        .view(4, 1, 8, 1).expand(4, 1, 8, 8).contiguous(),
    ),
}  # fmt: skip

# -- parameter -------------------------------------------------------------------------------------


def broken(value=float("nan"), name="last.weight", level=None):
    model = block(torch.relu)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return once(model) if level is None else at_level(level, model, 1.0)


def broken_buffer():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model[1].running_var[2] = float("nan")
    model[1].eval()
    return once(model)


def broken_later(optimizer_type, **options):
    model = block(torch.relu)
    optimizer = optimizer_type(model.parameters(), lr=0.01, **options)

    def harm(step):
        if step == 3:
            model.first.weight.data[0, 0] = float("nan")

    return steps(model, optimizer, between=harm)


PARAMETER = {
    "NaN": broken,
    "inf": lambda: broken(float("inf")),
    "bias": lambda: broken(name="first.bias"),
    "masters": lambda: broken(level="O2"),
    "buffer": broken_buffer,
    "between steps": lambda: broken_later(torch.optim.SGD),
    "between steps of Adam": lambda: broken_later(torch.optim.Adam),
}

# -- optimizer -------------------------------------------------------------------------------------


class Normalised(torch.optim.Optimizer):
    """A custom optimizer that divides by the change of its average, which is 0 at last."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.5)
                p.sub_(group["lr"] * mean / mean.norm())


def small(out):
    return out.float().square().mean() * 1e-4


def in_half(optimizer_type, **options):
    model = block(torch.relu).half()
    return steps(model, optimizer_type(model.parameters(), lr=1e-3, **options), loss_of=small)


def amp_without_masters():
    model = block(torch.relu)
    model, optimizer = amp.initialize(
        model, torch.optim.Adam(model.parameters(), lr=1e-3), opt_level="O3", verbosity=0
    )
    return steps(model, optimizer, x=torch.randn(4, 8), loss_of=small)


def custom():
    model = block(torch.relu)
    return steps(model, Normalised(model.parameters(), lr=0.1))


def without_eps(optimizer_type):
    """A layer whose gradient is exactly zero: its update is 0 / 0."""
    model = block(torch.relu)
    with torch.no_grad():
        model.first.bias.fill_(-100.0)
    return steps(model, optimizer_type(model.parameters(), lr=0.01, eps=0.0))


OPTIMIZER = {
    "Adam": lambda: in_half(torch.optim.Adam),
    "AdamW": lambda: in_half(torch.optim.AdamW, weight_decay=0.1),
    "Adam, amsgrad": lambda: in_half(torch.optim.Adam, amsgrad=True),
    "RMSprop": lambda: in_half(torch.optim.RMSprop),
    "Adagrad": lambda: in_half(torch.optim.Adagrad),
    "O3": amp_without_masters,
    "custom": custom,
    "Adam, eps=0": lambda: without_eps(torch.optim.Adam),
    "Adadelta, eps=0": lambda: without_eps(torch.optim.Adadelta),
}

# -- compiled --------------------------------------------------------------------------------------


def corrupt(value=float("nan"), first=1, direction="forward"):
    """A backend of torch.compile that computes a wrong value from its ``first`` call on."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * value if direction == "forward" else x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * value

    def backend(graph, inputs):
        calls = 0

        def run(*args):
            nonlocal calls
            calls += 1
            out = graph(*args)
            return out if calls < first else tuple(Wrong.apply(one) for one in out)

        return run

    return backend


def compiled_in_place():
    model = block(torch.relu)
    model.compile(backend=corrupt())
    return once(model)


def compiled_part():
    model = block(torch.relu)
    model.function.compile(backend=corrupt(float("inf")))
    return once(model)


def compiled_wrapped_part():
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 4), backend=corrupt()))
    return once(model)


def compiled_later():
    model = torch.compile(block(torch.relu), backend=corrupt(first=3))
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.01))


def past_the_hooks(model):
    """The program calls ``model.forward``, and gives the function that does so."""
    x = torch.randn(4, 8)

    def compute():
        return model.forward(x).square().mean()

    return explained(model, compute, step=compute)


COMPILED = {
    "torch.compile(model)": lambda: once(torch.compile(block(torch.relu), backend=corrupt())),
    "backward": lambda: once(
        torch.compile(block(torch.relu), backend=corrupt(direction="backward"))
    ),
    "model.compile()": compiled_in_place,
    "a part, in place": compiled_part,
    "a part, wrapped": compiled_wrapped_part,
    "the third step": compiled_later,
    "a function": lambda: once(block(torch.compile(torch.sin, backend=corrupt()))),
    "forward of step()": lambda: past_the_hooks(block(torch.compile(torch.sin, backend=corrupt()))),
}

# -- uninitialised ---------------------------------------------------------------------------------


class Scratch(torch.autograd.Function):
    """A kernel that writes half of its result, in ``direction``."""

    @staticmethod
    def forward(ctx, x, allocate, direction):
        ctx.allocate = allocate if direction == "backward" else None
        return x.clone() if ctx.allocate else Scratch.fill(x, allocate)

    @staticmethod
    def backward(ctx, gradient):
        return Scratch.fill(gradient, ctx.allocate) if ctx.allocate else gradient, None, None

    @staticmethod
    def fill(x, allocate):
        out = allocate(x)
        if not math.isnan(ctypes.c_float.from_address(out.data_ptr()).value):  # filled by nobody
            ctypes.memset(out.data_ptr(), 0, out.nbytes)  # what lay there may be anything
        out[: len(x) // 2] = x[: len(x) // 2]
        return out


def scratch(allocate, direction="forward", *, while_explained=False):
    """The memory holds NaN in the step, and in the replay perhaps."""
    torch.use_deterministic_algorithms(True)
    try:
        model = block(lambda x: Scratch.apply(x, allocate, direction))
        with watching(model) as (optimizer, watch):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            torch.use_deterministic_algorithms(while_explained)
            return watch.explain()
    finally:
        torch.use_deterministic_algorithms(False)


def by_turns():
    """Memory that holds NaN in the step and in every second replay, as reused memory may."""
    calls = itertools.count()

    def allocate(x):
        out = torch.empty_like(x)
        ctypes.memset(out.data_ptr(), 0xFF * (next(calls) in (0, 2, 4)), out.nbytes)
        return out

    return scratch(allocate)


def in_step():
    """Memory that holds NaN in the step, and zeros later where the watch does not fill it."""
    calls = itertools.count()

    def allocate(x):
        out, is_first = torch.empty_like(x), next(calls) == 0
        if is_first or not out.isnan().all():
            ctypes.memset(out.data_ptr(), 0xFF * is_first, out.nbytes)
        return out

    return past_the_hooks(block(lambda x: Scratch.apply(x, allocate, "forward")))


UNINITIALISED = {
    "empty": lambda: scratch(lambda x: torch.empty(x.shape)),
    "empty_like": lambda: scratch(torch.empty_like),
    "new_empty": lambda: scratch(lambda x: x.new_empty(x.shape)),
    "empty_strided": lambda: scratch(lambda x: torch.empty_strided(x.shape, x.stride())),
    "NaN in every second replay": by_turns,
    "forward of step()": in_step,
    "backward": lambda: scratch(torch.empty_like, "backward"),
    "not finite in the replay either": lambda: scratch(torch.empty_like, while_explained=True),
    "backward, the same": lambda: scratch(torch.empty_like, "backward", while_explained=True),
}

# -- unrepeatable ----------------------------------------------------------------------------------


def of_numpy(x):
    return x * (float("nan") if np.random.rand() > 0.9 else 1.0)


def unrepeated(function):
    """A forward that gives NaN in its first call only."""
    calls = iter([True])
    return block(lambda x: function(x) if next(calls, False) else x)


def changed_gradient():
    model = block(torch.relu)
    return once(model, before_step=lambda: model.last.weight.grad.fill_(float("nan")))


def written_input():
    x = bad_row()
    return once(block(torch.relu), x=x, before_step=lambda: x.zero_())


def called_past_the_hooks():
    model = block(torch.relu)
    return explained(model, lambda: (model.forward(torch.randn(4, 8)) * float("nan")).mean())


def gradients_of_the_programs_own():
    model = block(torch.relu)

    def change():
        for param in model.parameters():
            param.grad = torch.full_like(param, float("inf"))

    return once(model, before_step=change)


UNREPEATABLE = {
    "a state of its own": lambda: once(unrepeated(lambda x: x * float("nan"))),
    "in backward only": lambda: once(unrepeated(lambda x: (x - x.detach()).sqrt())),
    "NumPy's random numbers": lambda: once(block(of_numpy)),
    "a gradient changed": changed_gradient,
    "gradients of its own": gradients_of_the_programs_own,
    "an input written to": written_input,
    "forward() called": called_past_the_hooks,
}

CASES = {
    "scale": SCALE,
    "range": RANGE,
    "model": MODEL,
    "loss": LOSS,
    "data": DATA,
    "parameter": PARAMETER,
    "optimizer": OPTIMIZER,
    "compiled": COMPILED,
    "uninitialised": UNINITIALISED,
    "unrepeatable": UNREPEATABLE,
}


def test_each_cause_has_cases():
    assert set(CASES) == set(debug.CAUSES) - {"rank"}  # that one: test_ranks.py
    assert all(len(cases) >= 5 for cases in CASES.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo
@pytest.mark.parametrize(
    ("cause", "case"),
    [
        pytest.param(cause, case, id=f"{cause}-{name}")
        for cause, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_cause(cause, case):
    np.random.seed(37)  # of its first numbers only the very first is above 0.9

    report = case()

    assert report.cause == cause, report.text()
    assert report.sentence.endswith(".")


def test_the_scale_that_is_named_is_the_highest_power_of_two_that_is_finite():
    def at(scale):
        torch.manual_seed(0)
        return at_level("O2", block(torch.relu), scale)

    named = re.search(r"finite at (\S+)\.$", at(2.0**22).sentence)[1]
    highest = 2.0 ** round(math.log2(float(named)))  # the sentence has six digits of it
    assert at(2 * highest).cause == "scale"
    with pytest.raises(AssertionError, match="no step had a fault"):
        at(highest)


@pytest.mark.parametrize(
    ("case", "module"),
    [
        (PARAMETER["NaN"], "last"),
        (PARAMETER["bias"], "first"),
        (PARAMETER["masters"], "last"),
        (PARAMETER["buffer"], "1"),
        (PARAMETER["between steps"], "first"),
        (OPTIMIZER["O3"], "first"),
        (OPTIMIZER["Adam, eps=0"], "first"),
        (OPTIMIZER["Adadelta, eps=0"], "first"),
    ],
)
def test_the_module_of_a_broken_parameter_is_named(case, module):
    report = case()
    assert report.module == module, report.text()
    assert f"\n  module     {module}\n" in report.text()


def test_no_other_batch_is_suspected_of_a_compiled_model():
    model = torch.compile(block(torch.relu), backend=corrupt())
    assert once(model, step=True).notes == []


def test_a_mask_is_named_where_it_becomes_a_nan():
    assert MODEL["a row all masked"]().operation == "aten._softmax.default"
