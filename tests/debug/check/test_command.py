"""``apex check`` as a command: exit codes, JSON, options, and what is printed."""

import os
import re

import pytest
import torch

from apex.debug.check import run, scales, schedules
from tests import forked
from tests.debug.check.healthy import HEALTHY as HEALTHY_PROGRAMS
from tests.debug.check.planted import HEAD, PLANTED

CLIPS = PLANTED["clip_grad_norm"].program()
LINE = PLANTED["clip_grad_norm"].line()
CLIP = "nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
HEALTHY = PLANTED["clip_grad_norm"].program(twin=True)
FIELDS = {
    "version", "status", "exit", "steps", "found", "not_reached", "ignored", "failed_rules",
    "not_finite",
}  # fmt: skip
FINDING = {
    "kind", "file", "line", "function", "text", "sentence", "fix", "first", "first_step", "worst",
    "worst_step", "count", "steps", "ranks", "measured",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "status", "own"),
    [
        (HEALTHY, 0, "nothing found", 0),
        (HEALTHY + "raise SystemExit(7)\n", 7, "failed", 7),
        (HEALTHY + "raise SystemExit(4)\n", 4, "failed", 4),
        (HEALTHY + "raise OSError('lost')\n", 1, "failed", 1),
        ("print('nothing')\n", 4, "no step", 0),
        ("raise SystemExit(7)\n", 7, "failed", 7),
        (CLIPS, 3, "found", 0),
        (CLIPS + "raise SystemExit(7)\n", 3, "found", 7),
    ],
)
def test_exit_codes(check, text, code, status, own):
    found = check(text)
    assert (check.code, found["status"], found["exit"]) == (code, status, own)
    assert found.keys() == FIELDS
    assert found["version"] == 1
    assert found["steps"] == (8 if "net" in text else 0)
    assert ("OSError: lost" in check.err) == ("OSError" in text)
    last = check.err.splitlines()[-1]
    assert last.startswith("apex check: ")
    assert ("nothing was checked: no optimizer made a step" in last) == (found["steps"] == 0)
    assert last.endswith(" (checkpoint, resume, schedule: not reached)")


TRAINS = """
{make}
for step in range(30):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.{dtype}, enabled={low}):
        loss = F.mse_loss(net(x).float(), x[:, :1]) * {factor}
    opt.zero_grad()
    {backward}
"""
MAKE = "net = nn.Linear(8, 1)\nopt = torch.optim.SGD(net.parameters(), lr=1e-3)"
PLAIN = "loss.backward(); opt.step()"
SCALED = "scaler.scale(loss).backward(); scaler.step(opt); scaler.update()"
SCALER = f"{MAKE}\nscaler = torch.amp.GradScaler('cpu', init_scale=256.0)"
AMP = """from apex import amp
net, opt = amp.initialize(net, opt, opt_level="{}", verbosity=0)"""
BLOCK = "with amp.scale_loss(loss, opt) as scaled: scaled.backward()\n    opt.step()"
GRAD_IS_NAN = "torch.sqrt((net.weight * (step < 4)).square().sum())"  # from step 5 on
GRAD_IS_INF = "1e30"
NAN = "25 of 30 losses were not finite (the first in step 6), weights are NaN"


@pytest.mark.parametrize(
    ("make", "factor", "backward", "dtype", "says"),
    [
        (MAKE, GRAD_IS_NAN, PLAIN, None, NAN),
        (MAKE, GRAD_IS_NAN, PLAIN, "bfloat16", NAN),
        (SCALER, GRAD_IS_NAN, SCALED, "float16", "26 of 30 steps were skipped"),
        (SCALER, "float('inf')", SCALED, "float16",
         "30 of 30 losses were not finite (the first in step 1), 30 of 30 steps were skipped"),
        (SCALER, GRAD_IS_INF, SCALED, "float16", "30 of 30 steps were skipped"),
        (f"{MAKE}\n{AMP.format('O1')}", GRAD_IS_INF, BLOCK, None, "30 of 30 steps were skipped"),
        (f"{MAKE}\n{AMP.format('O2')}", GRAD_IS_INF, BLOCK, None, "30 of 30 steps were skipped"),
        (f"{MAKE}\n{AMP.format('O4')}", GRAD_IS_NAN, BLOCK, None, NAN),
        (f"{MAKE}\n{AMP.format('O3')}", GRAD_IS_NAN, BLOCK, None, NAN),
    ],
)  # fmt: skip
def test_a_training_that_is_not_finite_is_not_all_clear(check, make, factor, backward, dtype, says):
    names = {"dtype": dtype or "bfloat16", "low": dtype is not None}
    found = check(HEAD + TRAINS.format(make=make, factor=factor, backward=backward, **names))
    assert (found["found"], found["not_finite"]) == ([], says)
    assert (found["status"], found["exit"], check.code) == ("not finite", 0, 5)
    assert f" 30 steps of {check.folder / 'script.py'}, but {says}: to find out" in check.err
    assert torch.overrides._len_torch_function_stack() == 0


