"""``amp.GradScaler``: as torch's where that works, and right where it raises, hangs or diverges."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import apex
from apex import amp, debug
from apex.catalogue.optimizers import makers
from apex.contrib import optimizers as contrib
from apex.parallel import LARC
from tests.amp.scaling import scaler_programs as programs
from tests.amp.scaling.scaler_programs import OURS, SCALE, THEIRS, leaf
from tests.amp.training import no_waits, same
from tests.ranks import Ranks
from tests.tolerance import CLIPPED, assert_close_to_largest, assert_one_rounding, each

ADAM = functools.partial(apex.optimizers.FusedAdam, lr=0.01)
SGD = functools.partial(apex.optimizers.FusedSGD, lr=0.5)


# -- ranks -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    # a hang ends sooner than by default: collectives of a mesh wait for half an hour
    with Ranks(tmp_path_factory.mktemp("ranks"), seconds=150, count=4) as ranks:
        yield ranks


def run(ranks, program, *args):
    """The answers of the ranks that train."""
    answers = ranks.run(functools.partial(_call, program, args))
    return [answer for answer in answers if answer is not None]


def _call(program, args, rank):
    """Errors are answers: each is raised on all ranks, so their process group goes on."""
    try:
        return program(rank, *args)
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.dist
@pytest.mark.slow
def test_float16_shards(four):
    """(a), the weights as if their gradients had been unscaled in float32."""
    for found, weights, alone in run(four, programs.float16_shards, OURS):
        assert found == [(1024.0, True), (512.0, False), (512.0, True)]
        assert same(weights, alone)
    theirs = run(four, programs.float16_shards, THEIRS)
    assert theirs == ["Attempting to unscale FP16 gradients."] * 2


@pytest.mark.dist
@pytest.mark.slow
def test_plain_tensors_beside_dtensors(four):
    """(b)"""
    for found, weights, alone in run(four, programs.mixed_kinds, OURS):
        assert found == [(1024.0, True), (512.0, False)]
        assert same(weights, alone)
    theirs = run(four, programs.mixed_kinds, THEIRS)
    assert ["got mixed torch.Tensor and DTensor" in text for text in theirs] == [True] * 2


@pytest.mark.dist
@pytest.mark.parametrize("clip", [False, True])
def test_a_rank_without_gradients_takes_part(four, clip):
    """(c), where torch's hangs"""
    (found, norms), (other, others) = run(four, programs.no_gradients, clip)
    assert found == [(1024.0, False), (512.0, False)]  # it has nothing to step
    assert other == [(1024.0, True), (512.0, False)]
    assert str(norms) == str(others)
    assert norms[:1] == ([pytest.approx(2 * 8**0.5)] if clip else [])


@pytest.mark.dist
def test_a_weight_that_is_sharded_over_one_dimension(four):
    """(d)"""
    assert run(four, programs.over_tp_only, OURS) == [[(512.0, False), (512.0, True)]] * 4
    scales = [found[0][0] for found in run(four, programs.over_tp_only, THEIRS)]
    assert scales == [512.0, 512.0, 1024.0, 1024.0]
    assert run(four, programs.over_tp_with_amp) == [(False, 0, 1, 512.0)] * 4


@pytest.mark.dist
def test_replicas_whose_gradients_differ(four):
    """(e)"""
    assert run(four, programs.replicas_that_differ, OURS) == [(512.0, False)] * 2
    theirs = run(four, programs.replicas_that_differ, THEIRS)
    assert sorted(scale for scale, _ in theirs) == [512.0, 1024.0]


@pytest.mark.dist
def test_a_partial_gradient_is_reduced_first(four):
    for finite, too_large in run(four, programs.parts_of_a_sum):
        assert finite == (4.0, True, [1.0] * 3)
        assert too_large == (2.0, False, [0.0] * 3)


