"""FusedAdam: the formula, torch's Adam and AdamW, masters, storages, CUDA-graph state."""

import pytest
import torch

from apex.ops.lists import storage as storages
from apex.ops.lists.storage import LOW_BITS, join_bits, round_stochastically, split_bits
from apex.optimizers import FusedAdam
from tests.optimizers import common
from tests.optimizers.common import PATHS, give_grads, parameters, same, started, train, values
from tests.tolerance import CLIPPED, assert_close_to_largest

SMALL = ((7,), (33, 5))


# -- torch's optimizers ----------------------------------------------------------------------------

TORCH_OPTIMIZERS = [(torch.optim.AdamW, True), (torch.optim.Adam, False)]


def torch_optimizer(params, kind, **more):
    return kind(params, lr=0.02, weight_decay=0.1, **more)


def test_torch_does_not_share_tensors():
    params, optimizer = started(FusedAdam, steps=2)
    plain = torch.optim.AdamW(params)
    plain.load_state_dict(optimizer.torch_state_dict())
    assert plain.state[params[1]]["exp_avg"] is not optimizer.state[params[1]]["exp_avg"]
    train(plain, params, range(1))
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("key", ["amsgrad", "maximize"])
def test_states_of_other_algorithms_are_refused(key):
    params, theirs = started(torch.optim.AdamW, shapes=SMALL, **{key: True})
    with pytest.raises(ValueError, match=f"saved with {key}=True"):
        FusedAdam(params).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(("kind", "mode"), TORCH_OPTIMIZERS)
def test_the_other_optimizers_weight_decay_is_refused(kind, mode):
    params = parameters(shapes=SMALL)
    saved = torch_optimizer(params, kind).state_dict()
    with pytest.raises(ValueError, match=f"Make the optimizer with adam_w_mode={mode}"):
        FusedAdam(params, adam_w_mode=not mode).load_state_dict(saved)
    without = kind(params, weight_decay=0.0).state_dict()
    FusedAdam(params, adam_w_mode=not mode).load_state_dict(without)
    FusedAdam(params, adam_w_mode=mode).load_state_dict(saved)


def test_different_steps_in_a_group_are_refused():
    params, theirs = started(torch.optim.AdamW, shapes=SMALL)
    train(theirs, params[:1], range(1))
    train(theirs, params, range(1))
    with pytest.raises(ValueError, match="at different steps"):
        FusedAdam(params).load_state_dict(theirs.state_dict())


# -- capturable and masters ----------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_capturable_takes_the_same_steps(path):
    plain, params = parameters(), parameters()
    expected = train(FusedAdam(plain, lr=0.0625), plain, range(3), path)
    optimizer = FusedAdam(params, lr=0.0625, capturable=True)
    assert same(train(optimizer, params, range(3), path), expected)
    group = optimizer.param_groups[0]
    assert group["step"].dtype == torch.int32
    assert group["step"].tolist() == [3]
    assert group["lr"].dtype == torch.float32


def test_capturable_groups_have_their_own_numbers():
    first, second = parameters(shapes=SMALL)
    optimizer = FusedAdam([{"params": [first]}, {"params": [second]}], lr=0.5, capturable=True)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert optimizer.param_groups[1]["lr"].item() == 0.5


def test_a_program_may_set_capturable():
    """Groups that are added or loaded afterwards have tensors; so have pickles' of before."""
    first, second = parameters(shapes=((3,), (4,)))
    optimizer = FusedAdam([first], lr=0.5)
    optimizer.capturable = True
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    assert torch.equal(optimizer.param_groups[1]["lr"], torch.tensor(0.25))
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))


def test_capturable_state_loads_from_either():
    params = parameters(shapes=SMALL)
    plain, graph = FusedAdam(params), FusedAdam(params, capturable=True)
    train(plain, params, range(2))
    graph.load_state_dict(plain.state_dict())
    group = graph.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor)
    assert (group["step"].dtype, group["step"].tolist()) == (torch.int32, [2])
    train(graph, params, range(2))
    back = FusedAdam(params)
    back.load_state_dict(graph.state_dict())
    train(back, params, range(1))
    assert int(back.param_groups[0]["step"]) == 5


def masters(params, **more):
    return FusedAdam(params, lr=0.001, capturable=True, master_weights=True, **more)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_keep_what_16_bits_lose(dtype, path):
    """The original ignores them for bfloat16."""
    params = parameters(dtype, SMALL)
    wide = common.widened(params)
    optimizer, exact = masters(params), FusedAdam(wide, lr=0.001, capturable=True)
    for number in range(5):
        common.give_both(params, wide, number)
        common.take_step(path, optimizer, exact)
    for param, other in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[param]["master_param"], other)
        if path != "triton" or dtype != torch.bfloat16:  # which the interpreter truncates
            assert torch.equal(param, other.to(dtype))


