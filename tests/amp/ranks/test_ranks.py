"""Two ranks: levels, ways to accumulate and reduce, and an overflow on one rank.

Each cell is trained with amp and by hand; see :mod:`tests.amp.ranks.cells`. After every step
weights, masters, scale and skip are equal over ranks, and equal to those by hand, bit for bit.
"""

import functools

import pytest
import torch

from tests.amp.ranks import rank_programs as programs
from tests.amp.ranks.cells import HAS_MASTERS, OVERFLOW_STEP, Cell
from tests.ranks import RankError

pytestmark = pytest.mark.dist

CELLS = [  # each way at O2, where there are masters, and at another level
    Cell("O2", "ddp", "last"),
    Cell("O0", "ddp"),
    Cell("O2", "no_sync"),
    Cell("O2", "no_sync", "first"),
    Cell("O1", "no_sync", "last"),
    Cell("O5", "no_sync", "last"),
    Cell("O2", "no_sync_delayed", "last"),
    Cell("O4", "no_sync_delayed", "first"),
    Cell("O2", "delayed", "first"),
    Cell("O1", "delayed"),
    Cell("O2", "in_the_body", "last"),
    Cell("O1", "in_the_body", "first"),
    Cell("O2", "after_the_block", "last"),
    Cell("O1", "after_the_block"),
    Cell("O2", "after_the_block_delayed", "first"),
    Cell("O3", "after_the_block_delayed", "last"),
]


def _ids(cell):
    words = [cell.level, cell.way, cell.overflow, cell.start, cell.ours]
    words += [name for name, _ in cell.options]
    return "-".join(word for word in words if word not in ("", "none", "same"))


def _assert_equal(left, right, what):
    """Assert that two runs of a training had the same numbers after each step."""
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        where = f"{what}, step {number}"
        assert one.taken == other.taken, f"{where}: only one took the step"
        assert (one.scale, one.clean) == (other.scale, other.clean), f"{where}: scale, clean steps"
        for kind in ("weights", "masters"):
            mine, theirs = getattr(one, kind), getattr(other, kind)
            assert mine.keys() == theirs.keys()
            wrong = [name for name in mine if not _same(mine[name], theirs[name])]
            sizes = [f"{(mine[n].double() - theirs[n].double()).abs().max():.1e}" for n in wrong]
            assert not wrong, f"{where}: {kind} differ: {wrong} by {sizes}"


def _same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


def _assert_right(answers, *, ranks_agree=True):
    """Assert that ranks agree, and that amp and the training by hand do."""
    for rank, answer in enumerate(answers):
        assert answer.warnings == []
        assert all(m.isfinite().all() for step in answer.hand for m in step.masters.values())
        if ranks_agree:
            _assert_equal(answer.hand, answers[0].hand, f"by hand, ranks {rank} and 0")
            _assert_equal(answer.amp, answers[0].amp, f"amp, ranks {rank} and 0")
    for rank, answer in enumerate(answers):
        _assert_equal(answer.amp, answer.hand, f"amp and by hand, rank {rank}")


@pytest.mark.parametrize("cell", CELLS, ids=_ids)
def test_accumulation_and_overflow(pair, cell):
    answers = pair.run(cell)
    overflows = cell.overflow != "none"
    for answer in answers:
        taken = [step.taken for step in answer.amp]
        assert taken == [not (overflows and step == OVERFLOW_STEP) for step in range(cell.steps)]
    _assert_right(answers)


@pytest.mark.parametrize(("level", "overflow"), [("O0", "none"), ("O1", "first"), ("O4", "last")])
def test_passes_that_are_reduced_after_the_last_block_back_off_once(pair, level, overflow):
    """Without masters, which add passes up in float32."""
    answers = pair.run(Cell(level, "after_two_blocks", overflow))
    assert [step.taken for step in answers[0].amp] == [True, overflow == "none", True]
    _assert_right(answers)


