"""Two ranks: the fault of one is explained on both, and nothing hangs."""

import functools
import json

import pytest

from apex.debug import ranks as ours
from tests.debug import rank_programs as programs
from tests.debug.in_process import main
from tests.ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as pair:
        yield pair


@pytest.mark.parametrize("wrapper", programs.WRAPPERS)
def test_the_other_rank_says_from_which_rank_the_value_came(ranks, wrapper):
    job = functools.partial(programs.train, wrapper, programs.root)
    (there, stayed_there), (here, stayed) = ranks.run(job)
    assert stayed
    assert stayed_there
    assert (here.cause, here.operation, here.module) == ("model", "aten.div.Tensor", "function")
    assert (here.direction, here.rank, here.step, here.since) == ("backward", 1, 3, 2)
    assert (there.cause, there.rank) == ("rank", 0)
    assert there.sentence.startswith("A collective brought the value from rank 1, where: div in ")


@pytest.mark.parametrize(
    ("wrapper", "cause"), [("ddp", "data"), ("fsdp", "data"), ("fsdp float16", "data")]
)
def test_a_row_of_one_rank(ranks, wrapper, cause):
    job = functools.partial(programs.train, wrapper, programs.root, bad_rank=0, row=2)
    (here, _), (there, _) = ranks.run(job)
    assert (here.cause, here.values["rows"]) == (cause, [2])
    assert there.cause == "rank"


def test_float16_on_shards(ranks):
    job = functools.partial(programs.train, "fsdp float16", programs.OVERFLOW)
    (there, _), (here, _) = ranks.run(job)
    assert (here.cause, here.module, here.direction) == ("range", "function", "forward")
    assert there.cause == "rank"


SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model(torch.ones(2, 8)).sub(torch.inf).sum().backward()
optimizer.step()
"""


def test_the_command_writes_files_by_rank(ranks, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ranks.run(functools.partial(_command, tmp_path))
    names = {one.name for one in (tmp_path / "out").iterdir()}
    assert names >= {"report.txt", "report.json", "report-rank1.txt", "report-rank1.json"}
    reports = [tmp_path / "out" / f"report{rank}.json" for rank in ("", "-rank1")]
    assert [json.loads(one.read_text())["rank"] for one in reports] == [0, 1]


def _command(folder, rank):
    assert main(["debug", "--out", str(folder / "out"), str(folder / "train.py")]) == 0


@pytest.mark.slow
def test_a_rank_that_does_not_come(ranks, monkeypatch):
    """The other one says so, instead of waiting for ever; a replica is replayed without it."""
    for wrapper, cause in (("ddp", "model"), ("fsdp", "unrepeatable")):
        job = functools.partial(_impatient, wrapper)
        nothing, (report, _) = ranks.run(job)
        assert nothing is None
        assert report.cause == cause
        assert any("not all ranks called explain()" in note for note in report.notes)


def _impatient(wrapper, rank):
    ours.WAIT = ours.WAIT / 60
    try:
        return programs.train(wrapper, programs.root, rank, late=True)
    finally:
        ours.WAIT = ours.WAIT * 60
