"""What a report says of its levels, from runs made by hand."""

import dataclasses
import math
import random

import numpy as np
import pytest
from scipy import stats

from apex.commands.bench.intervals import Interval
from apex.commands.bench.training import table
from apex.commands.bench.training.answer import answers
from apex.commands.bench.training.notes import marks, notes, problems
from apex.commands.bench.training.results import Operator
from apex.commands.bench.training.rows import rows
from apex.commands.bench.training.sentences import sentences
from apex.commands.bench.training.verdict import UNEVEN, paired_ratio, verdicts
from tests.commands.bench import made
from tests.commands.bench.made import cell, level, of_runs, run, without

FAST = (0.50, 0.52, 0.51)
RIGHT = (98.0, 98.2, 98.4)
DIFFERENT = {"losses": (2.0, 1.0) * 30}  # from O0's: another arithmetic


def sentence(of):
    """All that is said of a level, in one paragraph."""
    return " ".join(sentences(of))


def _one(*runs, **others):
    (found,) = verdicts(of_runs(*runs, **others))
    return found


def answered(*runs, **report):
    of = of_runs(*runs, **report)
    return answers(of, verdicts(of))


def _beside_o0(name="O4", ms=FAST, accuracy=None, **others):
    alike = {"test_loss": (), **others}
    return _one(
        *level("O0", accuracy=accuracy and RIGHT, others=alike),
        *level(name, ms, accuracy, {**DIFFERENT, **alike}),
    )


def _against(found):
    return [(verdict.row.label, verdict.other.label) for verdict in found]


# --- which rows are compared ---------------------------------------------------------------------


def test_each_level_with_o0_and_with_torchs_autocast_in_its_dtype():
    levels = ["O0", "O1", "O4", "native-fp16", "native-bf16", "FP16"]
    runs = [r for name in levels for r in level(name)]
    assert _against(verdicts(of_runs(*runs))) == [
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
    found = _against(verdicts(of_runs(*runs)))
    assert found[0] == ("O0 TF32 on", "O0 TF32 off")
    assert found[1:4] == [
        ("O2 TF32 off", "O0 TF32 off"),
        ("O2 TF32 off", "O0 TF32 on"),
        ("O2 TF32 off", "native-fp16 TF32 off"),
    ]


def test_other_batches_and_tasks_are_not_compared():
    runs = [*level("O0"), *level("O4", batch=256), *level("O4", task="digits-mlp")]
    assert verdicts(of_runs(*runs)) == []


# --- speed ---------------------------------------------------------------------------------------


def test_the_speed_is_of_seeds_that_took_turns_with_students_t():
    found = _beside_o0(ms=(0.5, 0.53, 0.44))
    logs = np.log(np.array([1.0, 1.1, 0.9]) / [0.5, 0.53, 0.44])
    low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert found.speed.value == pytest.approx(math.exp(logs.mean()))
    assert (found.speed.low, found.speed.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert sentences(found)[0].startswith(f"O4 has {found.speed.value:.2f} times the speed of O0")


def test_the_runs_of_a_seed_that_took_turns_are_compared():
    both, alone = ("O0", "O4"), ("O0", "O1")
    base = [r for s in range(3) for r in (
        run(cell("O0", seed=s), ms=2.0, noise=0.0, together=both),
        run(cell("O0", seed=s), ms=9.0, noise=0.0, together=alone),
    )]  # fmt: skip
    plan = [cell(name, seed=s) for s in range(3) for name in both]
    mine = level("O4", (1.0,) * 3, others={"together": both})
    (found,) = verdicts(made.report(plan, [*base, *mine]))
    assert found.ratio == pytest.approx(2.0)


def test_a_clock_that_drifts_does_not_move_a_ratio():
    """In pairs of rounds of opposite order, at any steady drift and for a machine that slows."""
    block, rounds, truth = 8, 20, 1.2
    for drift in (0.0, 0.3, -0.2):
        now, taken, blocks = 0.0, {"O0": [], "O4": []}, {"O0": [], "O4": []}
        order, draw = ["O0", "O4"], random.Random(0)
        for turn in range(rounds):
            draw.shuffle(order) if turn % 2 else order.reverse()
            for name in order:
                blocks[name].append(len(taken[name]))
                for _ in range(block):
                    one = math.exp(drift * now) * (truth if name == "O0" else 1.0)
                    taken[name].append(one)
                    now += 1 / (2 * rounds * block)
        mine, theirs = (
            run(cell(name), step_ms=tuple(taken[name]), blocks=tuple(blocks[name]))
            for name in ("O4", "O0")
        )
        log = paired_ratio(mine, theirs)
        assert log == pytest.approx(math.log(truth), abs=1e-4)
        in_turn = np.log(np.median(theirs.step_ms[:40]) / np.median(mine.step_ms[-40:]))
        assert drift == 0.0 or abs(in_turn - math.log(truth)) > 0.02  # sequential runs do move


def test_the_first_round_and_the_first_step_of_a_turn_do_not_count():
    slow_first = (50.0,) * 4 + (9.0, 1.0, 1.0, 1.0) * 2
    mine = run(cell("O4"), step_ms=slow_first, blocks=(0, 4, 8))
    theirs = run(cell("O0"), step_ms=(2.0,) * 12, blocks=(0, 4, 8))
    assert mine.counted_ms == (1.0,) * 6
    assert paired_ratio(mine, theirs) == pytest.approx(math.log(2.0))


def test_fewer_than_three_seeds_have_no_interval():
    found = _one(*level("O0", (1.0, 1.0)), *level("O4", (0.5, 0.5)))
    assert found.speed is None
    assert "about" in sentences(found)[0]
    assert "(2 seeds; an interval needs 3)" in sentences(found)[0]


def test_uneven_steps_have_no_verdict_on_speed_in_any_sentence():
    steps = (1.0,) * 50 + (9.0,) * 10  # one step in six takes nine times as long
    busy = [run(cell("O0", seed=s), step_ms=steps) for s in range(3)]
    of = of_runs(*busy, *level("O4", FAST))
    (found,) = verdicts(of)
    assert (found.speed, found.noise) == (None, UNEVEN)
    assert sentences(found)[0] == f"O4 against O0: no verdict on speed ({UNEVEN})."
    assert not any("faster" in s or "slower" in s or "the speed of" in s for s in sentences(found))
    assert marks(of) == [f"UNEVEN: {UNEVEN}"]
    assert answers(of, [found]) == [f"No answer: {UNEVEN}."]


def test_an_interval_over_a_factor_of_two_is_noise():
    found = _beside_o0(ms=(0.3, 1.0, 3.0))
    assert (found.speed, found.noise) == (None, UNEVEN)


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (FAST, "O4 has 1.95 times the speed of O0 (95 %, 3 seeds: "),
        ((1.0, 1.12, 0.89), "O4 is about as fast as O0 (95 %, 3 seeds: "),
        (
            (2.0, 2.2, 1.75),
            "O4 is slower than O0: a step takes 1.98 times as long (95 %, 3 seeds: ",
        ),
    ],
)
def test_what_is_said_of_a_speed(ms, said):
    assert sentences(_beside_o0(ms=ms))[0].startswith(said)


