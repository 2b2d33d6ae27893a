"""16-bit weights with float32 gradients: ``param.grad_dtype = torch.float32``.

A gradient in float32 is not rounded to 16 bits: neither when a backward pass adds to it, nor before
the optimizer's step.
"""

import pytest
import torch

from apex import amp
from apex._compat import HAS_GRAD_DTYPE
from apex.optimizers import FusedAdam, FusedSGD
from tests.optimizers.common import MODES, PATHS, WAYS, check_steps, give_grads, parameters

pytestmark = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Tensor.grad_dtype: torch 2.13")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def with_float32_gradients(params):
    params = list(params)
    for param in params:
        param.grad_dtype = torch.float32
    return params


@pytest.mark.filterwarnings("ignore:.*bfloat16 weights were lost")
@HALVES
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MODES)
def test_formula_of_the_unrounded_gradient(name, dtype, path):
    params = with_float32_gradients(parameters(dtype))
    steps = 2 if path == "triton" else 10
    check_steps(MODES[name](params), WAYS[name][0].formula, steps, path)
    assert {param.grad.dtype for param in params} == {torch.float32}


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_torchs_adamw_raises(how):
    """What docs/optimizers.md says of it; if this fails, a torch has learned it."""
    params = with_float32_gradients(parameters(torch.bfloat16))
    give_grads(params, 0)
    with pytest.raises(RuntimeError, match=r"expected (scalar type BFloat16|dtype c10::BFloat16)"):
        torch.optim.AdamW(params, lr=1e-3, **{how: True}).step()


def first_gradients(level, kind, wide, **options):
    """Start with weight 1, and add up two scaled gradients in ``param.grad``: 1 and 2**-12."""
    model = torch.nn.Linear(1, 1, bias=False, device="cpu", dtype=torch.float32)
    torch.nn.init.ones_(model.weight)
    optimizer = kind(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0, **options
    )
    if wide:
        with_float32_gradients(model.parameters())
    for x, last in ((1.0, False), (2.0**-12, True)):
        batch = torch.full((1, 1), x, device="cpu", dtype=torch.float32)
        with amp.scale_loss(model(batch).sum(), optimizer, delay_unscale=not last) as scaled:
            scaled.backward()
    [master] = amp.master_params(optimizer)
    return model, optimizer, master


@pytest.mark.parametrize("options", [{}, {"fused_step": True}], ids=["", "fused_step"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_take_the_sum_of_float32(level, options):
    exact = 1.0 + 2.0**-12
    for wide in (True, False):  # a sum in 16 bits loses the second gradient
        model, optimizer, master = first_gradients(level, FusedSGD, wide, **options)
        assert model.weight.grad.dtype == (torch.float32 if wide else model.weight.dtype)
        optimizer.step()
        assert (1.0 - master.item() == exact) == wide
        assert torch.equal(model.weight, master.to(model.weight.dtype))
        amp.reset()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_adam_of_masters_takes_the_sum_of_float32(level):
    _, optimizer, master = first_gradients(level, FusedAdam, wide=True)
    assert master.grad.item() == 1.0 + 2.0**-12
    optimizer.step()
    moment = optimizer.state[master]["exp_avg"].item()
    assert moment == pytest.approx(0.1 * (1.0 + 2.0**-12), rel=2.0**-23)
    amp.reset()
