"""The program of docs/nan.md that needs two ranks, and what the page says that no block shows."""

import functools
import pathlib
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.debug.in_process import main
from tests.ranks import Ranks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "nan.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")


def names_of(page):
    """What the first block of the page and the one about FSDP2 define; nothing is trained."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    first, _, _ = blocks[0].partition("\nmodel = ")
    (sharded,) = (block for block in blocks if "fully_shard" in block)
    for block in (first, sharded):
        exec(compile(block, str(page), "exec"), names)
    return names


def sharded(rank, page):
    """Train on two ranks; the third batch has a row of zeros on rank 1 alone."""
    names = names_of(page)
    torch.manual_seed(0)
    model = names["network"]()
    torch.manual_seed(rank)
    batches = [names["batch"](zeros=rank == 1 and number == 2) for number in range(4)]
    report = names["train_sharded"](model, init_device_mesh("cpu", (2,)), batches)
    finite = all(bool(p.to_local().isfinite().all()) for p in model.parameters())
    return report.cause, report.module, report.step, report.sentence, finite


@pytest.mark.dist
def test_fsdp2_as_documented(tmp_path):
    """Rank 1 names the line, rank 0 the rank that sent the value; both keep their weights."""
    with Ranks(tmp_path) as ranks:
        clean, guilty = ranks.run(functools.partial(sharded, page=PAGE))
    assert guilty[:3] == ("model", "0", 3)
    assert guilty[3].startswith("div in module 0")
    assert (clean[0], clean[2]) == ("rank", 3)
    assert "rank 1" in clean[3]
    assert clean[4]
    assert guilty[4]


PARTS = """
import torch
torch.manual_seed(0)
encoder, decoder = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
params = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
hidden = torch.sqrt(encoder(torch.ones(3, 4)) * 0)
decoder(hidden).sum().backward()
optimizer.step()
print(all(bool(p.isfinite().all()) for p in params))
"""


def test_parts_that_a_script_calls_are_watched_one_by_one(tmp_path, monkeypatch, capsys):
    """What lies between them counts as the loss."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("parts.py").write_text(PARTS)
    assert main(["debug", "--skip", "parts.py"]) == 0
    said = capsys.readouterr()
    assert said.out == "True\n"
    assert "In the loss, div (in SqrtBackward0, the backward of parts.py:7 in <module>" in said.err
    assert main(["debug", "--skip", "--no-lines", "parts.py"]) == 0
    said = capsys.readouterr().err
    assert (
        "Output 0 of Linear[0] (forward 1 of 2 of this step) is finite but its gradient has "
        in said
    )


CLOSURE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = torch.log(model(torch.ones(2, 4)) * 0).sum()
    loss.backward()
    return loss
optimizer.step(closure)
print(bool(model.weight.isfinite().all()))
"""


def test_a_first_forward_in_a_closure_is_watched(tmp_path, monkeypatch, capsys):
    """Lightning's is: a step that began unwatched broke the weights, and was not explained."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("closure.py").write_text(CLOSURE)
    assert main(["debug", "--skip", "closure.py"]) == 0
    said = capsys.readouterr()
    assert said.out == "True\n"
    assert "cause      loss" in said.err


METHOD = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.last = torch.nn.Parameter(torch.zeros(3)), torch.nn.Linear(3, 1)
    def loss(self, x):
        return self.last(x * self.width.sqrt()).sum()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.loss(torch.ones(2, 3)).backward()
optimizer.step()
"""


def test_parameters_outside_of_what_is_called_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("method.py").write_text(METHOD)
    assert main(["debug", "method.py"]) == 0
    said = capsys.readouterr().err
    assert "1 of the 3 parameters of SGD are in no watched module" in said
    assert "None" not in said