def test_a_seed_that_failed_in_its_first_steps_leaves_the_speed_of_the_others():
    mine = level("O4", (0.5, 0.52, 0.51, 0.5))
    mine[3] = without(mine[3], status="failed", step_ms=(99.0,) * 5, blocks=(0,))
    said = sentences(_one(*level("O0", (1.0, 1.1, 0.9, 1.0)), *mine))[0]
    assert said.startswith("O4 has 1.95 times the speed of O0 (95 %, 3 seeds: ")


def test_an_interval_around_1_that_is_wide_is_not_about_as_fast():
    said = sentences(_beside_o0(ms=(1.0, 1.3, 0.9)))[0]
    assert said.startswith("O4 may be faster or slower than O0 (95 %, 3 seeds: 0.74 to 1.20 times")


def test_the_seeds_are_those_that_were_compared():
    base = level("O0", (1.0, 1.1, 0.9, 1.0))
    base[3] = without(base[3], status="failed", **made.NOTHING)
    said = sentences(_one(*base, *level("O4", (0.5, 0.52, 0.51, 0.5))))[0]
    assert "(95 %, 3 seeds: " in said
    gone = [without(one, status="failed", **made.NOTHING) for one in base]
    assert (
        sentences(_one(*gone, *level("O4", FAST)))[0] == "O4: its speed is not compared with O0's."
    )


def test_first_steps_alone_have_no_interval():
    of = of_runs(*level("O0"), *level("O4", FAST, others={"blocks": (0,)}))
    (found,) = verdicts(of)
    assert found.speed is None
    assert sentences(found)[0].endswith("(3 seeds, first steps only, too few for an interval).")
    assert answers(of, [found]) == ["No answer: the trainings have 60 steps, too few to compare."]
    assert [table._speed(line) for line in table.lines(of, [found])] == ["1.00", "≈1.95"]


# --- quality -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        ((98.0, 98.2, 98.4), "Accuracy: lower by 0.45 points at most (95 %, 3 seeds)"),
        ((97.0, 97.2, 97.4), "Accuracy: lower by 0.55 points to 1.45 points"),
        ((98.2, 98.4, 98.6), "Accuracy: lower by 0.25 points at most"),
        ((99.0, 99.2, 99.4), "Accuracy: higher by 0.55 points to 1.45 points"),
        ((98.4, 98.0, 98.2), "Accuracy: between 0.86 points lower and 0.86 points higher (95 %, 3 "
         "seeds)"),
        ((97.9, 97.7, 98.0), "; about "),
        ((97.4, 97.6, 97.8), "Accuracy: lower by 0.15 points to 1.05 points (95 %, 3 seeds)"),
    ],
)  # fmt: skip
def test_what_is_said_of_an_accuracy(accuracy, said):
    """Of equal differences the accuracies' own spread is the wider: 2.78 x 0.2 x sqrt(2 / 3)."""
    found = _beside_o0(accuracy=accuracy)
    assert said in sentence(found)
    fine, worse = found.accuracy.fine, found.accuracy.worse
    assert fine is ("at most" in said or "higher by" in said)
    assert worse is said.startswith("Accuracy: lower by 0.55")


def test_a_certain_small_loss_is_a_loss_and_within_the_margin():
    """ "Difference -0.40, interval -0.41 to -0.38" was called fine; now both are said."""
    size = {"test_loss": (), "test_size": 100_000}
    found = _one(
        *level("O0", accuracy=(98.00, 98.01, 97.99), others=size),
        *level("O4", FAST, (97.60, 97.62, 97.58), {**DIFFERENT, **size}),
    )
    assert found.accuracy.fine
    assert "Accuracy: lower by 0.36 points to 0.44 points" in sentence(found)


