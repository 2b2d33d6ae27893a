"""``amp_C``: each function against float64, its flag, and what it refuses."""

import inspect
import itertools

import amp_C
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.multi_tensor_apply.common import (
    CHUNK,
    FLOATS,
    PATHS,
    PLANTED,
    SIZES,
    exact,
    joined,
    no_flag,
    on,
    tensors,
)
from tests.tolerance import assert_one_rounding

SMALL = (1, 7, 0, 1030)
BAD = (float("inf"), -float("inf"), float("nan"))
PAIRS = list(itertools.product(FLOATS, FLOATS))
BETA1, BETA2, EPS, LR, DECAY = 0.9, 0.99, 1e-3, 0.25, 0.125


def sizes_for(path):
    return SMALL if path == "triton" else SIZES


def check(found, wanted, path):
    """Compare lists, all tensors of a list together."""
    for kind in {tensor.dtype for tensor in found}:
        pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a.dtype == kind]
        actual, oracle = joined([a for a, _ in pairs]), joined([b for _, b in pairs])
        assert_one_rounding(actual, oracle, interpreted=path == "triton")


# -- scale, axpby ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "out_kind"), PAIRS)
def test_scale(kind, out_kind, path):
    x = tensors(sizes_for(path), kind)
    out, flag = tensors(sizes_for(path), out_kind, seed=1), no_flag()
    factor = torch.tensor(0.3).item()
    with on(path):
        assert amp_C.multi_tensor_scale(65536, flag, [x, out], factor) is None
    check(out, [factor * tensor for tensor in exact(x)], path)
    assert flag.item() == 0


@pytest.mark.parametrize("path", PATHS)
def test_scale_in_place_with_mixed_dtypes_and_shapes(path):
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float16)
    x = tensors((12, 5, 0, 7, 9), kinds)
    x[0] = x[0].view(3, 4)
    out = [x[0].view(2, 6), *x[1:3], x[3].float(), x[4].float().view(3, 3)]
    wanted = exact(x)
    with on(path):
        amp_C.multi_tensor_scale(1, no_flag(), [x, out], 2.0)
    check(out, [2.0 * a.view_as(b) for a, b in zip(wanted, out, strict=True)], path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("path", "sizes"), PLANTED)
def test_scale_sees_what_is_not_finite_anywhere(path, sizes, bad):
    for tensor, size in enumerate(sizes):
        for element in {0, size // 2, size - 1} if size else ():
            x, out, flag = tensors(sizes), tensors(sizes, seed=1), no_flag()
            x[tensor][element] = bad
            with on(path):
                amp_C.multi_tensor_scale(65536, flag, [x, out], 0.5)
            assert flag.item() == 1
            assert torch.equal(joined(out).isfinite(), joined(x).isfinite())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "large"), [(torch.float16, 6e4), (torch.float32, 3e38)])
def test_scale_does_not_report_an_overflow_on_output(kind, large, path):
    x, out, flag = [torch.full((3,), large, dtype=kind)], [torch.zeros(3, dtype=kind)], no_flag()
    with on(path):
        amp_C.multi_tensor_scale(65536, flag, [x, out], 4.0)
    assert out[0].isinf().all()
    assert flag.item() == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kinds", [*[(kind,) * 3 for kind in FLOATS], (torch.float16, torch.float32, torch.bfloat16)]
)
def test_axpby(kinds, path):
    x, y, out = (tensors(sizes_for(path), kind, seed=n) for n, kind in enumerate(kinds))
    a, b, flag = 0.5, -2.0, no_flag()
    with on(path):
        assert amp_C.multi_tensor_axpby(65536, flag, [x, y, out], a, b, -1) is None
    check(out, [a * u + b * v for u, v in zip(exact(x), exact(y), strict=True)], path)
    assert flag.item() == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("which", "seen"), [(-1, (True, True)), (0, (True, False)), (1, (False, True))]
)
def test_axpby_checks_the_argument_that_it_is_told(which, seen, path):
    for bad, wanted in enumerate(seen):
        for element in (0, 600, -1):
            lists, flag = [tensors((5, 1030), seed=n) for n in range(3)], no_flag()
            lists[bad][1][element] = float("nan")
            with on(path):
                amp_C.multi_tensor_axpby(65536, flag, lists, 1.0, 1.0, which)
            assert flag.item() == wanted
            assert lists[2][1][element].isnan()


