"""The scale rule as a state machine, and ``LossScaler`` by hand."""

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from apex.amp.scaler import (
    LossScaler,
    axpby_check_overflow_python,
    iter_params,
    scale_check_overflow,
    scale_check_overflow_python,
)
from apex.ops.lists import unscale as unscaling
from apex.ops.lists.unscale import unscale_
from tests.amp.gradients.sequences import Scale


class ScalerMachine(RuleBasedStateMachine):
    """Any sequence of passes, steps, writes and restores; with and without a free host read."""

    @initialize(
        start=st.sampled_from([1.0, 2.0**16, 2.0**24]),
        window=st.integers(1, 4),
        floor=st.sampled_from([2.0**-126, 0.5, 1.0]),
        growth=st.sampled_from([1.0, 1.3, 2.0]),
        backoff=st.sampled_from([0.5, 0.7, 1.0]),
        on_host=st.booleans(),
    )
    def begin(self, start, window, floor, growth, backoff, on_host):
        reads = LossScaler if on_host else AsOnADevice
        self.scaler = reads(
            "dynamic",
            start,
            scale_window=window,
            min_loss_scale=floor,
            growth_factor=growth,
            backoff_factor=backoff,
        )
        self.rule = Scale(start, window, floor, 2.0**24, growth, backoff)
        self.waiting = False

    @rule(overflow=st.booleans())
    def checked_pass(self, overflow):
        self.scaler.finish_pass(torch.tensor(float(overflow)))
        self.rule.finish_pass(overflow or self.waiting)
        self.waiting = False

    @rule(overflow=st.booleans())
    def unchecked_pass(self, overflow):
        self.scaler.finish_pass(torch.tensor(float(overflow)), check=False)
        self.waiting |= overflow

    @rule()
    def step(self):
        self.scaler.count_step()
        self.rule.count()

    @rule(scale=st.sampled_from([0.25, 3.0, 2.0**20]))
    def written_by_hand(self, scale):
        self.scaler._loss_scale = scale
        self.rule.value = scale

    @rule(clean=st.integers(0, 9))
    def restored(self, clean):
        self.scaler._unskipped = clean
        self.rule.clean = clean

    @invariant()
    def equal(self):
        if hasattr(self, "scaler"):
            assert self.scaler.loss_scale() == self.rule.value
            assert self.scaler._unskipped == self.rule.clean


class AsOnADevice(LossScaler):
    """A scaler that never reads its state on the host, as where a read would wait."""

    _waits_for_nothing = False


ScalerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, derandomize=True, deadline=None
)
TestScaler = ScalerMachine.TestCase


def test_defaults():
    scaler = LossScaler("dynamic")
    assert (scaler.dynamic, scaler.loss_scale(), scaler._unskipped) == (True, 65536.0, 0)
    assert (scaler._scale_seq_len, scaler._max_loss_scale) == (2000, 2.0**24)
    assert scaler._min_loss_scale is None
    assert LossScaler(128).loss_scale() == 128.0
    assert LossScaler("dynamic", max_loss_scale=None).loss_scale() == 65536.0
    old = LossScaler("dynamic", 8.0, 4.0, 1)
    old.count_step()
    assert old.loss_scale() == 32.0


def test_growth_stops_at_the_ceiling_and_counts_past_the_window():
    scaler = LossScaler("dynamic", init_scale=2.0**23, scale_window=10)
    scaler._unskipped = 25  # loaded from a run with a longer window
    scaler.count_step()
    assert scaler.loss_scale() == 2.0**24
    scaler._unskipped = 9
    scaler.count_step()
    assert scaler.loss_scale() == 2.0**24


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"growth_factor": 0.5}, "growth_factor was 0.5"),
        ({"backoff_factor": 0.0}, "backoff_factor was 0.0"),
        ({"scale_window": 0}, "growth_interval was 0"),
        ({"init_scale": math.inf}, "init_scale was inf"),
        ({"init_scale": 1e300}, "init_scale was 1e"),
        ({"scale_window": 1.5}, "growth_interval was 1.5"),
        ({"max_loss_scale": 0.0}, "max_loss_scale was 0.0"),
        ({"min_loss_scale": -5.0}, "min_loss_scale was -5.0"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_loss_scale was 8.0"),
        *(
            ({"loss_scale": number}, "loss_scale was")
            for number in (0, "0", math.nan, math.inf, -1)
        ),
    ],
)
def test_bad_numbers_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=f"loss scaling: {match}.* must be"):
        LossScaler(**{"loss_scale": "dynamic", **kwargs})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("value", "place"), [(math.inf, -1), (-math.inf, 0), (math.nan, 17)])
