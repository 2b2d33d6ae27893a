"""``amp_C``: steps of the optimizers against their formulas in float64."""

import amp_C
import pytest
import torch

from tests.multi_tensor_apply.common import FLOATS, PATHS, check, exact, no_flag, on, tensors
from tests.tolerance import assert_one_rounding

BETA1, BETA2, EPS, LR, DECAY = 0.9, 0.99, 1e-3, 0.25, 0.125
SHAPES = (1, 7, 0, 1030)


def moments(shapes, count, kind=torch.float32):
    """Lists of non-negative numbers, as moments."""
    return [[x.abs() for x in tensors(shapes, kind, seed=7 + n)] for n in range(count)]


def adam_oracle(g, p, m, v, *, step, mode, corrected, decay):
    if mode == 0:
        g = g + decay * p
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    c1, c2 = (1 - BETA1**step, 1 - BETA2**step) if corrected else (1, 1)
    term = (m / c1) / ((v / c2).sqrt() + EPS) + (decay * p if mode else 0)
    return p - LR * term, m, v, term


def check_all(found, wanted, path):
    for column, oracle in zip(found, wanted, strict=True):
        check(column, oracle, path)


def _skipped_then_stepped(call, lists, flag=1):
    """With a flag nothing changes."""
    before = [[x.clone() for x in column] for column in lists]
    call(no_flag().fill_(flag))
    assert all(all(map(torch.equal, a, b)) for a, b in zip(before, lists, strict=True))
    call(no_flag())
    return before


