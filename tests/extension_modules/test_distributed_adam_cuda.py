"""``distributed_adam_cuda``: the steps of ``FusedAdam`` on shards."""

import distributed_adam_cuda as module
import pytest
import torch

from apex.ops.lists.storage import join_bits, split_bits
from apex.optimizers import FusedAdam

NUMBERS = (0.9, 0.999, 1e-8)


def lists():
    weights = [torch.randn(3, 4), torch.randn(5)]
    return weights, *([torch.zeros_like(w) for w in weights] for _ in range(2))


def fused(weights, grads, steps, mode):
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = FusedAdam(params, lr=0.125, weight_decay=0.01, adam_w_mode=mode == 1)
    for _ in range(steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.float() * 0.5
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("name", ["multi_tensor_fused_adam", "multi_tensor_fused_adam_capturable"])
def test_steps_of_the_optimizer(name, mode):
    weights, *moments = lists()
    grads, outs = [torch.randn_like(w).half() for w in weights], [w.half() for w in weights]
    wanted, scale, flag = fused(weights, grads, 2, mode), torch.tensor([0.5]), torch.zeros(1).int()
    lr = torch.tensor(0.125) if name.endswith("capturable") else 0.125
    for step in (1, 2):
        step = torch.tensor([step], dtype=torch.int32) if name.endswith("capturable") else step
        everything = [weights, *moments, grads, outs]
        getattr(module, name)(65536, flag, everything, scale, lr, *NUMBERS, step, mode, 1, 0.01)
    assert all(map(torch.equal, weights, wanted))
    assert all(map(torch.equal, outs, (w.half() for w in wanted)))
    before = [w.clone() for w in weights]
    getattr(module, name)(65536, flag + 1, everything, scale, lr, *NUMBERS, 3, mode, 1, 0.01)
    assert all(map(torch.equal, weights, before))


def test_remainders():
    weights, *moments = lists()
    grads = [torch.randn_like(w).bfloat16() for w in weights]
    wanted = fused(weights, grads, 2, 1)
    high, low = map(list, zip(*map(split_bits, weights), strict=True))
    outs, flag = [torch.zeros_like(w) for w in high], torch.zeros(1, dtype=torch.int32)
    for step in (1, 2):
        everything = [high, low, *moments, grads, outs]
        numbers = (0.5, 0.125, *NUMBERS, step, 1, 1, 0.01)
        module.multi_tensor_fused_adam_with_param_remainders(65536, flag, everything, *numbers)
        high = [out.clone() for out in outs]
    assert all(map(torch.equal, map(join_bits, outs, low), wanted))
    kept = [x.clone() for x in (*outs, *low)]
    module.multi_tensor_fused_adam_with_param_remainders(65536, flag + 1, everything, *numbers)
    assert all(map(torch.equal, kept, (*outs, *low)))