def test_axpby_refuses_another_argument_to_check():
    lists = [tensors((2,)) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"arg_to_check was 2; allowed are -1"):
        amp_C.multi_tensor_axpby(1, no_flag(), lists, 1.0, 1.0, 2)


# -- norms ----------------------------------------------------------------------------------------


def _norms(name, x, flag, per_tensor):
    """Call a norm function so that it measures ``x``."""
    function = getattr(amp_C, name)
    if name == "multi_tensor_l2norm_scale":
        return function(65536, flag, [x, [tensor.clone() for tensor in x]], 0.5, per_tensor)
    if name == "multi_tensor_unscale_l2norm":
        return function(65536, flag, [x], torch.ones(1), per_tensor)
    return function(65536, flag, [x], per_tensor)


NORMS = [
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_unscale_l2norm",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, kind, path):
    x, flag = tensors(sizes_for(path), kind), no_flag()
    wanted = torch.stack([tensor.norm() for tensor in exact(x)])
    with on(path):
        norm, each = _norms(name, x, flag, True)
        alone, none = _norms(name, x, flag, None)
    assert norm.dtype == each.dtype == torch.float32
    assert_one_rounding(norm, wanted.norm().reshape(1))
    assert_one_rounding(each, wanted)
    assert torch.equal(alone, norm)
    assert none.shape == (0,)
    assert flag.item() == 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [*BAD, 1e30])  # the square of the last exceeds float32
@pytest.mark.parametrize("name", NORMS)
def test_norms_report_what_is_not_finite(name, bad, path):
    for tensor, element in ((0, 0), (2, 600), (2, -1)):
        x, flag = tensors((4, 0, 1030)), no_flag()
        x[tensor][element] = bad
        with on(path):
            norm, each = _norms(name, x, flag, True)
        assert flag.item() == 1
        assert not norm.isfinite().any()
        assert each.isfinite().sum() == 2


@pytest.mark.parametrize("path", PATHS)
def test_l2norm_scale_writes_and_unscale_l2norm_does_not(path):
    x, out = tensors((5, 0, 9), torch.float16), tensors((5, 0, 9), torch.bfloat16, seed=1)
    before = [tensor.clone() for tensor in x]
    wanted = torch.stack([tensor.norm() for tensor in exact(x)])
    with on(path):
        _, each = amp_C.multi_tensor_l2norm_scale(1, no_flag(), [x, out], 4.0, True)
        _, scaled = amp_C.multi_tensor_unscale_l2norm(1, no_flag(), [x], torch.tensor(4.0), True)
    check(out, [4 * tensor for tensor in exact(before)], path)
    assert_one_rounding(each, wanted)
    assert_one_rounding(scaled, 4 * wanted)
    assert all(map(torch.equal, x, before))


# -- optimizers -----------------------------------------------------------------------------------


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