def test_masters_that_were_not_saved_are_made():
    params, without = started(FusedAdam, torch.float16, SMALL, steps=2)
    optimizer = masters(params)
    optimizer.load_state_dict(without.state_dict())
    assert same(optimizer.param_groups_master[0]["params"], common.widened(params))
    train(optimizer, params, range(2))
    without.load_state_dict(optimizer.state_dict())
    assert "master_param" not in without.state[params[0]]


@pytest.mark.parametrize("loaded", [False, True])
def test_masters_are_made_at_the_first_step(loaded):
    """So that weights loaded or broadcast after the constructor count."""
    params, optimizer = started(masters, torch.bfloat16, SMALL)
    if loaded:
        optimizer.load_state_dict(FusedAdam(params).state_dict())
    with torch.no_grad():
        for param in params:
            param.fill_(0.5)
    train(optimizer, params, range(1))
    for param, master in zip(params, optimizer.param_groups_master[0]["params"], strict=True):
        assert master is optimizer.state[param]["master_param"]
        assert (master - 0.5).abs().max() < 0.01
        assert torch.equal(param, master.bfloat16())


def test_masters_can_be_read_before_the_first_step():
    params, optimizer = started(masters, torch.bfloat16, SMALL)
    found = optimizer.param_groups_master[0]["params"]
    assert same([param.float() for param in params], found)
    train(optimizer, params, range(1))
    assert all(
        optimizer.state[param]["master_param"] is master
        for param, master in zip(params, found, strict=True)
    )


def test_masters_of_groups_added_later():
    """The original never steps them."""
    first, second = parameters(torch.bfloat16, SMALL)
    optimizer = masters([first])
    optimizer.add_param_group({"params": [second]})
    before = values([second])
    train(optimizer, [first, second], range(3))
    assert not same(before, values([second]))
    assert [len(group["params"]) for group in optimizer.param_groups_master] == [1, 1]


def test_float32_needs_no_master():
    params, optimizer = started(masters, torch.float32, SMALL, steps=1)
    assert "master_param" not in optimizer.state[params[0]]
    assert optimizer.param_groups_master[0]["params"][0] is params[0]


# -- storages ------------------------------------------------------------------------------------


def stored(storage, path, steps=4, lr=0.001):
    how = {"steps": steps, "path": path, "lr": lr, "weight_decay": 0.1, "storage": storage}
    params, optimizer = started(FusedAdam, torch.bfloat16, ((7,), (1500,)), **how)
    return optimizer, params


def float32_weights(path, steps=4, lr=0.001):
    params = parameters(torch.bfloat16, ((7,), (1500,)))
    wide = common.widened(params)
    optimizer = FusedAdam(wide, lr=lr, weight_decay=0.1)
    for number in range(steps):
        common.give_both(params, wide, number)
        common.take_step(path, optimizer)
    return values(wide)


def test_every_float32_is_split_and_joined():
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    inf, nan = 0x7F800000, 0x7FFFFFFF  # the latter is what a GPU makes
    awkward = [0, -(2**31), 1, inf, inf - 1, -1, nan, inf + 1, 0x7F808000, 0x7F7F8000]
    value = torch.cat([bits, torch.tensor(awkward, dtype=torch.int32)]).view(torch.float32)
    high, low = split_bits(value)
    joined = join_bits(high, low)
    good = ~value.isnan()
    assert torch.equal(joined[good].view(torch.int32), value[good].view(torch.int32))
    assert joined[~good].isnan().all()
    assert high[~good].isnan().all()
    error = (high.double() - value.double())[high.isfinite()].abs()
    assert (error <= value.double()[high.isfinite()].abs() * 2**-8 + 2.0**-134).all()