@pytest.mark.parametrize(
    ("level", "way"),
    [
        *(("O0", "no_sync"), ("O3", "no_sync"), ("O3", "delayed"), ("O4", "in_the_body")),
        *(("O5", "no_sync_delayed"), ("O5", "after_the_block")),
    ],
)
def test_at_the_levels_whose_scale_is_1(pair, level, way):
    _assert_right(pair.run(Cell(level, way, dynamic=False, steps=2)))


STARTS = [
    *(("O2", start) for start in ("seeds", "rank0_before", "rank0_after", "all_before")),
    *(("O5", "all_after"), ("O1", "seeds"), ("O1", "rank0_after"), ("O3", "all_after")),
]


@pytest.mark.parametrize(("level", "start"), STARTS)
def test_all_ranks_go_on_from_rank_0(pair, level, start):
    """Where there are masters: from the unrounded ones, or from the float32 checkpoint.

    Without masters, what only rank 0 loads after wrapping stays on rank 0, as in plain torch.
    """
    torchs_own = start == "rank0_after" and level not in HAS_MASTERS
    answers = pair.run(Cell(level, "ddp", steps=2, start=start))
    _assert_right(answers, ranks_agree=not torchs_own)
    if torchs_own:
        weights = [answer.hand[-1].weights["first.weight"] for answer in answers]
        assert not torch.equal(*weights)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_is_wrapped_again_goes_on_from_rank_0_again(pair, level):
    _assert_right(pair.run(Cell(level, "ddp", again=True)))


@pytest.mark.parametrize(
    ("way", "option", "spare"),
    [
        ("no_sync", "find_unused_parameters", True),
        ("no_sync", "gradient_as_bucket_view", False),
        ("no_sync_delayed", "gradient_as_bucket_view", False),
        ("ddp", "static_graph", True),
    ],
)
def test_options_of_ddp(pair, way, option, spare):
    cell = Cell("O2", way, start="seeds", options=((option, True),), spare=spare)
    _assert_right(pair.run(cell))


OURS = [
    Cell("O2", "ddp", "last", start="seeds", ours="after"),
    Cell("O2", "no_sync", "first", start="seeds", ours="before"),
    Cell("O2", "no_sync_delayed", "last", start="seeds", ours="after"),
    Cell("O2", "delayed", start="seeds", ours="after"),
    Cell("O0", "no_sync", start="seeds", ours="after"),
    Cell("O1", "no_sync", "last", start="seeds", ours="before"),
    Cell("O4", "no_sync_delayed", "first", start="seeds", ours="after"),
    Cell("O3", "delayed", "last", start="seeds", ours="after"),
    Cell("O5", "no_sync", "first", start="seeds", ours="before"),
    *(
        Cell(level, "ddp", steps=2, start=start, ours=when)
        for level, start, when in (
            ("O2", "rank0_before", "before"),
            ("O2", "rank0_after", "after"),
            ("O2", "all_after", "before"),
            ("O1", "rank0_after", "before"),
            ("O1", "all_after", "after"),
        )
    ),
    *(Cell(level, "ddp", again=True, ours="after") for level in ("O1", "O2")),
    *(
        Cell("O2", "no_sync", start="seeds", options=(option,), spare=True, ours="after")
        for option in (
            ("message_size", 20),
            ("delay_allreduce", True),
            ("retain_allreduce_buffers", True),
            ("allreduce_always_fp32", True),
            ("gradient_predivide_factor", 2.0),
        )
    ),
]


@pytest.mark.parametrize("cell", OURS, ids=_ids)
def test_apexs_own_wrapper(pair, cell):
    """Made before or after ``initialize``; by hand it is torch's, which computes the same."""
    _assert_right(pair.run(cell))


@pytest.mark.parametrize(
    ("level", "compiled", "ours"),
    [("O1", "model", "after"), ("O2", "model", ""), ("O2", "wrapper", "after")],
)
@pytest.mark.slow
def test_what_torch_compile_traces(pair, level, compiled, ours):
    cell = Cell(level, "no_sync", start="seeds", compiled=compiled, ours=ours)
    _assert_right(pair.run(cell))


