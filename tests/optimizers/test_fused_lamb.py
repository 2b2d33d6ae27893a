"""FusedLAMB: the formula, trust ratios, clipping, what is left in gradients, layouts of state."""

import copy
import itertools
import math

import pytest
import torch

from apex import amp
from apex.ops.updates import cpu_fused
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.optimizers.common import (
    DTYPES,
    PATHS,
    SHAPES,
    assert_pooled,
    fuzz,
    give_grads,
    in_two_groups,
    on,
    parameters,
    same,
    train,
    values,
)
from tests.tolerance import CLIPPED, assert_close_to_largest, assert_one_rounding

SMALL = ((7,), (33, 5))
OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True, "bias_correction": False},
    {"weight_decay": 0.1, "adam_w_mode": False},
    {"weight_decay": 0.1, "grad_averaging": False, "max_grad_norm": 0.0},
]


def oracle(optimizer, group, number, grad, param, state, whole):
    """Param, moments and term in float64; ``whole`` is the norm of all gradients."""
    (beta1, beta2), decay = group["betas"], float(group["weight_decay"])
    largest = optimizer.defaults["max_grad_norm"]
    if largest and whole > largest:
        grad = grad * (largest / whole)
    if not optimizer.adam_w_mode:
        grad = grad + decay * param
    m = beta1 * state["exp_avg"] + (1 - beta1 if group["grad_averaging"] else 1) * grad
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2
    c1, c2 = 1.0, 1.0
    if group["bias_correction"]:
        c1, c2 = 1 - beta1**number, 1 - beta2**number
    term = (m / c1) / ((v / c2).sqrt() + group["eps"])
    if optimizer.adam_w_mode:
        term = term + decay * param
    ratio = 1.0
    if (decay or optimizer.use_nvlamb) and param.norm() > 0 and term.norm() > 0:
        ratio = param.norm() / term.norm()
    return param - float(group["lr"]) * ratio * term, {"exp_avg": m, "exp_avg_sq": v}, term


def check(optimizer, steps, path, factor=1.0):
    """Compare each step with float64, from what was stored before it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in range(1, steps + 1):
        give_grads(params, number)
        grads = [param.grad.double() * factor for param in params]
        whole = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        before = copy.deepcopy(optimizer.state_dict()["state"])
        old = [param.detach().double().clone() for param in params]
        with on(path):
            optimizer.step_scaled(factor)
        pairs, index = [], 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                zero = torch.zeros((), dtype=torch.float64)
                state = {s: before.get(index, {}).get(s, zero).double() for s in optimizer.slots}
                wanted, slots, term = oracle(
                    optimizer, group, number, grads[index], old[index], state, whole
                )
                pairs += [("param", param.detach(), wanted), ("grad", param.grad, term)]
                pairs += [(s, optimizer.state[param][s], slots[s]) for s in optimizer.slots]
                index += 1
        assert_right(pairs, path, clips=0 < optimizer.defaults["max_grad_norm"] < whole)


def assert_right(pairs, path, *, clips):
    """One rounding; but a norm is float32, and its own error is every element's."""
    off = [torch.float64, torch.float32] if clips else [torch.float64]
    assert_pooled([pair for pair in pairs if pair[1].dtype not in off], path)
    for kind in {(pair[0], pair[1].dtype) for pair in pairs if pair[1].dtype in off}:
        of_kind = [(a.flatten(), e.flatten()) for name, a, e in pairs if (name, a.dtype) == kind]
        actual, exact = map(torch.cat, zip(*of_kind, strict=True))
        assert_close_to_largest(actual, exact, CLIPPED)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, options) for options in OPTIONS]
    + [(dtype, OPTIONS[3]) for dtype in DTYPES if dtype != torch.float32],
    ids=str,
)
def test_formula(dtype, path, options):
    shapes = SMALL if path == "triton" else SHAPES
    optimizer = FusedLAMB(in_two_groups(parameters(dtype, shapes)), lr=0.02, **options)
    check(optimizer, 2 if path == "triton" else 20, path, 1.0 if path is None else 0.125)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", list(itertools.product((True, False), repeat=4)), ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("largest", [0.0, 1.0, 1e6])