def _applied(oracle, *columns, **numbers):
    """The oracle's results as lists."""
    return [list(x) for x in zip(*(oracle(*p, **numbers) for p in zip(*columns, strict=True)))]  # noqa: B905


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("corrected", [0, 1])
@pytest.mark.parametrize("kind", FLOATS)
def test_adam(kind, corrected, mode, path):
    shapes = (1, 7, 0, 1030)
    lists = [tensors(shapes, kind, scale=1.0), tensors(shapes, kind, 1, 1.0), *moments(shapes, 2)]
    wanted = _applied(
        adam_oracle, *map(exact, lists), step=3, mode=mode, corrected=corrected, decay=DECAY
    )
    grads = [x.clone() for x in lists[0]]
    with on(path):
        amp_C.multi_tensor_adam(
            65536, no_flag().fill_(1), lists, LR, BETA1, BETA2, EPS, 3, mode, corrected, DECAY
        )
    for found, oracle in zip(lists[1:], wanted[:3], strict=True):
        check(found, oracle, path)
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
    for found, oracle in zip(lists[1:3], wanted[:2], strict=True):
        check(found, oracle, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("kind", FLOATS)
def test_adam_capturable(kind, master, path):
    shapes, inverse = (1, 7, 0, 1030), 0.25
    grads, params = tensors(shapes, kind, scale=4.0), tensors(shapes, kind, 1, 1.0)
    masters = [param.float() for param in params] if master else []
    lists = [grads, params, *moments(shapes, 2), *([masters] if master else [])]
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

    before = [[x.clone() for x in column] for column in lists]
    call(no_flag().fill_(1))
    assert all(all(map(torch.equal, a, b)) for a, b in zip(before, lists, strict=True))
    call(no_flag())
    check(grads, unscaled, path)
    check(params, wanted[0], path)
    check(lists[2], wanted[1], path)
    check(lists[3], wanted[2], path)
    if master:
        check(masters, wanted[0], path)
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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "numbers",
    [
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "first": False, "after": False},
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "first": True, "after": True},
        {"momentum": 0.9, "dampening": 0.5, "nesterov": False, "first": True, "after": False},
        {"momentum": 0.9, "dampening": 0.5, "nesterov": False, "first": False, "after": True},
        {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "first": False, "after": False},
    ],
)
@pytest.mark.parametrize(
    "kinds",
    [
        "half half",
        "bfloat16 bfloat16",
        "float float",
        "half float half",
        "float float half",
        "bfloat16 float bfloat16",
    ],
)
def test_sgd(kinds, numbers, path):
    grad_kind, kind, *copy_kind = (getattr(torch, name) for name in kinds.split())
    shapes = (1, 7, 0, 1030)
    lists = [tensors(shapes, grad_kind, 0, 4.0), tensors(shapes, kind, 1, 1.0)]
    lists.append(tensors(shapes, kind, 2, 1.0))
    wanted = _applied(sgd_oracle, *map(exact, lists), scale=0.25, **numbers)
    lists += [tensors(shapes, other, 3) for other in copy_kind]

    def call(flag):
        with on(path):
            amp_C.multi_tensor_sgd(
                65536, flag, lists, DECAY, numbers["momentum"], numbers["dampening"], LR,
                numbers["nesterov"], numbers["first"], numbers["after"], 0.25,
            )  # fmt: skip

    before = [[x.clone() for x in column] for column in lists]
    call(no_flag().fill_(2))
    assert all(all(map(torch.equal, a, b)) for a, b in zip(before, lists, strict=True))
    call(no_flag())
    assert all(map(torch.equal, before[0], lists[0]))
    check(lists[1], wanted[0], path)
    check(lists[2], wanted[1], path)
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
    shapes = (1, 7, 0, 1030)
    lists = [tensors(shapes, kind, seed, 1.0) for seed in (0, 1)] + moments(shapes, 1, kind)

    def oracle(g, p, h):
        g = g if mode else g + DECAY * p
        h = h + g * g
        return p - LR * (g / (h.sqrt() + EPS) + (DECAY * p if mode else 0)), h

    wanted = _applied(oracle, *map(exact, lists))
    with on(path):
        amp_C.multi_tensor_adagrad(65536, no_flag().fill_(1), lists, LR, EPS, mode, DECAY)
    check(lists[1], wanted[0], path)
    check(lists[2], wanted[1], path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("kind", FLOATS)
def test_novograd(kind, mode, norm_type, path):
    shapes, step = (1, 7, 0, 1030), 3
    lists = [tensors(shapes, kind, seed, 1.0) for seed in (0, 1, 2)]
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
    check(lists[1], wanted[0], path)
    check(lists[2], wanted[1], path)
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
@pytest.mark.parametrize(("nvlamb", "decay"), [(None, DECAY), (False, 0.0), (True, 0.0)])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("kind", FLOATS)
def test_lamb(kind, mode, nvlamb, decay, path):
    shapes = (1, 7, 0, 1030)
    lists = [tensors(shapes, kind, s, 1.0) for s in (0, 1)] + moments(shapes, 2, kind)
    wanted = _applied(
        lamb_oracle, *map(exact, lists), factor=0.5, mode=mode, nvlamb=nvlamb, decay=decay
    )
    with on(path):
        amp_C.multi_tensor_lamb(
            65536, no_flag().fill_(1), lists, LR, BETA1, BETA2, EPS, 3, 1, decay, 1, mode,
            torch.tensor([3.0]), 1.5, nvlamb,
        )  # fmt: skip
    for found, oracle in zip([*lists[1:], lists[0]], wanted, strict=True):
        check(found, oracle, path)


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
    shapes, inverse = (1, 7, 0, 1030), 0.25
    state_kind = wide[0] if wide else kind
    lists = [tensors(shapes, kind, 0, 4.0), tensors(shapes, state_kind, 1, 1.0)]
    lists += moments(shapes, 2, state_kind)
    wanted = _applied(
        lamb_oracle, *map(exact, lists), factor=inverse / 2, mode=1, nvlamb=False, decay=DECAY
    )
    lists += [tensors(shapes, kind, 5)] if wide else []

    def call(flag):
        with on(path):
            amp_C.multi_tensor_lamb_mp(
                65536, flag, lists, torch.tensor(LR), BETA1, BETA2, EPS, torch.tensor([3]), 1,
                DECAY, 1, 1, torch.tensor([12.0]), torch.tensor(6.0), False, torch.zeros(1),
                torch.tensor(inverse),
            )  # fmt: skip

    before = [[x.clone() for x in column] for column in lists]
    call(no_flag().fill_(1))
    assert all(all(map(torch.equal, a, b)) for a, b in zip(before, lists, strict=True))
    call(no_flag())
    for found, oracle in zip(lists[1:4], wanted[:3], strict=True):
        check(found, oracle, path)
    if wide:
        check(lists[4], wanted[0], path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", ["float", "half", "bfloat16", "half float", "float half"])
def test_lamb_stages(kinds, path):
    kind, *other = (getattr(torch, name) for name in kinds.split())
    shapes, other = (1, 7, 0, 1030), other[0] if other else kind
    lists = [tensors(shapes, kind, 0, 1.0), tensors(shapes, other, 1, 1.0)]
    lists += [*moments(shapes, 2, other), tensors(shapes, kind, 4)]
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
    check(lists[4], [entry[3] for entry in wanted], path)
    check(lists[2], [entry[1] for entry in wanted], path)
    check(lists[3], [entry[2] for entry in wanted], path)
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


# -- the loss scale -------------------------------------------------------------------------------


class Hysteresis:
    """The rules of the scale, one after the other."""

    def __init__(self, scale, hysteresis):
        self.scale, self.growth, self.left = scale, 0, hysteresis

    def update(self, found, growth_factor, backoff_factor, interval, hysteresis):
        if found > 0:
            self.left -= 1
            self.growth = 0
            if self.left <= 0:
                self.scale *= backoff_factor
            return
        self.left = hysteresis
        self.growth += 1
        if self.growth == interval:
            self.growth = 0
            if self.scale * growth_factor <= torch.finfo(torch.float32).max:
                self.scale *= growth_factor


@given(
    st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0]), max_size=40),
    st.sampled_from([1.0, 2.0**16, 2.0**126]),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_hysteresis(founds, scale, interval, hysteresis):
    wanted = Hysteresis(scale, hysteresis)
    current, growth = torch.tensor([scale]), torch.zeros(1, dtype=torch.int32)
    left = torch.full((1,), hysteresis, dtype=torch.int32)
    for found in founds:
        result = amp_C.update_scale_hysteresis(
            current, growth, left, torch.tensor([found]), 2.0, 0.5, interval, hysteresis
        )
        wanted.update(found, 2.0, 0.5, interval, hysteresis)
        assert result is current
        assert (current.item(), growth.item(), left.item()) == (
            wanted.scale,
            wanted.growth,
            wanted.left,
        )