def _assert_same_end(answers):
    params, scale, taken = answers[0]
    for others, other_scale, other_taken in answers[1:]:
        assert all(map(_same, params, others))
        assert (scale, taken) == (other_scale, other_taken)
    assert all(param.isfinite().all() for param in params)


PROGRAMS = [
    functools.partial(programs.recomputed_under_no_sync, level="O1", use_reentrant=False),
    functools.partial(programs.recomputed_under_no_sync, level="O2", use_reentrant=True),
    functools.partial(programs.evaluated_first, level="O2", throughout=False),
    functools.partial(programs.evaluated_first, level="O2", throughout=True),
    functools.partial(programs.a_scale_loaded_on_rank_0, level="O1", wrap="torch"),
    functools.partial(programs.a_scale_loaded_on_rank_0, level="O2", wrap="apex"),
    functools.partial(programs.two_overflows_of_one_pass, level="O1"),
    functools.partial(programs.two_overflows_of_one_pass, level="O2"),
    *(
        functools.partial(program, level="O2")
        for program in (
            programs.another_forward_under_no_sync,
            programs.reduced_by_hand,
            programs.a_part_is_wrapped,
            programs.reduced_before_each_step,
            programs.after_forwards_that_nobody_used,
            programs.dropped_by_the_program,
        )
    ),
    *(
        functools.partial(program, level="O1")  # without masters the gradients are the model's own
        for program in (
            programs.another_forward_under_no_sync,
            programs.reduced_by_hand,
            programs.reduced_before_each_step,
        )
    ),
    *(
        functools.partial(programs.partly_reduced, level=level, what=what)
        for level, what in (
            *(("O2", "ignored"), ("O2", "beside"), ("O2", "group of one")),
            *(("O1", "ignored"), ("O1", "beside")),
        )
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.func.__name__}-{p.keywords}")
def test_programs_that_keep_ranks_equal(pair, program):
    _assert_same_end(pair.run(program))


@pytest.mark.parametrize("reduce", ["torch", "apex", "by hand"])
def test_handles_of_2018_keep_ranks_equal(pair, reduce):
    answers = pair.run(functools.partial(programs.with_the_handle_of_2018, reduce=reduce))
    for (weights, *numbers), (others, *same_numbers) in zip(*answers, strict=True):
        assert all(map(_same, weights, others))
        assert numbers == same_numbers
    scales, taken = zip(*[numbers for _, *numbers in answers[0]], strict=True)
    assert taken == (True, False, True)
    assert scales[0] == [2.0**16] * 2
    assert scales[2][1] == 2.0**15
    assert answers[0][1][0][0].isfinite().all()


@pytest.mark.parametrize("data", [False, True])
def test_masters_that_a_program_broadcasts(pair, data):
    """The forward that follows computes with them."""
    first, second = pair.run(functools.partial(programs.masters_by_hand, data=data))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_uneven_inputs(pair):
    answers = pair.run(functools.partial(programs.joined, level="O1"))
    assert all(map(_same, answers[0][0], answers[1][0]))
    with pytest.raises(RankError, match="(?s)Use O1 or O4, or give.*Use O1 or O4, or give"):
        pair.run(functools.partial(programs.joined, level="O2"))


def test_ranks_without_reduction_are_seen_to_differ(pair):
    answers = pair.run(Cell("O2", "never", steps=1))
    _assert_equal(answers[1].amp, answers[1].hand, "amp and by hand, rank 1")
    with pytest.raises(AssertionError, match="weights differ: \\['first.weight'"):
        _assert_equal(answers[1].amp, answers[0].amp, "ranks 1 and 0")


def test_errors_are_told_and_the_next_cell_runs(pair):
    with pytest.raises(RankError, match=r"(?s)rank 0: .*no such way.*rank 1: .*no such way"):
        pair.run(Cell("O0", "no such way"))
    _assert_right(pair.run(Cell("O0", "ddp")))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_different_numbers_of_losses(pair, level):
    """gloo sends 12 bytes to a rank that expects 24, and no rank gets an error."""
    program = functools.partial(programs.different_num_losses, level=level)
    with pytest.raises(RankError, match="(?s)different num_losses.*different num_losses"):
        pair.run(program)
