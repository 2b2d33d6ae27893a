"""Launches that pass over Triton's JIT take the kernel that the JIT would; see planning.py."""

import pytest

pytest.importorskip("triton")

from apex.catalogue.ops import OPS
from tests.gpu.worker import call
from tests.kernels import list_planning, planning

# Frames of Python in files of apex, forward and backward, with one of the catalogue's own in some.
# Of group norm three are launches, and one asks how images lie in memory; of focal loss one checks
# targets, on a CPU alone.
FRAMES = {"swiglu": (10, 6), "group_norm": (14, 8), "index_mul_2d": (11, 8), "rotary": (13, 7)}
FRAMES |= dict.fromkeys(("masked_softmax", "cross_entropy", "focal_loss"), (12, 6))
USUAL = (13, 7)
ALL = (21, 42)  # those of torch and Triton, too; a launch here is three of the stand-in's

pytestmark = pytest.mark.slow  # kernels are compiled half of the way


def test_a_plan_is_never_stale():
    """Over sizes of 1, of multiples of 16, of 2**31 and more, addresses, absent tensors."""
    wrong, planned = call(planning.differing)
    assert not wrong
    assert planned >= 50  # the others went to the JIT


def test_a_key_without_the_numbers_would_be_stale():
    """The comparison finds it."""
    wrong, _ = call(planning.differing_without_sizes)
    assert len(wrong) > 50


def test_what_is_left_to_the_jit():
    found = call(planning.left_to_the_jit)
    assert not found.pop("the same again")
    assert all(found.values()), found


def test_launch_options_make_kernels_of_their_own():
    assert call(planning.options) == 3


@pytest.mark.parametrize("name", [op.name for op in OPS if op.operator])
def test_plans_of_an_operation_are_never_stale(name):
    wrong, planned = call(planning.of_operations, name)
    assert not wrong
    assert planned >= 10


def test_plans_of_mixed_arguments_are_never_stale():
    wrong, planned = call(planning.of_mixed_arguments)
    assert not wrong
    assert planned >= 50


def test_a_plan_of_a_launch_over_lists_is_never_stale():
    """Over dtypes, addresses, kinds of scalars and numbers of 1, skipping, flags, sums, storage."""
    assert call(list_planning.differing) == ([], set())


def test_a_key_of_lists_without_one_of_its_parts_would_be_stale():
    """The comparison finds it. Who draws numbers, or has codes, is known by other parts."""
    found, parts = call(list_planning.parts_that_matter)
    constants, seed = 1, 4
    assert {*parts} - {*found} == {constants, seed}
    wrong, _ = call(list_planning.differing_without_addresses)
    assert wrong


def test_launches_over_lists_that_are_left_to_the_jit():
    found = call(list_planning.left_to_the_jit)
    assert not found.pop("the same again")
    assert all(found.values()), found


def test_the_benchmark_counts_launches_by_plans_too():
    pytest.importorskip("benchmarks.turns", reason="not in a checkout")
    assert call(list_planning.counted_by_the_benchmark) == [[True, True]] * 3


def test_frames():
    found = call(planning.frames)
    for name, counts in found.items():
        of_apex, of_all = zip(*counts, strict=True)
        base = name.split(",")[0]
        limits = FRAMES.get(base, USUAL)
        assert all(n <= most for n, most in zip(of_apex, limits, strict=True)), (name, counts)
        allowed = ALL if base != "group_norm" else (26, 47)  # three launches
        assert all(n <= most for n, most in zip(of_all, allowed, strict=True)), (name, counts)
