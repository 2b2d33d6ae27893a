"""``apex debug``: scripts as they are, what they print and return, and what is written of them."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from apex.debug import reproduce
from tests import forked
from tests.debug.in_process import main

HEAD = """
import sys
import torch
from torch import nn
"""
MODEL = (
    HEAD
    + """
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
    def forward(self, x, number=1):
        x = self.first(x)
        if number == BAD:
            x = (x - x.detach()).sqrt()
        return self.last(x)
BAD = 3
"""
)
FINITE = "all losses and gradients of {} optimizer steps were finite"
PLAIN = (
    MODEL
    + """
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for number in range(1, 6):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8), number=number).square().mean()
    loss.backward()
    optimizer.step()
    print(number, bool(loss.isfinite()))
print(all(bool(p.isfinite().all()) for p in model.parameters()))
"""
)


class Command:
    """Runs ``apex debug`` in this process, in a folder of its own."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.out = folder / "apex-debug"

    def write(self, text, name="script.py"):
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def __call__(self, text, *arguments, options=()):
        """Run a script; its exit code, stdout and stderr."""
        script = self.write(text)
        return self.main("debug", *options, script, *arguments)

    def main(self, *arguments):
        self.capsys.readouterr()
        code = main(arguments)
        printed = self.capsys.readouterr()
        return code, printed.out, printed.err

    def report(self):
        """The JSON that was written."""
        return json.loads((self.out / "report.json").read_text())

    def files(self):
        return sorted(one.name for one in self.out.iterdir()) if self.out.exists() else []


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = (list(sys.argv), list(sys.path), os.getcwd())
    inits = (torch.optim.Optimizer.__init__, torch.amp.GradScaler.__init__)
    call = nn.Module.__call__
    yield Command(tmp_path, capsys)
    assert (sys.argv, sys.path, os.getcwd()) == before
    assert nn.Module.__call__ is call
    assert (torch.optim.Optimizer.__init__, torch.amp.GradScaler.__init__) == inits
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks


@pytest.mark.parametrize("skip", [False, True])
def test_a_fault_is_written_and_the_output_stays(command, skip):
    """Unless skipping is asked for: then weights stay finite."""
    code, out, err = command(PLAIN, options=["--skip"] if skip else [])

    assert code == 0
    assert out == "".join(f"{n} {skip or n < 4}\n" for n in range(1, 6)) + f"{skip}\n"
    assert ("apex debug: 1 of 5 steps were skipped" in err) == skip
    assert err.startswith("apex.debug: div in the model's forward (")
    assert "script.py:14 in forward: x = (x - x.detach()).sqrt()" in err
    assert "apex debug: wrote" in err
    saved = os.path.join("apex-debug", "nan.pt")
    assert re.search(
        rf"^apex debug repro .*{re.escape(saved)} runs the operation again$", err, re.M
    )
    assert command.files() == ["nan.pt", "report.json", "report.txt"]
    report = command.report()
    fields = ("cause", "module", "direction", "step", "since", "operation")
    assert [report[name] for name in fields] == ["model", "", "backward", 3, 2, "aten.div.Tensor"]
    assert report["sentence"] in (command.out / "report.txt").read_text()
    assert reproduce.load(command.out / "nan.pt")["operation"] == "aten.div.Tensor"


def test_a_meta_model_trains_as_without_the_command(command):
    code, out, err = command(HEAD + """
net = nn.Linear(8, 1, device="meta")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    net(torch.ones(4, 8, device="meta")).mean().backward()
    optimizer.step()
print("trained")
""")  # fmt: skip
    assert (code, out) == (0, "trained\n")
    assert err == f"apex debug: {FINITE.format(4).replace('losses and ', '')}\n"


def test_a_rank_that_is_no_number_is_not_read(command, monkeypatch):
    monkeypatch.setenv("RANK", "node-a")
    _, _, err = command(PLAIN.replace("BAD = 3", "BAD = 0"))
    assert "Traceback" not in err


def test_ranks_whose_steps_were_all_skipped_end_with_one_line(tmp_path):
    """The process group is gone at the end, and with it the way to explain together."""
    (tmp_path / "script.py").write_text(HEAD + """
torch.distributed.init_process_group("gloo")
net = nn.Linear(4, 1)
opt, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu")
for _ in range(4):
    out = net(torch.ones(2, 4)); loss = (out + (out - out.detach()).sqrt()).mean()
    opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
torch.distributed.destroy_process_group()
""")  # fmt: skip
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "apex"]
    [(code, _, errors)] = forked.run(
        [*words, "debug", "script.py"], folder=tmp_path, environment=dict(os.environ), seconds=300
    )
    assert (code, "Traceback" in errors) == (0, False)
    assert errors.count("apex debug: 4 of 4 steps were skipped because gradients were not") == 1