@pytest.mark.parametrize("torchs", [True, False])
def test_unscale_checks_every_element(dtype, value, place, torchs, monkeypatch):
    if not torchs:  # as bfloat16 on CUDA, which torch's kernel does not take
        monkeypatch.setattr(unscaling, "_torch_unscales", lambda device, dtype: False)
    grads = [torch.full((n,), 4.0, dtype=dtype) for n in (1, 33, 0, 1000)]
    assert unscale_(grads, torch.tensor(2.0)).item() == 0.0
    assert all(torch.equal(g, torch.full_like(g, 2.0)) for g in grads)
    grads[3][place] = value
    assert unscale_(grads, torch.tensor(2.0)).item() == 1.0


def test_unscale_takes_mixed_dtypes_complex_and_nothing():
    grads = [torch.ones(3, dtype=d) for d in (torch.float16, torch.float32, torch.complex64)]
    assert unscale_(grads, torch.tensor(4.0)).item() == 0.0
    assert all(torch.equal(g, torch.full_like(g, 0.25)) for g in grads)
    assert unscale_([], torch.tensor(4.0)).item() == 0.0
    assert unscale_(grads, 0.25) is None
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)


@pytest.mark.parametrize("scale", [100.0, 2.0**25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_inverse_of_a_static_scale_is_not_rounded_to_16_bits(dtype, scale):
    """2**-25 would be 0 in float16."""
    grads = [torch.arange(1.0, 256.0).to(dtype)]
    expected = (grads[0].float() * (1.0 / scale)).to(dtype)
    unscale_(grads, scale)
    assert torch.equal(grads[0], expected)


@pytest.mark.parametrize("model", [torch.float16, torch.float32])
@pytest.mark.parametrize("master", [torch.float16, torch.float32])
def test_public_unscale_methods(model, master):
    scaler = LossScaler("dynamic", init_scale=8.0)
    grads = [torch.full((5,), 16.0, dtype=model)]
    out = [torch.zeros(5, dtype=master)]
    scaler.unscale(grads, out, None)
    assert torch.equal(out[0], torch.full((5,), 2.0, dtype=master))
    scaler.unscale_with_stashed(grads, [torch.ones(5)], out)
    assert torch.equal(out[0], torch.full((5,), 3.0, dtype=master))
    scaler.unscale_with_stashed_python(grads, [torch.ones(5)], out, 0.25, 2.0)
    assert torch.equal(out[0], torch.full((5,), 6.0, dtype=master))
    assert not scaler.update_scale()
    grads[0][4] = math.inf
    scaler.unscale_python(grads, out, 8.0)
    assert scaler._has_overflow
    assert scaler._overflow_buf.tolist() == [1]
    assert scaler.update_scale()
    assert scaler.loss_scale() == 4.0
    scaler.clear_overflow_state()
    assert not scaler._has_overflow


def test_flags_of_passes_without_a_check_add_up():
    scaler = LossScaler("dynamic", init_scale=8.0)
    for flag in (1.0, 0.0):
        scaler.finish_pass(torch.tensor(flag), check=False)
    assert scaler.loss_scale() == 8.0
    scaler.finish_pass(torch.tensor(0.0))
    assert scaler.loss_scale() == 4.0


@pytest.mark.parametrize("reads", [LossScaler, AsOnADevice])
def test_an_overflow_starts_the_count_of_clean_steps_anew(reads):
    scaler = reads("dynamic", init_scale=8.0, scale_window=3)
    scaler.count_step()
    scaler.count_step()
    scaler.finish_pass(torch.tensor(1.0))
    assert (scaler.loss_scale(), scaler._unskipped) == (4.0, 0)


def test_old_helpers():
    grad, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert not scale_check_overflow_python(grad, out, 2.0, True)
    assert torch.equal(out, torch.tensor([2.0, 4.0]))
    assert not axpby_check_overflow_python(grad, torch.ones(2), out, 2.0, 3.0, True)
    assert torch.equal(out, torch.tensor([5.0, 7.0]))
    assert scale_check_overflow_python(grad / 0, out, 2.0, True)
    assert axpby_check_overflow_python(grad / 0, grad, out, 2.0, 3.0, True)
    assert not scale_check_overflow(grad, 2.0)
    assert torch.equal(grad, torch.tensor([2.0, 4.0]))
    groups = [{"params": [grad]}, {"params": [out]}]
    assert [id(p) for p in iter_params(groups)] == [id(grad), id(out)]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 8.0)
    scaler = LossScaler("dynamic", init_scale=8.0)
    assert not scaler.unscale_and_update([{"params": [parameter]}], 8.0)
    assert torch.equal(parameter.grad, torch.ones(2))
