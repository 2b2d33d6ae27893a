"""DistributedFusedAdam and DistributedFusedLAMB on four ranks, or on pairs of two, over gloo."""

import functools
import math
import pathlib

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from apex import amp
from apex.optimizers import FusedAdam
from tests.amp.levels import LEVELS
from tests.contrib import sharded_programs as programs
from tests.contrib.sharded_programs import (
    BFLOAT,
    FLOAT,
    HALF,
    LAMB,
    LEFT_OUT,
    MIXED,
    REMAINDERS,
    SMALL,
)
from tests.ranks import alone, from_two
from tests.tolerance import CLIPPED, ROUNDED_WEIGHTS, assert_close_to_largest, each

pytestmark = pytest.mark.dist
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "distributed.md"


def assert_all_are(answers, wanted):
    for found in answers:
        assert [*map(torch.equal, found, wanted)] == [True] * len(wanted)
        assert [p.dtype for p in found] == [p.dtype for p in wanted]


BUFFERS = {"contiguous_grad_buffer": True, "contiguous_param_buffer": True}
CASES = {
    "defaults": ({}, (FLOAT,)),
    "mixed": (SMALL, MIXED),
    "summed in 16 bits": ({"grad_sync_dtype": HALF, "overlap_grad_sync": False}, MIXED),
    "nothing stored": ({"store_params": False, "grad_sync_dtype": BFLOAT}, (FLOAT,)),
    "remainders": (REMAINDERS, (BFLOAT,)),
    "buffers": ({**BUFFERS, **SMALL, "overlap_param_sync": True}, MIXED),
    "bytes": ({**REMAINDERS, **BUFFERS, "param_sync_dtype": torch.int16}, (BFLOAT,)),
    "capturable": ({"capturable": True, "device": "cpu", "param_sync_dtype": torch.uint8}, MIXED),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_fused_adam_with_the_mean_gradients(four, name, ranks):
    options, dtypes = CASES[name]
    answers = four.run(functools.partial(programs.sharded, options, ranks, dtypes=dtypes))
    assert_all_are(answers, programs.alone(ranks, dtypes))


def test_parameters_are_rounded_to_the_dtype_that_is_sent(four):
    answers = four.run(functools.partial(programs.sharded, {"param_sync_dtype": HALF}, 4))
    assert_all_are(answers, [p.half().float() for p in programs.alone(4)])


DOUBLE = torch.float64
ROUNDING = {
    "float64": (DOUBLE, {}, ["dtype=torch.float32 rounds parameters of torch.float64"]),
    "float64, not stored": (DOUBLE, {"store_params": False}, []),
    "float64 in float64": (DOUBLE, {"dtype": DOUBLE}, []),
    "sent in bfloat16": (
        FLOAT,
        {"param_sync_dtype": BFLOAT},
        ["param_sync_dtype=torch.bfloat16 rounds parameters of torch.float32"],
    ),
    "sent in bfloat16, not stored": (
        FLOAT,
        {"param_sync_dtype": BFLOAT, "store_params": False},
        ["param_sync_dtype=torch.bfloat16 rounds parameters of torch.float32"],
    ),
    "16 bits": (HALF, {"dtype": HALF}, []),
    "bytes": (FLOAT, {"param_sync_dtype": torch.uint8}, []),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_dtypes_that_round_are_warned_of(four, name):
    dtype, options, wanted = ROUNDING[name]
    exact = programs.alone(2, (dtype,))
    for weights, texts in four.run(functools.partial(programs.rounded, (dtype,), options)):
        assert len(texts) == len(wanted)
        assert all(part in text for part, text in zip(wanted, texts, strict=True))
        for p, q in zip(weights, exact, strict=True):
            assert p.dtype == dtype
            sent = options.get("param_sync_dtype", dtype)
            coarse = sent if sent.is_floating_point else dtype
            assert_close_to_largest(p, q, ROUNDED_WEIGHTS[coarse])


def test_buckets_that_are_filled_by_less_than_70_percent_are_warned_of(four):
    for found in four.run(functools.partial(programs.filled, [None, 0.125, 0.17, 0.18])):
        assert found[:3] == [[]] * 3
        (text,) = found[3]
        assert "buckets are 69% full on average, with bucket_cap_mb=0.18" in text
        assert "Consider decreasing the bucket_cap_mb argument." in text


def test_moments_in_float16_with_a_scale(four):
    for (wide, narrow), (moments, scaled), dtypes in four.run(programs.scaled_moments):
        assert dtypes == {HALF}
        each(assert_close_to_largest, narrow, wide, ROUNDED_WEIGHTS[HALF])
        for x, y in zip(scaled, moments, strict=True):
            assert 0 < float(y.max()) < 2.0**-24  # nothing of it is in float16 itself
            assert_close_to_largest(x, y, ROUNDED_WEIGHTS[HALF])


@pytest.mark.parametrize("form", [1, 2])
def test_moments_in_float16_are_saved(four, form):
    assert four.run(functools.partial(programs.scaled_and_resumed, form)) == [[True] * 5] * 4


def test_the_stages_in_which_lamb_is_made(four):
    assert_all_are(
        four.run(programs.lamb_in_stages), four.run(functools.partial(programs.of_lamb, {}))[0]
    )


def test_names_that_programs_import():
    from apex.contrib.optimizers.distributed_fused_adam import (
        _disable_pre_forward_hook,
        _multi_tensor_copy,
    )

    sources = [torch.arange(6.0), torch.ones(0), torch.tensor([1.5])]
    found = [torch.zeros(2, 3, dtype=HALF), torch.ones(0), sources[2]]
    _multi_tensor_copy(sources, found, dummy_overflow_buf=torch.zeros(1))
    assert torch.equal(found[0], sources[0].view(2, 3).half())
    assert found[2].item() == 1.5
    with _disable_pre_forward_hook(found[0]):  # nothing is on its way
        assert found[0][1, 2] == 5.0


def test_sums_instead_of_means(four):
    answers = four.run(functools.partial(programs.sharded, {"average_grad_sync": False}, 2))
    mean = programs.alone(2)
    assert any(not torch.equal(p, q) for p, q in zip(answers[0], mean, strict=True))
    eps = functools.partial(FusedAdam, eps=0.5e-8)  # Adam of doubled gradients, but for eps
    each(assert_close_to_largest, answers[0], programs.alone(2, make=eps), CLIPPED)


def test_backends_that_reduce_whole_tensors_alone(four):
    assert_all_are(four.run(programs.without_shards), programs.alone(4))


@pytest.mark.parametrize("sharded", ["DistributedFusedAdam", "DistributedFusedLAMB"])
def test_a_rank_without_any_part(four, sharded):
    answers = four.run(functools.partial(programs.tiny, getattr(programs, sharded)))
    p = torch.nn.Parameter(torch.ones(()))
    make = {"DistributedFusedAdam": FusedAdam, "DistributedFusedLAMB": LAMB}[sharded]
    optimizer = make([p], lr=0.1)
    for _ in range(2):
        p.grad = torch.tensor(2.5)
        optimizer.step()
    assert_all_are([found for found, _ in answers], [p.detach()])
    assert {step for _, step in answers} == {2}


def test_state_in_bfloat16(four):
    assert four.run(programs.narrow_state) == [True] * 4


def test_equal_shards_on_other_ranks(four):
    answers = four.run(programs.redundant)
    assert_all_are([weights for weights, _ in answers], programs.alone(4))


@pytest.mark.parametrize(
    ("options", "dtypes", "equal"),
    [
        ({}, (FLOAT,), True),
        ({"set_param_views_to_flat_buffer": True, "adam_w_mode": False}, MIXED, True),
        ({"max_grad_norm": 1.0, "use_nvlamb": True, "grad_averaging": False}, (FLOAT,), False),
    ],
)
def test_numbers_are_those_of_fused_lamb(four, options, dtypes, equal):
    """Norms are added up by fragments, which may change their last bit."""
    answers = four.run(functools.partial(programs.of_lamb, options, dtypes=dtypes))
    theirs = {key: value for key, value in options.items() if not key.startswith("set")}
    wanted = programs.alone(4, dtypes, functools.partial(LAMB, **theirs))
    if equal:
        assert_all_are(answers, wanted)
    for found in answers:
        assert_all_are([found], answers[0])
        each(assert_close_to_largest, found, wanted, CLIPPED)


# -- gradients -------------------------------------------------------------------------------------

WITHOUT = {
    "on one rank": [(1, 4), (), (), ()],
    "on all": [(0, 2)] * 4,
    "a rank has none": [(0, 1, 2, 3, 4), (), (), (1,)],
}


@pytest.mark.parametrize("name", WITHOUT)
def test_missing_gradients(four, name):
    job = functools.partial(programs.sharded, SMALL, 4, without=WITHOUT[name])
    assert_all_are(four.run(job), programs.alone(4, without=WITHOUT[name]))


@pytest.mark.parametrize(
    "how", ["no_sync", "greedy", "buffer", "twice", "twice, buffer", "last", "last, greedy"]
)
def test_accumulation(four, how):
    answers = four.run(functools.partial(programs.accumulation, how))
    assert_all_are(answers, programs.alone(4, passes=2))


@pytest.mark.parametrize("options", [{}, {"contiguous_grad_buffer": True}, BUFFERS], ids=len)
def test_no_backward_pass_waits_for_other_ranks(four, options):
    """Else two ranks wait for each other, in a backward pass and in a collective after it."""
    answers = four.run(functools.partial(programs.between, options))
    assert_all_are(answers, programs.alone(2, passes=2, without=LEFT_OUT))


def test_a_batch_that_is_dropped(four):
    assert_all_are(four.run(programs.dropped), programs.alone(4))


@pytest.mark.parametrize("when", ["before the backward", "after the backward", "and loaded"])
@pytest.mark.parametrize("ranks", [range(4), (1,)], ids=len)
def test_a_group_that_is_added_later(four, ranks, when):
    for found, wanted in four.run(functools.partial(programs.added, ranks, when)):
        assert all(map(torch.equal, found, wanted))


def test_gradients_that_the_program_writes_into_the_buffer(four):
    answers = four.run(programs.buffers)
    assert_all_are([weights for weights, _ in answers], programs.alone(4))
    assert {memories for _, memories in answers} == {3}  # five parameters in three buckets


def test_bytes_sent(four):
    """Each parameter begins at a multiple of 8 elements, each of four shards too."""
    sizes = [[math.prod(shape) for shape in programs.SHAPES[i::2]] for i in (0, 1)]
    padded = [math.ceil(sum(8 * math.ceil(n / 8) for n in some) / 32) * 32 for some in sizes]
    reduced = [4 * size + size for size in padded]  # flat, and the shard: a quarter of 4 bytes
    gathered = [4 * padded[0] + padded[0], 2 * padded[1] + padded[1] // 2]
    for sent in four.run(programs.bytes_sent):
        scattered = [n for name, n in sent if name.startswith("reduce_scatter")]
        assert sorted(scattered) == sorted(reduced)
        assert sorted(n for name, n in sent if name.startswith("all_gather")) == sorted(gathered)
        assert [n for name, n in sent if name == "all_reduce"] == [5]  # a byte for each parameter


@pytest.mark.parametrize("compiled", ["", "model", "function"])
@pytest.mark.slow
def test_readers_of_parameters_of_other_modules_wait(four, compiled):
    assert four.run(functools.partial(programs.attention, compiled)) == [True] * 4


# -- scaling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "apex", "unscale", "left", "lamb"])
def test_an_inf_on_one_rank_skips_on_all(four, kind):
    answers = four.run(functools.partial(programs.scaled, kind))
    for seen, _ in answers:
        assert seen == [(4.0, False), (2.0, True), (2.0, False), (2.0, False)]
    assert_all_are([weights for _, weights in answers], answers[0][1])


@pytest.mark.parametrize("how", ["step", "unscale", "told"])
def test_a_scaler_of_more_ranks_than_the_optimizers(four, how):
    answers = four.run(functools.partial(programs.scaler_of_more_ranks, how))
    assert answers == [(2.0, 1.0)] * 4


@pytest.mark.parametrize("how", ["unscale", "told"])
def test_the_scale_of_lamb_counts_instead_of_the_scalers(four, how):
    assert four.run(functools.partial(programs.global_scale, how)) == [2.0] * 4


def test_the_program_of_the_page(four):
    answers = four.run(functools.partial(programs.recipe, PAGE))
    assert len({answer[:3] for answer in answers}) == 1
    taken, skipped, *_ = answers[0]
    assert taken + skipped == 30
    assert taken > 20
    assert_all_are([answer[3] for answer in answers], answers[0][3])
    torch.manual_seed(2)
    assert not torch.equal(answers[0][3][0], torch.nn.Linear(8, 16).weight.half())


def test_norms_and_clipping(four):
    mean = [
        (a + b) / 2
        for a, b in zip(*(programs.grads(0, r, programs.params()) for r in (0, 1)), strict=True)
    ]
    whole, part, rest = (torch.cat([*map(torch.flatten, x)]) for x in (mean, mean[2:], mean[:2]))
    first = [whole.norm() / 2, whole.norm() / 2, 1.0, rest.norm() / whole.norm()]
    second = [part.norm(), part.norm(), 1.0, rest.norm()]
    for found in four.run(programs.clipping):
        clips = [1 / whole.norm()] * 5, [1, 1, *[1 / part.norm()] * 3]
        for (norms, weights), wanted, factors in zip(found, (first, second), clips, strict=True):
            assert_close_to_largest(torch.tensor(norms), torch.tensor(wanted), CLIPPED)
            ps = programs.params()
            for p, grad, factor in zip(ps, mean, factors, strict=True):
                p.grad = grad * factor
            FusedAdam(ps, lr=0.1).step()
            each(assert_close_to_largest, weights, ps, CLIPPED)


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["state", "weights"])
@pytest.mark.parametrize("name", ["mixed", "remainders"])
def test_state_of_other_numbers_of_ranks(four, name, first):
    options, dtypes = CASES[name]
    weights, state = four.run(functools.partial(programs.saved, options, dtypes, 2, None))[0]
    for number, p in enumerate(weights):
        saved = state["state"][number]
        assert [saved[key].dtype for key in ("param", "exp_avg")] == [FLOAT] * 2
        assert torch.equal(saved["param"].to(p.dtype), p)
    assert state["format"] == 2
    job = functools.partial(programs.resumed, options, dtypes)
    on_two = four.run(functools.partial(job, 2, weights, state, first))
    on_four = four.run(functools.partial(job, 4, weights, state, first))
    wanted = programs.alone(2, dtypes, more=1)  # without an interruption
    assert_all_are([found for found, _ in (*on_two, *on_four)], wanted)
    for _, again in (*on_two, *on_four):
        for number in range(5):
            both = again["state"][number], state["state"][number]
            assert all(torch.equal(both[0][key], both[1][key]) for key in both[1])


def test_state_of_this_rank(four):
    options, dtypes = CASES["remainders"]
    answers = four.run(functools.partial(programs.saved, options, dtypes, 4, 1))
    weights, states = answers[0][0], [state for _, state in answers]
    job = functools.partial(programs.resumed, options, dtypes, 4, weights)
    answers = four.run(functools.partial(job, states, "weights"))
    assert_all_are([found for found, _ in answers], programs.alone(4, dtypes, more=1))
    kept = [s["exp_avg"].numel() for state in states for s in state["state"].values()]
    assert sum(kept) == sum(math.prod(shape) for shape in programs.SHAPES)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("name", ["mixed", "remainders"])
def test_torchs_get_state_dict_and_set_state_dict(four, name, before, after, tmp_path):
    options, dtypes = CASES[name]
    job = functools.partial(programs.distributed_checkpoint, options, dtypes, tmp_path)
    answers = four.run(functools.partial(job, before, after))
    assert_all_are(answers, programs.alone(before, dtypes, more=1))


@pytest.mark.parametrize("name", ["mixed", "remainders", "nothing stored", "buffers"])
def test_weights_that_the_program_writes(four, name):
    options, dtypes = CASES[name]
    for found in four.run(functools.partial(programs.written, options, dtypes)):
        assert found == [True] * 5


# -- errors ----------------------------------------------------------------------------------------

ERRORS = {
    "amsgrad": "RuntimeError: DistributedFusedAdam does not support amsgrad=True",
    "scaled states": "with_scaled_states=True needs dtype=torch.float16; it was torch.float32",
    "nccl_ub": "does not support nccl_ub=True",
    "both stored": "RuntimeError: .*Pass store_params=False",
    "remainders": "has torch.float32, and store_param_remainders=True needs torch.bfloat16",
    "buffer": "contiguous_param_buffer=True excludes param_sync_dtype=torch.float16",
    "dtype": "dtype was torch.int32; allowed are",
    "cap": "ValueError: .*bucket_cap_mb was 0; it must be a number above 0",
    "pipeline": "ValueError: .*pipeline_size was '2'",
    "lr": "ValueError: Invalid learning rate: -1.0",
    "not in group": "ValueError: .*rank . is not in process_group. Pass a group that contains it",
    "sizes": "RuntimeError: .*the first must be the product of the others",
    "meta": "is on meta, and another parameter is on cpu",
    "ranks differ": "rank 1 differs from rank 0 .* Build the same model and optimizer",
    "options differ": r"in options: it has \('bucket_cap_mb', 3\), and rank 0 has .* 2\)",
    "tuning": "TypeError: .*dwu_num_chunks was 4.0; it must be of type int. apex ignores its value",
    "gather": "does not support skip_allgather=True",
    "e5m2": "does not support e5m2_allgather=True",
    "clip": "does not support clip_after_ar=False",
    "view": "grad_buffer_view needs contiguous_grad_buffer=True",
    "param buffer": "init_param_buffer needs contiguous_param_buffer=True",
    "stranger": "ValueError: .*a parameter is in none of the optimizer's groups",
    "norm type": "ValueError: .*norm_type was 1.0; only 2.0",
    "copy": "cannot be copied or pickled.* Save its state_dict",
    "old arguments": "TypeError",
    "amp": "amp.initialize: DistributedFusedAdam keeps gradients and masters itself",
    "moved": r"a parameter of shape \(8,\) on cpu got other memory",
    "no scale": "TypeError: .*pass either inv_scale or grad_scaler",
    "twice": "gradients were unscaled or clipped already",
    "late gradient": "a gradient arrived after the gradients were unscaled or clipped",
    "torch's unscale_": "GradScaler.unscale_ has not seen any gradients. Use apex.amp.GradScaler",
    "two optimizers": "another hook removed the gradient",
}


def test_bad_input(four):
    for texts in four.run(programs.refused):
        assert texts.keys() == ERRORS.keys()
        for name, text in texts.items():
            assert text, name
            with pytest.raises(AssertionError, match=ERRORS[name]):
                raise AssertionError(text)


def test_states_that_do_not_fit(four):
    wanted = {
        "format": "the dict has format 3",
        "nothing": "the dict has format 2 and no keys. Pass the dict that",
        "ranks": "is the part of rank . of 2, and this is rank . of 4; .*state_dict_format=2",
        "not root": "only the state of rank 0 contains tensors",
        "groups": "ValueError",
        "what": "state_dict_format was 1 and gather_on_root True",
        "shape": r"saved exp_avg of parameter 2 has shape \(3,\), and this .* needs \(130, 9\)",
    }
    for rank, texts in enumerate(four.run(programs.bad_states)):
        for name, text in texts.items():
            if name == "not root" and rank % 2 == 0:
                assert not text
                continue
            with pytest.raises(AssertionError, match=wanted[name]):
                raise AssertionError(text)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(tmp_path):
    text = from_two(programs.killed, tmp_path)
    assert "a collective failed. Has another rank ended" in text


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9's own
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_rank(device, tmp_path):
    with alone({"cpu": "gloo", "cuda": "nccl"}[device]):
        programs.one_rank(device, tmp_path)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("kind", [programs.DistributedFusedAdam, programs.DistributedFusedLAMB])
def test_amp_initialize_refuses_them(kind):
    layer = torch.nn.Linear(4, 2)
    optimizer = kind(layer.parameters(), lr=1e-3)
    for level in LEVELS:
        with pytest.raises(RuntimeError, match=f"{kind.__name__} keeps gradients and masters itse"):
            amp.initialize(layer, optimizer, opt_level=level, verbosity=0)


@pytest.mark.usefixtures("group_of_one")
def test_a_flat_state_is_refused():
    """That of torch's ``flatten_optimizer_state_dict=True`` lacks what it loads."""
    layer = torch.nn.Linear(4, 2)
    optimizer = programs.DistributedFusedAdam(layer.parameters(), lr=1e-3)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(layer, optimizer, options=options)
    with pytest.raises(ValueError, match="the saved param of parameter . is missing"):
        set_optimizer_state_dict(layer, optimizer, state, options=options)


def test_it_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        programs.DistributedFusedAdam(programs.params())
