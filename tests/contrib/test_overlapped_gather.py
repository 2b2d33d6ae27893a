"""DistributedFusedAdam(overlap_param_sync=True) on two ranks over gloo: who reads new values."""

import functools
import gc
import weakref

import pytest
import torch

from apex.contrib.optimizers._sharded_parameters import _in_compiled_module
from tests.contrib import overlapped_programs as programs
from tests.contrib.overlapped_readers import RIGHT, SAID, SLOW
from tests.ranks import Ranks, from_two
from tests.tolerance import ADAM_UNDER_DDP

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_every_reader_gets_new_values(two):
    assert len(RIGHT) > 80
    assert two.run(functools.partial(programs.read, [*RIGHT])) == [{}, {}]


@pytest.mark.slow
def test_readers_for_which_torch_imports_a_lot(two):
    assert two.run(functools.partial(programs.read, [*SLOW])) == [{}, {}]


def test_readers_that_the_page_excludes(two):
    for found in two.run(programs.said):
        assert found == {name: [True, True] for name in SAID}


def test_values_are_those_of_torchs_adam_under_ddp(two):
    for found in two.run(programs.matrix):
        assert found.keys() == programs.MATRIX.keys()
        for name, difference in found.items():
            assert difference <= ADAM_UNDER_DDP[programs.MATRIX[name][0]], name


@pytest.mark.parametrize(
    ("how", "graphs", "pending"),
    [
        ("layer", 1, [3, 3, 3, 3, 3, 3]),
        pytest.param("layer in place", 1, [2, 2, 2, 2, 2, 2], marks=pytest.mark.slow),
        pytest.param("model in place", 1, [0, 0, 0, 0, 0, 0], marks=pytest.mark.slow),
        ("function", 1, [3, 0, 0, 0, 0, 0]),
    ],
)
def test_compiled_code_is_not_compiled_again(two, how, graphs, pending):
    assert two.run(functools.partial(programs.compiled, how)) == [(True, graphs, pending)] * 2


def test_zero_grad_reads_no_parameter(two):
    """A parameter that is on its way reads its gradient ten times slower."""
    for without, pending in two.run(programs.frames_of_zero_grad):
        assert pending == without < 100


def test_nothing_is_left_behind(two):
    for found in two.run(programs.ends):
        written = found.pop("written")
        assert "read an old value of a parameter of shape (8, 6)" in found.pop("backward")
        assert all("call param_sync() before writing" in text for text in written)
        assert [*found.values()] == [True] * len(found), found


@pytest.mark.slow
def test_a_reader_learns_that_a_rank_has_ended(tmp_path):
    texts = from_two(programs.lost, tmp_path)
    assert all("a collective failed. Has another rank ended" in text for text in texts)


@pytest.mark.slow
def test_killed_and_restarted(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with Ranks(tmp_path / "first") as ranks:
        assert ranks.run(functools.partial(programs.saved_and_killed, tmp_path)) == [True] * 2
    with Ranks(tmp_path / "second") as ranks:
        assert ranks.run(functools.partial(programs.restarted, tmp_path)) == [True] * 2


def test_looking_for_a_compiled_module_keeps_no_frame():
    """A cycle of frames would keep the locals of all callers alive."""

    def looked():
        local = torch.nn.Linear(1, 1)
        assert not _in_compiled_module()
        return weakref.ref(local)

    gc.disable()
    try:
        assert looked()() is None
    finally:
        gc.enable()