@pytest.mark.parametrize("other", [1.0, float("inf"), float("nan"), torch.finfo().max])
def test_bits_are_written_and_joined_in_few_passes_as_in_many(other):
    """On a CPU a list without inf and nan goes another way."""
    bits = torch.randint(0x3F800000, (100_000,), dtype=torch.int32)
    bits = torch.cat([bits, bits | -(2**31), torch.tensor([0, -(2**31), 1, 0x3F008000, 0x8000])])
    value = torch.cat([bits.int().view(torch.float32), torch.tensor([other])])
    wanted = split_bits(value)
    written = [torch.empty_like(part) for part in wanted]
    LOW_BITS.write(value.clone(), *written)
    for part, exact in zip(written, wanted, strict=True):
        assert torch.equal(part.view(torch.int16), exact.view(torch.int16))
    joined = join_bits(*wanted)[: len(bits)]
    assert torch.equal(joined.view(torch.int32), bits.int())


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_a_nan_is_seen_in_low_bits(path):
    params, optimizer = started(FusedAdam, torch.bfloat16, SMALL, storage="low_bits")
    give_grads(params, 0)
    params[0].grad[3] = float("nan")
    common.take_step(path, optimizer)
    assert params[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_kahan_loses_less(path):
    steps = 12
    exact = torch.cat(float32_weights(path, steps))
    off = {}
    for storage in ("plain", "kahan"):
        optimizer, params = stored(storage, path, steps)
        sums = [p.detach().float() for p in params]
        if storage == "kahan":
            sums = [
                s + optimizer.state[p]["error"].float() for s, p in zip(sums, params, strict=True)
            ]
        off[storage] = (torch.cat(sums) - exact).square().mean().sqrt()
    assert off["kahan"] < off["plain"] / 50


def assert_unbiased(drawn, exact):
    """The mean of the draws is within four standard errors; both neighbours occur."""
    spacing = drawn.max() - drawn.min()
    share = (exact - drawn.min()) / spacing
    error = (share * (1 - share)).sqrt() * spacing / drawn.numel() ** 0.5
    assert (drawn.mean() - exact).abs() <= 4 * error
    assert drawn.unique().numel() == 2


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.slow
def test_stochastic_rounding_is_unbiased(path, sign):
    param = torch.nn.Parameter(torch.full((100_000,), sign, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=0.0005, storage="stochastic")
    param.grad = torch.full_like(param, -sign)
    common.take_step(path, optimizer)
    assert_unbiased(param.detach().double(), torch.tensor(sign * 1.0005).double())


@pytest.mark.parametrize("value", [1.001, -3.1e-5, 6.02e23])
def test_rounding_of_one_value(value):
    exact = torch.tensor(value)
    drawn = round_stochastically(exact.expand(100_000))
    assert_unbiased(drawn.double(), exact.double())


def test_stochastic_rounding_keeps_what_is_exact():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf")])
    assert torch.equal(round_stochastically(exact).float(), exact)
    assert round_stochastically(torch.tensor([float("nan")])).isnan().all()


def test_the_seed_is_drawn_on_the_device(monkeypatch):
    """So a CUDA graph draws another one at each replay."""
    drawn = []
    monkeypatch.setattr(storages, "run", lambda *_, **kwargs: drawn.append(kwargs["seed"]))
    param = torch.nn.Parameter(torch.empty(3, device="meta", dtype=torch.bfloat16))
    param.grad = torch.empty_like(param)
    FusedAdam([param], storage="stochastic").step()
    assert drawn[0].is_meta


def test_stochastic_steps_differ_and_repeat():
    """Two steps do not draw the same; the seed decides."""
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        optimizer, params = stored("stochastic", "reference")
        results.append(values(params))
    assert same(*results)
    optimizer, params = stored("stochastic", "reference")
    assert not same(values(params), results[0])


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"master_weights": True}, RuntimeError, "only supported with the capturable version"),
        ({"storage": "int8"}, ValueError, "allowed are 'plain', 'low_bits'"),
        ({"storage": "kahan"}, RuntimeError, "keeps bfloat16 weights"),
        (
            {"storage": "kahan", "master_weights": True, "capturable": True},
            ValueError,
            'needs storage="plain"',
        ),
    ],
)
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        FusedAdam(parameters(), **options)


@pytest.mark.parametrize("value", [True, False])
def test_grad_averaging_is_refused(value):
    with pytest.raises(TypeError, match=f"no grad_averaging={value}.* use FusedLAMB or FusedNovo"):
        FusedAdam(parameters(), grad_averaging=value)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_step_arguments_of_old_are_refused(name):
    with pytest.raises(RuntimeError, match="FusedAdam has been updated"):
        FusedAdam(parameters()).step(**{name: 1.0})


@pytest.mark.parametrize("path", PATHS)
def test_keywords_of_berts_time(path):
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    twin = torch.nn.Parameter(param.detach().clone())
    optimizer = FusedAdam([param], lr=0.1, eps=1e-2, max_grad_norm=0.5, use_mt=True)
    expected = FusedAdam([twin], lr=0.1, eps=1e-2)
    for grad in ([3.0, 4.0], [0.03, 0.04]):
        param.grad, twin.grad = torch.tensor(grad), torch.tensor(grad)
        torch.nn.utils.clip_grad_norm_([twin], 0.5)
        common.take_step(path, optimizer, expected)
    assert_close_to_largest(param.detach(), twin.detach(), CLIPPED)
    with pytest.raises(RuntimeError, match=r"apex\.contrib\.optimizers"):
        FusedAdam([param], eps_inside_sqrt=True)
    with pytest.raises(RuntimeError, match="FusedAdam has been updated"):
        optimizer.step(None, [param.grad])
