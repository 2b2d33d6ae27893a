"""Intervals and the rule for quality, on samples whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from apex.commands.bench.intervals import interval, judge

PAGES = 1000


SAMPLE = 100 / 599  # points: of the digits' test set
# Standard deviations of the control and of the levels, and one that a seed has in common.
SPREADS = {
    "alike": ((0.4, 0.4, 0.4, 0.4), 0.0),
    "seeds differ more than levels": ((0.2, 0.2, 0.2, 0.2), 1.0),
    "the control by the seed alone": ((0.0, *[0.3] * 5), 0.3),
    "one level twice": ((0.3, 0.3, 0.3, 0.6), 0.0),
    "one level thrice": ((0.3, 0.3, 0.3, 0.9), 0.0),
}


def _pages(seeds, lost, spread, sample, draw):
    """Pairs of each level on each page: all lose so many points, accuracies in whole samples."""
    own, shared = SPREADS[spread]
    base = draw.uniform(95, 98, (PAGES, 1, 1)) + draw.normal(0, shared, (PAGES, seeds, 1))
    values = base + draw.normal(0, 1, (PAGES, seeds, len(own))) * own
    values[:, :, 1:] -= lost
    values = sample * np.round(values / sample)
    for page in values:
        yield [list(zip(page[:, k], page[:, 0], strict=True)) for k in range(1, len(own))]


def _judged(pages, margin, sample):
    for among in pages:
        given = {"among": among, "comparisons": len(among), "least_sd": sample / math.sqrt(2)}
        yield [judge(pairs, margin, **given) for pairs in among]


def one(differences):
    """Pairs of these differences from a control that has one value alone."""
    return [(value, 0.0) for value in differences]


OFTEN = {(3, "alike"), (6, "one level thrice"), (10, "seeds differ more than levels")}


@pytest.mark.parametrize(
    ("seeds", "spread"),
    [
        pytest.param(
            seeds, spread, marks=[] if (seeds, spread) in OFTEN else pytest.mark.exhaustive
        )
        for seeds in (3, 6, 10)
        for spread in SPREADS
    ],
)
@pytest.mark.slow
def test_intervals_have_the_truth_and_few_pages_call_a_loss_of_the_margin_fine(
    seeds, spread, capsys
):
    """A level that spreads three times as much as the others is the worst of these."""
    draw = np.random.default_rng([seeds, *spread.encode()])
    margin = 3 * SAMPLE  # in whole samples, so that what is lost is the margin
    bad = list(_judged(_pages(seeds, margin, spread, SAMPLE, draw), margin, SAMPLE))
    wrong = sum(any(level.fine for level in page) for page in bad)
    held = sum(all(j.interval.low <= -margin <= j.interval.high for j in page) for page in bad)
    assert wrong <= stats.binom.ppf(0.9995, PAGES, 0.05)
    expected = 0.91 if spread == "one level thrice" else 0.95
    assert held >= stats.binom.ppf(0.0005, PAGES, expected)
    good = list(_judged(_pages(seeds, 0.0, spread, SAMPLE, draw), margin, SAMPLE))
    fine = np.mean([level.fine for page in good for level in page])
    assert sum(any(level.worse for level in page) for page in good) <= wrong + 0.01 * PAGES
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{seeds} seeds, {spread}: all intervals of {held} of {PAGES} pages have the truth, "
            f"{wrong} are wrongly fine, no loss confirmed {100 * fine:.0f} %",
            end="",
        )


@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_no_interval_is_narrower_than_dunnetts(groups, shared):
    draw = np.random.default_rng([groups, int(shared)])
    values = 98 + draw.normal(0, 0.3, (6, groups + 1)) + shared * draw.normal(0, 1, (6, 1))
    among = [list(zip(values[:, k], values[:, 0], strict=True)) for k in range(1, groups + 1)]
    dunnett = stats.dunnett(*values[:, 1:].T, control=values[:, 0], random_state=0)
    ends = dunnett.confidence_interval(0.95)
    for pairs, low, high in zip(among, ends.low, ends.high, strict=True):
        found = judge(pairs, 0.5, among=among, comparisons=groups).interval
        assert found.value == pytest.approx((low + high) / 2)
        assert found.high - found.low >= 0.99 * (high - low)  # its quantile is drawn


def test_the_rule_by_hand():
    # sd 0.1; t(0.995, 2) = 9.925: half = 9.925 x 0.1 / sqrt(3) = 0.573
    found = judge(one([0.0, 0.1, -0.1]), 0.5, comparisons=5)
    assert found.interval.value == pytest.approx(0.0, abs=1e-12)
    assert found.interval.high == pytest.approx(0.573, rel=1e-3)
    assert (found.fine, found.worse) == (False, False)
    alone = judge(one([0.0, 0.1, -0.1]), 0.5)  # t(0.975, 2) = 4.303: half 0.248
    assert (alone.fine, alone.worse, alone.needed) == (True, False, None)
    lost = judge(one([-0.9, -1.0, -1.1]), 0.5)
    assert (lost.fine, lost.worse) == (False, True)
    # pooled with a level of sd 0.3: sqrt((0.01 + 0.09) / 2) on 4 x 2 / 5 x 2 = 3.2 degrees
    pooled = judge(one([0.0, 0.1, -0.1]), 9.0, among=[one([0.0, 0.1, -0.1]), one([0.3, -0.3, 0.0])])
    half = stats.t.ppf(0.975, 3.2) * math.sqrt(0.05 / 3)
    assert pooled.interval.high == pytest.approx(half)
    # both spread by 0.1 on 4 degrees, and their differences not at all
    apart = judge([(98.0, 98.0), (98.1, 98.1), (97.9, 97.9)], 9.0, least_sd=0.01)
    assert apart.interval.high == pytest.approx(stats.t.ppf(0.975, 4) * 0.1 * math.sqrt(2 / 3))


def test_equal_differences_have_the_spread_of_a_rounded_sample():
    sample = 100 / 600
    found = judge(one([0.0] * 3), 0.5, least_sd=sample / math.sqrt(2))
    half = stats.t.ppf(0.975, 2) * sample / math.sqrt(2) / math.sqrt(3)
    assert found.interval.high == pytest.approx(half)
    assert found.interval.low == pytest.approx(-half)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.4), (-0.3, 0.2), (-0.8, 0.4)])
def test_as_many_seeds_as_are_named_tell_in_four_of_five_cases(mean, sd):
    draw = np.random.default_rng(2)
    few = mean + sd * np.array([-1.0, 0.0, 1.0])  # whose sd is the true one
    needed = judge(one(few), 0.5).needed
    assert 4 <= needed <= 60
    for seeds, least in ((needed, 0.75), (max(3, needed // 2), 0.0)):
        samples = mean + draw.normal(0, sd, (400, seeds))
        tell = [found.fine or found.worse for found in (judge(one(x), 0.5) for x in samples)]
        assert np.mean(tell) >= least
    assert np.mean(tell) < 0.7  # half as many do not


def test_what_no_number_of_seeds_would_tell_is_not_advised():
    assert judge(one([-0.5, -0.4, -0.6]), 0.5).needed is None  # the truth seems to be the margin


@pytest.mark.parametrize("values", [[], [0.1, 0.2], [0.1, math.nan, 0.2], [math.inf] * 3])
def test_too_few_or_no_numbers_are_not_judged(values):
    assert judge(one(values), 0.5) is None


@pytest.mark.parametrize("count", [3, 5, 40])
def test_intervals_are_scipys_t(count):
    logs = np.random.default_rng(0).normal(0.2, 0.1, count)
    found = interval(list(logs))
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert found.value == pytest.approx(stats.gmean(np.exp(logs)), rel=1e-12)
    assert (found.low, found.high) == pytest.approx(np.exp(expected), rel=1e-12)
    assert judge(one(logs), 9.0).interval.low == pytest.approx(expected.low, rel=1e-12)


def test_too_few_values_give_no_interval():
    assert interval([]) is interval([0.1, 0.2]) is None