def test_hysteresis_has_no_floor():
    scale, count = torch.tensor([2.0**-140]), torch.zeros(1, dtype=torch.int32)
    for _ in range(12):
        amp_C.update_scale_hysteresis(scale, count, count.clone(), torch.ones(1), 2.0, 0.5, 9, 1)
    assert scale.item() == 0


# -- what all have in common ----------------------------------------------------------------------

NUMBERS = {  # what follows the lists, and how many lists there are
    "multi_tensor_scale": (2, (1.0,)),
    "multi_tensor_axpby": (3, (1.0, 1.0, -1)),
    "multi_tensor_l2norm": (1, (False,)),
    "multi_tensor_l2norm_mp": (1, (False,)),
    "multi_tensor_l2norm_scale": (2, (1.0, False)),
    "multi_tensor_unscale_l2norm": (1, (1.0, False)),
    "multi_tensor_sgd": (3, (0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)),
    "multi_tensor_adam": (4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)),
    "multi_tensor_adam_capturable": (4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, 1.0)),
    "multi_tensor_adam_capturable_master": (5, (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, 1.0)),
    "multi_tensor_adagrad": (3, (0.1, 1e-8, 0, 0.0)),
    "multi_tensor_novograd": (
        3, (torch.ones(2), 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.0, 1, 0, 2)
    ),
    "multi_tensor_lamb": (4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 0, 1.0, 1.0, None)),
    "multi_tensor_lamb_mp": (
        4, (0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 0, 1.0, 1.0, None, 0.0, 1.0)
    ),
    "multi_tensor_lamb_stage1_cuda": (5, (torch.ones(2), 1, 0.9, 0.99, 1e-8, 1.0, 1.0)),
    "multi_tensor_lamb_stage2_cuda": (2, (torch.ones(2), torch.ones(2), 0.1, 0.1, None)),
}  # fmt: skip
ALL = sorted(NUMBERS)


