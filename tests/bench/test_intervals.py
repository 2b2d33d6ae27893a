"""Intervals and the rule for quality, on samples whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from apex.bench.intervals import interval, judge

PAGES = 1000
LEVELS = 5


def _pages(seeds, losses, size, sd, draw):
    """Paired differences of levels that lose so many points, accuracies in whole test samples."""
    sample = 100 / size
    base = draw.uniform(95, 98, (PAGES, 1, 1)) + draw.normal(0, sd, (PAGES, seeds, 1))
    levels = base - np.array(losses) + draw.normal(0, sd, (PAGES, seeds, len(losses)))
    return sample * (np.round(levels / sample) - np.round(base / sample))


def _judged(pages, size):
    margin, least = max(0.5, 300 / size), 100 / size / math.sqrt(2)
    for page in pages:
        of = [judge(list(one), margin, comparisons=LEVELS, least_sd=least) for one in page.T]
        yield margin, of


OFTEN = {(3, 599), (5, 100), (10, 10_000), (30, 599)}  # each value in one pair at least


@pytest.mark.parametrize(
    ("seeds", "size", "sd"),
    [
        pytest.param(
            seeds, size, sd, marks=[] if (seeds, size) in OFTEN else pytest.mark.exhaustive
        )
        for seeds in (3, 5, 10, 30)
        for size, sd in ((599, 0.3), (100, 1.0), (10_000, 0.1))
    ],
)
@pytest.mark.slow
def test_a_loss_of_the_margin_is_called_fine_on_at_most_5_percent_of_pages(seeds, size, sd, capsys):
    draw = np.random.default_rng([seeds, size])
    margin = max(0.5, 300 / size)
    bad = _pages(seeds, [margin] * LEVELS, size, sd, draw)
    wrong = sum(any(one.fine for one in of) for _, of in _judged(bad, size))
    assert wrong <= stats.binom.ppf(0.9995, PAGES, 0.05)
    none = _pages(seeds, [0.0] * LEVELS, size, sd, draw)
    found = [one for _, of in _judged(none, size) for one in of]
    fine, worse = sum(one.fine for one in found), sum(one.worse for one in found)
    assert worse <= stats.binom.ppf(0.9995, PAGES, 0.05)
    if seeds == 30:
        assert fine > 0.9 * len(found)
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{seeds} seeds, {size} samples, sd {sd}: wrongly fine on {wrong} of {PAGES} pages, "
            f"no loss confirmed {100 * fine / len(found):.1f} %",
            end="",
        )


@pytest.mark.parametrize("lost", [0.5, -0.3])
def test_the_interval_has_the_truth_at_all_levels_of_95_percent_of_pages(lost):
    draw = np.random.default_rng(1)
    pages = -lost + draw.normal(0, 0.3, (PAGES, LEVELS, 5))
    hits = 0
    for page in pages:
        of = [judge(list(one), 0.5, comparisons=LEVELS).interval for one in page]
        hits += all(one.low <= -lost <= one.high for one in of)
    assert hits >= stats.binom.ppf(0.0005, PAGES, 0.95)
    assert hits <= stats.binom.ppf(0.9995, PAGES, 0.975)  # Bonferroni is a little too wide


def test_the_rule_by_hand():
    # sd 0.1; t(0.995, 2) = 9.925: half = 9.925 x 0.1 / sqrt(3) = 0.573
    found = judge([0.0, 0.1, -0.1], 0.5, comparisons=5)
    assert found.interval.value == pytest.approx(0.0, abs=1e-12)
    assert found.interval.high == pytest.approx(0.573, rel=1e-3)
    assert (found.fine, found.worse) == (False, False)
    alone = judge([0.0, 0.1, -0.1], 0.5)  # t(0.975, 2) = 4.303: half 0.248
    assert (alone.fine, alone.worse, alone.needed) == (True, False, None)
    lost = judge([-0.9, -1.0, -1.1], 0.5)
    assert (lost.fine, lost.worse) == (False, True)


def test_equal_differences_have_the_spread_of_a_rounded_sample():
    sample = 100 / 600
    found = judge([0.0] * 3, 0.5, least_sd=sample / math.sqrt(2))
    half = stats.t.ppf(0.975, 2) * sample / math.sqrt(2) / math.sqrt(3)
    assert found.interval.high == pytest.approx(half)
    assert found.interval.low == pytest.approx(-half)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.4), (-0.3, 0.2), (-0.8, 0.4)])
def test_as_many_seeds_as_are_named_tell_in_four_of_five_cases(mean, sd):
    draw = np.random.default_rng(2)
    few = mean + sd * np.array([-1.0, 0.0, 1.0])  # whose sd is the true one
    needed = judge(list(few), 0.5).needed
    assert 4 <= needed <= 60
    for seeds, least in ((needed, 0.75), (max(3, needed // 2), 0.0)):
        samples = mean + draw.normal(0, sd, (400, seeds))
        tell = [one.fine or one.worse for one in (judge(list(x), 0.5) for x in samples)]
        assert np.mean(tell) >= least
    assert np.mean(tell) < 0.7  # half as many do not


def test_what_no_number_of_seeds_would_tell_is_not_advised():
    assert judge([-0.5, -0.4, -0.6], 0.5).needed is None  # the truth seems to be the margin


@pytest.mark.parametrize("values", [[], [0.1, 0.2], [0.1, math.nan, 0.2], [math.inf] * 3])
def test_too_few_or_no_numbers_are_not_judged(values):
    assert judge(values, 0.5) is None


@pytest.mark.parametrize("count", [3, 5, 40])
def test_intervals_are_scipys_t(count):
    logs = np.random.default_rng(0).normal(0.2, 0.1, count)
    found = interval(list(logs))
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert found.value == pytest.approx(stats.gmean(np.exp(logs)), rel=1e-12)
    assert (found.low, found.high) == pytest.approx(np.exp(expected), rel=1e-12)
    assert judge(list(logs), 9.0).interval.low == pytest.approx(expected.low, rel=1e-12)


def test_too_few_values_give_no_interval():
    assert interval([]) is interval([0.1, 0.2]) is None