def test_repro_shows_it(command):
    command(PLAIN)
    path = str(command.out / "nan.pt")

    code, out, err = command.main("debug", "repro", path)

    assert (code, err) == (0, "")
    assert "aten.div.Tensor" in out
    assert "The result is not finite on this machine either." in out
    script = out.partition("Without apex:\n\n")[2]
    assert script == reproduce.script(path)
    printed = command.main("debug", command.write(script))[1]
    assert "nan" in printed or "inf" in printed


def test_repro_of_what_is_no_file(command):
    code, out, err = command.main("debug", "repro", "none.pt")
    assert (code, out) == (2, "")
    assert err == "apex debug repro: none.pt: no such file\n"

    command.write("import os", "text.pt")
    code, out, err = command.main("debug", "repro", "text.pt")
    assert (code, out) == (2, "")
    assert "text.pt: not a file of apex.debug" in err
    assert len(err.splitlines()) == 1


def test_repro_of_what_is_finite(command):
    path = command.folder / "nan.pt"
    call = (torch.ops.aten.log.default, (torch.ones(3),), {})
    reproduce.save(path, call, {"sentence": "Once."})

    code, out, _ = command.main("debug", "repro", str(path))

    assert code == 1
    assert "All values are finite" in out


def test_healthy_scripts_leave_one_line_and_no_file(command):
    code, out, err = command(PLAIN.replace("BAD = 3", "BAD = 0"))

    assert (code, err) == (0, f"apex debug: {FINITE.format(5)}\n")
    assert out.endswith("True\n")
    assert command.files() == []


def test_out_is_the_folder(command):
    code, _, err = command(PLAIN, options=("--out", "here/there"))

    assert code == 0
    assert (command.folder / "here" / "there" / "report.json").is_file()
    assert command.files() == []
    assert os.path.join("here", "there") in err


def test_a_folder_that_cannot_be_written_is_said_and_the_script_goes_on(command):
    (command.folder / "here").write_text("a file")

    code, out, err = command(PLAIN, options=("--out", "here"))

    assert code == 0
    assert "\n5 " in out
    assert err.startswith("apex.debug: div in the model's forward (")
    assert "apex debug: could not write all files: --out " in err
    assert "here: is a file" in err


def test_a_full_disk_is_said_and_the_script_goes_on(command, monkeypatch):
    def fail(*_):
        raise RuntimeError("PytorchStreamWriter failed writing file")  # what torch says of one

    monkeypatch.setattr(torch, "save", fail)

    code, _, err = command(PLAIN)

    assert code == 0
    assert "apex debug: could not write all files: PytorchStreamWriter" in err
    assert command.files() == ["report.json", "report.txt"]


def test_arguments_exit_codes_and_modules(command):
    text = """
        import sys, os
        print(sys.argv[1:], __name__, os.path.basename(sys.argv[0]), os.path.isabs(__file__))
        sys.exit({code})
    """
    code, out, _ = command(text.format(code=7), "--out", "x", "-m", "--lr=0.1")
    assert (code, out) == (7, "['--out', 'x', '-m', '--lr=0.1'] __main__ script.py True\n")
    code, out, err = command(text.format(code="'stopped'"))
    assert code == 1
    assert err.splitlines()[0] == "stopped"
    assert command(text.format(code="None"))[0] == 0
    assert command(text.format(code="True"))[0] == 1
    assert command(text.format(code=""))[0] == 0

    command.write(
        "import sys\nfrom other import name\nprint(__name__, name, sys.argv[1:])", "mod.py"
    )
    command.write("name = 'other'", "other.py")
    try:
        code, out, _ = command.main("debug", "-m", "mod", "a", "-b")
        assert (code, out) == (0, "__main__ other ['a', '-b']\n")
        code, out, _ = command.main("debug", command.write("from other import name; print(name)"))
        assert (code, out) == (0, "other\n")
    finally:
        sys.modules.pop("other", None)


