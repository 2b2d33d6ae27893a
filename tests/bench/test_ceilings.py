import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.kernels import clocks
from apex.bench.training import ceilings
from apex.bench.training.counts import count
from apex.bench.training.precision import LEVELS
from apex.bench.training.rows import rows
from tests.bench.reports import level, report

CPU = torch.device("cpu")


# --- ceilings ------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(ceilings, "SIZES", (16, 32))
    monkeypatch.setattr(ceilings, "SECONDS", 0.0)
    monkeypatch.setattr(clocks, "COPY_BYTES", 2**16)


def test_the_keys_are_those_that_rows_read(small):
    found = ceilings.ceilings(CPU)
    assert list(found) == ["flops fp32", "flops fp16", "flops bf16", "bytes"]
    assert all(value > 0 for value in found.values())
    assert {f"flops {dtype}" for dtype in LEVELS.values()} <= found.keys()


def _laps(calls, repeats, ms):
    return {name: [clocks.Lap(ms(name), ms(name))] * repeats for name in calls}


def test_the_rate_is_two_operations_for_each_multiplication(small, monkeypatch):
    """Every product takes 3 ms here, so the largest size has the highest rate."""
    turns = lambda calls, repeats, device: _laps(calls, repeats, lambda name: 3.0)  # noqa: E731
    monkeypatch.setattr(ceilings, "take_turns", turns)
    assert ceilings._flops(torch.float32, CPU) == 2 * 32**3 / 0.003


@pytest.mark.parametrize("faster", list(ceilings.PRODUCTS))
def test_the_faster_layout_counts_and_the_sizes_end_where_it_takes_long(small, monkeypatch, faster):
    seen = []

    def turns(calls, repeats, device):
        seen.append((list(calls), next(iter(calls.values()))().shape[0]))
        slow = 30.0 if seen[-1][1] == 32 else 10.0
        return _laps(calls, repeats, lambda name: slow if name == faster else 80.0)

    monkeypatch.setattr(ceilings, "SIZES", (16, 32, 64))
    monkeypatch.setattr(ceilings, "take_turns", turns)
    assert ceilings._flops(torch.float16, CPU) == 2 * 32**3 / 0.03
    both = list(ceilings.PRODUCTS)
    assert seen == [(both, 16), (both, 16), ([faster], 32), ([faster], 32)]


def test_the_precision_of_products_is_put_back(small, monkeypatch):
    seen = []

    def product(calls, repeats, device):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return _laps(calls, repeats, lambda name: 1.0)

    monkeypatch.setattr(ceilings, "take_turns", product)
    with ceilings._fp32("tf32"):
        ceilings.ceilings(CPU)
        assert set(seen) == {"ieee"}
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_level_with_tf32_is_compared_with_the_ceiling_of_tf32():
    top = {"flops fp32": 1e6, "flops fp32 TF32": 4e6, "flops fp16": 8e6, "bytes": 1e7}
    counted = {"flops": 1000, "moved_bytes": 2000}
    runs = [r for on in (False, True) for r in level("O0", tf32=on, others=counted)]
    runs += level("O2", tf32=True, others=counted)
    found = {row.label: row for row in rows(report(*runs, ceilings=top))}
    assert found["O0 TF32 off"].of_flops == pytest.approx(1.0)  # 1,000 in 1 ms
    assert found["O0 TF32 on"].of_flops == pytest.approx(1 / 4)
    assert found["O2 TF32 on"].of_flops == pytest.approx(1 / 8)
    assert found["O2 TF32 on"].of_bytes == pytest.approx(2 / 10)


@pytest.mark.gpu
def test_on_a_gpu_tf32_is_measured_too():
    begin = time.perf_counter()
    found = ceilings.ceilings(torch.device("cuda"))
    assert time.perf_counter() - begin < 10
    assert found["flops fp32 TF32"] > 0


# --- counts --------------------------------------------------------------------------------------


def _numel(*shapes):
    return 4 * sum(torch.Size(shape).numel() for shape in shapes)


def test_a_linear_layer_by_hand():
    x, layer = torch.ones(4, 3), nn.Linear(3, 5, bias=False)
    flops, moved = count(lambda: layer(x).backward(torch.ones(4, 5)))
    assert flops == 2 * (2 * 4 * 3 * 5)  # forward, gradient of the weight; x needs none
    forward = _numel((4, 3), (3, 5), (4, 5))
    ones = _numel((4, 5))
    weight = _numel((5, 4), (4, 3), (5, 3))  # the product is written as the gradient itself
    assert moved == forward + ones + weight
    x.requires_grad_()
    layer.weight.grad = torch.zeros(5, 3)
    both, moved = count(lambda: layer(x).backward(torch.ones(4, 5)))
    assert both == 3 * (2 * 4 * 3 * 5)
    added = _numel((5, 3), (5, 3), (5, 3))  # in place: the gradient is read and written
    assert moved == forward + ones + weight + _numel((4, 5), (5, 3), (4, 3)) + added


def test_a_convolution_by_hand():
    x, weight = torch.ones(2, 3, 8, 8, requires_grad=True), torch.ones(4, 3, 3, 3)
    weight.requires_grad_()
    dy = torch.ones(2, 4, 6, 6)
    flops, moved = count(lambda: F.conv2d(x, weight).backward(dy))
    once = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    assert flops == 3 * once
    forward = _numel(x.shape, weight.shape, dy.shape)
    backward = _numel(dy.shape, x.shape, weight.shape, x.shape, weight.shape)
    assert moved == forward + backward


@pytest.mark.parametrize(
    ("step", "numbers"),
    [
        (lambda x, y: x.t()[1:].reshape(-1).detach(), 8 + 8),  # no view: 2 x 4 are copied
        (lambda x, y: x.view(6, 2).expand(5, 6, 2), 0),
        (lambda x, y: x + y, 36),
        (lambda x, y: x * x, 24),  # read once
        (lambda x, y: x.add_(y), 36),
        (lambda x, y: torch.add(x, y, out=torch.empty_like(x)), 36),
        (lambda x, y: torch._foreach_add_([x, y], [y, x]), 24 + 24),
        (lambda x, y: x.to(torch.float32), 0),
        (lambda x, y: x.half(), 12 + 6),
        (lambda x, y: x + x[:1].expand(4, 3), 12 + 3 + 12),
        (lambda x, y: torch.ops.aten._unsafe_view(x, [12]), 0),
        (lambda x, y: x.sum().item(), 13),
        (lambda x, y: torch.zeros_like(x), 12),
        (lambda x, y: x.new_ones(5), 5),
        (lambda x, y: torch.empty(100), 0),
    ],
)
def test_bytes_of_single_operations(step, numbers):
    x, y = torch.ones(4, 3), torch.ones(4, 3)
    assert count(lambda: step(x, y))[1] == 4 * numbers


def test_a_training_step_with_amp_is_counted_and_trains():
    from apex import amp
    from apex.optimizers import FusedAdam

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = FusedAdam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0)
    x = torch.randn(16, 64)
    before = model.weight.detach().clone()

    def step():
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    flops, moved = count(step)
    amp.reset()
    assert flops == 2 * (2 * 16 * 64 * 64)
    weights = 64 * 64 + 64
    assert moved > weights * 7 * 4  # Adam alone reads four and writes three numbers for each
    assert not torch.equal(model.weight, before)
