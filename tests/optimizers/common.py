"""What the tests of the optimizers share: paths, parameters, and the check of each step."""

import contextlib
import functools
import math

import numpy as np
import torch

from apex import amp
from apex._compat import HAS_GRAD_DTYPE
from apex.catalogue.optimizers import OPTIMIZERS, Step
from apex.contrib import optimizers as contrib
from apex.contrib.optimizers import fused_sgd
from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedMixedPrecisionLamb
from tests.checkpoints import reloaded
from tests.tolerance import CLIPPED, assert_close_to_largest, assert_one_rounding, each

PATHS = (None, "reference", "triton")  # torch's own kernels, the definition, the interpreter
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((), (1,), (7,), (0,), (33, 5), (3, 4, 5))
WAYS = {  # every variant of the catalogue that float32 weights of these sizes can have
    optimizer.called(variant): (optimizer, variant)
    for optimizer in OPTIMIZERS
    for variant in optimizer.variants
    if "fp32" in variant.dtypes
    and not variant.larc
    and "state" not in variant.options
    and "SWA" not in optimizer.title  # whose weights are float32 alone: test_openfold_triton.py
}


def maker(name):
    """How the tests make an optimizer: with weight decay, and what they add."""
    optimizer, variant = WAYS[name]
    options = {"lr": 0.02, "weight_decay": 0.1, **optimizer.options, **variant.options}
    return lambda params, **more: optimizer.make(params, **{**options, **more})


MODES = {name: maker(name) for name, (_, variant) in WAYS.items() if variant.every_test}
EVERY = {name: make for name, make in MODES.items() if "," not in name}  # one way to make each


OLD = {  # of apex.contrib, which are called in their own way too: tests/contrib/test_optimizers.py
    "contrib.FusedAdam": functools.partial(contrib.FusedAdam, lr=0.02),
    "contrib.FusedSGD": functools.partial(fused_sgd.FusedSGD, lr=0.02, momentum=0.9),
}
WITH_MASTERS = {  # of bfloat16 weights
    FusedAdam: {"capturable": True, "master_weights": True},
    FusedMixedPrecisionLamb: {"reduced_precision_dtype": torch.bfloat16},
}


def in_two_groups(params, lr=0.03):
    """Every other parameter in a group of its own with another learning rate."""
    return [{"params": params[::2]}, {"params": params[1::2], "lr": lr}]


def on(path):
    return contextlib.nullcontext() if path is None else _runtime.use(path)


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def give_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        dtype = param.grad_dtype if HAS_GRAD_DTYPE else param.dtype
        param.grad = (scale * grad).to(param.device, dtype)


def widened(params):
    """float32 parameters of the same values."""
    return [torch.nn.Parameter(param.detach().float()) for param in params]


def give_both(params, wide, seed, scale=1.0):
    """Random gradients for parameters, multiplied by the scale, and without it for wider ones."""
    give_grads(params, seed)
    for param, other in zip(params, wide, strict=True):
        other.grad = param.grad.to(other.dtype)
        param.grad *= scale


def through_a_file(saved):
    return reloaded(saved, weights_only=True)


def take_step(path, *optimizers):
    with on(path):
        for optimizer in optimizers:
            optimizer.step()


def assert_rounded(params, others):
    """One rounding of each tensor, with the other as the exact one."""
    each(assert_one_rounding, params, [other.detach().double() for other in others])


def copy_into(params, others):
    """Write values as programs do that load or average weights."""
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            param.copy_(other)


def values(params):
    return [param.detach().clone() for param in params]


def train(optimizer, params, steps, path=None, scale=1.0):
    """Step on the gradients of the numbered steps."""
    with on(path):
        for number in steps:
            give_grads(params, number, scale)
            optimizer.step()
    return values(params)


def started(make, dtype=torch.float32, shapes=SHAPES, *, steps=0, path=None, **options):
    """Parameters, and an optimizer of them that has taken some steps."""
    params = parameters(dtype, shapes)
    optimizer = make(params, **options)
    train(optimizer, params, range(steps), path)
    return params, optimizer


def check_closure(optimizer, params):
    """A step calls its closure once, returns its loss and lessens it; hooks are called."""
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("hook"))

    def closure():
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    assert closure().item() < before
    assert seen == ["hook"]


def stepped_on_expanded_gradients(make, path):
    """Parameters after a step on gradients whose elements share memory, and on others."""
    params, expected = parameters(shapes=SHAPES[2:5:2]), parameters(shapes=SHAPES[2:5:2])
    for param, other in zip(params, expected, strict=True):
        param.grad = torch.ones(()).expand(param.shape)
        other.grad = torch.ones_like(other)
    with on(path):
        make(params).step()
        make(expected).step()
    assert all(param.grad.eq(1).all() for param in params)
    return values(params), values(expected)


