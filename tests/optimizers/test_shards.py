"""Fused optimizers on DTensors of two and four ranks, against one process, and their checkpoints.

Updates without norms are the same bit for bit. Norms are added up in another order.
"""

import pytest
import torch

from apex.ops.lists.storage import KAHAN, LOW_BITS
from tests.optimizers import shard_checkpoints as checkpoints
from tests.optimizers import shard_programs as programs
from tests.optimizers.common import EVERY, same
from tests.tolerance import CLIPPED, NEXT_BFLOAT16, assert_close_to_largest

pytestmark = pytest.mark.dist
PLACED, WITH_NORMS = programs.PLACED, programs.WITH_NORMS


def assert_close(pairs):
    for mine, exact in pairs:
        if mine.numel():
            assert_close_to_largest(mine, exact, CLIPPED)
        else:
            assert mine.shape == exact.shape


@pytest.mark.parametrize("name", programs.WITHOUT_NORMS)
@pytest.mark.slow
def test_shards_are_stepped_as_whole_tensors(four, name):
    """By the definition, bit for bit; torch's CPU kernels round the last elements otherwise."""
    for answer in four.run(programs.stepped, name, "reference", [*PLACED]):
        for calls, pairs in answer.values():
            assert calls == 0
            assert same(*zip(*pairs, strict=True))
    for answer in four.run(programs.stepped, name, None, ["rows", "columns"]):
        for _, pairs in answer.values():
            assert_close(pairs)


@pytest.mark.parametrize("name", WITH_NORMS)
@pytest.mark.slow
def test_norms_are_those_of_whole_tensors(four, name):
    """A step has one all-reduce for each norm and each dimension of the mesh with shards."""
    cases = ["rows", "two ranks"] if name == "LARC of torch" else [*PLACED]
    answers = four.run(programs.stepped, name, None, cases)
    assert [len(answer) for answer in answers] == [len(cases)] * 2 + [len(cases) - 1] * 2
    for answer in answers:
        for case, (calls, pairs) in answer.items():
            assert calls == WITH_NORMS[name][0] * PLACED[case][2]
            assert_close(pairs)


@pytest.mark.parametrize("name", [name for name in EVERY if name in programs.MAKERS])
@pytest.mark.slow
def test_kernels(four, name):
    for answer in four.run(programs.stepped, name, "triton", ["two ranks"]):
        for _, pairs in answer.values():
            assert_close(pairs)
            assert name in WITH_NORMS or same(*zip(*pairs, strict=True))


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad", "LARC", "clipped"])
@pytest.mark.slow
def test_several_meshes_in_one_optimizer(four, name):
    """Groups of ranks are asked once each, whatever meshes they are in."""
    for calls, pairs in four.run(programs.mixed, name):
        assert calls == WITH_NORMS[name][0] * 3
        assert_close(pairs)


@pytest.mark.parametrize("name", [*(n for n in EVERY if n in programs.MAKERS), "clipped"])
def test_a_skipped_step_changes_nothing_and_nothing_waits(four, name):
    for before, after, taken in four.run(programs.skipped, name):
        assert same([x for x, _ in before], [x for x, _ in after])
        assert_close(taken)


@pytest.mark.parametrize("name", ["clipped", "contrib", "by hand", "FusedLAMB", "LARC"])
def test_a_rank_without_gradients_takes_part(four, name):
    answers = four.run(programs.without_gradients, name)
    for weights in answers[:3]:
        if name in ("clipped", "contrib", "by hand"):  # norms of gradients alone
            assert_close([(mine, exact) for mine, exact, _ in weights])
        assert all(mine.isfinite().all() for mine, _, _ in weights)
    assert all(same([mine], [start]) for mine, _, start in answers[3])


@pytest.mark.parametrize("order", [0, 2])
def test_a_nan_of_one_rank_is_in_the_norm_on_all(four, order):
    for with_nan, without in four.run(programs.nan_on_one_rank, order):
        assert with_nan != with_nan
        assert without > 0


def test_what_has_no_norm_is_refused(four):
    for partial, order in four.run(programs.refused):
        assert partial.startswith("RuntimeError: ")
        assert "redistribute(placements=...)" in partial
        assert order.startswith("ValueError: ")
        assert "it must be above 0" in order