def _applied(oracle, *columns, **numbers):
    """The oracle's results as lists."""
    return [list(x) for x in zip(*(oracle(*p, **numbers) for p in zip(*columns, strict=True)))]  # noqa: B905


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("mode", "corrected"), [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("kind", FLOATS)
def test_adam(kind, corrected, mode, path):
    lists = [tensors(SHAPES, kind, scale=1.0), tensors(SHAPES, kind, 1, 1.0), *moments(SHAPES, 2)]
    wanted = _applied(
        adam_oracle, *map(exact, lists), step=3, mode=mode, corrected=corrected, decay=DECAY
    )
    grads = [x.clone() for x in lists[0]]
    with on(path):
        amp_C.multi_tensor_adam(
            65536, no_flag().fill_(1), lists, LR, BETA1, BETA2, EPS, 3, mode, corrected, DECAY
        )
    check_all(lists[1:], wanted[:3], path)
    assert all(map(torch.equal, grads, lists[0]))


@pytest.mark.parametrize("path", PATHS)
def test_adam_takes_mixed_dtypes_and_moments_as_they_are(path):
    """Read as float32 whatever they are, 16-bit moments would be overrun."""
    shapes, kinds = (9, 5, 7, 3), (torch.float16, torch.float32, torch.bfloat16, torch.float64)
    lists = [tensors(shapes, kinds, seed, 1.0) for seed in (0, 1)]
    lists += [[x.abs() for x in tensors(shapes, kinds, seed)] for seed in (2, 3)]
    wanted = _applied(adam_oracle, *map(exact, lists), step=2, mode=1, corrected=1, decay=DECAY)
    with on(path):
        amp_C.multi_tensor_adam(1, no_flag(), lists, LR, BETA1, BETA2, EPS, 2, 1, 1, DECAY)
    check_all(lists[1:3], wanted[:2], path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("kind", FLOATS)
def test_adam_capturable(kind, master, path):
    inverse = 0.25
    grads, params = tensors(SHAPES, kind, scale=4.0), tensors(SHAPES, kind, 1, 1.0)
    masters = [param.float() for param in params] if master else []
    lists = [grads, params, *moments(SHAPES, 2), *([masters] if master else [])]
    unscaled = [inverse * grad for grad in exact(grads)]
    start = exact(masters) if master else exact(params)
    wanted = _applied(
        adam_oracle, unscaled, start, *map(exact, lists[2:4]), step=3, mode=1, corrected=1,
        decay=DECAY,
    )  # fmt: skip
    name = "multi_tensor_adam_capturable" + "_master" * master
    numbers = (torch.tensor(LR), BETA1, BETA2, EPS, torch.tensor([3], dtype=torch.int32), 1, 1)

    def call(flag):
        with on(path):
            getattr(amp_C, name)(65536, flag, lists, *numbers, DECAY, torch.tensor([inverse]))

    _skipped_then_stepped(call, lists)
    check_all(lists, [unscaled, *wanted[:3], *[wanted[0]] * master], path)
    if master:
        narrow = {True: [x.to(kind) for x in masters], False: params}[path != "triton"]
        assert all(map(torch.equal, params, narrow))


def sgd_oracle(g, p, m, *, scale, momentum, dampening, nesterov, first, after):
    g = g * scale
    if not after:
        g = g + DECAY * p
    if momentum:
        m = g if first else momentum * m + (1 - dampening) * g
        g = g + momentum * m if nesterov else m
    if after:
        g = g + DECAY * p
    return p - LR * g, m


def _sgd_numbers(momentum, dampening=0.0, **flags):
    numbers = {"nesterov": False, "first": False, "after": False, **flags}
    return {"momentum": momentum, "dampening": dampening, **numbers}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kinds", "numbers"),
    [
        ("float float", _sgd_numbers(0.0)),
        ("half half", _sgd_numbers(0.0, first=True, after=True)),
        ("bfloat16 bfloat16", _sgd_numbers(0.9, 0.5, first=True)),
        ("float float", _sgd_numbers(0.9, 0.5, after=True)),
        ("half half", _sgd_numbers(0.9, nesterov=True)),
        ("half float half", _sgd_numbers(0.9, 0.5, first=True)),
        ("float float half", _sgd_numbers(0.9, nesterov=True)),
        ("bfloat16 float bfloat16", _sgd_numbers(0.9, 0.5, after=True)),
    ],
    ids=str,
)
def test_sgd(kinds, numbers, path):
    grad_kind, kind, *copy_kind = (getattr(torch, name) for name in kinds.split())
    lists = [tensors(SHAPES, grad_kind, 0, 4.0), tensors(SHAPES, kind, 1, 1.0)]
    lists.append(tensors(SHAPES, kind, 2, 1.0))
    wanted = _applied(sgd_oracle, *map(exact, lists), scale=0.25, **numbers)
    lists += [tensors(SHAPES, other, 3) for other in copy_kind]

    def call(flag):
        with on(path):
            amp_C.multi_tensor_sgd(
                65536, flag, lists, DECAY, numbers["momentum"], numbers["dampening"], LR,
                numbers["nesterov"], numbers["first"], numbers["after"], 0.25,
            )  # fmt: skip

    before = _skipped_then_stepped(call, lists, flag=2)
    assert all(map(torch.equal, before[0], lists[0]))
    check_all(lists[1:3], wanted, path)
    if copy_kind:
        check(lists[3], wanted[0], path)


@pytest.mark.parametrize(
    "kinds", ["half float", "float half", "half half half", "float float float", "double double"]
)
def test_sgd_refuses_other_combinations(kinds):
    kind = [getattr(torch, name) for name in kinds.split()]
    lists = [tensors((3,), k) for k in (*kind[:2], kind[1], *kind[2:])]
    with pytest.raises(RuntimeError, match="^multi_tensor_sgd only supports some combinations of"):
        amp_C.multi_tensor_sgd(1, no_flag(), lists, 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("kind", FLOATS)
def test_adagrad(kind, mode, path):
    lists = [tensors(SHAPES, kind, seed, 1.0) for seed in (0, 1)] + moments(SHAPES, 1, kind)

    def oracle(g, p, h):
        g = g if mode else g + DECAY * p
        h = h + g * g
        return p - LR * (g / (h.sqrt() + EPS) + (DECAY * p if mode else 0)), h

    wanted = _applied(oracle, *map(exact, lists))
    with on(path):
        amp_C.multi_tensor_adagrad(65536, no_flag().fill_(1), lists, LR, EPS, mode, DECAY)
    check_all(lists[1:], wanted, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("mode", "norm_type"), [(0, 0), (1, 2)])
@pytest.mark.parametrize("kind", FLOATS)
def test_novograd(kind, mode, norm_type, path):
    step = 3
    lists = [tensors(SHAPES, kind, seed, 1.0) for seed in (0, 1, 2)]
    norms = torch.tensor([0.5, 2.0, 1.0, 30.0])
    order = 2 if norm_type else float("inf")
    sizes = [x.norm(p=order) if x.numel() else x.sum() for x in exact(lists[0])]
    sizes, old = torch.stack(sizes), norms.double()
    blended = BETA2 * old + (1 - BETA2) * sizes
    if norm_type:
        blended = (BETA2 * old**2 + (1 - BETA2) * sizes**2).sqrt()
    c1, c2 = 1 - BETA1**step, (1 - BETA2**step) ** 0.5

    def oracle(g, p, m, norm):
        divisor = norm / c2 + EPS
        if mode == 0:
            m = BETA1 * m + (1 - BETA1) * (g / divisor + DECAY * p)
            return p - LR * m / c1, m
        m = BETA1 * m + (1 - BETA1) * g
        return p - LR * ((m / c1) / divisor + DECAY * p), m

    wanted = _applied(oracle, *map(exact, lists), blended)
    flag = no_flag()
    with on(path):
        amp_C.multi_tensor_novograd(
            65536, flag, lists, norms, LR, BETA1, BETA2, EPS, step, 1, DECAY, 1, mode, norm_type
        )
    assert_one_rounding(norms, blended)
    check_all(lists[1:], wanted, path)
    assert flag.item() == 0


def test_novograd_reports_and_steps_all_the_same():
    lists, norms, flag = [tensors((4, 5), seed=n) for n in range(3)], torch.ones(2), no_flag()
    lists[0][1][2] = float("inf")
    before = lists[1][0].clone()
    numbers = (LR, BETA1, BETA2, EPS, 1, 1, 0.0, 1, 0, 2)
    amp_C.multi_tensor_novograd(1, flag, lists, norms, *numbers)
    assert flag.item() == 1
    assert not torch.equal(lists[1][0], before)
    with pytest.raises(RuntimeError, match="grad_norms has 3 elements for 2 tensors"):
        amp_C.multi_tensor_novograd(1, flag, lists, torch.ones(3), *numbers)


def lamb_oracle(g, p, m, v, *, factor, mode, nvlamb, decay):
    _, m, v, term = adam_oracle(factor * g, p, m, v, step=3, mode=mode, corrected=True, decay=decay)
    ratio = 1.0
    if (nvlamb or decay) and p.norm() and term.norm():
        ratio = p.norm() / term.norm()
    return p - LR * ratio * term, m, v, term


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("mode", "nvlamb", "decay"),
    [(0, None, DECAY), (1, False, DECAY), (1, False, 0.0), (0, True, 0.0)],
)
@pytest.mark.parametrize("kind", FLOATS)
def test_lamb(kind, mode, nvlamb, decay, path):
    lists = [tensors(SHAPES, kind, s, 1.0) for s in (0, 1)] + moments(SHAPES, 2, kind)
    wanted = _applied(
        lamb_oracle, *map(exact, lists), factor=0.5, mode=mode, nvlamb=nvlamb, decay=decay
    )
    with on(path):
        amp_C.multi_tensor_lamb(
            65536, no_flag().fill_(1), lists, LR, BETA1, BETA2, EPS, 3, 1, decay, 1, mode,
            torch.tensor([3.0]), 1.5, nvlamb,
        )  # fmt: skip
    check_all([*lists[1:], lists[0]], wanted, path)


@pytest.mark.parametrize(("norm", "limit"), [(1.0, 1.5), (3.0, 0.0)])
def test_lamb_does_not_clip_below_the_limit_nor_to_0(norm, limit):
    lists = [tensors((9,), seed=s, scale=1.0) for s in (0, 1)] + moments((9,), 2)
    wanted = _applied(lamb_oracle, *map(exact, lists), factor=1, mode=1, nvlamb=None, decay=DECAY)
    numbers = (LR, BETA1, BETA2, EPS, 3, 1, DECAY, 1, 1)
    amp_C.multi_tensor_lamb(1, no_flag(), lists, *numbers, torch.tensor(norm), limit, None)
    check(lists[1], wanted[0], None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", ["float", "half", "half float", "bfloat16 float"])
def test_lamb_mp(kinds, path):
    kind, *wide = (getattr(torch, name) for name in kinds.split())
    inverse = 0.25
    state_kind = wide[0] if wide else kind
    lists = [tensors(SHAPES, kind, 0, 4.0), tensors(SHAPES, state_kind, 1, 1.0)]
    lists += moments(SHAPES, 2, state_kind)
    wanted = _applied(
        lamb_oracle, *map(exact, lists), factor=inverse / 2, mode=1, nvlamb=False, decay=DECAY
    )
    lists += [tensors(SHAPES, kind, 5)] if wide else []

    def call(flag):
        with on(path):
            amp_C.multi_tensor_lamb_mp(
                65536, flag, lists, torch.tensor(LR), BETA1, BETA2, EPS, torch.tensor([3]), 1,
                DECAY, 1, 1, torch.tensor([12.0]), torch.tensor(6.0), False, torch.zeros(1),
                torch.tensor(inverse),
            )  # fmt: skip

    _skipped_then_stepped(call, lists)
    check_all(lists[1:4], wanted[:3], path)
    if wide:
        check(lists[4], wanted[0], path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", ["float", "half", "bfloat16", "half float", "float half"])
def test_lamb_stages(kinds, path):
    kind, *other = (getattr(torch, name) for name in kinds.split())
    other = other[0] if other else kind
    lists = [tensors(SHAPES, kind, 0, 1.0), tensors(SHAPES, other, 1, 1.0)]
    lists += [*moments(SHAPES, 2, other), tensors(SHAPES, kind, 4)]
    decays = [0.0, 0.5, 0.0, 0.25]
    columns = [exact(column) for column in lists]
    wanted = [
        adam_oracle(0.5 * g, p, m, v, step=3, mode=1, corrected=True, decay=decay)
        for g, p, m, v, decay in zip(*columns[:4], decays, strict=True)
    ]
    with on(path):
        amp_C.multi_tensor_lamb_stage1_cuda(
            65536, no_flag(), lists, torch.tensor(decays), 2, BETA1, BETA2, EPS,
            torch.tensor([3.0]), 1.5,
        )  # fmt: skip
    check_all(lists[2:], [list(column) for column in zip(*wanted, strict=True)][1:], path)
    sizes, terms = torch.tensor([1.0, 0.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 0.0, 2.0])
    for nvlamb, decay, ratios in (
        (None, 0.0, (1, 1, 1, 1)), (True, 0.0, (0.5, 1, 1, 1.5)), (False, 0.5, (0.5, 1, 1, 1.5)),
    ):  # fmt: skip
        params = [x.clone() for x in lists[1]]
        oracle = [
            p - LR * ratio * term
            for p, ratio, term in zip(exact(params), ratios, exact(lists[4]), strict=True)
        ]
        with on(path):
            amp_C.multi_tensor_lamb_stage2_cuda(
                65536, no_flag(), [params, lists[4]], sizes, terms, LR, decay, nvlamb
            )
        check(params, oracle, path)
