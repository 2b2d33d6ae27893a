"""Slots of other shapes than the weight: a small Adafactor, written as ours are."""

import pytest
import torch

from apex.optimizers._base import FusedOptimizer
from tests.optimizers.common import give_grads, parameters, same, started, train


class Factored(FusedOptimizer):
    """Adafactor's second moment of matrices, without its clipping: one row and one column."""

    slots = ("row", "column")
    slot_shapes = {
        "row": lambda param: param.shape[:-1],
        "column": lambda param: param.shape[:-2] + param.shape[-1:],
    }

    def __init__(self, params, lr=0.1, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    def _update(self, group, bucket, options):
        for grad, weight, row, column in zip(*bucket.columns, strict=True):
            square = (grad.float() * options.factor).square()
            row.lerp_(square.mean(-1), 1 - group["decay"])
            column.lerp_(square.mean(-2), 1 - group["decay"])
            second = row.unsqueeze(-1) * column.unsqueeze(-2) / row.mean(-1)[..., None, None]
            weight.sub_(group["lr"] * options.factor * grad / (second.sqrt() + 1e-8))


def trained(dtype=torch.bfloat16):
    params, optimizer = started(Factored, dtype, [(3, 5), (2, 4, 6)], steps=2)
    return optimizer, params


def test_they_have_their_shapes_and_go_on_after_loading():
    optimizer, params = trained()
    found = [tuple(optimizer.state[params[1]][slot].shape) for slot in Factored.slots]
    assert found == [(2, 4), (2, 6)]
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = Factored(others)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[others[0]]["row"].dtype == torch.float32
    assert same(train(optimizer, params, range(2, 4)), train(resumed, others, range(2, 4)))


def test_the_state_of_another_shape_is_refused():
    optimizer, _ = trained()
    with pytest.raises(ValueError, match=r"saved column of parameter 0 has shape \(5,\)"):
        Factored(parameters(shapes=[(3, 4), (2, 4, 6)])).load_state_dict(optimizer.state_dict())


def test_other_data_with_the_old_state_are_refused():
    optimizer, params = trained(torch.float32)
    params[0].grad = None
    params[0].data = torch.ones(5, 3)
    give_grads(params, 3)
    with pytest.raises(RuntimeError, match=r"the row of .* \(3,\) .* \(5,\)"):
        optimizer.step()