@pytest.mark.parametrize("name", ["FusedAdam, low_bits", "FusedNovoGrad, plain"])
def test_a_state_of_other_shards_is_refused(four, name):
    for found, is_unchanged in four.run(checkpoints.other_states, name):
        assert is_unchanged
        assert len(found) == 3
        assert all("load with torch.distributed.checkpoint" in text for text in found)
        assert "a plain tensor of shape" in found[2]


@pytest.mark.parametrize("name", programs.PARTITIONED)
def test_zero_redundancy_optimizer_clips_by_the_norm_of_all(four, name):
    for pairs in four.run(programs.partitioned, name):
        assert_close(pairs)


# -- checkpoints -----------------------------------------------------------------------------------

USUAL = [  # each key of a state in each dtype
    *[f"FusedAdam, {storage}" for storage in ("plain", "low_bits", "kahan", "stochastic", "auto")],
    "FusedSGD, auto", "FusedMuon, auto", "FusedNovoGrad, auto",
    "FusedSGD, plain", "FusedSGD, low_bits", "FusedAdagrad, kahan", "FusedLion, low_bits",
    "FusedLAMB, low_bits", "FusedNovoGrad, plain", "FusedNovoGrad, kahan",
    "FusedMuon, low_bits", "FusedMixedPrecisionLamb, masters", "FusedAdam, masters", "LARC, plain",
    "contrib.FusedAdam, plain",
]  # fmt: skip
ELSEWHERE = ["FusedAdam, low_bits", "FusedLAMB, low_bits", "FusedNovoGrad, kahan"]


def _assert_saved(four, names, cases, folder):
    """Assert that shards of two ranks have the numbers of one process, there and after loading."""
    alone = checkpoints.stepped_and_saved(0, None, names)
    saved = four.run(checkpoints.stepped_and_saved, "two ranks", names, folder)[0]
    found = [x for case in cases for x in four.run(checkpoints.loaded, case, saved, folder)]
    with pytest.warns(UserWarning, match="in a single process"):
        found.append(checkpoints.loaded(0, None, saved, folder))
    for name in names:
        if "stochastic" not in name:
            here = alone[name][0]
            _assert_states(name, {key: (here[key], x) for key, x in saved[name][0].items()})
        for before, after in [answer[name] for answer in found if answer]:
            assert same(*zip(*before.values(), strict=True)), name
            if "stochastic" not in name:
                _assert_states(name, after)


def _assert_states(name, pairs):
    """Bit-equal where no norm is needed."""
    if not any(kind in name for kind in ("LAMB", "Lamb", "NovoGrad", "LARC")):
        assert same(*zip(*pairs.values(), strict=True)), name
        return
    mine, wanted = ({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))
    for found, exact in zip(_joined(mine), _joined(wanted), strict=True):
        if found.numel():
            tolerance = CLIPPED if found.dtype == torch.float32 else NEXT_BFLOAT16
            assert_close_to_largest(found, exact, tolerance)


def _joined(states):
    """Weights in float32 if there is something beside them, and the other states."""
    for key in [*states]:
        for beside, join in (("low_bits", LOW_BITS.widen), ("error", KAHAN.widen)):
            if key.endswith(beside):
                weight = key.removesuffix(beside)
                states[weight] = join(states[weight], states.pop(key))
    return states.values()


@pytest.mark.slow
def test_checkpoints_fit_any_number_of_ranks(four, tmp_path):
    _assert_saved(four, USUAL, ["two ranks", "rows"], str(tmp_path))


@pytest.mark.slow
def test_checkpoints_fit_other_placements(four, tmp_path):
    _assert_saved(four, ELSEWHERE, ["HSDP", "columns", "rows and columns"], str(tmp_path))


@pytest.mark.parametrize("name", ["FusedAdam, kahan", "FusedAdam, auto", "FusedNovoGrad, plain"])
def test_gathered_states_are_spread_again(four, name):
    for straight_on, resumed in four.run(checkpoints.gathered, name):
        assert same(straight_on, resumed)


def test_low_bits_are_gathered_by_way_of_a_checkpoint(four, tmp_path):
    for said, (straight_on, resumed) in four.run(checkpoints.converted, tmp_path):
        assert "Invalid scalar type" in said
        assert same(straight_on, resumed)


@pytest.mark.exhaustive
def test_every_checkpoint_fits_every_placement(four, tmp_path):
    _assert_saved(four, [*checkpoints.STORED], [*PLACED], str(tmp_path))
