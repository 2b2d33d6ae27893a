"""``amp.float16_weights``: torch's own scaler with float16 weights, and with torch's wrappers."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex._compat import HAS_GRAD_DTYPE
from apex.amp import half_weights
from apex.optimizers import FusedAdam, FusedSGD
from tests.ranks import Ranks
from tests.tolerance import HALF_ROUNDING, HALF_WEIGHTS

SCALE, CLIP, STEPS = 2.0**10, 0.5, 8
NEEDS_2_13 = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Tensor.grad_dtype: torch 2.13")


def network(dtype):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers).to(dtype)


def train(model, dtype, optimizer_class=FusedAdam, seed=0):
    """Losses of a loop that knows nothing of apex but its optimizer: two passes for each step."""
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    if dtype == torch.float16:
        assert amp.float16_weights(optimizer) is optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == torch.float16)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    losses = []
    for _ in range(STEPS):
        for _ in range(2):
            loss = (model(x.to(dtype)).float() - x[:, :4]).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if dtype == torch.float16:
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_ranks(rank, how):
    """Losses in float32 and in float16."""
    found = []
    for dtype in (torch.float32, torch.float16):
        model = network(dtype)
        if how == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view=how == "views")
        found.append(train(model, dtype, seed=dist.get_rank()))
    return found


def assert_trained_alike(losses, others):
    found, wanted = torch.tensor(losses), torch.tensor(others)
    torch.testing.assert_close(found, wanted, rtol=HALF_WEIGHTS, atol=0.0)
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks"), seconds=150, count=2) as ranks:
        yield ranks


@NEEDS_2_13
@pytest.mark.parametrize("optimizer_class", [FusedAdam, FusedSGD])
def test_a_loop_of_torchs_trains_float16_weights(optimizer_class):
    wanted, found = (
        train(network(dtype), dtype, optimizer_class) for dtype in (torch.float32, torch.float16)
    )
    assert_trained_alike(found, wanted)


@NEEDS_2_13
@pytest.mark.slow
@pytest.mark.parametrize("how", ["DDP", "views", "FSDP2"])
def test_with_what_spreads_a_model_over_ranks(pair, how):
    """In a backward pass DDP expects gradients of the weights' dtype."""
    for wanted, found in pair.run(functools.partial(on_ranks, how=how)):
        assert_trained_alike(found, wanted)


@NEEDS_2_13
def test_gradients_are_divided_in_float32():
    """1e-7 is no number of float16; float16 weights are the only ones that change."""
    half, wide = (
        torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float16, torch.float32)
    )
    optimizer = amp.float16_weights(FusedSGD([half, wide], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale(1e-7 * half.float().sum() + wide.sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(half.grad, torch.full((3,), 1e-7), rtol=HALF_ROUNDING, atol=0.0)
    assert torch.equal(wide.grad, torch.ones(3))
    scaler.step(optimizer)
    assert (half.grad_dtype, wide.grad_dtype) == (torch.float16, torch.float32)
    assert torch.equal(wide, torch.zeros(3))


@NEEDS_2_13
def test_a_skipped_step_leaves_gradients_of_the_weights_dtype():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer, scaler = amp.float16_weights(FusedAdam([weight])), torch.amp.GradScaler("cpu")
    (scaler.scale(weight.float().sum()) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones_like(weight))
    assert (weight.grad_dtype, weight.grad.dtype) == (torch.float16,) * 2
    assert scaler.get_scale() == 2.0**15


@NEEDS_2_13
def test_a_dropped_batch_leaves_gradients_of_the_weights_dtype():
    """`unscale_`, no `step`: the next backward of torch's DDP would raise."""
    weight, other = (torch.nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2))
    optimizers = [amp.float16_weights(FusedAdam([one])) for one in (weight, other)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=SCALE) for _ in optimizers]
    for scaler, optimizer, one in zip(scalers, optimizers, (weight, other), strict=True):
        scaler.scale(one.float().sum()).backward()
        scaler.unscale_(optimizer)
    optimizers[0].zero_grad()
    scalers[0].update()
    assert other.grad.dtype == torch.float32  # of another scaler, which goes on
    scalers[0].scale(weight.float().sum()).backward()
    assert weight.grad.dtype == torch.float16


@NEEDS_2_13
def test_other_optimizers_meet_torchs_scaler():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    amp.float16_weights(FusedAdam([weight]))
    scaler, other = torch.amp.GradScaler("cpu"), FusedAdam([weight])
    scaler.scale(weight.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(other)


@NEEDS_2_13
def test_an_optimizer_of_torch_is_refused_with_the_line_to_write():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    said = r"AdamW cannot update .*amp.float16_weights\(apex.optimizers.FusedAdam\("
    with pytest.raises(TypeError, match=said):
        amp.float16_weights(torch.optim.AdamW([weight]))


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr(half_weights, "HAS_GRAD_DTYPE", False)
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"needs torch 2.13 .* Use apex.amp.GradScaler"):
        amp.float16_weights(FusedAdam([weight]))
