"""DTensors on two ranks: gradients in other placements, norms over ranks, and checkpoints."""

import pytest
import torch

from tests.optimizers import placed_programs as programs
from tests.optimizers.common import same
from tests.tolerance import PARALLEL, assert_close_to_largest, assert_one_rounding, each

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("case", programs.PLACED)
@pytest.mark.parametrize("name", programs.MAKERS)
def test_gradients_come_to_their_weights(two, name, case):
    answers = two.run(programs.stepped, name, case)
    assert same(answers[0][0], answers[1][0])
    for weights, alone, as_weights in answers:
        if name in programs.WITH_NORMS:  # that are added up in another order
            assert_close_to_largest(flat(weights), flat(alone), PARALLEL)
        else:
            assert same(weights, alone)
        assert as_weights


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_gradients_that_a_collective_still_sends(two):
    """They are wrappers, whose address is that of nothing."""
    for weights, alone, _ in two.run(
        programs.stepped, "FusedAdam", "partial", "triton", waits=True
    ):
        assert same(weights, alone)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_go_over_all_ranks(two, order):
    answers = two.run(programs.norms, order)
    assert torch.equal(answers[0][0], answers[1][0])
    for norm, exact, grads, clipped in answers:
        assert type(norm) is torch.Tensor
        assert_one_rounding(norm, exact)
        assert_one_rounding(flat(grads), flat(clipped))


@pytest.mark.parametrize("name", programs.MAKERS)
def test_what_cannot_be_placed_is_refused(two, name):
    for mesh, partial in two.run(programs.refused, name):
        assert "Make both DTensors on the same mesh" in mesh
        assert "Partial" in partial


@pytest.mark.parametrize(
    ("make", "storage", "column"),
    [
        ("FusedSGD", "plain", None),
        ("FusedAdam", "low_bits", "low_bits"),
        ("FusedAdam", "auto", "low_bits"),
    ],
)
def test_sharded_checkpoints_resume(two, make, storage, column, tmp_path):
    answers = two.run(programs.resumed, make, storage, str(tmp_path))
    for different, are_dtensors, keys, said in answers:
        assert different == 0
        assert are_dtensors
        assert column is None or column in keys
        assert not said


@pytest.mark.parametrize("make", ["FusedAdam", "FusedSGD", "FusedLAMB"])
def test_a_sharded_checkpoint_of_plain_goes_on_with_low_bits(two, make, tmp_path):
    answers = two.run(programs.resumed, make, "plain", str(tmp_path), then="auto")
    for different, are_dtensors, keys, said in answers:
        assert (different, are_dtensors, "low_bits" in keys) == (0, True, True)
        assert "without low bits, so it continues from the bfloat16 weights" in said[0]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_tensor_and_sequence_parallel(two, options):
    answers = two.run(programs.tensor_parallel, options)
    assert same(answers[0][0], answers[1][0])
    for weights, alone in answers:
        each(assert_close_to_largest, weights, alone, PARALLEL)