def trained_under_amp(make, level, wrap=lambda optimizer: optimizer, **options):
    """Losses, masters and optimizer after six steps of a small model, whose losses fall."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    made, losses, generator = make(model.parameters()), [], torch.Generator().manual_seed(1)
    try:
        _, optimizer = amp.initialize(model, made, opt_level=level, verbosity=0, **options)
        optimizer = wrap(optimizer)
        for _ in range(6):
            loss = model(torch.randn(16, 6, generator=generator)).float().square().mean()
            losses.append(loss.item())
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0]
        masters = [p.detach().float().clone() for p in amp.master_params(optimizer)]
        return losses, masters, optimizer
    finally:
        amp.reset()


def normal(seed, shapes):
    """Tensors of normally distributed numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def same(left, right):
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(left, right, strict=True)
    )


def check_steps(optimizer, formula, steps, path, factor=None):
    """Compare each step with a formula of the catalogue, in float64, from what was stored before.

    Gradients are scaled, but for torch's own kernels, and a step is skipped. With a factor they are
    made smaller by it.
    """
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    scaled = factor is None
    factor = factor or (1.0 if path is None else 0.125)
    for number in range(1, steps + 1):
        give_grads(params, number, 1 / factor if scaled else 1.0)
        if number == 2:
            with on(path):
                optimizer.step_scaled(factor, torch.ones(()))
        grads, old = [factor * param.grad.double() for param in params], values(params)
        states = [
            {slot: x.double().clone() for slot, x in optimizer.state.get(param, {}).items()
             if slot in optimizer.slots}
            for param in params
        ]  # fmt: skip
        largest, whole = optimizer._largest_norm(), math.hypot(*[grad.norm() for grad in grads])
        clips = 0 < largest < whole
        with on(path):
            optimizer.step_scaled(factor)
        pairs, of = [], iter(zip(grads, old, states, strict=True))
        for group in groups:
            numbers = {**optimizer._arguments(), **group, "lr": round(float(group["lr"]), 6)}
            for param in group["params"]:
                grad, weight, state = next(of)
                grad = grad * (largest / whole) if clips else grad
                step = Step(number, numbers, grad, weight.double(), state)
                wanted, slots = formula(step)
                pairs.append(("param", param.detach(), wanted))
                pairs += [(slot, optimizer.state[param][slot], x) for slot, x in slots.items()]
        assert_right(pairs, path, norms=bool(optimizer._kinds()) or clips, clips=clips)


def assert_right(pairs, path, *, norms=False, clips=False):
    """One rounding; but a norm is float32, and its own error is every element's."""
    off = [torch.float64] * norms + [torch.float32] * clips
    assert_pooled([pair for pair in pairs if pair[1].dtype not in off], path)
    for kind in {(pair[0], pair[1].dtype) for pair in pairs if pair[1].dtype in off}:
        of_kind = [(a.flatten(), e.flatten()) for name, a, e in pairs if (name, a.dtype) == kind]
        actual, exact = map(torch.cat, zip(*of_kind, strict=True))
        assert_close_to_largest(actual, exact, CLIPPED)


def assert_pooled(pairs, path):
    """Judge all tensors of a kind and a dtype together: a single number may be off by chance."""
    pools = {}
    for kind, actual, exact in pairs:
        pool = pools.setdefault((kind, actual.dtype), ([], []))
        pool[0].append(actual.flatten())
        pool[1].append(exact.flatten())
    for actual, exact in pools.values():
        assert_one_rounding(torch.cat(actual), torch.cat(exact), interpreted=path == "triton")


BORDERS = (0, 1, 127, 1024, 1025, 8191, 8192, 8193, 16385)


def fuzz(make, seed, dtype, path):
    """Step a list of awkward sizes with inf and nan planted; compare with float64."""
    generator = torch.Generator().manual_seed(seed)

    def pick(limit):
        return int(torch.randint(limit, (), generator=generator))

    shapes = [(BORDERS[pick(len(BORDERS))],) for _ in range(pick(6))]
    shapes.insert(pick(1 + len(shapes)), (BORDERS[-1 - seed % 4],))  # always one by the border
    params = parameters(dtype, shapes, seed)
    wide = [torch.nn.Parameter(param.detach().double()) for param in params]
    give_grads(params, seed)
    full = [param for param in params if param.numel()]
    if full:
        spoilt = full[pick(len(full))].grad
        at = (0, spoilt.numel() // 2, spoilt.numel() - 1)[pick(3)]
        spoilt[at] = (float("inf"), float("-inf"), float("nan"))[pick(3)]
    for param, exact in zip(params, wide, strict=True):
        exact.grad = param.grad.double()
    optimizer, exactly = make(params), make(wide)
    with on(path), np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns
        optimizer.step()
    exactly.step()
    pairs = []
    for param, exact in zip(params, wide, strict=True):
        pairs.append(("param", param.detach(), exact.detach()))
        for slot in optimizer.slots:
            if slot == "norm":  # float32 there, too
                continue
            pairs.append((slot, optimizer.state[param][slot], exactly.state[exact][slot]))
    assert_pooled(pairs, path)