def call(name, lists, flag=None):
    flag = no_flag() if flag is None else flag
    numbers = [x.clone() if isinstance(x, torch.Tensor) else x for x in NUMBERS[name][1]]
    return getattr(amp_C, name)(65536, flag, lists, *numbers)


def lists_for(name, shapes=(3, 4), **how):
    return [tensors(shapes, seed=seed, **how) for seed in range(NUMBERS[name][0])]


def test_every_function_is_here():
    assert sorted(amp_C.__all__) == sorted([*ALL, "update_scale_hysteresis"])
    for name in amp_C.__all__:
        kinds = {p.kind for p in inspect.signature(getattr(amp_C, name)).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_ONLY}


@pytest.mark.parametrize("name", ALL)
def test_lists_that_do_not_fit(name):
    lists = lists_for(name)
    for wrong in (lists * 3, []):
        with pytest.raises(RuntimeError, match=r"tensor_lists\.size\(\) != depth"):
            call(name, wrong)
    with pytest.raises(RuntimeError, match=r"tensor_lists\[0\]\.size\(\) is not > 0"):
        call(name, [[] for _ in lists])
    bad = [list(column) for column in lists]
    bad[0][0] = torch.zeros(3, 2).t()
    with pytest.raises(RuntimeError, match=r"A tensor was not contiguous\."):
        call(name, bad)
    bad[0][0] = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"\"{name}\" not implemented for 'Int'"):
        call(name, bad)
    bad = [list(column) for column in lists]
    bad[-1][1] = torch.zeros(4, device="meta")
    with pytest.raises(RuntimeError, match="not on the same device as the first tensor"):
        call(name, bad)


@pytest.mark.parametrize("name", [name for name in ALL if NUMBERS[name][0] > 1])
def test_sizes_that_do_not_fit(name):
    lists = lists_for(name)
    with pytest.raises(RuntimeError, match="Size mismatch among tensor lists"):
        call(name, [*lists[:-1], lists[-1][:1]])
    lists[-1][1] = torch.zeros(5)
    with pytest.raises(RuntimeError, match="Size mismatch: .* has 5 elements; .* has 4"):
        call(name, lists)
    lists[-1][1] = torch.zeros(2, 5)[:, :2].t()  # the layout comes first
    with pytest.raises(RuntimeError, match="not contiguous"):
        call(name, lists)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ALL)
def test_empty_tensors_are_passed_over_wherever_they_are(name, path):
    """In the original an empty last tensor kept those before it from being computed."""
    results = []
    for shapes in ((5, 0), (0, 5)):
        lists, flag = lists_for(name, shapes, scale=1.0), no_flag()
        if NUMBERS[name][0] == 1:
            lists[0][shapes.index(5)][2] = float("nan")
        else:
            for column in lists:
                column[shapes.index(5)].copy_(torch.linspace(0.1, 1, 5))
        with on(path):
            call(name, lists, flag)
        results.append((flag.item(), [column[shapes.index(5)] for column in lists]))
    assert results[0][0] == results[1][0] == (NUMBERS[name][0] == 1)
    if NUMBERS[name][0] > 1:
        assert all(map(torch.equal, results[0][1], results[1][1]))
        before = torch.linspace(0.1, 1, 5)
        writes = name not in ("multi_tensor_scale", "multi_tensor_l2norm_scale")  # by 1
        assert not writes or not all(torch.equal(x, before) for x in results[0][1])


@pytest.mark.parametrize("name", ALL)
def test_only_empty_tensors(name):
    call(name, lists_for(name, (0, 0)))


@pytest.mark.parametrize("name", ALL)
def test_nothing_waits(name):
    """On the meta device every reading raises."""
    lists = [[x.to("meta") for x in column] for column in lists_for(name)]
    flag = no_flag(device="meta")
    numbers = list(NUMBERS[name][1])
    keep = {"multi_tensor_sgd": (0, 3, 7), "multi_tensor_scale": (0,)}
    on_device = keep.get(name, ())
    for index in on_device:
        numbers[index] = torch.tensor(numbers[index], device="meta")
    if "capturable" in name or name == "multi_tensor_lamb_mp":
        for index in (0, 4, -1):
            numbers[index] = torch.tensor(numbers[index], device="meta")
    if "lamb" in name and "stage" not in name:
        numbers[9] = torch.tensor(numbers[9], device="meta")
    numbers = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in numbers]
    getattr(amp_C, name)(65536, flag, lists, *numbers)


