"""``FP16_Optimizer``: masters, gradients of several passes, skipped steps, closures."""

import copy
import gc
import logging
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _speech
from apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdam
from apex.parallel.LARC import LARC

DYNAMIC = {"static": False, "dynamic": True}


class Mixed(nn.Module):
    """Two linear layers of 16 bits and a layer norm of 32 between them."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.first = nn.Linear(4, 3).to(dtype)
        self.norm = nn.LayerNorm(3)
        self.last = nn.Linear(3, 2).to(dtype)

    def forward(self, x):
        x = self.first(x.to(self.first.weight.dtype))
        return self.last(self.norm(x.float()).to(x.dtype)).float()


@pytest.fixture
def spoken(capsys, monkeypatch):
    """A function that returns what was said since the last call."""
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers
    return lambda: capsys.readouterr().out


def start(make=None, dtype=torch.float16, **options):
    torch.manual_seed(0)
    model = Mixed(dtype)
    make = make or (lambda params: torch.optim.SGD(params, lr=0.125))
    options = {"static_loss_scale": 128.0, "verbose": False, **options}
    return model, FP16_Optimizer(make(model.parameters()), **options)


def loss_of(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator)
    return F.mse_loss(model(x), torch.ones(8, 2))


def grads_of(optimizer):
    return [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]


def expected_grads(model, *seeds):
    """Each pass alone with a scale of 128, unscaled, then added up in float32."""
    total = None
    for seed in seeds:
        grads = torch.autograd.grad(128.0 * loss_of(model, seed), [*model.parameters()])
        one = [grad.float() / 128.0 for grad in grads]
        total = one if total is None else [a + b for a, b in zip(total, one, strict=True)]
    return total


def assert_equal(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# -- masters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_stand_at_the_places_of_their_parameters(dtype):
    model = Mixed(dtype)
    model.last.bias.requires_grad_(False)
    groups = [
        {"params": [*model.first.parameters(), model.norm.weight]},
        {"params": [model.norm.bias, *model.last.parameters()], "lr": 0.5},
    ]
    inner = torch.optim.SGD(groups, lr=0.125)
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    weight, bias, norm = optimizer.param_groups[0]["params"]
    assert (weight.dtype, bias.dtype) == (torch.float32, torch.float32)
    assert (weight.is_leaf, weight.requires_grad) == (True, True)
    assert torch.equal(weight, model.first.weight.float())
    assert norm is model.norm.weight
    assert optimizer.param_groups[1]["params"][2] is model.last.bias  # frozen: as it was
    names = ("fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups")
    sizes = [[len(group) for group in getattr(optimizer, name)] for name in names]
    assert sizes == [[2, 1], [2, 1], [1, 1]]
    assert optimizer.all_fp16_params[2] is model.last.weight
    assert optimizer.all_fp32_from_fp16_params[0] is weight
    assert optimizer.all_fp32_from_fp32_params[1] is model.norm.bias


@pytest.mark.parametrize("unfreezes", [False, True])
def test_state_that_was_there_moves_to_the_masters(unfreezes):
    model = Mixed()
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    loss_of(model).backward()
    inner.step()
    before = inner.state[model.first.weight]["momentum_buffer"].clone()
    model.first.requires_grad_(not unfreezes)
    optimizer = FP16_Optimizer(inner, verbose=False)
    if unfreezes:
        model.first.requires_grad_(True)
        optimizer.update_master_grads()
        optimizer.zero_grad()
    master = next(m for m in optimizer.all_fp32_from_fp16_params if m.shape == before.shape)
    after = optimizer.state[master]["momentum_buffer"]
    assert after.dtype == torch.float32
    assert torch.equal(after, before.float())
    assert model.first.weight not in optimizer.state


def test_a_step_moves_masters_and_rounds_them_into_the_model():
    model, optimizer = start()
    masters = [m.clone() for m in optimizer.all_fp32_from_fp16_params]
    want = expected_grads(model, 1)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert_equal(grads_of(optimizer), want)
    optimizer.step()
    halves = [want[0], want[1], want[4], want[5]]
    moved = [m - 0.125 * grad for m, grad in zip(masters, halves, strict=True)]
    assert_equal(optimizer.all_fp32_from_fp16_params, moved)
    assert_equal(optimizer.all_fp16_params, [m.half() for m in moved])


@pytest.mark.parametrize("adds_group", [False, True])
def test_weights_that_the_program_writes_are_taken_over(adds_group):
    model, optimizer = start()
    with torch.no_grad():
        model.first.weight[0, 0] = 0.5
    if adds_group:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float16))]})
    kept = optimizer.fp32_from_fp16_groups[0][0].clone()
    kept[0, 0] = 0.5
    optimizer.step()  # no gradients
    assert torch.equal(optimizer.fp32_from_fp16_groups[0][0], kept)
    assert model.first.weight[0, 0] == 0.5


def test_groups_and_unfrozen_parameters_that_come_later():
    model = Mixed()
    model.last.weight.requires_grad_(False)
    inner = torch.optim.SGD(model.first.parameters(), lr=0.125)
    optimizer = FP16_Optimizer(inner, verbose=False)
    optimizer.add_param_group({"params": [*model.norm.parameters(), *model.last.parameters()]})
    assert [len(group) for group in optimizer.fp16_groups] == [2, 1]
    model.last.weight.requires_grad_(True)
    optimizer.backward(loss_of(model))
    assert [len(group) for group in optimizer.fp16_groups] == [2, 2]
    before = model.last.weight.clone()
    optimizer.step()
    assert not torch.equal(model.last.weight, before)
    assert {p.dtype for g in optimizer.param_groups for p in g["params"]} == {torch.float32}


@pytest.mark.parametrize("how", ["unfrozen", "added to the wrapped optimizer"])
def test_the_first_gradient_of_a_float32_parameter_that_comes_later(how):
    model = Mixed()
    inner = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.125)
    if how == "unfrozen":
        inner.add_param_group({"params": [*model.norm.requires_grad_(False).parameters()]})
    optimizer = FP16_Optimizer(inner, static_loss_scale=128.0, verbose=False)
    if how == "unfrozen":
        model.norm.requires_grad_(True)
    else:
        inner.add_param_group({"params": [*model.norm.parameters()]})
    optimizer.backward(loss_of(model))
    grads = [p.grad for p in model.norm.parameters()]
    assert_equal(grads, expected_grads(model, 1)[2:4])


@pytest.mark.slow
def test_a_deleted_optimizer_leaves_no_hooks():
    model, optimizer = start()
    optimizer.backward(loss_of(model))
    other = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.125), verbose=False)
    assert len(model.norm.weight._post_accumulate_grad_hooks) == 2
    del optimizer
    gc.collect()
    assert len(model.norm.weight._post_accumulate_grad_hooks) == 1
    other.zero_grad()
    other.backward(loss_of(model))
    del other
    gc.collect()
    assert not model.norm.weight._post_accumulate_grad_hooks


# -- gradients of several passes -------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", DYNAMIC.values(), ids=DYNAMIC)
@pytest.mark.parametrize("defers", [False, True])
def test_several_losses(dynamic, defers):
    """In the original parameters without masters were unscaled once more by each backward."""
    model, optimizer = start(dynamic_loss_scale=dynamic, dynamic_loss_args={"init_scale": 128.0})
    want = expected_grads(model, 1, 1)
    optimizer.zero_grad()
    loss = loss_of(model)
    for retains in (True, False):
        optimizer.backward(loss, update_master_grads=not defers, retain_graph=retains)
    if defers:
        optimizer.update_master_grads()
        optimizer.update_master_grads()  # changes nothing
    assert_equal(grads_of(optimizer), want)
    assert optimizer.loss_scale == 128.0


def test_passes_add_up_when_the_scale_grows_between_them():
    options = {"init_scale": 128.0, "scale_window": 1}
    make = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
    model, optimizer = start(make, dynamic_loss_scale=True, dynamic_loss_args=options)
    for _ in range(2):
        optimizer.backward(loss_of(model))
        optimizer.step()  # the scale doubles, and nobody clears gradients
    assert optimizer.loss_scale == 512.0
    assert_equal(grads_of(optimizer), expected_grads(model, 1, 1))


def test_a_scale_that_the_program_writes_between_passes():
    model, optimizer = start()
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.loss_scale = 512.0
    assert optimizer.loss_scaler.cur_scale == 512.0
    optimizer.backward(loss_of(model))
    assert_equal(grads_of(optimizer), expected_grads(model, 1, 1))
    with pytest.raises(ValueError, match="loss_scale was 0"):
        optimizer.loss_scale = 0


@pytest.mark.parametrize("dense", [True, False])
def test_gradients_of_all_dtypes_are_multiplied_at_once(dense):
    """By numbers that 16 bits cannot hold, with the bits that ``mul_`` of each gives."""
    torch.manual_seed(0)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float16)
    params = [nn.Parameter(torch.randn(5, 3).to(dtype)) for dtype in dtypes]
    unused = nn.Parameter(torch.ones(2))
    optimizer = FP16_Optimizer(torch.optim.SGD([*params, unused], 0.1), 100.0, verbose=False)

    def grads():
        return [p.grad if dense else p.grad._values() for p in params]

    places = torch.tensor([1, 2, 2])  # a sparse gradient is not coalesced
    rows = [F.embedding(places, param, sparse=not dense).double() for param in params]
    loss = (torch.stack(rows) * torch.arange(1.0, 4.0) / 7e6).sum()
    optimizer.backward(loss, update_master_grads=False)
    for scale in (37.0, 2.0**26):
        expected = [grad.clone().mul_(scale / optimizer.loss_scale) for grad in grads()]
        optimizer.loss_scale = scale
        assert_equal(grads(), expected)
    assert all(torch.isfinite(grad).all() for grad in expected)
    assert unused.grad is None
    optimizer.update_master_grads()
    expected = [grad.clone().mul_(2.0**26) for grad in grads()[2:4]]
    zero = torch.zeros((), requires_grad=True)
    optimizer.backward(zero, update_master_grads=False)  # scales those of earlier passes
    assert_equal(grads()[2:4], expected)


def test_a_state_that_is_loaded_between_passes():
    """The loaded scale is another; the passes of before the load still count."""
    model, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 512.0})
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.loss_scale = 128.0
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.load_state_dict(state)
    optimizer.backward(loss_of(model))
    assert_equal(grads_of(optimizer), expected_grads(model, 1, 1))


def test_a_backward_that_the_program_scales_itself():
    model, optimizer = start()
    (loss_of(model) * optimizer.loss_scale).backward()
    optimizer.update_master_grads()
    assert_equal(grads_of(optimizer), expected_grads(model, 1))


def test_a_backward_that_is_not_the_optimizers_is_seen():
    model, optimizer = start()
    before = [p.clone() for p in model.parameters()]
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"Call optimizer.backward\(loss\) instead of"):
        optimizer.step()
    assert_equal(model.parameters(), before)
    with pytest.raises(TypeError, match="loss was a float"):
        optimizer.backward(3.0)


def test_a_model_that_is_converted_later():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.25), verbose=False)
    model.half()
    optimizer.backward(model(torch.ones(1, 4).half()).float().sum())
    optimizer.step()
    assert [len(group) for group in optimizer.fp16_groups] == [2]
    assert optimizer.fp32_from_fp32_groups == [[]]
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}


def test_gradients_cleared_on_the_model_leave_no_stale_masters():
    """In the original of 2025 a master kept its gradient, and the next step applied it again."""
    model, optimizer = start()
    optimizer.backward(loss_of(model))
    model.zero_grad()
    optimizer.backward(model.last(torch.ones(1, 3, dtype=torch.float16)).float().sum())
    grads = [master.grad for master in optimizer.all_fp32_from_fp16_params]
    assert grads[:2] == [None, None]
    assert torch.equal(grads[2], torch.ones(2, 3))


def test_a_step_does_what_is_pending():
    for act in ("step", "clip_master_grads", "inspect_master_grad_data"):
        model, optimizer = start()
        want = expected_grads(model, 1)
        optimizer.backward(loss_of(model), update_master_grads=False)
        getattr(optimizer, act)(*([1e9] if act == "clip_master_grads" else []))
        assert_equal(grads_of(optimizer), want)


@pytest.mark.parametrize("frees", [False, True])
def test_zero_grad(frees):
    model, optimizer = start()
    optimizer.backward(loss_of(model))
    optimizer.zero_grad(set_grads_to_None=frees)
    tensors = [*model.parameters(), *optimizer.all_fp32_from_fp16_params]
    assert all(t.grad is None if frees else not t.grad.any() for t in tensors)
    optimizer.backward(loss_of(model))
    assert_equal(grads_of(optimizer), expected_grads(model, 1))
    optimizer.zero_grad(set_to_none=True)
    assert all(t.grad is None for t in tensors)


def test_zero_grad_of_gradients_that_are_views():
    """As DistributedDataParallel(gradient_as_bucket_view=True) makes them."""
    model, optimizer = start()
    buckets = [torch.ones(p.numel() + 1, dtype=p.dtype) for p in model.parameters()]
    for p, bucket in zip(model.parameters(), buckets, strict=True):
        p.grad = bucket[1:].view(p.shape)
    optimizer.zero_grad()
    assert all(bucket.sum() == 1.0 for bucket in buckets)
    assert all(p.grad._base is b for p, b in zip(model.parameters(), buckets, strict=True))


def test_clip_and_inspect():
    model, optimizer = start()
    want = expected_grads(model, 1)
    optimizer.backward(loss_of(model))
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in want]))
    assert torch.equal(optimizer.clip_master_grads(math.inf), norm)
    assert_equal(optimizer.inspect_master_grad_data()[0], want)
    optimizer.clip_master_grads(float(norm) / 2)
    clipped = torch.cat([grad.flatten() for grad in grads_of(optimizer)])
    assert float(torch.linalg.vector_norm(clipped)) <= float(norm) / 2
    assert optimizer.clip_master_grads(1.0, norm_type=math.inf) == clipped.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients(dtype):
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 2, sparse=True).to(dtype)
    sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
    optimizer = FP16_Optimizer(sgd, 128.0, verbose=False)
    before = embedding.weight.detach().float().clone()
    optimizer.backward(embedding(torch.tensor([1, 1, 3])).float().sum())
    optimizer.step()
    moved = before - torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None]
    assert torch.equal(optimizer.param_groups[0]["params"][0], moved)


# -- overflow --------------------------------------------------------------------------------------


def overflowing(**options):
    scale = {"init_scale": 128.0, "scale_window": 2}
    return start(dynamic_loss_scale=True, dynamic_loss_args=scale, **options)


@pytest.mark.parametrize("where", ["first.weight", "norm.bias"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_skips_the_step_and_lowers_the_scale_once(where, bad, spoken):
    model, optimizer = overflowing(verbose=True)
    text = "FP16_Optimizer: 4 parameters of 16 bits with float32 masters; "
    text += "2 float32 parameters without.\n"
    assert spoken() == text
    before = [p.clone() for p in model.parameters()]
    optimizer.backward(loss_of(model), update_master_grads=False)
    model.get_parameter(where).grad.view(-1)[-1] = bad
    optimizer.update_master_grads()
    assert optimizer.overflow
    assert optimizer.loss_scale == 64.0
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert_equal(model.parameters(), before)
    assert optimizer.loss_scale == 64.0
    assert "Skipping step, reducing loss scale to 64.0" in spoken()
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        assert not optimizer.overflow
        optimizer.step()
    assert optimizer.loss_scale == 128.0
    assert not torch.equal(model.first.weight, before[0])


def test_several_losses_of_a_step_count_once():
    """In the original of 2025 each backward counted as a step."""
    model, optimizer = overflowing()
    for _ in range(2):
        assert optimizer.loss_scale == 128.0
        optimizer.zero_grad()
        for _ in range(3):
            optimizer.backward(loss_of(model))
        optimizer.step()
    assert optimizer.loss_scale == 256.0


def test_a_static_scale_checks_nothing():
    model, optimizer = start()
    optimizer.backward(loss_of(model) * math.nan)
    assert not optimizer.overflow
    optimizer.step()
    assert model.first.weight.isnan().any()


def test_an_overflow_lowers_the_scale_once_until_gradients_are_cleared():
    """In the original of 2025 each later backward of the step lowered it again."""
    model, optimizer = overflowing()
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
        scale = optimizer.loss_scale
        optimizer.backward(loss_of(model) * math.inf)
        for _ in range(3):
            optimizer.backward(loss_of(model))
            assert optimizer.overflow
        assert optimizer.loss_scale == scale / 2
        clear()
    optimizer.backward(loss_of(model))
    assert not optimizer.overflow


@pytest.mark.parametrize("dynamic", DYNAMIC.values(), ids=DYNAMIC)
def test_a_loss_that_is_never_finite_ends_with_an_error(dynamic):
    """In the original the scale fell to nothing, and nothing was trained."""
    model, optimizer = start(dynamic_loss_scale=dynamic)
    optimizer._always_checks = True  # as in the optimizer of BERT's programs
    for _ in range(49):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model) * math.nan)
        assert optimizer.step() is None
    with pytest.raises(RuntimeError, match="not finite 50 times in a row"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert optimizer._skipped == 0


def test_options_of_the_scale():
    """In the original of 2025 ``scale_factor`` was accepted and 2 used."""
    _, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args={"scale_factor": 4.0})
    scaler = optimizer.loss_scaler
    assert type(scaler) is DynamicLossScaler
    assert (scaler.cur_scale, scaler.scale_window, scaler.max_loss_scale) == (2**16, 2000, 2**24)
    assert (scaler.scale_factor, scaler.min_loss_scale) == (4.0, None)
    _, optimizer = start(static_loss_scale=8)
    assert type(optimizer.loss_scaler) is LossScaler
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (8.0, False)
    _, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2**32})
    assert (optimizer.loss_scale, optimizer.loss_scaler.max_loss_scale) == (2.0**32, 2**32)
    options = {"init_scale": 2**32, "max_loss_scale": 2.0**20}
    _, optimizer = start(dynamic_loss_scale=True, dynamic_loss_args=options)
    assert optimizer.loss_scale == 2.0**20


# -- closures --------------------------------------------------------------------------------------


def closure_of(model, optimizer, calls=None, bad=()):
    def closure():
        number = len(calls)
        calls.append(model.first.weight.clone())
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss * math.nan if number in bad else loss)
        return loss

    return closure


@pytest.mark.parametrize("dynamic", DYNAMIC.values(), ids=DYNAMIC)
def test_closure_of_lbfgs(dynamic):
    make = lambda params: torch.optim.LBFGS(params, lr=0.25, max_iter=4)  # noqa: E731
    model, optimizer = start(
        make, dynamic_loss_scale=dynamic, dynamic_loss_args={"init_scale": 128.0}
    )
    calls = []
    bad = {2} if dynamic else ()
    first = optimizer.step(closure_of(model, optimizer, calls, bad))
    assert first.item() == pytest.approx(loss_of(start()[0]).item())
    assert len(calls) == 5 + len(bad) - 1  # LBFGS evaluates max_iter times
    assert all(not torch.equal(calls[0], seen) for seen in calls[1:])  # the model follows
    assert_equal(optimizer.all_fp16_params, [m.half() for m in optimizer.all_fp32_from_fp16_params])
    assert loss_of(model) < first
    assert optimizer.first_closure_call_this_step
    assert optimizer.loss_scale == (64.0 if dynamic else 128.0)


def test_a_closure_that_is_never_finite_ends_with_an_error():
    """In the original it was called for ever."""
    model, optimizer = start(dynamic_loss_scale=True)
    calls = []
    closure = closure_of(model, optimizer, calls, bad=range(1000))
    before = model.first.weight.clone()
    with pytest.raises(RuntimeError, match="not finite 50 times in a row"):
        optimizer.step(closure)
    assert len(calls) == 50
    assert torch.equal(model.first.weight, before)
    assert optimizer.first_closure_call_this_step


# -- with what stands around it --------------------------------------------------------------------


def test_schedulers_and_hooks_take_it():
    """In the original it was no ``torch.optim.Optimizer``."""
    model, optimizer = overflowing()
    seen = []
    optimizer.register_step_post_hook(lambda *of: seen.append(of[0]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inner = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step)
    optimizer.backward(loss_of(model) * math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
        inner.step()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0625
    assert optimizer.defaults["lr"] == 0.125
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert seen == [optimizer.optimizer]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: LARC(torch.optim.SGD(params, lr=0.125, weight_decay=0.5)),
        lambda params: FusedAdam(params, lr=0.125),
    ],
    ids=["LARC", "FusedAdam"],
)
def test_other_optimizers_step_as_on_float32_weights(make):
    model, optimizer = start(make)
    twins = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    plain = make(twins)
    for seed in range(3):
        for twin, grad in zip(twins, expected_grads(model, seed), strict=True):
            twin.grad = grad
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, seed))
        optimizer.step()
        plain.step()
    assert_equal([p.detach() for p in optimizer.param_groups[0]["params"]], twins)


@pytest.mark.parametrize("scheduled", [False, True])
def test_copies_and_pickles_train_on(scheduled):
    """In the original both raised RuntimeError."""
    pair = start(lambda params: torch.optim.Adam(params), dynamic_loss_scale=True)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(pair[1], 10)  # patches the object's step
    pair[1].backward(loss_of(pair[0]))
    pair[1].step()
    ends = []
    for model, optimizer in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair)), pair):
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model), update_master_grads=False)
            optimizer.backward(loss_of(model, 2))
            optimizer.step()
        assert optimizer.all_fp16_params[0] is model.first.weight
        ends.append([*model.parameters()])
    assert_equal(ends[0], ends[2])
    assert_equal(ends[1], ends[2])


def test_errors_change_nothing():
    model = Mixed()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=r"optimizer was Mixed\("):
        FP16_Optimizer(model)
    with pytest.raises(TypeError, match="args had windows; allowed are init_scale, scale"):
        FP16_Optimizer(sgd, dynamic_loss_scale=True, dynamic_loss_args={"windows": 3})
    with pytest.raises(ValueError, match="static_loss_scale was -1"):
        FP16_Optimizer(sgd, -1)
    weight = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    both = torch.optim.SGD([model.last.weight, weight], lr=1.0)
    with pytest.raises(TypeError, match="a parameter is torch.complex64"):
        FP16_Optimizer(both)
    assert [p.dtype for p in both.param_groups[0]["params"]] == [torch.float16, torch.complex64]
    assert [*sgd.param_groups[0]["params"]] == [*model.parameters()]
    optimizer = FP16_Optimizer(sgd, verbose=False)
    with pytest.raises(TypeError, match="an FP16_Optimizer already"):
        FP16_Optimizer(optimizer)
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(nn.Linear(1, 1), optimizer, verbosity=0)
    other = nn.Linear(1, 1)
    other, managed = amp.initialize(other, torch.optim.SGD(other.parameters(), lr=1.0), verbosity=0)
    with pytest.raises(RuntimeError, match="went through amp.initialize"):
        FP16_Optimizer(managed)


def test_what_subclasses_hand_to_multi_tensor_applier():
    """As the original's own copies between masters and weights did."""
    model, optimizer = start()
    given, found = [torch.full((3,), 2.0)], [torch.zeros(3, dtype=torch.float16)]
    flag = optimizer._dummy_overflow_buf
    multi_tensor_applier(optimizer.multi_tensor_scale, flag, [given, found], 0.5)
    assert found[0].tolist() == [1.0, 1.0, 1.0]
    given[0][1] = torch.inf
    multi_tensor_applier(optimizer.multi_tensor_scale, flag, [given, found], 0.5)
    assert optimizer._dummy_overflow_buf.tolist() == [1]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda model: [model.first.weight], ValueError, r"shape \[3, 4\] is in the groups twice"),
        (lambda model: [nn.Parameter(torch.ones(2).cfloat())], TypeError, "is torch.complex64"),
        (lambda model: nn.LazyLinear(2, dtype=torch.float16).parameters(), TypeError, "no shape"),
        (lambda model: nn.LazyLinear(2).parameters(), TypeError, "has no shape yet"),
    ],
    ids=["twice", "complex", "lazy half", "lazy"],
)
def test_a_group_that_cannot_be_added_is_not_added(make, error, text):
    model, optimizer = start()
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": make(model)})
    assert len(optimizer.param_groups) == 1
    optimizer.backward(loss_of(model))
    assert_equal(grads_of(optimizer), expected_grads(model, 1))