def test_later_steps_and_local_optimizers_are_judged_too(check):
    text = TRAINS.format(
        make=SCALER, factor="(1 if step < 12 else float('nan'))", backward=SCALED, dtype="float16",
        low=True,
    )  # fmt: skip
    text = "def main():\n" + "\n".join(f"    {line}" for line in text.splitlines()) + "\nmain()\n"
    found = check(HEAD + text, "--steps", "3")
    assert found["not_finite"] == "18 of 30 losses were not finite, 18 of 30 steps were skipped"


def test_a_vector_that_is_nan_in_backward_counts_as_a_loss(check):
    """The optimizer, whose weights are NaN, is gone at the end."""
    text = """
def main():
    net = nn.Linear(8, 1)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(10):
        losses = net(torch.randn(16, 8)) / (step < 4)
        opt.zero_grad(); losses.backward(torch.ones_like(losses)); opt.step()
main()
"""
    found = check(HEAD + text)
    assert found["not_finite"] == "5 of 10 losses were not finite (the first in step 6)"
    assert check.code == 5


SPARSE = """
net = nn.Embedding(10, 4, sparse=True)
opt = torch.optim.{optimizer}(net.parameters(), lr=0.01)
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.linear(net(torch.arange(8)), torch.ones(2, 4)).float().square().mean()
        opt.zero_grad(); loss.backward(); opt.step()
"""
META = """
with torch.device("meta"):
    net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(4):
    loss = net(torch.ones(16, 8, device="meta")).mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.mark.parametrize(
    "text", [SPARSE.format(optimizer="SparseAdam"), SPARSE.format(optimizer="SGD"), META]
)
def test_sparse_gradients_and_meta_tensors_break_no_rule(check, text):
    found = check(HEAD + text)
    assert (check.code, found["found"], found["steps"]) == (0, [], 4)
    assert "please report it" not in check.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (
            ["book.ipynb"],
            "book.ipynb is a notebook: make a program of it with `jupyter nbconvert --to script "
            "book.ipynb`, or put its training into `with apex.debug.check(model, optimizer) as "
            "found:`",
        ),
        (["--steps", "0", "script.py"], "--steps 0: must be 1 or more"),
        (["--ignore", "clip-before-unscal", "script.py"], "did you mean 'clip-before-unscale'?"),
    ],
)
def test_usage(check, words, message, monkeypatch):
    monkeypatch.chdir(check.folder)
    check.write(HEALTHY)
    check.write("{}", name="book.ipynb")
    assert check.main(*words) is None
    assert check.code == 2
    assert message in check.err
    assert len(check.err.splitlines()) == 1


def test_what_is_printed_and_what_the_json_has(check):
    found = check(CLIPS, "--steps", "5")
    (one,) = found["found"]
    assert one.keys() == FINDING
    assert (one["function"], one["text"]) == ("<module>", CLIP)
    assert (one["first_step"], one["count"], one["steps"]) == (1, 5, 5)
    assert one["file"] == str(check.folder / "script.py")
    script = re.escape(str(check.folder / "script.py"))
    assert re.fullmatch(
        f"apex check: 1 precision mistake in 8 steps of {script}\n"
        rf"1  clip-before-unscale  script.py:{LINE} in <module>: {re.escape(CLIP)}\n"
        "   clips gradients that are still multiplied by the loss scale\n"
        r"   measured: step 1: the norm was .+ \(5 of 5 steps\)\n"
        r"   fix:      scaler.unscale_\(optimizer\)\n"
        "             before this line\n"
        "apex check: exit 3; the script ended with 0 "
        r"\(checkpoint, resume, schedule: not reached\)\n",
        check.err,
    )


SKIPPED = """
scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
for step in range(4):
    opt.zero_grad()
    loss = scaler.scale(net(torch.ones(4, 8)).square().mean()) * float("inf")
    loss.backward()
    scaler.step(opt)
    scaler.update()
    scheduler.step()
