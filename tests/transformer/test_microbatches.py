"""Numbers of micro-batches."""

import logging

import pytest

from apex.transformer.microbatches import (
    ConstantNumMicroBatches,
    RampupBatchsizeNumMicroBatches,
    build_num_microbatches_calculator,
)


def test_constant():
    calculator = build_num_microbatches_calculator(0, None, 24, 2, 3)
    assert isinstance(calculator, ConstantNumMicroBatches)
    calculator.update(10**6, True)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (4, 24)
    assert calculator.micro_batch_size == 2
    with pytest.raises(ValueError, match="global batch size 25 is not divisible"):
        ConstantNumMicroBatches(25, 2, 3)


def test_ramp_up():
    """From 6 to 24 by 6 over 900 samples: three steps, after each 300."""
    calculator = build_num_microbatches_calculator(0, ["6", "6", "900"], 24, 2, 3)
    assert isinstance(calculator, RampupBatchsizeNumMicroBatches)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (1, 6)
    wanted = {0: 6, 299: 6, 300: 12, 599: 12, 600: 18, 899: 18, 900: 24, 901: 24, 10**6: 24}
    for consumed, size in wanted.items():
        calculator.update(consumed, True)
        assert (calculator.get(), calculator.get_current_global_batch_size()) == (size // 6, size)


def test_ramp_up_that_does_not_fit_micro_batches():
    calculator = RampupBatchsizeNumMicroBatches(4, 4, 400, 12, 2, 3)
    assert calculator.get() == 0
    with pytest.raises(ValueError, match="global batch size 8 is not divisible by .* = 6"):
        calculator.update(200, True)
    calculator.update(200, False)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (1, 8)


def test_a_batch_that_is_made_smaller():
    """To whole micro-batches, but not to none; at each step of a ramp-up, too."""
    calculator = build_num_microbatches_calculator(0, None, 23, 2, 3, True)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (3, 18)
    with pytest.raises(ValueError, match="global batch size 5 is not divisible by .* = 6"):
        build_num_microbatches_calculator(0, None, 5, 2, 3, decrease_batch_size_if_needed=True)
    calculator = build_num_microbatches_calculator(0, [8, 4, 400], 16, 2, 3, True)
    found = []
    for consumed in (0, 200, 401):
        calculator.update(consumed, True)
        found.append((calculator.get(), calculator.get_current_global_batch_size()))
    assert found == [(1, 6), (2, 12), (2, 12)]


def test_no_steps_or_no_samples():
    for start, samples in ((12, 100), (6, 0)):
        calculator = RampupBatchsizeNumMicroBatches(start, 6, samples, 12, 2, 3)
        for consumed in (0, 50, 100, 101):
            calculator.update(consumed, True)
            assert calculator.get() == 2


def test_rank_0_logs(caplog):
    with caplog.at_level(logging.INFO, logger="apex"):
        for rank in (1, 0):
            assert not caplog.records
            build_num_microbatches_calculator(rank, None, 24, 2, 3)
            build_num_microbatches_calculator(rank, [6, 6, 900], 24, 2, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "number of micro-batches: 4",
        "global batch size: from 6 to 24 by 6 over 900 samples",
    ]


@pytest.mark.parametrize(
    ("rampup", "sizes", "match"),
    [
        (None, (25, 2, 3), "global batch size 25 is not divisible by micro_batch_size x .* = 6"),
        (None, (24, 0, 3), "micro_batch_size is 0; pass a positive number"),
        (None, (24, 2, 0), "data_parallel_size is 0; pass a positive number"),
        (None, (0, 2, 3), "global_batch_size is 0; pass a positive number"),
        ([0, 6, 900], (24, 2, 3), "start_batch_size is 0; pass a positive number"),
        ([6, 6, 900], (0, 2, 3), "global_batch_size is 0; pass a positive number"),
        ([6, 6, -1], (24, 2, 3), "by 6 over -1 samples"),
        ([6, 6], (24, 2, 3), r"rampup_batch_size is \[6, 6\]; pass \(start_batch_size"),
        ([6, 0, 900], (24, 2, 3), "batch_size_increment is 0; pass a positive number"),
        ([6, 5, 900], (24, 2, 3), "cannot ramp up batches from 6 to 24 by 5 over 900 samples"),
        ([30, 6, 900], (24, 2, 3), "cannot ramp up batches from 30 to 24 by 6"),
    ],
)
def test_errors(rampup, sizes, match):
    with pytest.raises(ValueError, match=match):
        build_num_microbatches_calculator(0, rampup, *sizes)