def test_nothing_waits_for_the_scale():
    one, count = torch.ones(1, device="meta"), torch.ones(1, device="meta", dtype=torch.int32)
    assert amp_C.update_scale_hysteresis(one, count, count, one, 2.0, 0.5, 3, 2) is one


@pytest.mark.parametrize("two", [torch.tensor(2.0), torch.tensor([2]), 2, "numpy"])
def test_numbers_may_be_anything_that_is_one(two):
    if two == "numpy":
        two = pytest.importorskip("numpy").float32(2)
    x, out = tensors((4,)), tensors((4,))
    amp_C.multi_tensor_scale(1, no_flag(), [x, out], two)
    assert torch.equal(out[0], 2 * x[0])


def test_parameters_that_require_gradients_are_written():
    params = [torch.ones(3, requires_grad=True)]
    amp_C.multi_tensor_scale(1, no_flag(), [params, params], 0.5)
    assert params[0].tolist() == [0.5] * 3


@pytest.mark.parametrize("flag", [torch.zeros(()), torch.zeros(1, dtype=torch.uint8)])
def test_the_flag_may_have_any_dtype_and_is_never_cleared(flag):
    amp_C.multi_tensor_scale(1, flag, [[torch.tensor([float("inf")])], tensors((1,))], 1.0)
    assert flag.item() == 1
    amp_C.multi_tensor_scale(1, flag, [tensors((1,)), tensors((1,))], 1.0)
    assert flag.item() == 1
    with pytest.raises(RuntimeError, match="noop_flag is empty"):
        amp_C.multi_tensor_scale(1, torch.zeros(0), [tensors((1,)), tensors((1,))], 1.0)


@pytest.mark.parametrize("path", PATHS)
def test_channels_last(path):
    """One format at a position, or two: elements go by their index."""
    plain = tensors((2 * 3 * 4 * 5,))[0].view(2, 3, 4, 5)
    last = plain.contiguous(memory_format=torch.channels_last)
    for x in (plain, last):
        for out in (torch.zeros_like(plain), torch.zeros_like(last)):
            with on(path):
                amp_C.multi_tensor_scale(1, no_flag(), [[x], [out]], 2.0)
            assert torch.equal(out, 2 * plain)


@st.composite
def _lists(draw):
    border = st.sampled_from([0, 1, 2, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1])
    sizes = draw(st.lists(border, min_size=1, max_size=130))
    kinds = draw(st.lists(st.sampled_from(FLOATS), min_size=len(sizes), max_size=len(sizes)))
    spoilt = draw(st.none() | st.integers(0, len(sizes) - 1))
    return sizes, kinds, spoilt, draw(st.sampled_from([0, 0.5, 1])), draw(st.sampled_from(BAD))


@pytest.mark.parametrize("path", [None, "reference"])
@given(_lists())
def test_scale_and_norm_of_any_lists(path, drawn):
    sizes, kinds, spoilt, where, bad = drawn
    x = tensors(sizes, kinds)
    planted = spoilt is not None and sizes[spoilt] > 0
    if planted:
        x[spoilt][int(where * (sizes[spoilt] - 1))] = bad
    out, flags = [torch.empty_like(tensor) for tensor in x], [no_flag(), no_flag()]
    with on(path):
        amp_C.multi_tensor_scale(65536, flags[0], [x, out], 0.5)
        norm, each = amp_C.multi_tensor_l2norm(65536, flags[1], [x], True)
    assert [flag.item() for flag in flags] == [planted, planted]
    assert all(
        torch.equal((0.5 * a).nan_to_num(), b.nan_to_num()) for a, b in zip(x, out, strict=True)
    )
    oracle = torch.stack([tensor.norm() for tensor in exact(x)])
    assert_one_rounding(each, oracle)
    assert_one_rounding(norm, oracle.norm().reshape(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["multi_tensor_scale", "multi_tensor_l2norm"])
def test_a_thousand_tensors_in_the_interpreter(name):
    x = tensors([1 + n % 40 for n in range(1000)])
    with on("triton"):
        call(name, [x] * NUMBERS[name][0])
