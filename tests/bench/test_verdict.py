import math

import numpy as np
import pytest
from scipy import stats

from apex.bench import intervals
from apex.bench.intervals import Interval, difference_interval, inside, interval, mean_interval
from apex.bench.training.verdict import verdicts
from tests.bench.reports import CPU, ENVIRONMENT, level, report, run, without

FAST = (0.50, 0.52, 0.51)
SLOW = (4.0, 4.1, 3.9)
RIGHT = (98.0, 98.2, 98.4)


def _one(*runs, **others):
    (found,) = verdicts(report(*runs, **others))
    return found


def _against(found):
    return [(verdict.label, verdict.against) for verdict in found]


# --- intervals -----------------------------------------------------------------------------------

TRUTH = 0.3
SIMULATIONS = 1000


def _covered(count, draw, monkeypatch):
    """In how many of 1,000 samples the interval contains the true mean."""
    monkeypatch.setattr(intervals, "RESAMPLES", 999)  # at 9,999 it covers as often and takes 5 s
    samples = TRUTH + draw(np.random.default_rng(count), (SIMULATIONS, count))
    low, high = intervals.bounds(samples)
    return int(((low <= TRUTH) & (high >= TRUTH)).sum())


def _normal(generator, shape):
    return generator.normal(0.0, 0.05, shape)


def _skewed(generator, shape):
    """A machine that is disturbed: most times are close to the least, some far above."""
    return generator.exponential(0.05, shape) - 0.05


@pytest.mark.parametrize(
    ("count", "draw", "rate"),
    [(3, _normal, 0.95), (5, _normal, 0.95), (30, _normal, 0.934), (30, _skewed, 0.922)],
)
def test_intervals_cover_the_known_mean_at_the_stated_rate(monkeypatch, count, draw, rate):
    """Student's t is exact for normal values; the module's docstring states the other rates."""
    low, high = stats.binom.ppf([0.0005, 0.9995], SIMULATIONS, rate)
    assert low <= _covered(count, draw, monkeypatch) <= high


@pytest.mark.parametrize("count", [3, 5, 19])
def test_below_20_pairs_the_interval_is_scipys_t(count):
    logs = np.random.default_rng(0).normal(0.2, 0.1, count)
    found = interval(list(logs))
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert found.value == pytest.approx(stats.gmean(np.exp(logs)), rel=1e-12)
    assert (found.low, found.high) == pytest.approx(np.exp(expected), rel=1e-12)
    plain = mean_interval(list(logs))
    assert (plain.low, plain.high) == pytest.approx(tuple(expected), rel=1e-12)


