"""``examples/tensor_parallel``: two ranks train as one process."""

import functools

import pytest
import torch

from apex.transformer import parallel_state, tensor_parallel
from tests import tolerance
from tests.examples.imported import program
from tests.transformer.parallel_ranks import parallel

STEPS = ["--steps", "3", "--batch", "4", "--length", "8", "--float64"]


def _trained(size, arguments):
    """Losses, and the weights of all ranks together."""
    train = program("tensor_parallel", "train")
    with parallel(size):
        losses, model = train.train(train.parse([*STEPS, *arguments]))
        whole = {}
        for name, param in model.named_parameters():
            found = param.detach()
            if getattr(param, "tensor_model_parallel", False) and size > 1:
                dim = param.partition_dim
                blocks = found.chunk(param.partition_stride, dim)
                gather = tensor_parallel.gather_from_tensor_model_parallel_region
                blocks = [gather(block.movedim(dim, -1)).movedim(-1, dim) for block in blocks]
                found = torch.cat(blocks, dim)
            whole[name] = found
        return losses, whole


def _compared(arguments, rank):
    alone, weights = _trained(1, [])
    losses, found = _trained(2, arguments)
    closes = torch.tensor([losses, alone], dtype=torch.float64)
    tolerance.assert_close_to_largest(*closes, tolerance.TENSOR_PARALLEL)
    for name, weight in found.items():
        tolerance.assert_close_to_largest(weight, weights[name], tolerance.TENSOR_PARALLEL)
    return losses


@pytest.mark.dist
@pytest.mark.parametrize("arguments", [[], ["--sequence-parallel"]])
@pytest.mark.slow
def test_two_ranks_are_one_process(four, arguments):
    losses = four.run(functools.partial(_compared, arguments))
    assert losses[0][2] < losses[0][0]


@pytest.mark.dist
def test_the_program(capsys):
    train = program("tensor_parallel", "train")
    train.main(["--steps", "2", "--batch", "2", "--length", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 ranks, 16864 parameters on each"
    assert len(lines) == 4
    assert parallel_state.is_unitialized()
    assert not torch.distributed.is_initialized()
    with pytest.raises(SystemExit):
        train.main(["--steps", "0"])
    assert "--steps 0: it must be at least 1" in capsys.readouterr().err
