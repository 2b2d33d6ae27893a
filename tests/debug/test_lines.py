"""Lines of the loss and of the preparation of a batch, named without a change of the script."""

import json
import linecache
import os
import pathlib
import re
import textwrap

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from apex import debug
from apex.debug.calls import Replay
from apex.debug.lines import Lines
from tests.debug.in_process import main

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
opt = torch.optim.SGD(net.parameters(), 0.01)
def batch(i):
    x = torch.randn(16, 8)
    if i == 2:
        x[:, 3] = 1.0
    return x
for i in range(4):
"""
LOOP = (
    HEAD
    + """
    x = batch(i)
    opt.zero_grad()
    out = net(x)
    if i == 2: out = out * 0
    LOSS
    loss.backward()
    opt.step()
"""
)
PREPARED = (
    HEAD
    + """
    x = batch(i)
    LINES
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
)
AMP = """
from apex import amp
net, opt = amp.initialize(net, opt, opt_level="O2", verbosity=0, loss_scale=4.0)
for i in range(4):
    opt.zero_grad()
    loss = net(batch(i)).float() * (i != 2)
    loss = torch.log(loss.abs()).mean()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
"""
LOADED = """
from torch.utils.data import DataLoader, TensorDataset
rows = torch.cat([batch(i) for i in range(4)])
for i, (x,) in enumerate(DataLoader(TensorDataset(rows), 16)):
    z = (x - x.mean(0)) / x.std(0)
    loss = net(z).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
GAN = """
critic = nn.Linear(4, 1)
second = torch.optim.SGD(critic.parameters(), 0.01)
for i in range(40):
    second.zero_grad()
    loss = critic(batch(1)[:, :4]).square().mean()
    loss.backward()
    fake = net(batch(1))
    loss = critic(fake.detach()).square().mean()
    loss.backward()
    second.step()
    opt.zero_grad()
    out = critic(fake)
    if i == 38: out = out * 0
    loss = torch.log(out).mean()
    loss.backward()
    opt.step()