def test_a_gain_that_is_not_sure_is_no_gain():
    """ "+0.16 points, interval -0.48 to +0.80" was outside a band; now it is within the margin."""
    found = _beside_o0(accuracy=[r + d for r, d in zip(RIGHT, (0.42, 0.16, -0.10), strict=True)])
    assert "points lower and" in sentence(found) or "at most" in sentence(found)
    assert "higher by" not in sentence(found)


def test_the_margin_is_three_test_samples_at_least_and_can_be_given():
    small = _beside_o0(accuracy=(97.6, 97.8, 98.0), test_size=100)
    assert small.accuracy.margin == 3.0
    runs = [*level("O0", accuracy=RIGHT), *level("O4", FAST, RIGHT)]
    assert _one(*runs, margin=2.0).accuracy.margin == 2.0
    assert _one(*runs).accuracy.margin == 0.5


def test_the_interval_is_wider_the_more_comparisons_there_are():
    def width(*batches):
        runs = [r for batch in batches for name, mine in (("O0", RIGHT), ("O4", (97.9, 98.3, 98.2)))
                for r in level(name, accuracy=mine, batch=batch)]  # fmt: skip
        found = verdicts(of_runs(*runs))[0].accuracy.interval
        return found.high - found.low

    assert width(1, 2, 4) > 1.4 * width(1)


def test_more_seeds_are_advised_with_the_time_that_they_would_take():
    runs = [*level("O0", accuracy=RIGHT), *level("O4", FAST, (98.4, 98.0, 98.2), DIFFERENT)]
    found = _one(*runs, seconds=90.0)
    needed = found.accuracy.needed
    minutes = round(30 * needed / 60)
    assert (
        f"about {needed} seeds would decide (`--seeds {needed}`, about {minutes} minutes)"
        in sentence(found)
    )


def test_the_test_loss_has_the_same_rule_and_is_finer():
    def losses(factors):
        return [{"test_loss": (f * (1 + s / 50),)} for s, f in enumerate(factors)]

    def both(factors):
        base = [run(cell("O0", seed=s), **x) for s, x in enumerate(losses((0.2, 0.2, 0.2)))]
        mine = [run(cell("O4", seed=s), **x) for s, x in enumerate(losses(factors))]
        return _one(*base, *mine)

    fine = both((0.2002, 0.2, 0.1998))
    assert fine.loss.fine
    assert "Test loss: higher by 4.4 % at most (95 %, 3 seeds)" in sentence(fine)
    worse = both((0.3, 0.301, 0.302))
    assert worse.loss.worse
    assert "Test loss: higher by 43 % to 58 %" in sentence(worse)
    better = both((0.1, 0.1005, 0.0995))
    assert "Test loss: lower by" in sentence(better)
    unsure = both((0.21, 0.2, 0.19))
    assert "Test loss: between 13 % higher and 12 % lower" in sentence(unsure)
    assert "Test loss: not known (95 %, 3 seeds)" in sentence(both((0.4, 0.2, 0.1)))


