"""``storage="low_bits"`` is float32: the same bits as float32 weights and as float32 masters."""

import pytest
import torch

from apex.ops.lists.storage import join_bits
from apex.ops.lists.tensor_norms import square_sums
from apex.optimizers import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedSGD
from tests.optimizers.common import PATHS, WAYS, maker, on, parameters, same

# Lengths that fill a vector and those that do not, more than torch's kernels take at once, many
# that are joined, and a layout of its own.
SHAPES = ((), (1,), (0,), (7,), (64,), (1000,), (70_000,), *[(5,)] * 20, (2, 3, 4, 5))
INTERPRETED = SHAPES[:6]  # a step of all takes the interpreter 5 s
# Every variant of the catalogue, and what differs where a number of it is 0.
EVERY_WAY = {name: maker(name) for name in WAYS if "contrib" not in name}
MORE = {
    "SGD without decay": lambda params, **more: FusedSGD(params, lr=0.05, **more),
    "LAMB without decay": lambda params, **more: FusedLAMB(
        params, lr=0.02, weight_decay=0.0, **more
    ),
}


def weights(dtype, path):
    params = parameters(torch.bfloat16, INTERPRETED if path == "triton" else SHAPES)
    if params[-1].dim() == 4:
        params[-1].data = params[-1].data.contiguous(memory_format=torch.channels_last)
    return [torch.nn.Parameter(param.detach().to(dtype)) for param in params]


def train(make, dtype, path, factor=1.0, **options):
    """The float32 weights after a few steps on the same gradients."""
    params = weights(dtype, path)
    optimizer = make(params, **options)
    generator = torch.Generator().manual_seed(1)
    with on(path):
        for _ in range(2):
            for param in params:
                noise = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
                param.grad = torch.empty_like(param).copy_(noise)
            optimizer.step_scaled(factor)
    return [wide(param, optimizer.state[param]) for param in params]


def wide(param, state):
    if "low_bits" in state:
        return join_bits(param.detach(), state["low_bits"])
    return state.get("master_param", param).detach().clone()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("make", (EVERY_WAY | MORE).values(), ids=[*EVERY_WAY, *MORE])
def test_as_float32_weights(make, factor, path):
    bits = train(make, torch.bfloat16, path, factor, storage="low_bits")
    assert same(bits, train(make, torch.float32, path, factor))


@pytest.mark.parametrize("path", PATHS)
def test_as_masters_of_adam(path):
    """A learning rate in a tensor, as masters need, is the one without a tensor."""
    options = {"lr": 1e-3, "weight_decay": 0.1}
    bits = train(FusedAdam, torch.bfloat16, path, storage="low_bits", **options)
    masters = {**options, "master_weights": True, "capturable": True}
    assert same(bits, train(FusedAdam, torch.bfloat16, path, **masters))


@pytest.mark.parametrize("path", PATHS)
def test_as_masters_of_lamb(path):
    bits = train(FusedLAMB, torch.bfloat16, path, storage="low_bits", lr=0.02)
    masters = {"lr": 0.02, "reduced_precision_dtype": torch.bfloat16}
    assert same(bits, train(FusedMixedPrecisionLamb, torch.bfloat16, path, **masters))


def test_norms_are_those_of_the_widened_gradients():
    """Clipping, LAMB and NovoGrad multiply weights by them."""
    generator = torch.Generator().manual_seed(2)
    sizes = [*range(1500, 9000, 100), 140_000, 271_000]
    grads = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    assert torch.equal(square_sums(grads), square_sums([grad.float() for grad in grads]))
