"""The loss scalers against references of a few lines, and what they say about gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apex.amp.scaler import LossScaler as AmpLossScaler
from apex.fp16_utils import DynamicLossScaler, LossScaler

OVERFLOWS = st.lists(st.sampled_from([False, False, False, True]), max_size=60)


def reference(overflows, scale, factor, window, floor, ceiling):
    """The scale after each iteration: back off at once, grow after ``window`` clean ones."""
    scales, clean = [], 0
    for overflow in overflows:
        clean = 0 if overflow else clean + 1
        if overflow:
            scale = max(scale / factor, floor)
        elif clean == window:
            scale, clean = min(scale * factor, ceiling), 0
        scales.append(scale)
    return scales


@given(
    OVERFLOWS,
    st.sampled_from([1.0, 2.0**16, 1000.0]),
    st.sampled_from([2.0, 1.5, 4.0]),
    st.integers(1, 5),
    st.sampled_from([1.0, 0.25, None]),
    st.sampled_from([2.0**24, None]),
)
def test_dynamic_scaler(overflows, scale, factor, window, floor, ceiling):
    scaler = DynamicLossScaler(scale, factor, window, min_loss_scale=floor, max_loss_scale=ceiling)
    found = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        found.append(scaler.loss_scale)
    bounds = (floor or 2.0**-126, 2.0**126 if ceiling is None else ceiling)
    assert found == reference(overflows, scale, factor, window, *bounds)
    assert scaler.cur_iter == len(overflows)


@given(OVERFLOWS, st.integers(1, 5), st.sampled_from([2.0**10, None]))
def test_scaler_of_amp(overflows, window, floor):
    scaler = AmpLossScaler("dynamic", 2.0**16, 2.0, window, floor, 2.0**20)
    found = []
    for overflow in overflows:
        scaler._has_overflow = overflow
        assert scaler.update_scale() == overflow
        scaler.clear_overflow_state()
        found.append(scaler.loss_scale())
    bounds = (floor or 2.0**-126, 2.0**20)
    assert found == reference(overflows, 2.0**16, 2.0, window, *bounds)


def test_static_scaler_never_changes():
    scaler = LossScaler(128)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
    assert (scaler.loss_scale, scaler.cur_scale) == (128.0, 128.0)
    assert not scaler.has_overflow([tensor_with_grad(math.nan)])
    scaler.cur_scale = 4.0
    assert scaler.loss_scale == 4.0


def tensor_with_grad(*values, dtype=torch.float32):
    tensor = torch.zeros(len(values), dtype=dtype)
    tensor.grad = torch.tensor(values, dtype=dtype)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_overflow_is_an_element_that_is_not_finite(dtype):
    """The original asked the float32 sum, which is inf for large finite gradients too."""
    largest = torch.finfo(dtype).max
    scaler = DynamicLossScaler()
    assert not scaler.has_overflow([tensor_with_grad(largest, largest, dtype=dtype)])
    clean = [tensor_with_grad(1.0, dtype=dtype), torch.zeros(1)]  # the second has no gradient
    for bad in (math.inf, -math.inf, math.nan):
        params = [*clean, tensor_with_grad(0.0, bad, dtype=dtype), tensor_with_grad(1.0)]
        assert scaler.has_overflow(iter(params))
    assert not scaler.has_overflow(clean)
    assert not scaler.has_overflow([])
    assert scaler._has_inf_or_nan(torch.tensor([1.0, math.nan]))
    assert not scaler._has_inf_or_nan(torch.tensor([1.0]))


def test_overflow_in_a_sparse_gradient():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    assert not DynamicLossScaler().has_overflow(embedding.parameters())
    (embedding(torch.tensor([2])).sum() * math.inf).backward()
    assert DynamicLossScaler().has_overflow(embedding.parameters())


@pytest.mark.parametrize("make", [LossScaler, DynamicLossScaler])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_backward(make, dtype):
    scaler = make(2.0**10)
    weight = torch.ones(1, dtype=dtype, requires_grad=True)
    loss = (weight * (1.0 + torch.finfo(dtype).eps)).sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad == 2.0**11 * (1.0 + torch.finfo(dtype).eps)


def test_scaling_in_a_hook():
    scaler = LossScaler(8.0)
    module = torch.nn.Linear(2, 1, bias=False)
    module.register_full_backward_hook(scaler.scale_gradient)
    x = torch.ones(1, 2, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, 8.0 * module.weight.detach())
    assert scaler.scale_gradient(None, (None, torch.ones(1)), None)[0] is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_scale": 0}, "init_scale was 0"),
        ({"init_scale": math.inf}, "init_scale was inf"),
        ({"scale_factor": 1.0}, "scale_factor was 1.0"),
        ({"scale_window": 0}, "scale_window was 0"),
        ({"scale_window": 2.5}, "scale_window was 2.5"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "min_loss_scale was 4.0"),
    ],
)
def test_bad_numbers(options, text):
    with pytest.raises(ValueError, match=text):
        DynamicLossScaler(**options)


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, "dynamic", None, 1e-300, 1e40])
def test_bad_static_scale(scale):
    """1e40 is inf in float32, 1e-300 is 0: gradients would be, too."""
    with pytest.raises(ValueError, match=r"must be a number from 2\*\*-126 to 2\*\*126"):
        LossScaler(scale)


def test_the_ceiling_bounds_the_first_scale_too():
    assert DynamicLossScaler(2.0**30, max_loss_scale=2.0**24).loss_scale == 2.0**24
    scaler = DynamicLossScaler(2.0**125, scale_window=1)
    scaler.update_scale(False)
    scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**126


def test_defaults_of_2018():
    scaler = DynamicLossScaler()
    assert (scaler.loss_scale, scaler.scale_factor, scaler.scale_window) == (2.0**32, 2.0, 1000)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (1.0, None)