def test_seeds_that_were_asked_for_already_are_not_advised():
    cells = [cell(name, seed=seed) for seed in range(9) for name in ("O0", "O4")]
    runs = [*level("O0", accuracy=RIGHT), *level("O4", FAST, (98.4, 98.0, 98.2), DIFFERENT)]
    (found,) = verdicts(made.report(cells, runs))
    assert "0.86 points lower and 0.86 points higher (95 %, 3 seeds). Test" in sentence(found)
    budget = _one(*runs, budget_s=60.0)
    needed = budget.accuracy.needed
    assert f"about {needed} seeds would decide (`--seeds {needed}` with `--budget 2m`)" in sentence(
        budget
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_one_loss_without_a_logarithm_leaves_all_unjudged(bad):
    base, mine = level("O0", (1.0,) * 4), level("O4", (0.5,) * 4, others=DIFFERENT)
    mine[3] = without(mine[3], test_loss=(bad,))
    assert _one(*base, *mine).loss is None


def test_a_loss_of_any_size_is_said():
    def said(loss):
        runs = level("O4", FAST, others={**DIFFERENT, "test_loss": (loss,)})
        return sentence(_one(*level("O0", others={"test_loss": (1e-3,)}), *runs))

    assert "Test loss" not in said(1e300)  # equal at all seeds: their spread is not known
    wide = [without(r, test_loss=(1e300 if r.cell.seed else 1.0,)) for r in level("O4", FAST)]
    assert "Test loss: not known" in sentence(_one(*level("O0"), *wide))
    high = [without(r, test_loss=(1e300 * (1 + r.cell.seed / 9),)) for r in level("O4", FAST)]
    assert "Test loss: higher by a factor of 10,000 or more" in sentence(_one(*level("O0"), *high))


def test_equal_differences_without_a_test_size_are_not_judged():
    found = _beside_o0(accuracy=(97.9, 98.1, 98.3), test_size=None)
    assert found.accuracy is None


def test_a_task_without_an_accuracy_is_judged_by_its_training_loss():
    found = _beside_o0()
    assert found.accuracy is None
    assert found.loss_of == "training loss"
    assert "Training loss" in sentence(found)


def test_a_training_that_a_budget_cut_earlier_is_not_judged_beside_a_longer_one():
    cut = {"losses": (2.0, 1.0), "together": ("O4",), "planned_steps": 60}
    found = _one(*level("O0", accuracy=RIGHT), *level("O4", FAST, (90.0, 91.0, 92.0), cut))
    assert (found.accuracy, found.loss) == (None, None)


def test_the_same_arithmetic_is_said_instead_of_an_accuracy():
    of = made.report()
    found = {(v.row.label, v.other.label): v for v in verdicts(of)}
    assert found["O2", "O0"].same_as == "O1"
    assert "Its losses equal O1's to the last bit; see O1." in sentences(found["O2", "O0"])
    assert found["O4", "native-bf16"].same
    assert "its arithmetic is the same" in sentence(found["O4", "native-bf16"])
    assert not any("points" in s for s in sentences(found["O2", "O0"]))
    (said,) = [note for note in notes(of, list(found.values())) if "O1 and O2" in note]
    assert said.startswith("O1 and O2 have the same losses to the last bit")


def test_how_far_the_size_of_the_test_set_moves_an_accuracy_is_said_once():
    of = of_runs(*level("O0", accuracy=RIGHT), *level("O4", accuracy=RIGHT))
    (said,) = [note for note in notes(of, verdicts(of)) if "test samples" in note]
    points = 196 * math.sqrt(0.982 * 0.018 / 600)
    assert f"Another test set of that size would move an accuracy of 98.2 % by up to {points:.1f}" \
        in said  # fmt: skip


# --- reasons -------------------------------------------------------------------------------------


def _operators(*of):
    return {"operators": tuple(Operator(*one) for one in of)}


def test_the_three_operators_that_grew_most_are_named_with_what_to_do():
    full, half = "float32", "float16"
    base = _operators(("mm", full, 0.5), ("add", full, 0.3), ("relu", full, 0.1),
                      ("copy_", full, 0.05))  # fmt: skip
    mine = _operators(("mm", half, 5.0), ("add", half, 0.3), ("relu", half, 0.6),
                      ("copy_", half, 0.8), ("sum", half, 0.3))  # fmt: skip
    (found,) = verdicts(
        of_runs(
            *level("O0", others=base),
            *level("native-fp16", (9.0,) * 3, others={**mine, **DIFFERENT}),
        )
    )
    (said,) = [s for s in sentences(found) if s.startswith("What grew")]
    assert said == (
        "What grew: mm in float16 71 % of the step, 10 times O0's (this CPU has no float16 "
        "arithmetic; amp's levels use float32); copy_ in float16 11 % of the step, 16 times O0's "
        "(casts between dtypes); relu in float16 9 % of the step, 6.00 times O0's."
    )
    assert "Reason: this CPU has no float16 arithmetic." in sentences(found)


def test_a_level_that_is_not_slower_needs_no_reason():
    base, mine = _operators(("mm", "float32", 0.5)), _operators(("mm", "bfloat16", 0.9))
    runs = [*level("O0", others=base), *level("O4", FAST, others={**mine, **DIFFERENT})]
    assert "What grew" not in sentence(_one(*runs))


def test_a_gpu_that_waits_for_its_host_is_launch_bound():
    others = {"host_ms": 0.95, **DIFFERENT}
    runs = [*level("O0"), *level("O4", (1.0, 1.1, 0.9), others=others)]
    assert "O4 is launch-bound: try a larger batch or torch.compile" in sentence(_one(*runs))


def test_memory_is_said_as_a_ratio():
    def memory(bytes_of):
        return sentence(_one(*level("O0"), *level("O4", others={"peak_bytes": bytes_of})))

    base = run(cell("O0")).peak_bytes
    assert "It needs 0.50 times the memory" in memory(base // 2)
    assert "It needs as much memory" in memory(base)
    assert "memory" not in memory(None)


# --- what went wrong -----------------------------------------------------------------------------


def test_a_stopped_level_says_why_and_has_no_interval():
    why = "stopped after 8 of 60 steps to keep to the time budget: a step takes 29.0 times O0's"
    others = {"status": "stopped", "error": why, "accuracy": (), "test_loss": ()}
    of = of_runs(*level("O0"), *level("native-fp16", (29.0,) * 3, others=others), budget_s=60.0)
    (found,) = verdicts(of)
    assert sentences(found)[0] == f"native-fp16 was {why}."
    assert (found.speed, found.accuracy) == (None, None)
    assert found.ratio == pytest.approx(1 / 29, rel=0.2)
    assert marks(of) == ["CUT to 60 s: native-fp16 stopped"]


def test_a_level_that_was_stopped_at_one_seed_says_at_how_many():
    mine = level("O1", (3.0,) * 3)
    mine[0] = without(mine[0], status="stopped", error="stopped after 8 of 60 steps")
    of = of_runs(*level("O0"), *mine, budget_s=0.5)
    assert sentences(verdicts(of)[0])[0].startswith("O1 was, at 1 of 3 seeds, stopped after 8")
    assert marks(of) == ["CUT to 0.5 s: O1 stopped"]


def test_steps_that_a_budget_cut_are_said():
    others = {"planned_steps": 120}
    of = of_runs(*level("O0", others=others), *level("O4", others=others), budget_s=60.0)
    assert marks(of) == ["CUT to 60 s: all trained for 50 % of their steps on average"]


def test_a_diverged_level_has_no_speed():
    others = {"status": "diverged", "losses": (2.0, math.nan)}
    of = of_runs(*level("O0"), *level("O3", others=others))
    (found,) = verdicts(of)
    assert (found.speed, found.ratio, found.loss) == (None, None, None)
    assert sentences(found)[0] == "O3: its speed is not compared with O0's."
    assert "diverged (3 of 3)" in sentence(found)
    assert answers(of, [found]) == [
        "Stay with float32: no level is faster. O3 did not train to the end with every seed."
    ]


def test_what_went_wrong_is_one_line_for_all_batch_sizes():
    of = made.troubled((128, 256, 512))
    assert problems(of) == [
        ("FP16 (digits-cnn, batch size 128, 256, 512)",
         "failed (3 of 3): TypeError: tokens cannot be halved"),
        ("O0 (digits-cnn, batch size 512)", "out of memory (1 of 3)"),
        ("O3 (digits-cnn, batch size 512)", "diverged (3 of 3)"),
    ]  # fmt: skip


def test_missing_runs_are_counted():
    cells = [cell(name, seed=s) for s in range(3) for name in ("O0", "O4")]
    of = made.report(cells, [run(one) for one in cells[:3]])
    assert rows(of)[1].problem == "1 of 3 runs"
    assert marks(of)[0] == "INCOMPLETE: 3 of 6 runs"


def test_levels_that_ran_apart_are_named():
    of = of_runs(
        *level("O0"),
        *[without(one, together=("O4",)) for one in level("O4", FAST)],
        *level("O5", FAST),
    )
    found = verdicts(of)
    assert any(note.startswith("O4: apex trained these again") for note in notes(of, found))


# --- the answer ----------------------------------------------------------------------------------

SAME = {"peak_bytes": run(cell("O0")).peak_bytes}
HALF = {"peak_bytes": run(cell("O0")).peak_bytes // 2}
STOPPED = {"status": "stopped", "error": "stopped after 8 of 60 steps"}


NONE_LOST = "Accuracy is 98.2 % (O0: 98.2 %), lower by 0.48 points at most (95 %, 3 seeds)."
WORSE = (91.0, 91.2, 91.4)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        (
            {"O4": (FAST, RIGHT, HALF)},
            "Use bfloat16 (O4): it trains 1.95 times as fast on this machine and needs 0.50 of the "
            "memory. Accuracy is 98.2 % (O0: 98.2 %), lower by 0.45 points at most (95 %, 3 "
            "seeds).",
        ),
        (
            {"O4": (FAST, (97.0, 97.2, 97.4), HALF)},
            "Stay with float32: no faster level trains as well. O4 lost accuracy.",
        ),
        (  # the faster one loses accuracy
            {"O4": (FAST, RIGHT, HALF), "O5": ((0.1,) * 3, WORSE, HALF)},
            "Use bfloat16 (O4): it trains 1.95 times as fast on this machine and needs 0.50 of the "
            f"memory. {NONE_LOST}",
        ),
        (  # of two that are right the faster one
            {"O4": (FAST, RIGHT, HALF), "O5": ((0.25, 0.26, 0.25), RIGHT, SAME)},
            f"Use bfloat16 (O5): it trains 3.93 times as fast on this machine. {NONE_LOST}",
        ),
        (
            {"O4": (FAST, (98.4, 98.0, 98.2), SAME)},
            "bfloat16 (O4) trains 1.95 times as fast on this machine. Accuracy is 98.2 % (O0: "
            "98.2 %), between 0.86 points lower and 0.86 points higher (95 %, 3 seeds); about 6 "
            "seeds would decide (`--seeds 6`).",
        ),
        (
            {"O4": (FAST, RIGHT, {**SAME, "planned_steps": 80})},
            "bfloat16 (O4) trains 1.95 times as fast on this machine. The time budget cut the "
            "trainings to 75 % of their steps, too few to judge quality: run again with a larger "
            "`--budget`.",
        ),
        (  # a cut of less than a tenth is none
            {"O4": (FAST, RIGHT, {**SAME, "planned_steps": 66})},
            "Use bfloat16 (O4): it trains 1.95 times as fast on this machine. Accuracy is 98.2 % "
            "(O0: 98.2 %), lower by 0.45 points at most (95 %, 3 seeds).",
        ),
        (
            {"O4": ((1.0, 1.12, 0.89), RIGHT, HALF)},
            "Use bfloat16 (O4): it trains about as fast on this machine and needs 0.50 of the "
            "memory. Accuracy is 98.2 % (O0: 98.2 %), lower by 0.45 points at most (95 %, 3 "
            "seeds).",
        ),
        (
            {"O4": ((0.98, 1.09, 0.87), RIGHT, {"peak_bytes": 3 * HALF["peak_bytes"]})},
            "Stay with float32: no level is faster, because even the fastest, O4, trains 1.02 "
            "times as fast.",
        ),
        (
            {"O4": (FAST, RIGHT, {"peak_bytes": 3 * HALF["peak_bytes"]})},
            "Use bfloat16 (O4): it trains 1.95 times as fast on this machine and needs 1.50 times "
            "the memory. Accuracy is 98.2 % (O0: 98.2 %), lower by 0.45 points at most (95 %, 3 "
            "seeds).",
        ),
        (
            {
                "O3": (FAST, WORSE, HALF),
                "O4": ((2.0, 2.2, 1.75), RIGHT, HALF),
                "O5": ((2.1, 2.3, 1.85), RIGHT, HALF),
            },
            "Stay with float32: no faster level trains as well. O3 lost accuracy.",
        ),
        (  # what is not known is not said to be none
            {"O1": ((3.0,) * 3, RIGHT, HALF), "O4": ((0.1, 1.0, 1.0), RIGHT, HALF)},
            f"No answer on O4: {UNEVEN}.",
        ),
        (
            {"O4": ((1.0, 1.12, 0.89), RIGHT, {"peak_bytes": None})},
            "No answer: its memory was not measured.",
        ),
        (
            {"O4": ((1.0, 1.3, 0.9), RIGHT, SAME)},
            "No answer: 3 seeds cannot tell whether it is faster (0.74 to 1.20 times as fast).",
        ),
        (
            {"O4": (FAST, RIGHT, {"test_loss": (9.0,)})},
            "Stay with float32: no faster level trains as well. O4 had a higher test loss.",
        ),
        (
            {"O4": (FAST, (98.0, math.nan, 98.4), {**HALF, "test_loss": ()})},
            "bfloat16 (O4) trains 1.95 times as fast on this machine and needs 0.50 of the memory. "
            "Its quality could not be compared.",
        ),
        (
            {"O1": ((29.0,) * 3, RIGHT, STOPPED)},
            "Stay with float32: no level is faster, because this CPU has no float16 arithmetic, "
            "and even the fastest, O1, trains 0.03 times as fast.",
        ),
    ],
)
def test_the_answer(levels, said):
    runs = level("O0", accuracy=RIGHT)
    for place, (name, (ms, accuracy, others)) in enumerate(levels.items()):
        runs += level(name, ms, accuracy, {"losses": (2.0, 1.0 + place) * 30, **others})
    assert answered(*runs) == [said]


SLOW = (3.0, 3.2, 2.9)
NO_HALF = {**made.CPU["device"], "half_types": [
    {"dtype": dtype, "native": False, "why": "no such instructions"}
    for dtype in ("float16", "bfloat16")
]}  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (  # of two seeds too: that many tell that a level takes three times as long
            [*level("O0", (1.0, 1.1)), *level("O1", (3.0, 3.2)), *level("O4", (1.5, 1.6))],
            "Stay with float32: no level is faster, because this CPU has no float16 and no "
            "bfloat16 arithmetic, and even the fastest, O4, trains 0.68 times as fast.",
        ),
        (  # one was faster, but is no advice
            [*level("O0", accuracy=RIGHT), *level("O1", SLOW, RIGHT, DIFFERENT),
             *level("O4", FAST, WORSE, {"losses": (3.0,) * 60})],
            "Stay with float32: no faster level trains as well. O4 lost accuracy. This CPU has "
            "no float16 arithmetic.",
        ),
    ],
)  # fmt: skip
def test_where_no_level_was_faster_the_advice_is_float32_and_the_known_reason(runs, said):
    assert answered(*runs, environment={**made.CPU, "device": NO_HALF}) == [said]
    native = of_runs(*runs)  # of bfloat16, why is not known
    (found,) = answers(native, verdicts(native))
    assert found.endswith("This CPU has no float16 arithmetic.")
    assert "because this CPU" not in found