"""
STATE = """
cell = nn.RNNCell(8, 8)
opt = torch.optim.SGD(cell.parameters(), 0.01)
state, total = torch.zeros(16, 8), 0.0
for i in range(4):
    state = cell(batch(1), state.detach())
    out = state * (i != 2)
    loss = torch.log(out.abs()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.exp()
"""
SCRIPTS = {  # script -> cause, line, operation
    "logarithm": (LOOP.replace("LOSS", "loss = torch.log(out).mean()"), "loss", "torch.log", "log"),
    "backward": (LOOP.replace("LOSS", "loss = out.norm() + out.square().sum().sqrt()"),
                 "loss", "sqrt()", "div"),
    "a function of torch": (
        LOOP.replace("LOSS", "loss = F.poisson_nll_loss(out.abs(), x[:, :4], False, eps=0)"),
        "loss", "F.poisson_nll_loss", "log"),
    "a module without parameters": (
        LOOP.replace("LOSS", "loss = nn.GaussianNLLLoss(eps=1e-45)(x[:, :4], x[:, :4], out ** 2)"),
        "loss", "GaussianNLLLoss", None),
    "in other forms": (
        LOOP.replace("LOSS", "out = torch.as_tensor(out).T.contiguous(); loss = out.log().mean()"),
        "loss", "out.log()", "log"),
    "a function that passes out=None": (
        LOOP.replace("LOSS", "z = F.normalize(out, dim=1, eps=0); loss = z.sum()"),
        "loss", "F.normalize", "div"),
    "after a function that passes out=None": (
        LOOP.replace("LOSS", "z = F.normalize(out, dim=1); loss = z.log().mean()"),
        "loss", "z.log()", "log"),
    "between two modules": (
        LOOP.replace("LOSS", "z = out / out.sum(1, keepdim=True)\n    loss = head(z).sum()")
        .replace("opt = ", "head = nn.Linear(4, 2)\nopt = ")
        .replace("net.parameters()", "[*net.parameters(), *head.parameters()]"),
        "model", "out.sum(1", "div"),
    "written in place": (
        LOOP.replace("LOSS", "out += 1; out -= 1; out.log_(); loss = out.mean()"),
        "loss", "out.log_()", "log_"),
    "amp": (HEAD.replace("for i in range(4):", AMP), "loss", "torch.log(", "log"),
    "batch": (PREPARED.replace("LINES", "x = (x - x.mean(0)) / x.std(0)"),
              "data", "x.std(0)", "div"),
    "batch in place": (PREPARED.replace("LINES", "m = x.mean(0); x -= m; x /= x.std(0)"),
                       "data", "x /= ", "div_"),
    "two optimizers": (HEAD.replace("for i in range(4):", GAN), "loss", "torch.log(", "log"),
    "a state that goes on": (HEAD.replace("for i in range(4):", STATE),
                             "loss", "torch.log(", "log"),
    "batch of a DataLoader": (HEAD.replace("for i in range(4):", LOADED),
                              "data", "x.std(0)", "div"),
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script; its report and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(text, *options):
        pathlib.Path("train.py").write_text(text)
        linecache.checkcache()
        assert main(["debug", *options, "train.py"]) == 0
        report = pathlib.Path("apex-debug", "report.json")
        return json.loads(report.read_text()) if report.exists() else None, capsys.readouterr().err

    yield run
    assert _get_current_function_mode_stack() == []
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_line_is_named(run, name):
    text, cause, code, operation = SCRIPTS[name]
    report, said = run(text)
    number = next(n for n, line in enumerate(text.splitlines(), 1) if code in line)
    assert report["cause"] == cause, said
    assert report["line"].startswith(f"train.py:{number} in <module>: ")
    assert report["line"] in report["sentence"]
    assert operation is None or report["operation"].split(".")[1] == operation
    if name == "batch":
        assert "16 NaN of 128 values (all 16 rows). The operation div (at " in report["sentence"]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("out[out > 9].square().mean()", "the mean of no elements; skip such a batch"),
        ("F.cross_entropy(out, torch.full((16,), -100))",
         "all 16 labels are -100, which it ignores; skip such a batch"),
    ],
)  # fmt: skip
def test_a_mean_of_nothing_is_called_one(run, loss, said):
    report, _ = run(LOOP.replace("LOSS", f"loss = {loss}"))
    assert report["sentence"].endswith(f"gave 1 NaN of 1 value: {said}.")


SIZES = """
class Sizes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, power):
        total = x.norm(dim=1)
        ctx.save_for_backward(x, total)
        ctx.power = power
        return total**power, total
    @staticmethod
    def backward(ctx, of_power, of_total):
        x, total = ctx.saved_tensors
        slope = of_power[:, None] * x / (total - total * (i != 1))[:, None]  # wrong
        return slope, None
"""


@pytest.mark.parametrize(
    "call", ["Sizes.apply(out, 1)", "apply(out, 1)", "Sizes.apply(out * 2, 1)"]
)
def test_a_wrong_backward_outside_of_the_model_is_named_by_its_line(run, call):
    """As one inside of a module is; the forward is finite."""
    text = LOOP.replace("LOSS", f"loss = {call}[0].mean()").replace("if i == 2", "if i == 5")
    text = text.replace("for i in range(4):", f"{SIZES}\napply = Sizes.apply\nfor i in range(4):")
    report, said = run(text)
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "# wrong" in line)
    assert report["line"].startswith(f"train.py:{number} in backward: slope = "), said
    assert report["line"] in report["sentence"]
    assert (report["cause"], report["direction"]) == ("loss", "backward")
    assert vars(torch.autograd.Function)["apply"].__func__.__module__ == "torch.autograd.function"


@pytest.mark.parametrize("given", ["out.abs() + 0", "y"])
def test_an_own_function_that_writes_to_what_was_there_before_is_not_run_again(run, given):
    """A replay would write to a tensor of the program."""
    text = LOOP.replace("LOSS", f"loss = (Written.apply({given}) * out.abs()).log().mean()")
    report, _ = run(text.replace("for i in range(4):", f"{WRITTEN}\nfor i in range(4):"))
    assert report["cause"] == "loss"
    assert report["line"].startswith("train.py:") is (given != "y")


WRITTEN = """
class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1.0)
    @staticmethod
    def backward(ctx, gradient):
        return gradient