@pytest.mark.dist
def test_the_ranks_of_a_group_decide_together(four):
    """Where the group has all ranks of the mesh, one all-reduce decides; else the mesh does too."""
    for rank, (pipeline, world, mesh) in enumerate(run(four, programs.stages)):
        assert pipeline == (512.0, False, 2)
        assert world == (512.0, False, 1)
        assert mesh == ((512.0, False, 1) if rank > 1 else (1024.0, True, 1))


@pytest.mark.dist
def test_copies_keep_the_group_and_the_default_one_is_pickled(four):
    for said, pickled in run(four, programs.copies_of_groups):
        assert "process_group other than the default" in said
        with pytest.raises(RuntimeError, match="init_process_group.. before unpickling it"):
            pickle.loads(pickled)


@pytest.mark.dist
@pytest.mark.parametrize("order", [2.0, float("inf"), 3.0])
@pytest.mark.parametrize("make", [SGD, functools.partial(torch.optim.SGD, lr=0.5)])
def test_the_norm_is_that_over_all_shards(four, order, make):
    for norm, expected, weights, exact in run(four, programs.norm_over_all, order, make):
        assert_close_to_largest(norm, expected, CLIPPED)
        for mine, other in zip(weights, exact, strict=True):
            assert_close_to_largest(mine, other.float(), CLIPPED)


@pytest.mark.dist
def test_plain_tensors_decide_with_the_shards_of_their_scaler(four):
    """Before the scaler knows a mesh, the one of plain tensors is stepped by itself."""
    (first, second), (third, fourth) = run(four, programs.plain_beside_sharded)
    assert (first, third) == ((512.0, True, True), (512.0, False, True))
    assert second == fourth == (256.0, False, True)


@pytest.mark.dist
def test_two_worlds_are_refused(four):
    for said, untouched in run(four, programs.two_worlds):
        assert untouched
        assert [text.split(" are on two root meshes")[0] for text in said] == [
            "apex.amp.GradScaler: parameters of an optimizer",
            "apex.amp.GradScaler: parameters of the optimizers of a scaler",
        ]
        assert "pass a process_group=" in said[0]


@pytest.mark.dist
def test_no_other_rank_takes_part(four):
    first, second = run(four, programs.outsiders)
    assert first == second == [(True, 1, 0, SCALE), (False, 1, 1, 512.0), (True, 2, 1, 512.0)]


# -- as torch's ------------------------------------------------------------------------------------


def trained(kind, make, steps=6, spoiled=(2,), unscale=False, dtype=torch.float32):
    params = [leaf(5, 3, dtype=dtype), leaf(7, seed=1, dtype=dtype)]
    optimizer = make(params)
    scaler = kind("cpu", init_scale=1000.0, growth_factor=3.0, backoff_factor=0.3)
    scaler.set_growth_interval(2)
    seen = []
    for step in range(steps):
        loss = sum((p.float() * (step + 1)).square().sum() for p in params)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in spoiled:
            params[1].grad[0] = float("nan")
        if unscale:
            scaler.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(params, 3.0))
        scaler.step(optimizer)
        seen += [p.grad.clone() for p in params]
        scaler.update()
        seen.append(torch.tensor([scaler.get_scale(), scaler._get_growth_tracker()]))
    return [*seen, *(p.detach() for p in params)]


MAKERS = {  # with a large eps, or Adam's first step would not depend on the size of gradients
    "ours": functools.partial(ADAM, eps=1.0),
    "capturable": functools.partial(ADAM, eps=1.0, capturable=True),
    "torch": functools.partial(torch.optim.SGD, lr=0.1),
    "torch, fused": functools.partial(torch.optim.Adam, lr=0.1, eps=1.0, fused=True),
}


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_float32_is_torchs_bit_for_bit(name, unscale):
    for mine, theirs in zip(
        trained(OURS, MAKERS[name], unscale=unscale),
        trained(THEIRS, MAKERS[name], unscale=unscale),
        strict=True,
    ):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize(("first", "second"), [(OURS, THEIRS), (THEIRS, OURS)])
