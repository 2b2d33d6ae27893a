"""A loss that is not finite while all gradients are, and sentences that go one step further."""

import json
import linecache
import pathlib

import pytest
import torch
from torch import nn

from apex.debug.growth import Growth
from apex.debug.watch import Watch
from tests.debug.in_process import main
from tests.debug.planted import explained

LOOP = """
import torch
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
BEFORE
for step in range(5):
    x, y = torch.randn(4, 8), torch.randint(5, (4,))
    LOSS
    optimizer.zero_grad()
    BACKWARD
    print(step)
"""
PLAIN = "loss.backward(); optimizer.step()"
AMP = (
    'from apex import amp; amp.initialize(model, optimizer, opt_level="LEVEL", verbosity=0)',
    "with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()\n    optimizer.step()",
)
SCALER = (
    'scaler = torch.amp.GradScaler("cpu")',
    "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
)
IGNORED = (
    "y = torch.where(torch.tensor(step < 2), y, -100); loss = cross_entropy(model(x).float(), y)"
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script under apex debug; its report, and what it says in the end."""
    monkeypatch.chdir(tmp_path)

    def run(loss, before="", backward=PLAIN):
        text = LOOP.replace("LOSS", loss).replace("BEFORE", before).replace("BACKWARD", backward)
        pathlib.Path("train.py").write_text(text)
        linecache.checkcache()
        assert main(["debug", "train.py"]) == 0
        printed = capsys.readouterr()
        assert printed.out.split() == ["0", "1", "2", "3", "4"]
        report = pathlib.Path("apex-debug", "report.json")
        return json.loads(report.read_text()) if report.exists() else None, printed.err

    return run


@pytest.mark.parametrize(
    ("before", "backward"),
    [
        ("", PLAIN),
        *((AMP[0].replace("LEVEL", level), AMP[1]) for level in ("O0", "O1", "O2")),
        SCALER,
    ],
    ids=["plain", "O0", "O1", "O2", "GradScaler"],
)
def test_a_loss_without_labels_is_reported_though_gradients_are_finite(run, before, backward):
    report, said = run(IGNORED, before, backward)
    assert (report["cause"], report["step"]) == ("loss", 3)
    assert report["operation"] == "aten.nll_loss_forward.default"
    assert "cross_entropy(model(x).float(), y)" in report["line"]
    assert said.endswith("apex debug: 3 of 5 losses were not finite\n")


def test_a_mask_that_covers_the_target_is_named(run):
    fill = "logits.scatter(1, y[:, None], float('-inf')) if step == 2 else logits"
    report, said = run(f"logits = model(x); logits = {fill}; loss = cross_entropy(logits, y)")
    assert report["cause"] == "loss"
    assert (
        "gave 4 inf of 20 values, which the loss reads: a mask covers a target."
        in (report["sentence"])
    )
    assert said.endswith("apex debug: 1 of 5 losses were not finite\n")


def test_dice_of_an_empty_image_behind_a_dead_relu(run):
    loss = "p = model(x).clamp(max=0).relu(); loss = 2 * (p * 0).sum() / p.sum()"
    report, _ = run(f"{loss} if step > 1 else model(x).sum()")
    assert report["step"] == 3
    assert report["cause"] == "loss"


def test_a_healthy_script_has_no_report(run):
    report, said = run("loss = cross_entropy(model(x), y)")
    assert (report, said.count("\n")) == (None, 1)


@pytest.mark.parametrize("level", ["O1", "O2", "GradScaler"])
@pytest.mark.parametrize("value", ["s.log()", "s / s"])
def test_a_loss_that_no_scale_heals_is_reported_at_once(run, level, value):
    """Though its gradients are not finite either, and the step is skipped."""
    before, backward = (AMP[0].replace("LEVEL", level), AMP[1]) if level != "GradScaler" else SCALER
    loss = f"s = model(x).float().square().sum() * (step < 2); loss = {value}"
    report, said = run(loss, before, backward)
    assert (report["cause"], report["step"]) == ("loss", 3)
    assert report["line"].startswith("train.py:10 in <module>: ")
    assert said.endswith("apex debug: 3 of 5 losses were not finite\n")


@pytest.mark.parametrize("end", ["raise", "skip"])
def test_a_loss_without_a_step_is_explained_at_the_end(run, end):
    """The script has looked at it itself, after backward."""
    ends = "loss.backward()\n    if loss.isfinite(): optimizer.step()"
    if end == "raise":
        ends = f"{ends}\n    else: print(step, 3, 4); raise SystemExit"
    report, said = run("loss = model(x).square().sum().mul(step < 2).log()", backward=ends)
    assert (report["cause"], report["step"], report["since"]) == ("loss", 3, 2)
    assert "its argument is 0; clamp the argument above 0" in report["sentence"]
    count = "1 of 3" if end == "raise" else "3 of 5"
    assert said.endswith(f"apex debug: {count} losses were not finite\n")


class Attention(nn.Linear):
    def forward(self, x, mask):
        scores = super().forward(x) @ x.transpose(1, 2)
        return scores.masked_fill(mask[:, None], float("-inf")).softmax(-1) @ x


def test_an_empty_row_and_its_sample_are_named():
    torch.manual_seed(0)
    model = Attention(8, 8)
    mask = torch.zeros(4, 7, dtype=torch.bool)
    mask[2] = True
    report = explained(model, lambda: model(torch.randn(4, 7, 8), mask).square().mean(), told=True)
    said = "gave 49 NaN of 196 values (in sample 2 of the batch, of 4): each of the 7 inputs"
    assert said in report.sentence
    assert report.sentence.endswith(
        "of the row is -inf, so a mask leaves it empty; leave the row out."
    )


def test_what_float32_does_not_heal_is_said():
    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    model.register_forward_hook(lambda module, args, output: (output * 0).log() - output.log())
    x = -torch.ones(3, 4, dtype=torch.bfloat16)
    sentence = explained(model, lambda: model(x).sum()).sentence
    assert " when recomputed in float32): its arguments range from -" in sentence
    assert "(also " in sentence


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        root = x.clamp(min=0).sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, gradient):
        (root,) = ctx.saved_tensors
        return gradient / (2 * root)


class Rooted(nn.Linear):
    def forward(self, x):
        return Root.apply(super().forward(x))


def test_a_backward_of_the_programs_own_is_named_by_its_line():
    torch.manual_seed(0)
    model = Rooted(8, 4)
    report = explained(model, lambda: model(torch.randn(4, 8)).sum())
    assert "return gradient / (2 * root)" in report.line
    assert "in backward" in report.line
    assert report.direction == "backward"


def test_an_explosion_that_has_lasted_is_still_called_one():
    """At step 12 of 40 steps: the last eight show nothing."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = Watch([model], [optimizer], None, None, "keep", growth=Growth())
    for step in range(1, 41):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * (float("nan") if step == 40 else 1.0)).backward()
        optimizer.step()
        if step == 12:
            with torch.no_grad():
                model.weight.mul_(1e4)
    sentence = watch.explain().sentence
    watch.close()
    assert "The updates of steps 9 to 16 raised the norm of weight from " in sentence
