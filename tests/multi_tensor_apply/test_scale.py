"""scale and axpby beside their definitions, where memory is shared or not, and their flags."""

import itertools

import amp_C
import pytest
import torch

from apex.ops.lists.clip import clip_
from apex.ops.lists.multi_tensor import PIECE
from apex.ops.lists.scale import axpby_, scale_
from apex.ops.lists.tensor_norms import max_norms, square_sums
from apex.ops.lists.unscale import multiply_, unscale_, unscale_into
from tests.multi_tensor_apply.common import FLOATS, PATHS, exact, no_flag, on, tensors
from tests.tolerance import assert_one_rounding

FEW, LARGE = (3, 0, 1025), (5, PIECE + 3)
LOTS = (*range(37), 300)
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("sizes", [FEW, LARGE, LOTS], ids=["few", "large", "lots"])
@pytest.mark.parametrize(("source", "target"), [*itertools.product(FLOATS, FLOATS)])
def test_scale_is_its_definition_bit_for_bit(source, target, sizes):
    x = tensors(sizes, source)
    found = []
    for path in (None, "reference"):
        out = tensors(sizes, target, seed=1)
        with on(path):
            scale_(x, out, 0.3, no_flag())
        found.append(out)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("sizes", [FEW, LARGE, LOTS], ids=["few", "large", "lots"])
@pytest.mark.parametrize("shared", ["nothing", "x", "y", "x and y", "one of y"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_axpby_over_its_own_inputs(dtype, shared, sizes):
    x, y = tensors(sizes, dtype), tensors(sizes, dtype, seed=1)
    out = tensors(sizes, dtype, seed=2)
    if shared == "x and y":
        y = x
    if shared != "nothing":
        out = {"x": x, "y": y, "x and y": x, "one of y": [*out[:-1], y[-1]]}[shared]
    wanted = [0.5 * a - 3.0 * b for a, b in zip(exact(x), exact(y), strict=True)]
    axpby_(x, y, out, 0.5, -3.0, no_flag())
    assert_one_rounding(torch.cat(out), torch.cat(wanted))


@pytest.mark.parametrize("sizes", [FEW, LOTS], ids=["few", "lots"])
@pytest.mark.parametrize("in_place", [False, "x", "y"])
@pytest.mark.parametrize("checked", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_the_flag_of_axpby_looks_at_what_is_checked(bad, checked, in_place, sizes):
    for spoilt in (0, 1):
        columns = [tensors(sizes), tensors(sizes, seed=1)]
        columns[spoilt][-1][-1] = bad
        out = {False: tensors(sizes, seed=2), "x": columns[0], "y": columns[1]}[in_place]
        flag = no_flag()
        axpby_(*columns, out, 0.0, 2.0, flag, checked=checked)
        assert flag.item() == checked[spoilt]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_results_that_are_too_large_are_not_reported(dtype, in_place):
    huge = torch.finfo(dtype).max
    x, flag = [torch.full((37,), huge, dtype=dtype)], no_flag()
    axpby_(x, [torch.ones(37)], x if in_place else [torch.empty(37, dtype=dtype)], 4.0, 1.0, flag)
    x = [torch.full((37,), huge, dtype=dtype)]
    scale_(x, x if in_place else [torch.empty(37, dtype=dtype)], 4.0, flag)
    assert flag.item() == 0


def _negated(values):
    """The same values with the negative bit, contiguous."""
    return torch._neg_view(-torch.tensor(values))


LISTS = {  # what x = [1, -2, 4] and out, or x, become
    "scale_": lambda x, out: scale_(x, out, 0.5),
    "scale_, in place": lambda x, out: scale_(x, x, 0.5),
    "scale_, norms": lambda x, out: scale_(x, out, 0.5, norms=True),
    "axpby_": lambda x, out: axpby_(x, [torch.zeros(3)], out, 0.5, 1.0),
    "axpby_, y": lambda x, out: axpby_([torch.zeros(3)], x, out, 1.0, 0.5),
    "unscale_into": lambda x, out: unscale_into(x, out, 0.5, no_flag()),
    "unscale_": lambda x, out: unscale_(x, torch.tensor(2.0)),
    "multiply_": lambda x, out: multiply_(x, 0.5),
    "amp_C": lambda x, out: amp_C.multi_tensor_scale(1, no_flag(), [x, out], 0.5),
    "clip_": lambda x, out: clip_(x, 21**0.5 / 2),
    "square_sums": lambda x, out: square_sums(x),
    "max_norms": lambda x, out: max_norms(x),
}
NORMS = {"scale_, norms": 21, "unscale_into": 21 / 4, "clip_": 21**0.5}
NORMS |= {"square_sums": 21, "max_norms": 4}
IN_PLACE = ("scale_, in place", "unscale_", "multiply_", "clip_")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", ["x", "out", "both"])
@pytest.mark.parametrize("name", LISTS)
def test_the_negative_bit(name, bits, path):
    """Signs are those of the values, in what is read and in what is written."""
    x, out = [1.0, -2.0, 4.0], [5.0, 5.0, 5.0]
    x = [_negated(x) if bits != "out" else torch.tensor(x)]
    out = [_negated(out) if bits != "x" else torch.tensor(out)]
    with on(path):
        found = LISTS[name](x, out)
    if name in NORMS:
        assert_one_rounding(found.reshape(()), torch.tensor(NORMS[name], dtype=torch.float64))
    halved = x if name in IN_PLACE else out
    if name not in ("square_sums", "max_norms"):
        wanted = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        assert_one_rounding(halved[0].resolve_neg(), wanted)
    assert (x[0].is_neg(), out[0].is_neg()) == (bits != "out", bits != "x")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["unscale_", "multiply_", "clip_"])
def test_the_conjugate_bit(name, path):
    stored = torch.tensor([3 - 4j])
    x = [stored.conj()]
    with on(path):
        {**LISTS, "clip_": lambda x, _: clip_(x, 2.5)}[name](x, None)
    assert x[0].is_conj()
    assert_one_rounding(torch.view_as_real(stored), torch.tensor([[1.5, -2.0]]).double())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_measuring_writes_nothing(dtype, factor):
    for sizes in ((3,), (1025,), (3, 5)):
        column = tensors(sizes, dtype)
        before = exact(column)
        square_sums(column, factor=factor)
        assert all(map(torch.equal, exact(column), before))