def test_a_package_that_fails_is_shown_with_its_line(command):
    (command.folder / "failing").mkdir()
    command.write("raise ZeroDivisionError", "failing/__init__.py")
    code, _, err = command.main("debug", "-m", "failing")
    assert code == 1
    assert "line 1, in <module>" in err
    assert "runpy" not in err


def test_what_cannot_be_run(command, capsys):
    code, out, err = command.main("debug", "none.py")
    assert (code, out, err) == (2, "", "apex debug: none.py: no such file\n")
    book = str(command.folder / "book.ipynb")
    command.write("{}", "book.ipynb")
    code, out, err = command.main("debug", book)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"apex debug: {book} is a notebook: make a program of it with `jupyter ")
    assert err.endswith("or put its training into `with apex.debug.watch(model, optimizer):`\n")
    with pytest.raises(SystemExit):
        command.main("debug")
    assert "are required: SCRIPT (see" in capsys.readouterr().err
    code, out, err = command.main("debug", "-m", "no_such_module")
    assert code != 0
    assert "no_such_module" in err


def test_a_script_without_an_optimizer(command):
    code, out, err = command(MODEL + "print(Net()(torch.ones(2, 8)).shape)")

    assert (code, out) == (0, "torch.Size([2, 4])\n")
    assert err.startswith("apex debug: saw no step of an optimizer")
    assert "with apex.debug.watch(model, optimizer):" in err
    assert command.files() == []


def test_interrupt(command):
    assert command("raise KeyboardInterrupt")[0] == 130


def test_a_report_before_the_script_fails(command):
    """The report is written when the fault is found, not at the end."""
    code, out, err = command(PLAIN + "raise ValueError('later')")

    assert code == 1
    assert "later" in err
    assert command.report()["step"] == 3


GAN = (
    HEAD
    + """
torch.manual_seed(0)
class Generator(nn.Sequential): pass
class Discriminator(nn.Sequential): pass
G = Generator(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
D = Discriminator(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
of_d = torch.optim.Adam(D.parameters())
of_g = torch.optim.Adam(G.parameters())
for number in range(4):
    fake = G(torch.randn(4, 4)) * 1.0
    of_d.zero_grad()
    (D(torch.randn(4, 8)).mean() - D(fake.detach()).mean()).backward()
    of_d.step()
    of_g.zero_grad()
    judged = D(fake)
    if number == 2:
        judged = (judged - judged.detach()).log()
    judged.mean().backward()
    of_g.step()
print(all(bool(p.isfinite().all()) for m in (G, D) for p in m.parameters()))
"""
)


BOTH = PLAIN.replace(
    "optimizer = torch.optim.Adam(model.parameters())",
    "class Both(list):\n"
    "    def zero_grad(self): [one.zero_grad() for one in self]\n"
    "    def step(self): [one.step() for one in self]\n"
    "optimizer = Both(torch.optim.SGD(m.parameters(), lr=0.1) for m in model.children())",
)


SCALED = (
    MODEL
    + """
BAD = {bad}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=5)
for number in range(60):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(scaler.get_scale() > 0)
"""
)


def test_grad_scaler(command):
    code, out, err = command(SCALED.replace("{bad}", "0"))
    assert (code, out) == (0, "True\n")
    assert err == (  # its overflows heal
        "apex debug: 17 of 60 steps were skipped because gradients were not finite, and all losses "
        "were finite\n"
    )
    assert command.files() == []

    code, out, err = command(SCALED.replace("{bad}", "1"))
    assert (code, out) == (0, "True\n")
    report = command.report()
    assert (report["cause"], report["module"], report["step"]) == ("model", "", 17)
    assert "were skipped" not in err  # 16 of 17, and of the other 43 nobody knows


@pytest.mark.parametrize("steps", [1, 16])
def test_a_run_whose_steps_were_all_skipped_is_explained_at_its_end(command, steps):
    text = SCALED.replace("{bad}", "0").replace("2.0**30", "2.0**40")
    code, _, err = command(text.replace("range(60)", f"range({steps})"))
    assert code == 0
    assert (command.report()["cause"], command.report()["step"]) == ("scale", steps)
    assert err.endswith(f"apex debug: {steps} of {steps} steps were skipped\n")


