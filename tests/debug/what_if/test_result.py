"""What comes out: the answer, the table, the reasons, the policy and the plot."""

import importlib.util
import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp
from apex.debug import what_if
from apex.optimizers import FusedAdam
from tests.debug.what_if.test_local import batches, loss, network


@pytest.fixture(scope="module")
def overflowing():
    """Scores beyond float16, and a channel that bfloat16 can hold and e4m3 cannot."""
    model = network(factor=4e-7, channel=1e6)
    with torch.no_grad():
        model[0].q.weight.mul_(3e3)
        model[0].k.weight.mul_(3e3)
    return model, what_if(model, loss, batches())


def test_the_answer_comes_first(overflowing):
    text = str(overflowing[1])
    first, table, reasons = text.split("\n\n")
    assert first.startswith(
        "Use O4 (or O5). If your device is fast in float16 only, use O1 with the policy.\n"
        "bfloat16 everywhere is safe.\nfloat16 needs a loss scale of at most 2**"
    )
    assert " and `0.scores`, `1` and `3` in float32: in `0.scores` its scores reach 6" in first
    assert "e+07, float16 ends at 65504" in first
    assert "At O2 the whole model fails, with that policy too: the loss is nan." in first
    assert ". At O2 the tensors between modules are float16, and `" in first
    assert "e4m3: 3 of 6 layers are safe, look at 1, 2 are not: `1` and `3`." in first
    assert "16-bit weights would lose updates of AdamW at lr 0.001: " in first
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["layer", "kind", "float16", "bfloat16", "e4m3"]
    assert [row[:2] for row in rows[4:]] == [
        ["0.scores", "Scores"],
        ["1", "Linear"],
        ["3", "Linear"],
    ]
    assert " ".join(rows[4][2:4]) == "not safe"
    lines = [one for one in reasons.splitlines() if "0.k: look" not in one]
    assert lines[0].startswith("float16, 0.scores: not safe, its scores reach")
    assert lines[0].endswith("-> nan.")  # alone in float16
    alone = overflowing[1].layers[3].verdicts["e4m3"].whole
    assert alone.exact != alone.loss  # a mean over 48 rows
    assert 0.9 < alone.cosine < 1.0
    assert lines[-6].startswith("Largest: product ")
    assert lines[-5].startswith("In float16, at a loss scale of ")
    starts = [f"At {level}, first batch, with the policy: " for level in ("O1", "O2", "O4", "O5")]
    assert all(line.startswith(start) for line, start in zip(lines[-4:], starts, strict=True))
    assert [one.state for one in overflowing[1].levels] == ["trains", "fails", "trains", "trains"]


def test_a_model_that_is_safe_everywhere():
    answer = what_if(network(), loss, batches()).answer
    assert "\nbfloat16 everywhere is safe.\nfloat16 needs a loss scale of at most 2**" in answer
    assert (
        "; every layer is safe then.\ne4m3: 6 of 6 layers are safe.\nWithout float32 masters"
        in answer
    )


def test_fewer_batches_than_8_decide_nothing():
    result = what_if(network(factor=40.0), loss, batches(7))
    text = "Not decided: apex measured 7 batches, and each layer needs results in at least 8."
    assert result.answer.startswith(f"{text}\nfloat16 ")
    assert {v.state for one in result.layers for v in one.verdicts.values()} == {"not decided"}
    with pytest.raises(ValueError, match="needs 8 batches in which a layer"):
        result.policy()
    result = what_if(network(), loss, batches(7), formats=["e4m3"])
    assert result.answer == text


def test_what_is_to_be_looked_at():
    """bfloat16's cosine falls from 1 to 0.97 as scores grow; between 0.999 and 0.99 is "look"."""
    result = what_if(network(factor=13.0), loss, batches(), formats=["bfloat16"])
    verdict = result.layers[3].verdicts["bfloat16"]
    assert 0.99 <= verdict.cosine < 0.999
    assert verdict.state == "look"
    assert "\nbfloat16 is safe, but look at `0.scores`.\nWithout float32 masters" in result.answer
    assert result.policy()["formats"]["bfloat16"]["modules"] == {}