def _alike(*times):
    """O0, and O4, O5 and torch's autocast with the same losses, in these times of a step."""
    names = ("O4", "O5", "native-bf16")
    runs = [r for name, ms in zip(names, times, strict=False)
            for r in level(name, ms, RIGHT, {**HALF, **DIFFERENT})]  # fmt: skip
    (said,) = answered(*level("O0", accuracy=RIGHT), *runs)
    before, _, rest = said.partition(" on this machine")
    return before, rest.partition(" and needs 0.50 of the memory.")[0]


@pytest.mark.parametrize(
    ("times", "said", "beside"),
    [
        (  # the intervals overlap: they tie
            ((0.5, 0.55, 0.44), (0.8, 0.88, 0.72), (0.49, 0.54, 0.45)),
            "Use bfloat16 (O4 or torch's own autocast): it trains 2.02 to 2.03 times as fast",
            " (O5: 1.25)",
        ),
        (
            ((0.5, 0.55, 0.45), (0.5, 0.55, 0.45), (0.5, 0.55, 0.45)),
            "Use bfloat16 (O4, O5 or torch's own autocast): it trains 2.00 times as fast", "",
        ),
        (
            ((0.5, 0.55, 0.45), (0.8, 0.88, 0.72), (0.4, 0.44, 0.36)),
            "Use bfloat16 (torch's own autocast): it trains 2.50 times as fast",
            " (O4: 2.00; O5: 1.25)",
        ),
        (
            ((0.4, 0.44, 0.36), (0.8, 0.88, 0.72), (0.5, 0.55, 0.45)),
            "Use bfloat16 (O4): it trains 2.50 times as fast",
            " (O5: 1.25; torch's own autocast: 2.00)",
        ),
    ],
)  # fmt: skip
def test_of_levels_that_compute_the_same_the_fastest_is_named_and_all_that_tie(times, said, beside):
    found, rest = _alike(*times)
    assert found == said
    assert rest == beside


