"""``amp_C``: scaling, adding, norms and the loss scale, against float64 and its rules."""

import itertools

import amp_C
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.multi_tensor_apply.common import (
    FLOATS,
    PATHS,
    PLANTED,
    SIZES,
    check,
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


def sizes_for(path):
    return SMALL if path == "triton" else SIZES


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


class Computed(TorchDispatchMode):
    """Names of what torch computes: a launch each on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_norm_is_three_launches_and_nothing_of_torchs():
    """Sums of programs, of tensors, and the roots with the flag, which were ten of torch's."""
    case = pytest.importorskip("tools.kernels.case")
    x, flag = tensors((4097, 5)), no_flag()
    with on("triton"), Computed() as computed:
        launches = case.launches(lambda: _norms("multi_tensor_l2norm", x, flag, True))
    kernels = [kernel.__name__ for kernel, _ in launches]
    assert kernels == ["list_kernel", "segment_kernel", "norm_kernel"]
    assert computed.names == []


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
