"""``state="8bit"``: the codes, steps on every path, checkpoints, and shards on 1, 2 and 4 ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from apex.catalogue import optimizers as catalogue
from apex.ops import _runtime
from apex.ops.lists.quantized import BLOCK, SIGNED, UNSIGNED, dequantize, magnitudes, quantize
from apex.optimizers import (
    FusedAdam,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedMuon,
    FusedSGD,
    _muon_shards,
)
from apex.optimizers._eight_bit import CODES, is_code, stored, value_of
from tests import checkpoints
from tests.optimizers import common
from tests.optimizers import eight_bit_programs as programs
from tests.optimizers.common import give_grads, on, parameters, same, started, train, values
from tests.tolerance import CLIPPED, EIGHT_BIT_LOSS, THREE_STEPS, assert_close_to_largest, each

CODE = {"signed": SIGNED, "unsigned": UNSIGNED}
codes = pytest.mark.parametrize("code", CODE.values(), ids=CODE)
OURS = catalogue.makers(max_grad_norm=0.0)  # a norm is summed in some order
MAKERS = {name: OURS[name] for name in catalogue.WITH_8_BITS}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
# Full blocks, more than a program of the kernel has; rows that are no multiple of a block; a
# convolution, with rows shorter than a block. The last three keep float32: few elements, a vector,
# rows of one element.
SHAPES = ((34, 256), (13, 330), (36, 16, 3, 3), (33, 5), (4100,), (4100, 1))
HELD = 3


def held(optimizer, param):
    """The state with float32 instead of codes."""
    state = optimizer.state[param]
    return {slot: value_of(state, slot) for slot in CODES if is_code(state, slot)}


# -- codes -----------------------------------------------------------------------------------------


def drawn(code, rows=40, columns=300):
    """Values over twelve decades, both signs for a signed code."""
    generator = torch.Generator().manual_seed(5)
    sizes = 10 ** torch.linspace(-11, 1, columns)[torch.randperm(columns, generator=generator)]
    value = torch.randn(rows, columns, generator=generator) * sizes
    return value if code.signed else value.abs()


@codes
def test_every_value_becomes_the_nearest_code(code):
    value = drawn(code)
    found, absmax = quantize(value, code)
    sizes = magnitudes(code)
    parts = zip(value.split(BLOCK, 1), found.split(BLOCK, 1), absmax.unbind(1), strict=True)
    for part, number, largest in parts:
        assert torch.equal(largest, part.abs().amax(1))
        ratio = (part / largest[:, None]).double()
        off = (ratio.abs().unsqueeze(-1) - sizes).abs()
        if not code.signed:
            off[..., 0] = torch.where(ratio == 0, 0.0, torch.inf)  # only 0 becomes 0
        number = number.long() & (0x7F if code.signed else 0xFF)
        of_found = off.gather(-1, number.unsqueeze(-1)).squeeze(-1)
        assert (
            of_found <= off.amin(-1) + 2.0**-24 * ratio.abs()
        ).all()  # one rounding of the ratio


@codes
def test_the_error_is_within_its_bound(code):
    """4.5 / 2**n of the value in each decade, n bits of the fraction; below the last, absolute."""
    value = drawn(code).double()
    back = dequantize(*quantize(value.float(), code), code).double()
    largest = value.abs().split(BLOCK, 1)
    ratio = torch.cat([part / part.amax(1, keepdim=True) for part in largest], 1)
    bits = 7 if code.signed else 8
    decade = (-ratio.log10()).floor().clamp(max=bits - 1)
    bound = 4.5 / 2 ** (bits - 1 - decade) * (1 + 2.0**-20)
    error = (back - value).abs()
    above = ratio > 10.0 ** -(bits - 1)
    assert (error[above] <= (bound * value.abs())[above]).all()
    largest = torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in largest], 1)
    assert (error[~above] <= 10.0 ** -(bits - 1) * largest[~above]).all()
    assert (ratio[above] < 0.1).any()
    assert (~above).any()


@codes
def test_quantising_again_changes_nothing(code):
    once = quantize(drawn(code), code)
    assert same(quantize(dequantize(*once, code), code), once)


@codes
def test_the_largest_is_exact_and_a_tie_goes_to_the_smaller(code):
    sizes = magnitudes(code)
    assert len(sizes) == (128 if code.signed else 256)
    assert (sizes.diff() > 0).all()
    assert sizes[0] == 0
    assert sizes[-1] == 1
    value = torch.cat([torch.ones(1), ((sizes[1:] + sizes[:-1]) / 2).float()[1:]])
    expected = torch.arange(1, len(sizes) - 1)
    found, absmax = quantize(value[:BLOCK][None], code)
    assert absmax.item() == 1
    assert torch.equal(found[0, 1:].long(), expected)
    beyond = torch.cat([torch.ones(1), value[1:].nextafter(torch.ones(()))])
    assert torch.equal(quantize(beyond[None], code)[0][0, 1:].long(), expected + 1)


@codes
def test_what_is_not_finite_is_its_whole_block_and_no_other(code):
    value = drawn(code, rows=3)
    for bad in (torch.inf, torch.nan):
        value[1, 260] = bad
        back = dequantize(*quantize(value, code), code)
        assert back[1, 256:].isnan().all()
        value[1, 256:] = back[1, 256:] = 1.0
        assert torch.equal(back, dequantize(*quantize(value, code), code))


@codes
def test_zeros_denormals_and_signs(code):
    value = torch.zeros(3, 300)
    value[1] = torch.finfo(torch.float32).smallest_normal / 2
    value[2] = torch.finfo(torch.float32).smallest_normal
    value[0, 7] = -0.0
    found, absmax = quantize(value, code)
    back = dequantize(found, absmax, code)
    assert torch.equal(back[2], value[2])
    assert not back[:2].any()
    assert not absmax[:2].any()
    assert back[0].signbit().nonzero().tolist() == ([[7]] if code.signed else [])


# -- steps -----------------------------------------------------------------------------------------


@makers
def test_the_kernel_has_the_bits_of_the_definition(make):
    ends = []
    for path in ("reference", "triton", None):
        params, optimizer = started(make, shapes=SHAPES[:HELD], state="8bit")
        train(optimizer, params, range(1), "reference")
        give_grads(params, 1)
        for param in params:
            param.grad[0] *= 2.0**-126  # denormals
            stored(optimizer.state[param], next(iter(held(optimizer, param))))[:2] = 0
        params[0].grad[1] = 0.0
        common.take_step(path, optimizer)
        ends.append((values(params), optimizer, params))
    (weights, definition, params), *others = ends
    for found, optimizer, mine in others:
        each(assert_close_to_largest, found, weights, THREE_STEPS)
        for param, other in zip(params, mine, strict=True):
            left, right = definition.state[param], optimizer.state[other]
            assert left.keys() == right.keys()
            of = {key: value for key, value in left.items() if value.dim()}
            assert {torch.uint8, torch.float32} == {value.dtype for value in of.values()}
            assert [key for key in of if not torch.equal(of[key], right[key])] == []


@pytest.mark.parametrize("path", ["reference", "triton"])
@makers
def test_the_first_step_is_float32s_and_its_state_within_the_codes_error(make, path):
    sides = {}
    for state in ("plain", "8bit"):
        params, optimizer = started(make, shapes=SHAPES[1:2], state=state, steps=1, path=path)
        sides[state] = params, optimizer
    (plain, first), (other, second) = sides.values()
    assert same(values(plain), values(other))
    for slot, value in held(second, other[0]).items():
        exact = first.state[plain[0]][slot]
        assert torch.equal(value, dequantize(*quantize(exact, CODES[slot]), CODES[slot]))
        assert not torch.equal(value, exact)


@makers
def test_which_states_are_held(make):
    params = parameters(shapes=SHAPES)
    params += parameters(torch.float64, [(64, 64)]) + parameters(torch.bfloat16, [(64, 64), (9,)])
    optimizer = make(params, state="8bit")
    train(optimizer, params, range(1))
    is_held = [*[True] * HELD, *[False] * 4, True, False]
    for param, codes in zip(params, is_held, strict=True):
        state = {key: x for key, x in optimizer.state[param].items() if key != "norm"}
        dtypes = {x.dtype for x in state.values()}
        rows, length = param.shape[0], param[0].numel()
        if codes:
            assert dtypes == {torch.uint8, torch.float32}
            blocks = rows * -(-length // BLOCK)
            moments = len(state) // 2
            assert sum(x.nbytes for x in state.values()) == moments * (param.numel() + 4 * blocks)
        else:
            assert dtypes == {torch.promote_types(param.dtype, torch.float32)}


def test_batches_of_matrices(monkeypatch):
    ends = []
    for limit in (2**20, 1):
        monkeypatch.setattr(_muon_shards, "most", lambda device, limit=limit: limit)
        params = parameters(shapes=SHAPES)
        ends.append(train(FusedMuon(params, state="8bit"), params, range(3), "triton"))
    assert same(*ends)


def test_bytes_of_adams_state():
    params, optimizer = started(FusedAdam, shapes=[(64, 1024)], state="8bit", steps=1)
    kept = sum(x.nbytes for x in optimizer.state[params[0]].values())
    assert kept / params[0].numel() == 2 * (1 + 4 / 256)


@pytest.mark.parametrize("path", ["reference", "triton"])
@makers
def test_a_skipped_step_changes_nothing(make, path, monkeypatch):
    """On a device, where the flag is read."""
    params, optimizer = started(make, shapes=SHAPES[1:2], state="8bit", steps=1, path=path)
    monkeypatch.setattr(_runtime, "waits", lambda device: True)
    before = values(params), copy.deepcopy(optimizer.state_dict()["state"])
    give_grads(params, 1)
    params[0].grad[0, 0] = torch.inf
    with on(path):
        optimizer.step_scaled(0.5, torch.ones(()))
    assert same(values(params), before[0])
    checkpoints.assert_equal(optimizer.state_dict()["state"], before[1])


@pytest.mark.parametrize("path", ["reference", "triton", None])
def test_a_gradient_that_is_not_finite_is_its_block(path):
    params, optimizer = started(FusedAdam, shapes=SHAPES[1:2], state="8bit", steps=1, path=path)
    give_grads(params, 1)
    params[0].grad[2, 300] = torch.nan
    common.take_step(path, optimizer)
    assert params[0].isnan().nonzero().tolist() == [[2, 300]]
    train(optimizer, params, range(2, 3), path)
    bad = torch.zeros(params[0].shape, dtype=torch.bool)
    bad[2, 256:] = True
    assert torch.equal(params[0].isnan(), bad)


MEMORY = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("path", ["triton", None])
@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, (36, 16, 3, 3)) for kind in MEMORY), ("transposed", (36, 144))]
)
def test_numbers_do_not_depend_on_the_memory(kind, shape, path):
    ends, laid = [], MEMORY[kind]
    for way in (lambda x: x, laid):
        params = [torch.nn.Parameter(way(parameters(shapes=[shape])[0].detach()))]
        optimizer = FusedAdam(params, state="8bit")
        for seed in range(2):
            give_grads(params, seed)
            params[0].grad = way(params[0].grad)
            common.take_step("reference" if way is not laid else path, optimizer)
        ends.append((optimizer.state[params[0]], params))
    checkpoints.assert_equal(ends[0][0], ends[1][0])
    assert_close_to_largest(ends[1][1][0].detach(), ends[0][1][0].detach().double(), THREE_STEPS)


@pytest.mark.parametrize("path", ["triton", None])
@pytest.mark.parametrize("storage", ["low_bits", "kahan", "stochastic"])
def test_storages_are_independent_of_it(storage, path):
    params = parameters(torch.bfloat16, SHAPES[1:2])
    exact = common.widened(params)
    optimizer = FusedAdam(params, storage=storage, state="8bit")
    other = FusedAdam(exact, state="8bit")
    for seed, way in enumerate(("reference", path)):
        common.give_both(params, exact, seed)
        common.take_step(way, optimizer)
        other.step()
    mine, its = optimizer.state[params[0]], other.state[exact[0]]
    assert all(torch.equal(mine[key], its[key]) for key in its)


def test_masters_have_it_too():
    for make, options in common.WITH_MASTERS.items():
        some, optimizer = started(make, torch.bfloat16, SHAPES[:1], state="8bit", **options)
        train(optimizer, some, range(2))
        state = optimizer.state[some[0]]
        assert state["exp_avg_codes"].dtype == torch.uint8
        assert state["master_param"].dtype == torch.float32
        assert torch.equal(state["master_param"].bfloat16(), some[0])


@pytest.mark.parametrize("path", ["triton", None])
def test_the_first_gradient_enters_a_momentum_buffer_whole(path):
    params = parameters(shapes=SHAPES[:1])
    optimizer = MAKERS["FusedSGD"](params, state="8bit")
    give_grads(params, 0)
    with on(path):
        optimizer.step_scaled(1.0, torch.ones(()))  # a skipped step begins no history
        optimizer.step()
    buffer = held(optimizer, params[0])["momentum_buffer"]
    assert torch.equal(buffer, dequantize(*quantize(params[0].grad, SIGNED), SIGNED))


# -- training --------------------------------------------------------------------------------------


def loss_of(seed, state, make):
    """The loss of a small language model after 60 steps, of the last ten."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 64),
        torch.nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True),
        torch.nn.Linear(64, 64),
    )
    optimizer = make(model.parameters(), state=state)
    generator = torch.Generator().manual_seed(100)  # the same text for every seed
    follows = torch.randint(64, (64, 4), generator=generator)
    losses = []
    for _ in range(60):
        words = [torch.randint(64, (8,), generator=generator)]
        for choice in torch.randint(4, (12, 8), generator=generator):
            words.append(follows[words[-1], choice])
        text = torch.stack(words, 1)
        loss = torch.nn.functional.cross_entropy(
            model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize(
    "make",
    [  # at the rates that were best for float32 states
        lambda params, **more: FusedAdam(params, lr=3e-3, **more),
        pytest.param(
            lambda params, **more: FusedLion(params, lr=5e-4, **more), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            lambda params, **more: FusedMuon(params, lr=0.02, adam_lr=3e-3, **more),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["FusedAdam", "FusedLion", "FusedMuon"],
)
@pytest.mark.slow
def test_a_language_model_learns_as_with_float32(make):
    seeds = range(3)
    plain = torch.tensor([loss_of(seed, "plain", make) for seed in seeds])
    other = torch.tensor([loss_of(seed, "8bit", make) for seed in seeds])
    assert plain.max() < 3.4  # of 4.16: it has learnt
    assert (other - plain).mean().abs() <= EIGHT_BIT_LOSS


# -- states that are saved -------------------------------------------------------------------------


@makers
def test_a_saved_state_comes_back_bit_for_bit(make):
    params, optimizer = started(make, shapes=SHAPES, state="8bit", steps=1)
    for param, state in optimizer.state.items():
        if param.dim() > 1:  # smaller than is kept: quantised again it would be 0
            state.get(optimizer.slots[0] + "_absmax", param.grad)[0] = 2.0**-140
    others, other = started(make, shapes=SHAPES, state="8bit")
    other.load_state_dict(common.through_a_file(optimizer.state_dict()))
    for copied in (other, pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        checkpoints.assert_equal([*optimizer.state.values()], [*copied.state.values()])
    common.copy_into(others, params)
    assert same(train(optimizer, params, range(2, 4)), train(other, others, range(2, 4)))


@makers
def test_states_are_quantised_and_dequantised_on_loading(make):
    params = parameters(shapes=SHAPES)
    plain, eight = make(params), make(params, state="8bit")
    train(plain, params, range(2))
    eight.load_state_dict(plain.state_dict())
    wide = make(params)
    wide.load_state_dict(eight.state_dict())
    again = make(params, state="8bit")
    again.load_state_dict(wide.state_dict())
    for number, param in enumerate(params):
        assert wide.state[param].keys() == plain.state[param].keys()
        for slot in plain.state[param].keys() & CODES.keys():
            exact, value = plain.state[param][slot], wide.state[param][slot]
            assert value.dtype == exact.dtype
            if number < HELD:
                exact = dequantize(*quantize(exact, CODES[slot]), CODES[slot])
            assert torch.equal(value, exact)
        checkpoints.assert_equal(eight.state[param], again.state[param])


def test_torchs_state_both_ways():
    params, theirs = started(torch.optim.AdamW, shapes=SHAPES[1:3], lr=0.02, steps=1)
    ours = FusedAdam(params, lr=0.02, state="8bit")
    ours.load_state_dict(theirs.state_dict())
    back = torch.optim.AdamW(params, lr=0.02)
    back.load_state_dict(ours.torch_state_dict())
    for param in params:
        assert back.state[param].keys() == theirs.state[param].keys()
        for slot, value in held(ours, param).items():
            exact = theirs.state[param][slot]
            assert torch.equal(value, dequantize(*quantize(exact, CODES[slot]), CODES[slot]))
            assert torch.equal(value, back.state[param][slot])


def test_groups_that_are_added_later():
    params = parameters(shapes=SHAPES[:2])
    optimizer = FusedAdam(params[:1], state="8bit")
    train(optimizer, params[:1], range(1))
    optimizer.add_param_group({"params": params[1:], "lr": 0.5, "state": "8bit"})
    train(optimizer, params, range(1, 2))
    assert [optimizer.state[param]["exp_avg_codes"].dtype for param in params] == [torch.uint8] * 2


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*MAKERS.values(), FusedMixedPrecisionLamb])
def test_an_unknown_state_is_refused(make):
    with pytest.raises(ValueError, match="state was '4bit'; allowed are 'plain', '8bit'"):
        make(parameters(), state="4bit")


def test_sgd_without_momentum_has_no_state():
    with pytest.raises(ValueError, match="no group has momentum. Pass a momentum"):
        FusedSGD(parameters(), lr=0.1, state="8bit")
    params = parameters()
    optimizer = FusedSGD([{"params": params, "momentum": 0.9}], lr=0.1, state="8bit")
    with pytest.raises(RuntimeError, match="a momentum buffer may be stored as 8-bit codes"):
        optimizer.get_momentums(params)


def test_a_group_of_another_state_is_refused():
    with pytest.raises(ValueError, match="a group has state='8bit', and the opt.* state='plain'"):
        FusedAdam([{"params": parameters(), "state": "8bit"}])


@pytest.mark.parametrize("path", ["triton", None])
def test_what_was_taken_out_of_a_state_is_missed_before_anything_changes(path):
    params, optimizer = started(FusedAdam, shapes=SHAPES[:2], state="8bit", steps=1, path=path)
    whole = optimizer.state[params[1]]["exp_avg_absmax"]
    before = values(params)
    for wrong in (None, whole[1:], whole.double(), whole.t().contiguous().t()):
        optimizer.state[params[1]]["exp_avg_absmax"] = wrong
        if wrong is None:
            del optimizer.state[params[1]]["exp_avg_absmax"]
        with pytest.raises(RuntimeError, match='the "exp_avg_absmax" of a parameter does not fit'):
            train(optimizer, params, range(1, 2), path)
        assert same(values(params), before)


def test_codes_that_were_saved_alone_are_refused():
    params, optimizer = started(FusedAdam, shapes=SHAPES[:1], state="8bit", steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    for maker in (lambda: FusedAdam(params, state="8bit"), lambda: FusedAdam(params)):
        state = copy.deepcopy(saved)
        absmax = state["state"][0].pop("exp_avg_absmax")
        with pytest.raises(ValueError, match='the state has no "exp_avg_absmax"'):
            maker().load_state_dict(state)
        state["state"][0]["exp_avg_absmax"] = absmax[1:]
        with pytest.raises(ValueError, match="the saved exp_avg_absmax of parameter 0 has shape"):
            maker().load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("saved", "here"), [("8bit", "plain"), ("plain", "8bit")])
def test_a_checkpoint_of_the_other_form_is_refused(saved, here, tmp_path):
    """By torch, which copies what has one name and size, codes into moments too."""
    states = []
    for state in (saved, here):
        params, optimizer = started(FusedAdam, shapes=SHAPES[:1], state=state, steps=1)
        states.append(optimizer.state_dict()["state"][0])
    checkpoint.save(states[0], checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(checkpoint.api.CheckpointException, match="Missing key"):
        checkpoint.load(states[1], checkpoint_id=tmp_path, no_dist=True)
    both = {**optimizer.state_dict(), "state": {0: states[0] | states[1]}}
    with pytest.raises(
        ValueError, match="the state has a float32 one too. Load the state as it was"
    ):
        optimizer.load_state_dict(both)


def test_the_catalogue_has_it_for_every_optimizer():
    assert [*catalogue.BY_NAME] == catalogue.WITH_8_BITS


# -- shards ----------------------------------------------------------------------------------------


def alike(left, right, count=4, *, normed=False):
    """Weights and states of the first parameters have the same bits."""
    weights, *states = left
    others, *its = right
    if normed:
        each(assert_close_to_largest, weights, others, CLIPPED)
    else:
        assert same(weights[:count], others[:count])
    for one, two in zip(states[:count], its[:count], strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one if one[key].dim())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "path"), [*((name, "reference") for name in programs.MAKERS), ("FusedAdam", None)]
)
@pytest.mark.slow
def test_numbers_do_not_depend_on_how_many_ranks_share(four, name, path):
    answers = four.run(programs.stepped, name, path)
    alone = answers[0][1]
    held = 3  # torch's own kernels step the last, and round a tensor's last elements elsewhere
    assert [any(x.dtype == torch.uint8 for x in state.values()) for state in alone[1:]] == (
        [True] * held + [False]
    )
    for answer in answers:
        for kept in answer.values():
            alike(kept, alone, 4 if path else held, normed=name in programs.NORMED)
    assert [len(answer) for answer in answers] == [3, 3, 2, 2]


@pytest.mark.dist
@pytest.mark.parametrize("state", ["8bit", "bfloat16"])
def test_a_checkpoint_goes_from_two_ranks_to_four_to_one(four, tmp_path, state):
    alone, before = programs.Training("FusedAdam", 1, "reference", state), 0
    for seed, count in enumerate((2, 4, 1), 1):
        answers = four.run(programs.chained, "FusedAdam", str(tmp_path), count, before, seed, state)
        alone.step([seed])
        for answer in answers[:count]:
            alike(answer, alone.kept())
        before = count


@pytest.mark.dist
def test_shards_of_other_dimensions_are_refused(four):
    for large, small, copied in four.run(programs.refused):
        assert "Shard it with Shard(0), or leave state out" in large
        assert (small, copied) == ("", "")


@pytest.mark.dist
def test_fully_shard(four):
    for losses, placed, kept in four.run(programs.fully_sharded):
        assert losses[-1] < losses[0]
        assert placed
        assert kept == 2 * (32 * 64 + 4 * 32)  # a quarter of (128, 64)