"""
AFTER = """
with torch.autocast("cpu", torch.float16):
    out = net(torch.ones(4, 8))
    (out * 1e5).sum()
"""


def test_steps_are_counted_from_1_to_the_last(check):
    """A rule that looks after a step, and a line of the program after the last one."""
    before = HEALTHY.partition("for step")[0]
    (one,) = check(before + SKIPPED)["found"]
    assert (one["kind"], one["first_step"]) == ("scheduler-counts-skipped", 2)
    assert "worst in step 4: 3 of 4 steps had been skipped" in one["measured"]
    assert one["measured"].endswith("(3 of 4 steps)")
    (one,) = check(HEALTHY + AFTER)["found"]
    assert (one["kind"], one["first_step"], one["steps"]) == ("overflow-in-16-bits", 8, 8)


@pytest.mark.parametrize(
    ("comment", "options", "ignored"),
    [
        ("", ["--ignore", "clip-before-unscale"], 1),
        ("  # apex: ignore clip-before-unscale", [], 1),
        ("  # apex: ignore scaled-step, clip-before-unscale", [], 1),
        ("  # apex: ignore scaled-step", ["--ignore", "update-lost"], 0),
    ],
)
def test_a_mistake_can_be_ignored(check, comment, options, ignored):
    found = check(CLIPS.replace(CLIP, CLIP + comment), *options)
    assert (found["ignored"], len(found["found"]), check.code) == (
        (1, 0, 0) if ignored else (0, 1, 3)
    )
    assert ("1 ignored)" in check.err) == bool(ignored)


def test_a_module_and_its_arguments(check):
    package = check.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys\nprint(sys.argv[1:], __name__)\n" + CLIPS.strip("\n") + "\n"
    )
    found = check.main("-m", "package.train", "--lr", "3")
    (one,) = found["found"]
    assert (one["kind"], one["file"]) == ("clip-before-unscale", str(package / "train.py"))
    assert check.out.startswith("['--lr', '3'] __main__\n")


SAVES = """
try:
    {train}
except Exception:
    print("caught")
finally:
    print("finally")
torch.save([opt.state_dict(), scaler.state_dict()], io.BytesIO())
"""


@pytest.mark.parametrize("stops", [True, False])
def test_stop_ends_the_script_after_the_measured_steps(check, stops):
    head, body = HEAD, CLIPS.removeprefix(HEAD).partition("\nfor one in net")[0]
    train = "\n    ".join(line for line in body.splitlines() if line)
    text = head + SAVES.format(train=train) + "print('end')\n"
    found = check(text, "--steps", "3", *["--stop"] * stops)
    assert check.code == 3
    assert check.out == ("finally\n" if stops else "finally\nend\n")
    assert (found["steps"], found["exit"]) == ((3, None) if stops else (8, 0))
    assert ("checkpoint" in found["not_reached"]) == stops
    assert ("the script was stopped" in check.err) == stops
    (one,) = found["found"]
    assert (one["count"], one["steps"]) == (3, 3)


def test_a_rule_that_raises_is_dropped_and_named(check, monkeypatch):
    def steps(self, scaler, optimizer):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(scales.Scaled, "scaler_steps", steps)
    _, output = check.plainly(CLIPS)
    found = check(CLIPS)
    assert found["failed_rules"] == ["Scaled: ZeroDivisionError: a defect"]
    assert [one["kind"] for one in found["found"]] == ["clip-before-unscale"]
    assert check.out == output
    assert "apex failed in one of its checks, please report it: Scaled: ZeroDivision" in check.err


@pytest.mark.parametrize(
    ("owner", "place"),
    [(run, "scales_of"), (run.CheckRun, "_before_step"), (run.CheckRun, "_begin_module")],
)
def test_an_error_of_the_check_itself_ends_the_check_and_not_the_program(
    owner, place, check, monkeypatch
):
    def fails(*args):
        raise ZeroDivisionError("a defect")

    fails.__name__ = place
    _, output = check.plainly(HEALTHY)
    monkeypatch.setattr(owner, place, fails)
    found = check(HEALTHY)
    (failed,) = found["failed_rules"]
    assert failed.endswith(": ZeroDivisionError: a defect")
    assert (check.out, found["exit"]) == (output, 0)


GIVES = """
def gives():
    yield from net.parameters()
    raise ValueError("mine")
