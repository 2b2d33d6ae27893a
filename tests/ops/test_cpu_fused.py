"""Steps by torch's fused CPU kernels, in scratch where columns are not float32."""

import pytest
import torch

from apex.ops.lists.storage import StepOptions
from apex.ops.updates import adagrad, adam, cpu_fused, novograd, sgd
from tests.optimizers.common import assert_pooled

ADAM = {
    "lr": 0.02,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
    "step": 3,
}
NOVOGRAD = ADAM | {"reg_inside_moment": False, "grad_averaging": True, "norm_type": 2}
SGD = {"lr": 0.05, "dampening": 0.1, "weight_decay": 0.1, "wd_after_momentum": False}


def adams(*, adam_w_mode):
    numbers = adam.Adam(**ADAM, adam_w_mode=adam_w_mode)
    return cpu_fused, lambda columns, options: adam.adam_(columns, numbers, options)


def sgds(*, momentum, nesterov):
    numbers = sgd.SGD(**SGD, momentum=momentum, nesterov=nesterov)
    return cpu_fused, lambda columns, options: sgd.sgd_(columns, numbers, options)


def adagrads():
    numbers = adagrad.Adagrad(lr=0.05, eps=1e-10, weight_decay=0.1, adagrad_w_mode=False)
    return cpu_fused, lambda columns, options: adagrad.adagrad_(columns, numbers, options)


def novograds(**options):
    numbers = novograd.NovoGrad(**NOVOGRAD | options)

    def step(columns, options):
        norms = [torch.tensor(0.5) for _ in SHAPES]
        novograd.novograd_([*columns, norms], numbers, options)

    return novograd, step


# Those that torch has a kernel for, and NovoGrad.
STEPS = {  # the module that runs the definition, the step, how many states
    "adam": (*adams(adam_w_mode=False), 2),
    "adamw": (*adams(adam_w_mode=True), 2),
    "sgd": (*sgds(momentum=0.0, nesterov=False), 0),
    "momentum": (*sgds(momentum=0.9, nesterov=False), 1),
    "nesterov": (*sgds(momentum=0.9, nesterov=True), 1),
    "adagrad": (*adagrads(), 1),
    "novograd": (*novograds(), 1),
    "novograd, decay in the moment": (*novograds(reg_inside_moment=True), 1),
    "novograd, whole gradients": (*novograds(grad_averaging=False), 1),
}
HALF = (torch.float16, torch.bfloat16)
WIDE = torch.float32
# dtypes of gradients, weights, states and copies
KINDS = [
    *((half, half, WIDE, None) for half in HALF),
    *((half, half, half, None) for half in HALF),
    *((half, WIDE, WIDE, half) for half in HALF),
    (WIDE, WIDE, WIDE, torch.bfloat16),
    (WIDE, torch.bfloat16, WIDE, None),
    (WIDE, WIDE, WIDE, None),
]
# With pieces of 300: batches of many tensors and of few, whole ones and pieces.
SHAPES = ((), (1,), (0,), *[(5,)] * 40, (33, 5), (100,), (1001,), (17, 3), (20, 30), (2, 3, 4, 5))


def column(dtype, seed, *, spoilt=False):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
    if spoilt:
        for number, value in enumerate((float("inf"), float("-inf"), float("nan"))):
            made[3 + number][2] = value
    return made


def made(kind, states):
    grads, weights, state, copies = kind
    columns = [column(grads, 1, spoilt=True), column(weights, 2)]
    columns += [[x.abs() for x in column(state, 3 + number)] for number in range(states)]
    return columns, copies and column(copies, 9)


def doubled(columns):
    return [[x.double() for x in some] for some in columns]


@pytest.fixture
def cut(monkeypatch):
    monkeypatch.setattr(cpu_fused, "PIECE", 300)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
@pytest.mark.parametrize(("factor", "write_grads"), [(1.0, True), (0.3, False), (0.3, True)])
def test_one_rounding(name, kind, factor, write_grads, cut, monkeypatch):
    module, step, states = STEPS[name]
    columns, copies = made(kind, states)
    before = [grad.clone() for grad in columns[0]]
    exact = doubled(columns)
    step(
        exact, StepOptions(factor=factor, write_grads=True)
    )  # the definition: torch has none for float64
    monkeypatch.setattr(module, "run_stored", None)  # not to be called
    step(columns, StepOptions(factor=factor, write_grads=write_grads, extra=copies))
    pairs = []
    for number, (some, wanted) in enumerate(zip(columns[1:], exact[1:], strict=True)):
        pairs += [(number, a, e) for a, e in zip(some, wanted, strict=True)]
    if copies is not None:
        pairs += [("copy", a, e) for a, e in zip(copies, exact[1], strict=True)]
    if write_grads:
        pairs += [("grad", a, e) for a, e in zip(columns[0], exact[0], strict=True)]
    else:
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(columns[0], before, strict=True)
        )
    assert_pooled(pairs, None)


@pytest.mark.parametrize("name", STEPS)
def test_numbers_of_the_host_are_read(name, monkeypatch):
    module, step, states = STEPS[name]
    monkeypatch.setattr(module, "run_stored", None)
    found = []
    for options in (
        StepOptions(factor=0.5),
        StepOptions(factor=torch.tensor(0.5), noop=torch.zeros(1)),
    ):
        columns, _ = made(KINDS[1], states)
        step(columns, options)
        found.append([x.nan_to_num() for some in columns for x in some])
    assert all(map(torch.equal, *found))
    step(columns, StepOptions(noop=torch.ones(1)))
    skipped = [x.nan_to_num() for some in columns for x in some]
    assert all(map(torch.equal, skipped, found[1]))