def test_levels_that_compute_something_else_do_not_tie():
    (said,) = answered(
        *level("O0", accuracy=RIGHT),
        *level("O4", (0.5, 0.55, 0.44), RIGHT, DIFFERENT),
        *level("O5", (0.49, 0.54, 0.45), RIGHT, {"losses": (3.0,) * 60}),
    )
    assert said.startswith("Use bfloat16 (O5): it trains 2.03 times as ")


def test_the_names_of_levels_that_tie_are_in_the_answer_where_memory_differs():
    more = {"peak_bytes": round(1.1 * HALF["peak_bytes"])}
    (said,) = answered(
        *level("O0", accuracy=RIGHT),
        *level("O4", (0.5, 0.55, 0.45), RIGHT, {**HALF, **DIFFERENT}),
        *level("O5", (0.5, 0.55, 0.45), RIGHT, {**more, **DIFFERENT}),
    )
    trains = "(O4 or O5): it trains 2.00 times as fast on this machine and needs 0.50 to 0.55 of "
    assert f"{trains}the memory." in said


def test_levels_that_compute_the_same_are_one_comparison():
    mine = (98.4, 98.0, 98.2)
    same = {"losses": (1.5,) * 60}
    runs = [*level("O0", (1.0, 1.1, 0.9), RIGHT, same), *level("O4", FAST, mine, DIFFERENT)]
    (alone,) = verdicts(of_runs(*runs))
    runs += [*level("O5", FAST, mine, DIFFERENT), *level("O1", SLOW, RIGHT, same)]
    found = verdicts(of_runs(*runs))
    assert found[0].accuracy == found[1].accuracy == alone.accuracy
    assert (found[2].same, found[2].accuracy, found[2].loss) == (True, None, None)
    other = verdicts(of_runs(*runs, *level("O3", FAST, mine, {"losses": (3.0, 1.0) * 30})))
    assert other[0].accuracy.interval != alone.accuracy.interval