def test_the_last_line_counts_what_it_saw(command):
    _, _, err = command(PLAIN.replace("BAD = 3", "BAD = 0").replace("range(1, 6)", "range(1, 2)"))
    assert err == "apex debug: all losses and gradients of 1 optimizer step were finite\n"
    text = PLAIN.replace("BAD = 3", "BAD = 0").replace("loss.backward()", "loss = loss * 1")
    closure = "optimizer.step(lambda: (loss.backward(), loss)[1])"
    _, _, err = command(text.replace("optimizer.step()", closure))
    assert err == "apex debug: all losses and gradients of 5 calls of a closure were finite\n"
    text = PLAIN.replace("BAD = 3", "BAD = 0")
    _, _, err = command(text.replace("loss.backward()", "loss.backward(torch.tensor(1.0))"))
    assert err == "apex debug: all gradients of 5 optimizer steps were finite\n"


def test_the_last_line_of_a_script_that_fails_speaks_of_the_steps_before(command):
    """It may have failed because of a loss that no backward has shown."""
    code, _, err = command(
        PLAIN.replace("BAD = 3", "BAD = 0") + "raise ValueError(loss * torch.nan)"
    )
    assert code == 1
    assert err.endswith(f"apex debug: before the script stopped, {FINITE.format(5)}\n")


def test_losses_are_counted_where_no_step_was_seen(command):
    """The optimizer steps float32 copies, as in mixed precision by hand."""
    text = PLAIN.replace(
        "model.parameters()", "[p.clone().detach() for p in model.parameters()]", 1
    )
    _, _, err = command(text.replace(".square()", ".log()"))
    losses, advice = err.splitlines()
    assert losses == "apex debug: 5 of 5 losses were not finite"
    assert advice.startswith("apex debug: saw no step of an optimizer")


def test_of_several_ranks_the_first_says_that_all_was_finite(command, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert command(PLAIN.replace("BAD = 3", "BAD = 0"))[2] == ""


OFF = SCALED.replace("{bad}", "1").replace('"cpu", init', '"cpu", enabled=False, init')
AMP = (
    MODEL
    + """
from apex import amp
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0)
for number in range(1, 6):
    with amp.scale_loss(model(torch.randn(4, 8), number=number).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
print(all(bool(p.isfinite().all()) for p in amp.master_params(optimizer)))
"""
)
REPORTED = {
    "a GAN": (GAN, {"cause": "loss", "step": 6, "since": 5}),
    "an optimizer for each layer": (
        BOTH,
        {"cause": "model", "module": "", "direction": "backward"},
    ),
    "a GradScaler that is switched off": (OFF, {"cause": "model", "step": 1}),
    "amp": (AMP, {"cause": "model", "step": 3, "scale": 8.0}),
}


@pytest.mark.parametrize("name", REPORTED)
def test_what_is_reported_of(name, command):
    text, wanted = REPORTED[name]
    code, out, _ = command(text, options=[] if text is OFF else ["--skip"])

    assert (code, out.splitlines()[-1]) == (0, "True")
    report = command.report()
    assert {key: report[key] for key in wanted} == wanted


def test_a_script_with_a_watch_of_its_own(command):
    text = PLAIN.replace(
        "for number in range(1, 6):",
        "from apex import debug\n"
        "watch = debug.watch(model, optimizer, on_fault='keep')\n"
        "for number in range(1, 6):",
    )
    code, out, _ = command(text + "print(watch.steps)")

    assert code == 0
    assert out.endswith("True\n5\n")


def test_a_process(tmp_path):
    """As users run it: stdout, exit code and traceback are those of python alone.

    torch is imported by the script and not before, so it reads what the script has set.
    It takes 3 s: a process that imports torch and what optimizers need.
    """
    script = tmp_path / "train.py"
    threads = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\n"
    end = "print(torch.get_num_threads())\ndef fail():\n    raise KeyError('end')\nfail()\n"
    script.write_text(threads + PLAIN + end)
    done = subprocess.run(
        [sys.executable, "-m", "apex", "debug", str(script), "a"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    assert done.returncode == 1
    assert done.stdout == "".join(f"{n} {n < 4}\n" for n in range(1, 6)) + "False\n1\n"
    report, _, traceback = done.stderr.partition("Traceback (most recent call last):\n")
    assert report.startswith("apex.debug: div in the model's forward")
    frames = [line for line in traceback.splitlines() if line.startswith("  File ")]
    assert [line.split(", ")[0] for line in frames] == [f'  File "{script}"'] * 2
    assert traceback.endswith("\nKeyError: 'end'\n")
    assert json.loads((tmp_path / "apex-debug" / "report.json").read_text())["cause"] == "model"