y = torch.ones(16, 4)
"""


def test_a_row_that_a_mask_leaves_empty_is_named_before_a_forward_too(run):
    line = "x = x.masked_fill(torch.eye(16)[:, :1] > i - 2, -torch.inf).softmax(1)"
    report, _ = run(PREPARED.replace("LINES", line))
    assert report["sentence"].endswith("made it so: each of the 8 inputs of the row is -inf, so a "
                                       "mask leaves it empty; leave the row out.")  # fmt: skip


def test_an_infinity_that_the_first_layer_makes_nan_is_followed_to_its_line(run):
    """Of infinities a sum is NaN, and ``tanh`` after it gives the NaN on: it makes none."""
    text = PREPARED.replace("LINES", "x = x / (0 if i == 2 else 1)")
    report, _ = run(text.replace("net(x)", "net(x).tanh()"))
    assert report["cause"] == "data"
    assert report["operation"] == "aten.div.Tensor"
    assert report["sentence"].endswith("the divisor is 0; add a small number to it.")


def test_what_16_bits_alone_break_is_not_said_of_float32(run):
    """The product is finite in float32. The logarithm of 0 after it is not, there either."""
    out = "out = (net(x).half() + 1) * (1e5 if i == 2 else 1)"
    loss = f"{out}; loss = torch.log(out.float() * (i != 2)).mean()"
    report, _ = run(LOOP.replace("LOSS", loss))
    assert (report["cause"], report["operation"]) == ("range", "aten.mul.Tensor")
    assert " in float16, and finite values in float32: " in report["sentence"]
    assert report["notes"] == [
        "in float32 the step is not finite either: another operation makes an inf or NaN"
    ]


LOG = "loss = torch.log(out).mean()"
IN_A_THREAD = f"""
import threading
import torch
def work():
{textwrap.indent(LOOP.replace("LOSS", LOG), "    ")}
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
MANY = f"for _ in range(COUNT): out = out + 0\n    {LOG}"
UNNAMED = {  # what a step does -> whether its line is named
    "250 functions": (LOOP.replace("LOSS", MANY.replace("COUNT", "248")), True),
    "258 functions": (LOOP.replace("LOSS", MANY.replace("COUNT", "256")), False),
    "248 MB": (LOOP.replace("LOSS", f"torch.empty(62_000_000); {LOG}"), True),
    "260 MB": (LOOP.replace("LOSS", f"torch.empty(65_000_000); {LOG}"), False),
    "torch.compile": (LOOP.replace("LOSS", f"torch.compile(F.relu); {LOG}"), False),
    "a thread": (IN_A_THREAD, True),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_where_no_line_is_named(run, name):
    text, is_named = UNNAMED[name]
    report, said = run(text)
    assert report["cause"] == "loss", said
    assert ("torch.log(" in report["line"]) is is_named


def test_lines_can_be_switched_off(run):
    report, _ = run(SCRIPTS["logarithm"][0], "--no-lines")
    assert (report["cause"], report["line"]) == ("loss", "")
    assert "step=lambda: loss_function(model(x), y)) names the line" in report["sentence"]


def test_the_hint_is_a_program_that_works():
    """What it says to write is written here, and names the line."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 8), torch.zeros(2, 4)

    def loss_function(out, y):
        return (out * 0).log().sub(y).mean()

    def first(watch):
        with watch:
            loss_function(model(x), y).backward()
            optimizer.step()
            return watch.explain()

    hint = first(debug.watch(model, optimizer, on_fault="keep")).sentence
    call = re.search(r"apex\.debug\.(watch\(.*\)\)) names the line", hint)[1]
    names = {"model": model, "optimizer": optimizer, "loss_function": loss_function, "x": x, "y": y}
    watch = eval(
        call.replace("watch(", "watch(on_fault='keep', *[", 1).replace(", step", "], step"),
        {"watch": debug.watch, **names},
    )
    assert "log().sub(y)" in first(watch).line


MODES = """
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack as stack
class Mine(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
class Net(nn.Linear):
    def forward(self, x):
        seen.append([type(one).__name__ for one in stack()])
        return super().forward(x)
seen = []
net = Net(8, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
def step(x):
    opt.zero_grad()
    net(x).square().mean().backward()
    opt.step()
step(batch(0))
with Mine() as mine:
    step(batch(0))
    assert stack() == [mine]
assert mine not in stack()
x = batch(0)
with torch.device("cpu"):
    step(x)
    y = batch(0)
    step(y)
assert not any(type(one).__name__ == "DeviceContext" for one in stack())
step(y)
assert seen == [[], ["Mine"], ["DeviceContext"], ["DeviceContext"], []], seen
"""


WORKERS = """
from torch.overrides import _get_current_function_mode_stack as stack
from torch.utils.data import DataLoader
class Modes(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(len(stack()))
loader = DataLoader(Modes(), 2, num_workers=1, multiprocessing_context="fork")
assert [one.tolist() for one in loader] == [[0, 0], [0, 0]]
net(batch(0)).sum().backward()
opt.step()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_nothing_is_noted_in_workers_of_a_loader(run):
    report, said = run(HEAD.replace("for i in range(4):", WORKERS))
    assert report is None
    assert said.startswith("apex debug: all losses and gradients of ")


def test_modes_of_the_program_stay_in_order(run):
    report, said = run(HEAD.replace("for i in range(4):", MODES))
    assert report is None
    assert said.startswith("apex debug: all losses and gradients of ")


def test_other_networks_and_long_steps_are_not_noted():
    lines = Lines()
    lines.on()
    try:
        teacher, criterion = nn.Linear(2, 2), nn.MSELoss()
        x = torch.ones(3, 2)
        lines.begin_step()
        with torch.no_grad():
            out = teacher(x)
        criterion(x, out)
        assert [one.function.__name__ for one in lines.tape.items] == ["mse_loss"]
        for _ in range(300):
            x = x + 1
        assert not lines.tape.is_whole
        assert len(lines.tape.items) < 256
    finally:
        lines.stop()


def test_activations_are_not_kept(run):
    """Of forwards without a backward, and of two optimizers that step in turn."""
    report, said = run(HEAD.replace("for i in range(4):", KEPT))
    assert report is None
    assert said.startswith("apex debug: all losses and gradients of ")


KEPT = """
import gc, weakref
from torch.utils.data import DataLoader, TensorDataset
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mine = Activation()
        made.append(weakref.ref(ctx.mine))
        return x * x
    @staticmethod
    def backward(ctx, grad):
        return grad
class Activation:
    pass
class Net(nn.Linear):
    def forward(self, x):
        return Square.apply(super().forward(x))
made = []
nets = [Net(8, 4), Net(8, 4)]
opts = [torch.optim.SGD(one.parameters(), 0.01) for one in nets]
def alive():
    gc.collect()
    return sum(one() is not None for one in made)
for i in range(20):
    for net, opt in zip(nets, opts):
        out = net(batch(1))
        out.mean().backward()
        opt.step()
        opt.zero_grad()
assert alive() <= 2, alive()
for (x,) in DataLoader(TensorDataset(torch.randn(40, 8)), 2):  # a validation, without no_grad
    out = nets[0](x)
    loss = F.mse_loss(out, out.detach())
assert alive() <= 3, alive()
"""


def test_what_is_run_again_writes_to_nothing_of_the_program():
    """Averages of weights, masters: such writes are not recorded. Batches are written as copies."""
    lines = Lines()
    average, x, masters = nn.Parameter(torch.ones(3)), torch.ones(3), [torch.ones(3)]
    lines.on()
    try:
        with torch.no_grad():
            average.mul_(2.0)
            torch._foreach_mul_(masters, 2.0)
            x.mul_(2.0)
        y = x + average
    finally:
        lines.off()
    lines.tape.run(Replay([], {}, 1.0, None))
    assert [one.function.__name__ for one in lines.tape.items] == ["mul_", "add"]
    for one in (average, x, *masters):
        assert torch.equal(one, torch.full((3,), 2.0))
    assert torch.equal(y, torch.full((3,), 4.0))


OWNED = """
import numpy
array, generator = numpy.ones((16, 8), numpy.float32), torch.Generator()
average, state = [one.detach().clone() for one in net.parameters()], torch.zeros(8)
for i in range(4):
    x = batch(1)
    out = net(x)
    LINES
    loss = (out.exp() * (i != 2)).log().mean()
    loss.backward()
    opt.step()
print(array.sum(), torch.rand(4, generator=generator), average, state)
print([one.grad.isfinite().all() for one in net.parameters()])
"""
OWN = {
    "an average": "[one.data.mul_(0.9) for one in average]",
    "an array": "mine = torch.as_tensor(array); mine *= 2",
    "a generator": "out = out + torch.randn(16, 4, generator=generator)",
    "drawn in place": "out = out + torch.empty(16, 4).normal_(generator=generator)",
    "gradients": "[one.grad.zero_() for one in net.parameters() if one.grad is not None]",
    "a state": "state.data += x.mean(0)",
}


@pytest.mark.parametrize("name", OWN)
def test_what_the_script_has_stays_as_without(run, capsys, name):
    text = HEAD.replace("for i in range(4):", OWNED.replace("LINES", OWN[name]))
    exec(compile(text, "train.py", "exec"), {})
    plain = capsys.readouterr().out
    pathlib.Path("train.py").write_text(text)
    assert main(["debug", "train.py"]) == 0
    assert capsys.readouterr().out == plain
    report = json.loads(pathlib.Path("apex-debug", "report.json").read_text())
    assert ("loss = (out.exp() * (i != 2)).log()" in report["line"]) == (name != "drawn in place")


def test_only_one_mode_is_there_after_many_changes():
    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    lines = Lines()
    lines.on()
    with Other() as other:
        lines.off()
        assert _get_current_function_mode_stack() == [other]
        lines.on()  # not on top of it: the program would take ours off for its own
        assert _get_current_function_mode_stack() == [other]
    lines.on()
    lines.on()
    assert _get_current_function_mode_stack() == [lines]
    lines.stop()
    lines.on()
    assert _get_current_function_mode_stack() == []


ACCUMULATED = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(20, 2)
opt = torch.optim.SGD(net.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", enabled=DTYPE is torch.float16)
data = [(torch.randn(16, 20), torch.randint(2, (16,))) for _ in range(4 * N)]
data[N + PLACE][0][1, 3] = float("nan")
for i, (x, y) in enumerate(data):
    with torch.autocast("cpu", DTYPE):
        loss = torch.nn.functional.cross_entropy(net(x), y) / N
    scaler.scale(loss).backward()
    if (i + 1) % N == 0:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("passes", "place"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_row_of_one_pass_of_several_is_called_data(run, dtype, passes, place):
    """A loss that runs again in float16 overflows: the scale of 65536 is its gradient."""
    text = ACCUMULATED.replace("DTYPE", f"torch.{dtype}").replace("PLACE", str(place))
    report, _ = run(text.replace("N)", f"{passes})").replace("N ", f"{passes} ").replace(
        "N\n", f"{passes}\n"))  # fmt: skip
    of = f" (forward {place + 1} of {passes} of this step)" if passes > 1 else ""
    assert report["sentence"].startswith(f"Input 0 of the model{of} was not finite: 1 NaN of 320")
    assert report["sentence"].endswith("(row 1).")
    assert (report["cause"], report["operation"], report["line"]) == ("data", None, "")


SURROUNDED = {  # lines that are finite only in the mode that they ran in
    "autocast": """
    with torch.autocast("cpu", torch.float16):
        out = net(x) * (i != 2)
        far = F.mse_loss(out, out - 300, reduction="sum")
        root = out.float().square().sum(1).sqrt()  # here
        loss = root.mean() + far / 1e9
""",
    "no_grad": """
    root = out.square().sum(1).sqrt()  # here
    with torch.no_grad():
        weights = (out - out).sum(1).sqrt() + 1
    loss = (root * weights).mean()
""",
}


@pytest.mark.parametrize("name", SURROUNDED)
def test_lines_run_again_in_the_modes_that_they_ran_in(run, name):
    """Else a sum that autocast computes in float32 overflows, or another root has a gradient."""
    report, said = run(LOOP.replace("    LOSS", SURROUNDED[name]))
    assert "SqrtBackward0" in report["sentence"], said
    assert report["line"].endswith("# here")