def test_a_state_loads_in_both_classes(first, second):
    scaler = first("cpu", init_scale=8.0, growth_interval=7)
    for _ in range(3):
        optimizer = torch.optim.SGD([leaf(2)], lr=0.1)
        scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    other = second("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert scaler.state_dict()["_growth_tracker"] == 3
    again = copy.deepcopy(pickle.loads(pickle.dumps(scaler)))
    assert type(again) is first
    assert again.state_dict() == scaler.state_dict()


def test_wrong_states_are_refused():
    scaler = OURS("cpu", init_scale=8.0)
    before = scaler.state_dict()
    for wrong, said in (
        ({}, "The source state dict is empty"),
        ({"other": 2.0}, "'scale' of a GradScaler's state was None"),
        ({"loss_scaler0": {"loss_scale": 2.0}}, "what amp.state_dict.* pass {.*'_growth_tracker'"),
        ([8.0], "was given a list; it must be the dict that GradScaler.state_dict"),
        ({**before, "scale": float("inf")}, "was inf; it must be a number, at least 0"),
        ({**before, "scale": 0.0}, "'scale' of a GradScaler's state was 0.0"),
        ({**before, "growth_interval": "2"}, "'growth_interval' of a GradScaler's state was '2'"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            scaler.load_state_dict(wrong)
        assert scaler.state_dict() == before


def test_what_torch_refuses_is_refused():
    optimizer, scaler = SGD([leaf(2, dtype=torch.float16)]), OURS("cpu", init_scale=8.0)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="Attempted clip_grad_norm_ but _scale is None"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.scale(torch.ones(()))
    for one in (OURS("cpu"), THEIRS("cpu")):
        one.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            one.step(optimizer)
    scaled(optimizer)
    for args, kwargs in (((), {"closure": int}), ((lambda: None,), {})):
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, *args, **kwargs)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="has already been called since the last update"):
        scaler.step(optimizer)
    for call in (scaler.unscale_, lambda one: scaler.clip_grad_norm_(one, 1.0)):
        with pytest.raises(RuntimeError, match="is being called after step"):
            call(optimizer)
    scaler.update()
    wide = SGD([leaf(2)])
    scaled(wide)
    scaler.unscale_(wide)
    with pytest.raises(RuntimeError, match="has already been called on this optimizer"):
        scaler.unscale_(wide)
    with pytest.raises(TypeError, match="was given list. Pass the optimizer"):
        scaler.clip_grad_norm_([leaf(2)], 1.0)
    with pytest.raises(TypeError, match="apex.amp.GradScaler: process_group was 3"):
        OURS("cpu", process_group=3)


# -- 16 bits ---------------------------------------------------------------------------------------


def scaled(optimizer, size=1.0):
    """Give each parameter the gradient 1, 2, 3 ... times ``size``."""
    for param in [param for group in optimizer.param_groups for param in group["params"]]:
        values = torch.arange(1.0, param.numel() + 1).view(param.shape) * size
        param.grad = values.to(param.dtype)


EVERY = {
    **makers(lr=0.01),
    "FusedSGD": functools.partial(SGD, momentum=0.9, lr=2.0**25),
    "8bit": functools.partial(ADAM, state="8bit"),
    "capturable": functools.partial(ADAM, capturable=True),
    "FusedMixedPrecisionLamb": functools.partial(
        apex.optimizers.FusedMixedPrecisionLamb, lr=0.01, reduced_precision_dtype=torch.float16
    ),
    "contrib": functools.partial(contrib.FusedAdam, lr=0.01),
}


@pytest.mark.parametrize("clip", [None, 2.0**-30])
@pytest.mark.parametrize("name", EVERY)
def test_float16_gradients_reach_the_optimizer_unrounded(name, clip):
    """float16 has no 2**-30, float32 has it: a step as of float32 gradients, and a skipped one."""
    kinds = (torch.float16, torch.float32)  # mixed
    mine, exact = [[leaf(5, 3, dtype=kinds[0]), leaf(7, seed=1, dtype=kinds[1])] for _ in range(2)]
    optimizer, other = EVERY[name](mine), EVERY[name](exact)
    scaler = OURS("cpu", init_scale=2.0**30)
    for number, factor in enumerate((1.0, float("inf"), 2.0)):
        scaler.scale(torch.ones(()))
        scaled(optimizer, factor)
        norm = scaler.clip_grad_norm_(optimizer, clip) if clip else None
        before = [param.detach().clone() for param in mine]
        grads = [param.grad.clone() for param in mine]  # LAMB writes into them
        scaler.step(optimizer)
        scaler.update()
        assert bool(scaler.stepped(optimizer)) is (number != 1)
        assert same(mine, before) is (number == 1)
        if number == 1:
            continue
        scale = 2.0 ** (30 if number == 0 else 29)
        step = 1 / scale
        if clip:
            flat = torch.cat([grad.flatten().double() for grad in grads]) / scale
            assert_one_rounding(norm, flat.norm())
            step *= min(1.0, clip / (float(norm) + 1e-6))
        other.step_scaled(step, grads=dict(zip(exact, grads, strict=True)))
    each(assert_close_to_largest, mine, exact, CLIPPED if clip else 0.0)


def test_small_gradients_are_not_lost():
    """2**-24 is float16's smallest number: unscaled in memory these would be zeros."""
    param = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    optimizer, scaler = SGD([param], lr=2.0**20), OURS("cpu", init_scale=2.0**20)
    scaler.scale(torch.ones(()))
    param.grad = torch.full_like(param, 2.0**-10)
    scaler.step(optimizer)
    assert param.eq(-(2.0**-10)).all()
    assert param.grad.eq(2.0**-10).all()  # still scaled


@pytest.mark.parametrize("clip", [False, True])
def test_float16_with_an_optimizer_that_takes_no_scale(clip):
    param = leaf(4, dtype=torch.float16)
    for optimizer, said in (
        (torch.optim.SGD([param], lr=0.1), "SGD does not accept a scale"),
        (LARC(SGD([param])), "LARC does not accept a scale"),
    ):
        scaler = OURS("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        scaled(optimizer)
        calls = [scaler.unscale_, scaler.step, lambda one, it=scaler: it.clip_grad_norm_(one, 1.0)]
        for call in calls:
            with pytest.raises(ValueError, match=f"unscale FP16 gradients.*{said}"):
                call(optimizer)
        assert param.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match=r"Leave unscale_\(\) out.*FusedSGD"):
        scaler.unscale_(SGD([param]))


def test_bfloat16_is_unscaled_as_torch_does_it():
    mine, theirs = (
        trained(kind, functools.partial(torch.optim.SGD, lr=0.1), dtype=torch.bfloat16)
        for kind in (OURS, THEIRS)
    )
    assert same([x.nan_to_num(7.0) for x in mine], [x.nan_to_num(7.0) for x in theirs])


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_clipping_float32(name, unscale):
    """With every kind of optimizer as by torch's function after ``unscale_``; twice clips again."""
    by_scaler, by_hand = [[leaf(5, 3), leaf(7, seed=1)] for _ in range(2)]
    mine, other = MAKERS[name](by_scaler), MAKERS[name](by_hand)
    scaler, theirs = OURS("cpu", init_scale=SCALE), THEIRS("cpu", init_scale=SCALE)
    for one, optimizer in ((scaler, mine), (theirs, other)):
        one.scale(torch.ones(()))
        scaled(optimizer, SCALE)
    if unscale:
        scaler.unscale_(mine)
    norms = [scaler.clip_grad_norm_(mine, clip) for clip in (3.0, 1.0)]
    theirs.unscale_(other)
    expected = [nn.utils.clip_grad_norm_(by_hand, clip) for clip in (3.0, 1.0)]
    assert_close_to_largest(torch.stack(norms), torch.stack(expected), CLIPPED)
    for one, optimizer in ((scaler, mine), (theirs, other)):
        one.step(optimizer)
        one.update()
    each(assert_close_to_largest, by_scaler, by_hand, CLIPPED)


def test_a_norm_that_is_not_finite():
    optimizer, scaler = SGD([leaf(2)]), OURS("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaled(optimizer, float("inf"))
    with pytest.raises(RuntimeError, match="The total norm of order 2.0 for gradients"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert scaler.clip_grad_norm_(optimizer, 1.0).isinf()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).numbers() == (False, 0, 1, 4.0)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("size", [100.0, float("nan")])
def test_a_coefficient_goes_with_a_batch_that_is_dropped(size, clips):
    optimizer, scaler = SGD([leaf(2), leaf(1)]), OURS("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaled(optimizer, size)
    scaler.clip_grad_norm_(optimizer, 1.0)
    optimizer.zero_grad()
    scaled(optimizer, 8.0)
    if clips:
        assert scaler.clip_grad_norm_(optimizer, 10.0).item() == pytest.approx(6**0.5)
    weight = optimizer.param_groups[0]["params"][1]
    before = weight.item()
    scaler.step(optimizer)
    assert weight.item() == pytest.approx(before - 0.5)


def test_a_step_of_its_own_that_ignores_the_scale():
    class Own(apex.optimizers.FusedSGD):
        def step(self, closure=None):
            return None

    optimizer, scaler = Own([leaf(2, dtype=torch.float16)], lr=0.1), OURS("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaled(optimizer)
    with pytest.raises(RuntimeError, match="Own.step\\(\\) did not call the step\\(\\) of apex"):
        scaler.step(optimizer)


@pytest.mark.parametrize("compiled", ["model", "optimizer.step"])
def test_compiled(compiled):
    """Each step has other numbers, which a graph must not keep."""
    found = []
    for backend in ("eager", None):
        torch._dynamo.reset()
        param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        optimizer, scaler = SGD([param]), OURS("cpu", init_scale=8.0)

        def loss(factor, param=param):
            return (param * factor).float().sum()

        if backend and compiled == "model":
            loss = torch.compile(loss, backend=backend)
        elif backend:
            optimizer.step = torch.compile(optimizer.step, backend=backend)
        for factor in (1.0, 2.0, float("inf"), 3.0):
            scaler.scale(loss(torch.full((3,), factor, dtype=torch.float16))).backward()
            scaler.clip_grad_norm_(optimizer, 2.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((param.tolist(), scaler.outcome(optimizer).numbers()))
    assert found[0] == found[1]
    assert found[0][1] == (True, 3, 1, 4.0)


class Unscales(torch.optim.SGD):
    """Unscales its gradients itself, and takes the scaler by name."""

    _custom_amp_unscale_grads = _step_supports_amp_scaling = True

    def unscale_grads(self, inv_scale, found_inf, allow_fp16):
        flag = found_inf.clone()
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(inv_scale)
            flag.fill_(max(flag.item(), float(not param.grad.isfinite().all())))
        return {found_inf.device: flag}

    def step(self, closure=None, *, grad_scaler=None):
        if grad_scaler._per_optimizer_states[id(self)]["stage"].name == "READY":
            grad_scaler.unscale_(self)
        if not any(grad_scaler._found_inf_per_device(self).values()):
            super().step(closure)


def test_an_optimizer_that_unscales_itself():
    param = leaf(3)
    optimizer, scaler = Unscales([param], lr=1.0), OURS("cpu", init_scale=8.0)
    for factor in (1.0, float("inf")):
        before = param.detach().clone()
        scaler.scale((param * factor).sum()).backward()
        with pytest.raises(TypeError, match="was given Unscales.*itself, call scaler.unscale_"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert same([before - param.detach()], [torch.full((3,), float(factor == 1.0))])
    assert scaler.outcome(optimizer).numbers() == (False, 1, 1, 4.0)


# -- what happened ---------------------------------------------------------------------------------


def test_nothing_waits_for_a_device():
    """A meta tensor cannot be read: the flag, the norm, the step and the counts are its own."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float16, device="meta"))
    optimizer = ADAM([param])
    scaler = OURS("meta", init_scale=8.0)
    with no_waits():
        scaler.scale(torch.ones((), device="meta"))
        param.grad = torch.ones_like(param)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        found = scaler.outcome(optimizer)
    assert {x.device.type for x in (norm, scaler.stepped(optimizer), *found)} == {"meta"}
    assert [(x.dtype, x.dim()) for x in found] == [
        (torch.bool, 0), (torch.int64, 0), (torch.int64, 0), (torch.float32, 0)
    ]  # fmt: skip


def test_outcomes_do_not_change_later():
    optimizer, other, scaler = SGD([leaf(2)]), SGD([leaf(2)]), OURS("cpu", init_scale=8.0)
    before = scaler.outcome(optimizer)
    seen = []
    for size in (1.0, float("nan")):
        scaler.scale(torch.ones(()))
        scaled(optimizer, size)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.outcome(optimizer))
    assert before.numbers() == scaler.outcome(other).numbers()[:3] + (8.0,) == (False, 0, 0, 8.0)
    assert [one.numbers() for one in seen] == [(True, 1, 0, 8.0), (False, 1, 1, 4.0)]
    disabled = OURS("cpu", enabled=False)
    disabled.scale(torch.ones(()))
    scaled(optimizer)
    assert disabled.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5**0.5)
    assert optimizer.param_groups[0]["params"][0].grad.norm().item() == pytest.approx(1.0)
    disabled.step(optimizer)
    disabled.update()
    assert disabled.outcome(optimizer).numbers() == (True, 1, 0, 1.0)


@pytest.mark.parametrize("deferred", [False, True])
def test_outcomes_of_amp(deferred, request):
    if deferred:
        request.getfixturevalue("runs_behind")
    model = nn.Linear(3, 2)
    optimizer = ADAM(model.parameters())
    with pytest.raises(RuntimeError, match="Pass an optimizer of amp.initialize"):
        amp.outcome(optimizer)
    amp.initialize(model, optimizer, opt_level="O2", init_scale=8.0, num_losses=2, verbosity=0)
    seen = [amp.outcome(optimizer)]
    for factor in (1.0, float("inf"), 1.0):
        loss = model(torch.ones(1, 3)).float().sum() * factor
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(amp.outcome(optimizer))
    assert [one.numbers() for one in seen] == [
        (False, 0, 0, 8.0), (True, 1, 0, 8.0), (False, 1, 1, 4.0), (True, 2, 1, 4.0)
    ]  # fmt: skip
    assert amp.outcome(optimizer, 1).scale.item() == 8.0
    with pytest.raises(IndexError, match="allowed are 0 to 1"):
        amp.outcome(optimizer, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_watch_hears_of_skipped_steps(dtype):
    model = nn.Linear(3, 2).to(dtype)
    optimizer, scaler = ADAM(model.parameters()), OURS("cpu", init_scale=8.0)
    with debug.watch(model, optimizer, scaler=scaler, on_fault="keep") as watch:
        for factor in (1.0, float("inf"), 1.0):
            loss = model(torch.ones(1, 3, dtype=dtype)).float().sum() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (watch.fault is not None) is (factor != 1.0)
    assert (watch.steps, watch.skipped) == (3, 1)
    assert scaler.outcome(optimizer).numbers() == (True, 2, 1, 4.0)
