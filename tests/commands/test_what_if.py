"""`apex what-if`: from a file of the user's to an answer, a policy and a plot."""

import json
import re
import sys

import pytest
import torch

from apex.commands import command_line as cli

TASK = """
import torch
from torch import nn

class Task:
    optimizer, lr = "sgd", 0.1
    def model(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        with torch.no_grad():
            model[0].weight[0].mul_(1e6)
        return {MODEL}
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    def loader(self, batch_size, seed):
        for number in range(3):  # more epochs than one are needed
            generator = torch.Generator().manual_seed(10 * seed + number)
            yield {"x": torch.randn(batch_size, 4, generator=generator),
                   "y": torch.randint(2, (batch_size,), generator=generator)}

def build(options):
    return Task()
"""

STEP = "def step(self, precision, models, optimizers, batch)"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def run_(name, *options, model="model", text=TASK):
        (tmp_path / f"{name}.py").write_text(text.replace("{MODEL}", model))
        code = cli.main(["what-if", f"{name}.py:build", *options])
        return code, *capsys.readouterr()

    yield run_
    for name in set(sys.modules) - known:
        if name.startswith("whatif_"):
            del sys.modules[name]


def test_an_answer_a_policy_and_a_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run("whatif_one", "--save", "policy.json", "--plot", "p.png", "--batch", "5")
    assert (code, err) == (0, "")
    assert out.startswith(
        "Use O4 (or O5). If your device is fast in float16 only, use O1 with the policy.\n"
        "bfloat16 everywhere is safe.\nfloat16 needs a loss scale of at most"
    )
    assert "16-bit weights would lose updates of SGD: " in out
    assert out.endswith("Policy written: amp.initialize(..., policy='policy.json')\n")
    policy = json.loads((tmp_path / "policy.json").read_text())
    assert policy["formats"]["float16"]["modules"].keys() == {"0", "1"}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_batches_are_1_and_no_policy(run, tmp_path):
    code, out, _ = run("whatif_two", "--batches", "2", "--formats", "e4m3", "--save", "p.json")
    assert code == 1
    assert out.startswith("Not decided: apex measured 2 batches")
    assert not (tmp_path / "p.json").exists()


def test_a_model_without_products_is_1_and_no_policy(run, tmp_path):
    code, out, _ = run("whatif_norm", "--save", "p.json", model="nn.Sequential(nn.LayerNorm(4))")
    assert code == 1
    assert out.startswith(
        "Nothing was measured, because no layer with a product returned any numbers."
    )
    assert not (tmp_path / "p.json").exists()


def test_a_loader_without_batches(run, tmp_path, monkeypatch, capsys):
    text = TASK.replace("{MODEL}", "model").replace("in range(3)", "in range(0)")
    (tmp_path / "whatif_none.py").write_text(text)
    assert cli.main(["what-if", "whatif_none.py:build"]) == 2
    assert "loader(32, 0) yielded no batch" in capsys.readouterr().err


def test_weights_of_a_checkpoint(run, tmp_path):
    small = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    torch.save(small.state_dict(), tmp_path / "weights.pt")
    code, out, _ = run("whatif_three", "--formats", "float16", "--weights", "weights.pt")
    assert code == 0
    assert "every layer is safe then" in out
    scale = re.search(r"a loss scale of at most (2\*\*\d+)", out)[1]
    assert f"In float16, at a loss scale of {scale}, " in out
    assert out.endswith("--save policy.json writes the policy for amp.initialize(policy=...).\n")


def test_a_task_that_has_a_step_alone_is_told_what_is_missing(run):
    text = TASK.replace("def loss(self, model, batch)", STEP)
    code, out, err = run("whatif_step", text=text)
    assert (code, out) == (2, "")
    assert err.startswith(
        "apex what-if: whatif_step.py:build: TypeError: the task has no loss(model,"
    )


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("[model, model]", (), "model() returned several models"),
        ("None", (), "model() returned a NoneType; it must return an nn.Module"),
        ("model.half()", (), "is torch.float16; pass a model in float32"),
        ("model", ("--weights", "nowhere.pt"), "No such file"),
        ("model", ("--weights", "whatif_four.py"), "UnpicklingError: Weights only load failed"),
        ("model", ("--save", "."), "is a folder"),
        (
            "model",
            ("--plot", "p.txt"),
            "--plot p.txt: use a name that ends in .png or .svg or .pdf",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(run, model, options, said):
    code, out, err = run("whatif_four", *options, model=model)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