nn.utils.clip_grad_norm_(gives(), 1.0)
"""


def test_an_error_of_an_iterator_of_the_program_reaches_it(check):
    text = HEALTHY + GIVES
    assert "mine" not in text.replace(GIVES, "")
    found = check(text)
    assert (found["exit"], found["failed_rules"]) == (1, [])
    assert "ValueError: mine" in check.err


def test_what_is_saved_may_be_named(check):
    assert check(HEALTHY + "import io; torch.save(obj=net, f=io.BytesIO())\n")["failed_rules"] == []


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_last_step_of_amp_is_counted(level, check):
    text = HEALTHY_PROGRAMS[f"amp_{level}"]
    found = check(HEAD + text)
    assert found["steps"] == int(re.search(r"range\((\d+)\)", text)[1])


def test_what_was_reached(check):
    found = check(PLANTED["scaler_not_loaded"].program(twin=True))
    assert (found["not_reached"], check.code) == ([], 0)
    assert check.err.endswith(f"in 15 steps of {check.folder / 'script.py'}\n")


def test_nothing_of_a_check_stays_in_torch(check):
    def names():
        places = (
            (torch.nn.utils, "clip_grad_norm_"), (torch.autograd, "backward"), (torch, "save"),
            (torch, "load"), (torch.amp.GradScaler, "step"), (torch.optim.Optimizer, "__init__"),
            (torch.amp.autocast_mode.autocast, "__enter__"), (torch.nn.Module, "half"),
            (torch.optim.lr_scheduler.ExponentialLR, "step"),
        )  # fmt: skip
        return [getattr(owner, name) for owner, name in places]

    before = names()
    check(CLIPS)
    assert names() == before
    assert torch.overrides._len_torch_function_stack() == 0
    assert schedules.LRScheduler is torch.optim.lr_scheduler.LRScheduler


@pytest.mark.slow
def test_a_pool_that_nobody_shuts_down(tmp_path):
    """It trains after the end of the script, and its thread waits for more."""
    body = "\n".join(f"    {line}" for line in CLIPS.splitlines() if line)
    pool = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
    (tmp_path / "script.py").write_text(f"def train():\n{body}\n{pool}pool.submit(train)\n")
    words = ["-m", "apex", "check", "script.py"]
    options = {"folder": tmp_path, "environment": dict(os.environ), "seconds": 200}
    [(code, _, errors)] = forked.run(words, **options)
    assert code == 3, errors
    assert "apex check: 1 precision mistake in 8 steps of script.py" in errors


@pytest.mark.slow
@pytest.mark.dist
def on_two_ranks(folder, *command):
    """Exit code and stderr of a command under torchrun."""
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "apex"]
    [(code, _, errors)] = forked.run(
        [*words, *command], folder=folder, environment=dict(os.environ), seconds=300
    )
    return code, errors


def test_ranks_are_told_once(tmp_path):
    """Rank 1 alone makes the mistake; rank 0 tells it."""
    text = CLIPS.replace(CLIP, f'os.environ["RANK"] == "1" and {CLIP}')
    (tmp_path / "script.py").write_text("import os\n" + text.replace("print(", "str("))
    code, errors = on_two_ranks(tmp_path, "check", "--json", "found.json", "script.py")
    assert code == 1  # torchrun's, of any error
    assert errors.count("clip-before-unscale") == 1
    assert f"script.py:{LINE + 1} in <module>: os.environ" in errors
    assert "(rank 1)" in errors
    assert errors.count("apex check: exit 3; the script ended with 0") == 1


def test_losses_of_another_rank_are_not_all_clear(tmp_path):
    """Of a pipeline the last rank alone has a loss."""
    loss = "loss = net(torch.randn(16, 8)).mean() * (float('inf') if rank == '1' else 1)"
    text = f"import os\n{HEAD}{MAKE}\nrank = os.environ['RANK']\n"
    text += f"for step in range(4):\n    {loss}\n    opt.zero_grad(); loss.backward()\n"
    (tmp_path / "script.py").write_text(text + "    opt.step()\n")
    _, errors = on_two_ranks(tmp_path, "check", "script.py")
    assert errors.count("apex check: ") == 1
    assert "script.py, but on rank 1 4 of 4 losses were not finite (the first in step 1)" in errors
