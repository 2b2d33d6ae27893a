"""``fused_lamb_cuda.lamb``: the step of ``FusedLAMB`` without NVLAMB."""

import fused_lamb_cuda
import pytest
import torch

from apex.contrib.optimizers import FusedLAMB


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_of_the_optimizer(decay):
    """A norm of more than ``max_grad_norm`` clips, given as a number or as a tensor."""
    torch.manual_seed(0)
    weights = [torch.randn(3, 4), torch.randn(5)]
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = FusedLAMB(params, lr=0.1, weight_decay=decay, max_grad_norm=1.0)
    moments = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    for step in (1, 2):
        grads = [torch.randn_like(w) for w in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        norm = torch.cat([g.flatten() for g in grads]).norm()
        norm = norm if step == 1 else norm.item()
        numbers = (0.1, 0.9, 0.999, 1e-6, step, 1, decay, 1, 1, norm, 1.0)
        flag = torch.zeros(1, dtype=torch.int32)
        assert fused_lamb_cuda.lamb(65536, flag, [grads, weights, *moments], *numbers) is None
        for weight, param in zip(weights, params, strict=True):
            torch.testing.assert_close(weight, param.detach())
