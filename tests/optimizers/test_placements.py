"""DTensors on two ranks: gradients in other placements, norms over ranks, and checkpoints."""

import pytest
import torch

from tests.amp.ranks.cells import Pair
from tests.optimizers import placed_programs as programs
from tests.optimizers.common import same
from tests.tolerance import PARALLEL, assert_close_to_largest, assert_one_rounding

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Pair(tmp_path_factory.mktemp("ranks")) as both:
        yield both


class Call:
    """``program(rank, *args, **more)``, to be sent to both processes."""

    def __init__(self, program, *args, **more):
        self.program, self.args, self.more = program, args, more

    def __call__(self, rank):
        return self.program(rank, *self.args, **self.more)


@pytest.mark.parametrize("case", programs.PLACED)
@pytest.mark.parametrize("name", programs.MAKERS)
def test_gradients_come_to_their_weights(pair, name, case):
    answers = pair.run(Call(programs.stepped, name, case))
    assert same(answers[0][0], answers[1][0])
    for weights, alone, as_weights in answers:
        if name in programs.WITH_NORMS:  # that are added up in another order
            assert_close_to_largest(flat(weights), flat(alone), PARALLEL)
        else:
            assert same(weights, alone)
        assert as_weights


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_gradients_that_a_collective_still_sends(pair):
    """They are wrappers, whose address is that of nothing."""
    for weights, alone, _ in pair.run(
        Call(programs.stepped, "FusedAdam", "partial", "triton", waits=True)
    ):
        assert same(weights, alone)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_go_over_all_ranks(pair, order):
    answers = pair.run(Call(programs.norms, order))
    assert torch.equal(answers[0][0], answers[1][0])
    for norm, exact, grads, clipped in answers:
        assert type(norm) is torch.Tensor
        assert_one_rounding(norm, exact)
        assert_one_rounding(flat(grads), flat(clipped))


@pytest.mark.parametrize("name", programs.MAKERS)
def test_what_cannot_be_placed_is_refused(pair, name):
    for mesh, *partial in pair.run(Call(programs.refused, name)):
        assert "Make both DTensors of one mesh" in mesh
        assert all("Partial" in text for text in partial)
        assert len(partial) == 1


@pytest.mark.parametrize(
    ("make", "storage", "column"),
    [
        ("FusedSGD", "plain", None),
        ("FusedAdam", "low_bits", "low_bits"),
        ("FusedAdam", "auto", "low_bits"),
    ],
)
def test_sharded_checkpoints_resume(pair, make, storage, column, tmp_path):
    for different, are_dtensors, keys, said in pair.run(
        Call(programs.resumed, make, storage, str(tmp_path))
    ):
        assert different == 0
        assert are_dtensors
        assert column is None or column in keys
        assert not said


@pytest.mark.parametrize("make", ["FusedAdam", "FusedSGD", "FusedLAMB"])
def test_a_sharded_checkpoint_of_plain_goes_on_with_low_bits(pair, make, tmp_path):
    for different, are_dtensors, keys, said in pair.run(
        Call(programs.resumed, make, "plain", str(tmp_path), then="auto")
    ):
        assert (different, are_dtensors, "low_bits" in keys) == (0, True, True)
        assert "no low bits, and goes on from the bfloat16 weights" in said[0]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_tensor_and_sequence_parallel(pair, options):
    answers = pair.run(Call(programs.tensor_parallel, options))
    assert same(answers[0][0], answers[1][0])
    for weights, alone in answers:
        for mine, other in zip(weights, alone, strict=True):
            assert_close_to_largest(mine, other, PARALLEL)