def test_from_20_pairs_on_it_is_the_bootstrap_and_the_same_each_time(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 999)
    logs = np.random.default_rng(0).exponential(0.1, 20)
    found = interval(list(logs))
    assert found == interval(list(logs))
    same = stats.bootstrap(
        (logs,), np.mean, n_resamples=999, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx(np.exp(same), rel=1e-12)
    t = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert found.high - found.value > found.value - found.low  # as skewed as the values
    assert found.high != pytest.approx(math.exp(t.high), rel=1e-3)


def test_too_few_values_give_no_interval():
    assert interval([]) is interval([0.1, 0.2]) is mean_interval([1.0, 2.0]) is None
    assert difference_interval([1.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert difference_interval([1.0, 2.0, 3.0], [1.0, 2.0]) is None


@pytest.mark.parametrize("count", [3, 33])  # scipy's BCa interval of these 33 is nan
@pytest.mark.parametrize("rounding", [0.0, 1e-16])
def test_values_without_a_spread(count, rounding):
    found = interval([0.7 + rounding, *[0.7] * (count - 1)])
    assert (found.value, found.low, found.high) == pytest.approx((math.exp(0.7),) * 3, rel=1e-12)
    assert difference_interval([1.0] * 3, [3.0] * count) == Interval(2.0, 2.0, 2.0)


def test_the_difference_of_two_samples_is_welchs():
    before, after = [1.0, 2.0, 4.0], [2.0, 2.1, 2.2, 9.0]
    found = difference_interval(before, after)
    expected = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-12)
    assert found.value == np.mean(after) - np.mean(before)
    one_constant = difference_interval([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])  # t(2) x 1 / sqrt(3)
    expected = stats.t.interval(0.95, 2, 1.0, 1 / math.sqrt(3))
    assert (one_constant.low, one_constant.high) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("further", [3, 12])
def test_the_band_contains_the_mean_of_further_runs_in_95_percent(further):
    draw = np.random.default_rng(further)
    pairs = [(draw.normal(98, 0.3, further), draw.normal(98, 0.3, 5)) for _ in range(1000)]
    hits = sum(inside(list(values), list(others)) for values, others in pairs)
    low, high = stats.binom.ppf([0.0005, 0.9995], 1000, 0.95)
    assert low <= hits <= high


def test_the_band_by_hand_and_without_a_spread():
    # t(2) = 4.3027, sd 0.2, sqrt(1/3 + 1/3): +-0.7026 round 98.2
    assert inside([98.9] * 3, RIGHT) is inside([97.5] * 3, RIGHT) is True
    assert inside([98.91] * 3, RIGHT) is inside([97.49] * 3, RIGHT) is False
    assert inside([97.0, 97.1], RIGHT) is inside(RIGHT, [97.0, 97.1]) is None
    assert inside([98.4] * 4, [98.4] * 3) is True
    assert inside([98.3] * 4, [98.4] * 3) is None


# --- which rows are compared ----------------------------------------------------------------------


def test_each_level_with_o0_and_with_torchs_autocast_in_its_dtype():
    levels = ["O0", "O1", "O4", "native-fp16", "native-bf16", "FP16"]
    runs = [r for name in levels for r in level(name)]
    assert _against(verdicts(report(*runs))) == [
        ("O1", "O0"),
        ("O1", "native-fp16"),
        ("O4", "O0"),
        ("O4", "native-bf16"),
        ("native-fp16", "O0"),
        ("native-bf16", "O0"),
        ("FP16", "O0"),
        ("FP16", "native-fp16"),
    ]


def test_on_a_gpu_with_o0_both_ways_and_with_autocast_the_same_way():
    runs = [*level("O0", tf32=False), *level("O0", tf32=True), *level("O2", tf32=False)]
    runs += [r for tf32 in (False, True) for r in level("native-fp16", tf32=tf32)]
    found = _against(verdicts(report(*runs)))
    assert found[0] == ("O0 TF32 on", "O0 TF32 off")
    assert found[1:4] == [
        ("O2 TF32 off", "O0 TF32 off"),
        ("O2 TF32 off", "O0 TF32 on"),
        ("O2 TF32 off", "native-fp16 TF32 off"),
    ]


def test_only_rows_of_the_same_task_and_batch_are_compared():
    assert verdicts(report(*level("O0"), *level("O1", batch=16), *level("O1", task="text"))) == []
    assert verdicts(report(*level("O0"))) == []


# --- what is said --------------------------------------------------------------------------------


def test_faster_with_less_memory():
    found = _one(*level("O0"), *level("O4", FAST, others={"peak_tensor_bytes": 690}))
    logs = [math.log(a / b) for a, b in zip((1.0, 1.1, 0.9), FAST, strict=True)]
    assert found.speed == interval(logs)
    assert found.pairs == 3
    assert found.memory == 0.69
    assert found.total == pytest.approx(3.0 / sum(FAST))
    assert (found.accuracy, found.inside) == (None, None)
    assert found.sentence == (
        "O4 is faster than O0 by 95 % (95 % interval of 3 seeds: 55 % to 146 %). "
        "It needs 31 % less memory. Its final loss is 1.833, that of O0 1.833."
    )


def test_slower_with_the_reason_that_the_device_gives():
    slow = level("O1", SLOW)
    found = _one(*level("O0", (1.0, 1.01, 0.99)), *slow)
    assert found.sentence.startswith(
        "O1 is slower than O0 by a factor of 4.0 (95 % interval of 3 seeds: 3.9 to 4.2). "
        "Slower than fp32 here: this CPU has no fp16 arithmetic. It needs as much memory."
    )
    gpu = CPU | {"device": "cuda:0", "half_types": ()}
    known = {"dtype": "bfloat16", "native": False, "why": "needs compute capability 8.0: slow"}
    for half, said in ((known, True), (known | {"native": None}, False)):
        there = ENVIRONMENT | {"device": gpu | {"half_types": (half,)}}
        found = _one(*level("O0"), *level("O4", SLOW), environment=there)
        why = "Slower than fp32 here: bf16 on this device needs compute capability 8.0: slow."
        assert (why in found.sentence) == said
    native = [v for v in verdicts(report(*slow, *level("native-fp16"))) if v.label == "O1"]
    assert "fp32" not in native[0].sentence  # both compute in it


def test_no_difference():
    found = _one(*level("O0", (1.0, 1.0, 1.0)), *level("O4", (0.98, 1.0, 1.02)))
    assert found.speed.low < 1 < found.speed.high
    assert found.sentence.startswith(
        "O4 against O0: no difference in speed seen "
        "(between slower by 5.1 % and faster by 5.1 %; 95 % interval of 3 seeds)."
    )
    wide = _one(*level("O0", (1.0, 1.0, 1.0)), *level("O4", (0.5, 1.0, 2.0))).sentence
    assert "(between slower by a factor of 5.6 and faster by a factor of 5.6; " in wide


def test_a_difference_that_the_seeds_share_is_seen_because_they_are_paired():
    found = _one(*level("O0", (1.0, 2.0, 4.0)), *level("O4", (0.9, 1.8, 3.6)))
    assert found.speed.low == pytest.approx(1 / 0.9)
    assert "faster than O0 by 11 % (95 % interval of 3 seeds: 11 % to 11 %)" in found.sentence


def test_a_run_counts_by_its_median_step():
    disturbed = level("O4", others={"step_ms": (0.0, 0.0, 90.0, 1.0, 1.0, 1.0)})
    assert _one(*level("O0", (1.0, 1.0, 1.0)), *disturbed).speed == Interval(1.0, 1.0, 1.0)


def test_pairs_are_of_the_same_seed_whatever_the_order():
    runs = [*level("O0", (1.0, 2.0, 4.0)), *reversed(level("O4", (0.5, 1.0, 2.0)))]
    assert _one(*runs).speed.low == pytest.approx(2.0)


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed was"), (2, "2 seeds were")])
def test_fewer_than_three_seeds_give_no_verdict(seeds, said):
    found = _one(*level("O0", FAST[:seeds]), *level("O4", SLOW[:seeds], RIGHT[:seeds]))
    assert (found.pairs, found.speed, found.accuracy, found.inside) == (seeds, None, None, None)
    assert found.sentence == (
        f"O4 is not compared with O0: {said} measured at both, and 3 are needed."
    )


@pytest.mark.parametrize("status", ["diverged", "out of memory", "failed"])
def test_what_did_not_train_is_said(status):
    bad = level("O2", FAST, others={"status": status, "error": "no\nluck"})
    found = _one(*level("O0"), *bad)
    why = ": no luck" if status == "failed" else ""
    assert found.sentence == (
        "O2 is not compared with O0: no seeds were measured at both, and 3 are needed. "
        f"O2: {status} (3 of 3){why}."
    )
    one = [*level("O2", FAST)[:2], bad[2]]
    partly = _one(*level("O0"), *one)
    assert f"O2: {status} (1 of 3){why}." in partly.sentence
    assert partly.pairs == (3 if status == "diverged" else 2)


def test_launch_bound_and_loader():
    limits = {"host_ms": 0.95, "data_ms": (1.5,) * 6}
    runs = level("O4", (1.0, 1.01, 0.99), others=limits)
    said = _one(*level("O0"), *runs).sentence
    assert "O4 is launch-bound: try a larger batch or torch.compile." in said
    assert "At O4 the loader takes longer than the step." in said
    compiled = [without(r, cell=without(r.cell, compile=True)) for r in runs]
    assert "try a larger batch." in _one(*level("O0"), *compiled).sentence
    free = level("O4", (1.0, 1.01, 0.99), others={"host_ms": 0.5, "data_ms": (0.9,) * 6})
    said = _one(*level("O0"), *free).sentence
    assert "launch-bound" not in said
    assert "loader" not in said


def test_accuracy_inside_and_outside_the_band():
    # differences -0.2, -0.1, 0.0: t(2) x 0.1 / sqrt(3) = 0.248
    found = _one(*level("O0", accuracy=RIGHT), *level("O4", accuracy=(97.8, 98.1, 98.4)))
    assert found.inside is True
    assert found.accuracy.value == pytest.approx(-0.1)
    assert found.sentence.endswith(
        "Its accuracy, 98.10 %, is inside the band of O0's seeds "
        "(98.20 %; difference -0.10 points, 95 % interval: -0.35 to +0.15)."
    )
    found = _one(*level("O0", accuracy=RIGHT), *level("O4", accuracy=(90.0, 90.1, 90.2)))
    assert found.inside is False
    assert "is outside the band of O0's seeds (98.20 %; difference -8.10" in found.sentence
    found = _one(*level("O0", accuracy=RIGHT), *level("O4", accuracy=RIGHT))
    assert found.sentence.endswith("Its accuracy, 98.20 %, is that of O0 at every seed.")
    found = _one(*level("O0", accuracy=[100.0] * 3), *level("O4", accuracy=RIGHT))
    assert found.inside is None
    assert found.sentence.endswith(
        "Its accuracy is 98.20 %; every run of O0 had 100.00 %, "
        "which gives no band to compare with."
    )


def test_a_loss_that_is_not_finite_is_shown():
    lost = level("O4", others={"losses": (math.nan,) * 6})
    assert "Its final loss is nan, that of O0 1.833." in _one(*level("O0"), *lost).sentence


def test_a_quick_report_marks_every_sentence():
    runs = [r for name in ("O0", "O1", "O4") for r in level(name, quick=True)]
    runs += [run(r.cell, status="out of memory") for r in level("O2", FAST, quick=True)]
    found = verdicts(report(*runs))
    assert len(found) == 3
    assert all(verdict.sentence.startswith("quick run: O") for verdict in found)
    timed = [verdict for verdict in found if verdict.speed]
    assert all("95 % interval of 3 seeds in one process" in v.sentence for v in timed)
    assert len(timed) == 2