@pytest.mark.parametrize("waited", [0.05, 0.4])
def test_on_a_busy_machine_there_is_no_advice(waited):
    runs = [*level("O0", accuracy=RIGHT), *level("O4", FAST, RIGHT, {**HALF, **DIFFERENT})]
    of = of_runs(*(without(one, waited=waited) for one in runs))
    (said,) = answers(of, verdicts(of))
    busy = "other programs had the processor for 40% of the time of the trainings"
    if waited < 0.1:
        assert said.startswith("Use ")
        assert marks(of) == []
    else:
        again = "Close them and run the same command again"
        assert said.startswith(f"No advice: {busy}. {again}. Until then start with ")
        (found,) = verdicts(of)
        assert (found.speed, found.noise) == (None, busy)
        assert sentences(found)[0] == f"O4 against O0: no verdict on speed ({busy})."
        assert [table._speed(line) for line in table.lines(of, [found])] == ["1.00", "noisy"]
        assert marks(of) == [f"BUSY MACHINE: {busy}"]


@pytest.mark.parametrize(
    ("task", "option"), [("digits-cnn", ""), ("train.py:build", " --task train.py:build")]
)
def test_a_quick_run_names_what_would_decide(task, option):
    quick = {"quick": True, "task": task}
    unsure = (98.4, 98.0, 98.2)
    (said,) = answered(
        *level("O0", accuracy=RIGHT, **quick),
        *level("O4", FAST, unsure, {**SAME, **DIFFERENT}, **quick),
    )
    assert said == (
        "bfloat16 (O4) trains 1.95 times as fast on this machine. Accuracy is 98.2 % (O0: 98.2 "
        "%), between 0.86 points lower and 0.86 points higher (95 %, 3 seeds). To decide, run "
        f"`apex bench{option} --seeds 10`, which trains on all of the data."
    )


SHORT = {"step_ms": (1.0,) * 4, "losses": (1.0,) * 4, "blocks": (0,)}  # of 60 planned steps


@pytest.mark.parametrize(
    ("changes", "report", "said"),
    [
        (SHORT, {"budget_s": 9.0},
         "No answer: the time budget cut the trainings to 4 steps, too few to compare."),
        ({**SHORT, "planned_steps": 4}, {},
         "No answer: the trainings have 4 steps, too few to compare."),
    ],
)  # fmt: skip
def test_no_answer_for_the_steps_names_them_and_what_cut_them(changes, report, said):
    runs = [*level("O0", others=changes), *level("O4", FAST, others=changes)]
    assert answered(*runs, **report) == [said]


def test_no_answer_for_the_seeds_says_what_left_them_out():
    two = [*level("O0", (1.0, 1.1)), *level("O4", (0.5, 0.51))]
    of = of_runs(*two, left_out=2, budget_s=9.0)
    said = "No answer: the time budget left no time for more than 2 of the seeds."
    assert answers(of, verdicts(of)) == [said]
    said = "CUT to 9 s: no time for 2 more trainings (the last seeds)"
    assert marks(of) == [said]
    why = "; this took 12 s, because the first steps of all levels do not fit into the budget"
    assert marks(dataclasses.replace(of, seconds=12.0)) == [said + why]
    single = {"step_ms": (1.0,) * 6, "losses": (1.0,) * 6, "blocks": (0, 5)}  # one in round 2
    runs = [without(level(name)[0], **single) for name in ("O0", "O4")]
    said = "No answer: the time budget cut the trainings to 6 steps, too few to compare."
    assert answered(*runs, left_out=4, budget_s=9.0) == [said]
    cells = [cell(name, seed=seed) for seed in range(3) for name in ("O0", "O4")]
    of = made.report(cells, two)
    assert answers(of, verdicts(of)) == [
        "No answer: the run was interrupted after 2 of 3 seeds, and a comparison needs 3."
    ]


def test_no_answer_where_o0_failed_at_a_seed_says_what_o0_did():
    base = level("O0")
    base[1] = without(base[1], status="out of memory", **made.NOTHING)
    assert answered(*base, *level("O4", FAST)) == [
        "No answer: only 2 of 3 seeds can be compared (O0: out of memory (1 of 3))."
    ]


def test_torchs_autocast_and_tf32_stand_beside_the_level_that_is_advised():
    (said,) = answered(
        *level("O0", accuracy=RIGHT, tf32=False),
        *level("O0", (0.6, 0.66, 0.54), RIGHT, DIFFERENT, tf32=True),
        *level("O4", (0.5, 0.55, 0.45), RIGHT, DIFFERENT, tf32=False),
        *level("native-bf16", (0.52, 0.572, 0.468), RIGHT, DIFFERENT, tf32=False),
    )
    trains = "(O4 TF32 off): it trains 2.00 times as fast on this machine (TF32 alone: 1.67; "
    assert f"{trains}torch's own autocast: 1.92) and needs 0.85 of the memory. " in said