def test_updates_that_16_bit_weights_would_lose():
    """A weight of 1 and updates of 0.001 and 0.01: bfloat16's half unit there is 2**-9 below 1."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.tensor([[1.0, 10.0]], device="cpu", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    result = what_if(model, lambda m, b: m(b).sum(), [x], optimizer=optimizer)
    assert result.lost == {"float16": 0.0, "bfloat16": 0.5}
    assert result.optimizer == "SGD"


class Multiplied(torch.optim.SGD):
    """Has an option that no group has; torch's copies of an optimizer leave it out."""

    def __init__(self, params, times=1.0):
        super().__init__(params, lr=1e-3)
        self.times = times

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(self.times)
        super().step()


def test_the_copy_of_an_optimizer_has_its_options():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.tensor([[1.0, 10.0]], device="cpu", dtype=torch.float32)
    optimizer = Multiplied(model.parameters(), times=10.0)
    result = what_if(model, lambda m, b: m(b).sum(), [x], optimizer=optimizer)
    assert result.lost == {"float16": 0.0, "bfloat16": 0.0}
    # of Adam 3e-4, of AdamW half of it; float16's half unit below 1 is 2**-12, or 2.4e-4
    fused = FusedAdam(model.parameters(), lr=3e-4, adam_w_mode=False, weight_decay=0.5)
    result = what_if(model, lambda m, b: m(b).sum() * 0.0, [x], optimizer=fused)
    assert result.lost == {"float16": 0.0, "bfloat16": 1.0}


def test_the_policy_is_a_file_that_amp_takes(overflowing, tmp_path):
    model, result = overflowing
    result.save(tmp_path / "policy.json")
    policy = json.loads((tmp_path / "policy.json").read_text())
    assert policy == result.policy()
    assert policy["apex_precision_policy"] == 1
    assert policy["formats"] == {
        "float16": {
            "loss_scale": result.ranges.scale,
            "modules": {"0.scores": "float32", "1": "float32", "3": "float32"},
        },
        "bfloat16": {"modules": {}},
        "e4m3": {"modules": {"1": "bfloat16", "3": "bfloat16"}},
    }
    x, _ = batches()[0]
    model = network(factor=4e-7)
    for level in ("O1", "O2"):
        amp.initialize(model, opt_level=level, policy=str(tmp_path / "policy.json"), verbosity=0)
        seen = set()

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.bmm):
                    seen.add((func.overloadpacket._qualified_op_name[6:], args[1].dtype))
                return func(*args, **(kwargs or {}))

        with Seen():
            model(x)
        # 0.q, 0.k and 0.v are the only products in float16
        assert seen == {
            ("addmm", torch.float16), ("addmm", torch.float32), ("bmm", torch.float32),
        }  # fmt: skip
        amp.reset()


def test_a_name_inside_of_a_name_is_left_out():
    result = what_if(network(factor=40.0), loss, batches(), formats=["e4m3"])
    result.layers[0].verdicts["e4m3"] = result.layers[3].verdicts["e4m3"]
    result.layers[3].keep = "0"
    assert result.policy()["formats"]["e4m3"]["modules"] == {"0": "bfloat16"}
    assert "(a policy must name `0`" not in result.answer  # said of 16-bit formats


class SometimesLarge(nn.Sequential):
    """Has a layer that overflows float16, and is called for some batches only."""

    def forward(self, x):
        x = self[0](x)
        return self[1](x * 1e6) * 1e-6 if x[0, 0] > 0 else x


@pytest.mark.parametrize("last", [-1.0, 1.0])
def test_a_policy_names_no_module_that_some_batches_do_not_call(last):
    """``initialize`` would refuse it at a forward without it."""
    torch.manual_seed(0)
    model = SometimesLarge(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8, device="cpu", dtype=torch.float32))
        model[0].bias.zero_()
    signs = [1.0, -1.0] * 4 + [last]
    inputs = [sign * torch.ones(4, 8, device="cpu", dtype=torch.float32) for sign in signs]
    result = what_if(model, lambda m, x: m(x).square().mean(), inputs, formats=["float16"])
    assert [layer.name for layer in result.states("float16", "not safe")] == ["1"]
    assert "1" not in result.policy()["formats"]["float16"]["modules"]


def test_a_plot_of_layers_by_formats(overflowing, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        overflowing[1].plot(tmp_path / "plot.svg")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    overflowing[1].plot(tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {word} -->" in text for word in ("0.scores", "e4m3", "not safe inf"))