def test_formula_in_full(path, dtype, flags, decay, largest):
    names = ("bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb")
    options = dict(zip(names, flags, strict=True))
    optimizer = FusedLAMB(
        parameters(dtype), lr=0.02, weight_decay=decay, max_grad_norm=largest, **options
    )
    check(optimizer, 5 if path == "triton" else 20, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [True, False])
def test_clipping_looks_at_unscaled_gradients(path, mode):
    """One scale among dtypes and groups: the norm is that of all gradients, times the factor."""
    groups = [{"params": parameters(dtype, SMALL, seed)} for seed, dtype in enumerate(DTYPES)]
    groups[1]["weight_decay"] = 0.0
    optimizer = FusedLAMB(groups, lr=0.02, adam_w_mode=mode)
    check(optimizer, 2 if path == "triton" else 5, path, factor=0.125)
    check(FusedLAMB(parameters(shapes=SMALL), lr=0.02, max_grad_norm=1.0), 1, path, factor=1e-3)


@pytest.mark.parametrize("path", PATHS)
def test_no_clipping_at_zero(path):
    """There the original divides by 0: gradients vanish and only the decay acts."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    train(FusedLAMB(expected, max_grad_norm=1e9), expected, range(2), path)
    assert same(
        train(FusedLAMB(params, max_grad_norm=0.0), params, range(2), path), values(expected)
    )


def test_a_group_cannot_change_the_clipping():
    """As in the original, which reads the constructor's."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer = FusedLAMB([{"params": params, "max_grad_norm": 1e9}])
    plain = FusedLAMB(expected)
    assert same(train(optimizer, params, range(2)), train(plain, expected, range(2)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("zero", ["param", "grad"])
def test_no_ratio_without_a_norm(path, zero):
    params = parameters(shapes=SMALL)
    optimizer = FusedLAMB(params, lr=0.5, weight_decay=0.1, max_grad_norm=0.0, eps=1e-12)
    give_grads(params, 0)
    (params[0].data if zero == "param" else params[0].grad).zero_()
    before = params[0].detach().clone()
    with on(path):
        optimizer.step()
    assert params[0].isfinite().all()
    if zero == "param":  # the first step of Adam: all of size lr
        assert_close_to_largest(params[0].detach().abs(), torch.full((7,), 0.5), CLIPPED)
    else:  # the term is the decay alone, and the ratio takes its size out
        assert_close_to_largest(params[0].detach(), before * 0.5, CLIPPED)


@pytest.mark.parametrize("path", PATHS)
def test_large_tensors(path):
    """Beyond a row and a piece of the CPU's path, and a chunk of the kernel's."""
    size = cpu_fused.PIECE + 77 if path is None else 9000
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((5,), (size,), (3, 3), (size // 3, 2), (0,))
    ]
    check(FusedLAMB(params, lr=0.02), 1, path)
    check(FusedLAMB(params, lr=0.02, max_grad_norm=0.0), 1, path)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("path", PATHS)
def test_awkward_lists(seed, path):
    fuzz(lambda params: FusedLAMB(params, max_grad_norm=0.0), seed, torch.float32, path)


@pytest.mark.parametrize("path", PATHS)
def test_expanded_gradients_are_left_alone(path):
    """Their elements share memory, so nothing can be written there."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    for param, other in zip(params, expected, strict=True):
        param.grad = torch.ones(()).expand(param.shape)
        other.grad = torch.ones_like(other)
    with on(path):
        FusedLAMB(params).step()
        FusedLAMB(expected).step()
    for actual, exact in zip(values(params), values(expected), strict=True):
        assert_one_rounding(actual, exact.double())
    assert params[0].grad.eq(1).all()


@pytest.mark.parametrize("path", PATHS)
def test_gradients_behind_masters_are_left_alone(path):
    """amp's own bookkeeping would notice."""
    params = parameters(shapes=SMALL)
    grads = {param: torch.ones_like(param, dtype=torch.float16) for param in params}
    copies = {param: param.detach().half() for param in params}
    with on(path):
        FusedLAMB(params, lr=0.1).step_scaled(0.5, grads=grads, copies=copies)
    for param in params:
        assert grads[param].eq(1).all()
        assert torch.equal(copies[param], param.detach().half())


# -- numbers on a device, storage, state -----------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_tensors_as_numbers(path, decay):
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    plain = FusedLAMB(expected, lr=0.25, weight_decay=decay)
    optimizer = FusedLAMB(params, lr=torch.tensor(0.25), weight_decay=torch.tensor([decay]))
    left = train(plain, expected, range(2), path)
    for actual, exact in zip(train(optimizer, params, range(2), path), left, strict=True):
        assert_one_rounding(actual, exact.double())


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("storage", ["low_bits", "kahan", "stochastic"])
def test_storage(path, storage):
    params = parameters(torch.bfloat16, SMALL)
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer = FusedLAMB(params, lr=0.02, storage=storage)
    plain = FusedLAMB(masters, lr=0.02)
    for number in range(3):
        give_grads(params, number)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        with on(path):
            optimizer.step()
            plain.step()
    for param, master in zip(params, masters, strict=True):
        if storage == "low_bits":
            low = optimizer.state[param]["low_bits"]
            from apex.ops.lists.storage import join

            assert torch.equal(join(param.detach(), low), master.detach())
        else:
            assert_close_to_largest(param.detach(), master.detach(), 2.0**-6)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_moments(dtype, kept):
    """As the original keeps them; bfloat16, which it refuses, in float32."""
    params = parameters(dtype, SMALL)
    optimizer = FusedLAMB(params)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    assert set(saved["param_groups"][0]) == {
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "weight_decay",
        "grad_averaging",
        "max_grad_norm",
        "step",
        "params",
    }
    assert saved["param_groups"][0]["step"] == 2
    other = FusedLAMB(parameters(dtype, SMALL))
    other.load_state_dict(saved)
    for each in (optimizer, other):
        assert {x.dtype for state in each.state.values() for x in state.values()} == {kept}


def test_second_moments_of_bfloat16_forget():
    """In eight bits a change by a thousandth is rounded away, and old gradients would stay."""
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = FusedLAMB([param], max_grad_norm=0.0)
    for size in [1.0] + [1e-3] * 50:
        param.grad = torch.full_like(param, size)
        optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].max() < 0.96e-3


def test_amsgrad_is_refused():
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedLAMB(parameters(), amsgrad=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"max_grad_norm": -1.0}, "Invalid max_grad_norm value: -1.0"),
    ],
)
def test_numbers_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        FusedLAMB(parameters(), **options)


@pytest.mark.dist
def test_sharded_parameters_are_refused(tmp_path):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        with pytest.raises(RuntimeError, match="norm of a whole tensor"):
            FusedLAMB([param])
        with pytest.raises(RuntimeError, match="norm of a whole gradient"):
            FusedNovoGrad([param])
        FusedAdam([param], max_grad_norm=1.0)
    finally:
        torch.distributed.destroy_process_group()


# -- under amp -------------------------------------------------------------------------------------


def trained(level, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = FusedLAMB(model.parameters(), lr=0.02, max_grad_norm=0.05)
    try:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, loss_scale=1024.0, **options
        )
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(6):
            loss = model(torch.randn(16, 6, generator=generator)).float().square().mean()
            losses.append(loss.item())
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0]
        return [p.detach().float().clone() for p in amp.master_params(optimizer)]
    finally:
        amp.reset()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_amp_can_leave_the_scale_to_the_step(level):
    """Clipping sees unscaled gradients either way."""
    for actual, exact in zip(trained(level, fused_step=True), trained(level), strict=True):
        assert_close_to_largest(actual, exact, CLIPPED)