def test_tf32_alone_may_be_the_answer():
    (said,) = answered(
        *level("O0", accuracy=RIGHT, tf32=False),
        *level("O0", (0.6, 0.66, 0.54), RIGHT, DIFFERENT, tf32=True),
    )
    trains = "Use TF32 (O0 TF32 on): it trains 1.67 times as fast on this machine. "
    assert said.startswith(f"{trains}Accuracy ")


def test_a_level_that_learnt_nothing_is_not_taken():
    guess = {"chance": 97.9, "test_loss": ()}
    (said,) = answered(
        *level("O0", accuracy=(99.3, 99.2, 99.4), others=guess),
        *level("O4", FAST, (98.0, 99.6, 98.4), {**DIFFERENT, **guess}),
    )
    assert said.startswith("bfloat16 (O4) trains 1.95 times as fast on this machine")
    assert said.endswith("But O4's accuracy is at chance level: guessing gets 97.9 % right.")


# --- what was learnt -----------------------------------------------------------------------------


def test_an_accuracy_at_chance_level_is_said_and_is_no_proof():
    guess = {"chance": 10.0}
    low = (10.4, 10.2, 10.6)
    of = of_runs(*level("O0", accuracy=low, others=guess), *level("O4", FAST, low, DIFFERENT))
    (found,) = verdicts(of)
    assert "Accuracy is at chance level: guessing gets 10.0 % right." in sentences(found)
    assert answers(of, [found]) == [
        "bfloat16 (O4) trains 1.95 times as fast on this machine and needs 0.85 of the memory. But "
        "O0's accuracy is at chance level: guessing gets 10.0 % right."
    ]
    (said,) = [note for note in notes(of, [found]) if "chance" in note]
    assert said == (
        "On digits-cnn the accuracy of O0 (batch size 128: 10.4 %), O4 (batch size 128: 10.4 %) is "
        "at chance level: guessing gets 10.0 % right. It says nothing about the precision."
    )


def test_without_a_known_chance_the_untrained_model_is_the_bound():
    def said(accuracy):
        runs = level("O0", accuracy=accuracy, others={"untrained": 40.0})
        return rows(of_runs(*runs))[0].unlearnt

    assert said((41.0, 40.0, 42.0)) == "not clearly better than before the training, 40.0 %"
    assert said((60.0, 61.0, 62.0)) is None


# --- columns that disagree -----------------------------------------------------------------------


def test_times_that_do_not_give_the_speed_are_explained():
    """O0's third seed ran on a slower machine, as O4's did: the speeds agree, the medians not."""
    apart = [note for note in _notes((1.0, 1.0, 9.0), (0.5, 5.0, 5.0)) if "do not agree" in note]
    (said,) = apart
    assert "O4 against O0 (batch size 128): 0.20 by the times, 0.90 by the speed" in said
    few = _notes((1.0, 1.0, 9.0), (0.5, 5.0, 5.0), enough=False)  # too few steps to trust a speed
    assert not any("trust" in note for note in few)
    assert not any("do not agree" in note for note in _notes((1.0, 1.1, 0.9), (0.5, 0.55, 0.45)))


def _notes(base, mine, *, enough=True):
    of = of_runs(*level("O0", base), *level("O4", mine))
    found = [
        without(v, noise=None, speed=Interval(v.ratio, v.ratio, v.ratio) if enough else None)
        for v in verdicts(of)
    ]
    return notes(of, found)


def test_two_seeds_or_o0_alone_have_no_answer():
    assert answered(*level("O0", (1.0, 1.0)), *level("O4", (0.5, 0.5))) == [
        "No answer: 2 seeds are too few to compare (`--seeds 3`)."
    ]
    assert answered(*level("O0")) == ["No answer: apex needs results of O0 and of another level."]


def test_a_level_that_diverged_at_one_seed_is_not_taken_nor_its_loss_judged():
    base, five = level("O0", (1.0, 1.1, 0.9, 1.0, 1.0)), level("O3", (0.5, 0.52, 0.51, 0.5, 0.5))
    five[2] = without(five[2], status="diverged", losses=(*five[2].losses[:-1], math.nan))
    of = of_runs(*(without(one, accuracy=(), test_loss=()) for one in (*base, *five)))
    (found,) = verdicts(of)
    assert found.loss is None
    assert answers(of, [found])[0].endswith("O3 did not train to the end with every seed.")


@pytest.mark.parametrize(
    ("status", "losses"), [("diverged", (2.0, math.nan) * 30), ("out of memory", ())]
)
def test_beside_an_o0_that_did_not_train_there_is_no_answer(status, losses):
    base = level("O0", accuracy=(10.0,) * 3, others={"status": status, "losses": losses})
    assert answered(*base, *level("O4", FAST, RIGHT)) == [
        f"No answer, because O0 did not finish: {status} (3 of 3)."
    ]


def test_each_task_and_batch_size_has_an_answer():
    runs = [r for batch in (128, 256) for name in ("O0", "O4") for r in level(name, batch=batch)]
    found = answered(*runs)
    assert [line.partition(":")[0] for line in found] == [
        "digits-cnn, batch 128",
        "digits-cnn, batch 256",
    ]
