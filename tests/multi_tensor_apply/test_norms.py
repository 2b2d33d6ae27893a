"""Norms of lists: against float64, on each path."""

import pytest
import torch

from apex.ops.lists.multi_tensor import run
from apex.ops.lists.scale import SCALE, SQUARE, ScaleScalars
from apex.ops.lists.tensor_norms import l2_norm, l2_norms, max_norms, square_sums
from tests.multi_tensor_apply.common import (
    CHUNK,
    FLOATS,
    PATHS,
    PLANTED,
    SIZES,
    exact,
    no_flag,
    on,
    tensors,
)
from tests.tolerance import assert_one_rounding

MIXED = (torch.float32, torch.float16, torch.float32, torch.bfloat16, torch.float64, *FLOATS)


def _norms(column, factor=1.0):
    return torch.stack([(x * factor).norm() for x in exact(column)])


def _largest(column, factor=1.0):
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([(x * factor).abs().max() if x.numel() else zero for x in exact(column)])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_each_norm(dtype, path):
    column = tensors(dtype=dtype)
    with on(path):
        assert_one_rounding(l2_norms(column), _norms(column))
        assert_one_rounding(square_sums(column), _norms(column).square())
        assert_one_rounding(max_norms(column), _largest(column))
        assert_one_rounding(l2_norm(column), _norms(column).norm())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3), torch.tensor([0.3])])
def test_a_factor_and_mixed_dtypes_in_order(factor, path):
    column = tensors((5, 3000, 0, 7, 4097, 9000, 1, 100), MIXED)
    number = torch.tensor(0.3).double().item()
    with on(path):
        assert_one_rounding(l2_norms(column, factor=factor), _norms(column, number))
        assert_one_rounding(max_norms(column, factor=factor), _largest(column, number))


@pytest.mark.parametrize("path", PATHS)
def test_squares_are_summed_without_a_root(path):
    column = [torch.full((size,), 3.0) for size in (2, 5, 64)]
    with on(path):
        assert square_sums(column).tolist() == [18.0, 45.0, 576.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_long_tensor_is_summed_as_exactly_as_a_short_one(dtype):
    """torch's own norm is 5e-4 off here."""
    column = tensors((2**22 + 2**17 + 3,), dtype)
    assert_one_rounding(l2_norms(column), _norms(column))
    assert_one_rounding(l2_norms(column, factor=0.5), _norms(column, 0.5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_equal_elements_short_and_long(dtype, factor):
    """torch's own norm of 33,000 is 1.7e-5 off."""
    sizes = (33000, 0, 5, 1024, 1025, 2**17 + 1, 1)
    column = [torch.full((size,), 0.3, dtype=dtype) for size in sizes]
    assert_one_rounding(l2_norms(column, factor=factor), _norms(column, factor))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norms", [l2_norms, max_norms])
def test_layouts(norms, path):
    image = tensors((2 * 3 * 4 * 5,))[0].view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    column = [image, tensors((6000,))[0].view(60, 100).t(), tensors((4,))[0].sum(), image[:, 1:2]]
    wanted = _norms(column) if norms is l2_norms else _largest(column)
    with on(path):
        assert_one_rounding(norms(column), wanted)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(("path", "sizes"), PLANTED)
def test_what_is_not_finite_is_seen_anywhere(path, sizes, bad):
    for tensor, size in enumerate(sizes):
        for element in {0, size // 2, size - 1} if size else ():
            column, flag = tensors(sizes), no_flag()
            column[tensor][element] = bad
            with on(path):
                for norms in (l2_norms, max_norms):
                    found = norms(column, flag=flag.zero_())
                    assert flag.item() == 1
                    others = torch.arange(len(column)) != tensor
                    assert torch.equal(
                        found[tensor].nan_to_num(), torch.tensor(abs(bad)).nan_to_num()
                    )
                    assert found[others].isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("path", PATHS)
def test_the_flag_looks_at_elements_not_at_sums(path):
    flag = no_flag(torch.float32)
    with on(path):
        assert l2_norm([torch.full((9,), 1e30)], flag=flag).item() == float("inf")
        assert flag.item() == 0
        flag.fill_(1)
        l2_norm([torch.ones(9)], flag=flag)
        assert flag.item() == 1  # never cleared


@pytest.mark.parametrize("path", PATHS)
def test_repeated_bit_for_bit(path):
    column = tensors((4097, SIZES[-1]))
    with on(path):
        assert torch.equal(l2_norms(column), l2_norms([x.clone() for x in column]))


@pytest.mark.parametrize("bad", [None, 3, -1])
def test_more_partial_sums_than_are_added_at_a_time(bad, monkeypatch):
    """A program leaves one for each 8,192 elements; nan is not lost among them."""
    kernels = pytest.importorskip("apex.kernels.partial_sums")
    monkeypatch.setattr(kernels, "PARTIALS", 4)
    column = tensors((3, 9 * CHUNK + 5, 4 * CHUNK, 0))
    if bad is not None:
        column[1][bad] = float("nan")
    with on("triton"):
        for norms, wanted in ((l2_norms, _norms), (max_norms, _largest)):
            assert_one_rounding(norms(column), wanted(column))


def test_a_tensor_is_summed_alike_whatever_is_beside_it():
    column = tensors((4097, 12 * CHUNK))
    with on("triton"):
        assert torch.equal(l2_norms(column)[:1], l2_norms(column[:1]))


@pytest.mark.parametrize("sizes", [(3, 9000), ()])
def test_a_skipped_launch_sums_no_memory_that_nobody_wrote(sizes, monkeypatch):
    """A signalling nan there stopped a skipped step of FusedLAMB, by luck."""
    monkeypatch.setattr(torch, "empty", lambda shape, **how: torch.full(shape, torch.nan, **how))
    with on("triton"):
        numbers = [tensors(sizes)], (), ScaleScalars(1.0)
        sums = run(SCALE, *numbers, noop=torch.ones(1), sums=(SQUARE,))
    assert sums.shape == (1, len(sizes))
    assert not sums.any()


def test_nothing():
    assert square_sums([]).shape == (0,)
    assert l2_norm([]).item() == 0
    assert torch.equal(l2_norms([torch.zeros(0), torch.zeros(0, 3)]), torch.zeros(2))
    assert torch.equal(max_norms([torch.zeros(0)]), torch.zeros(1))


def test_nothing_waits():
    column = [torch.ones(5, device="meta"), torch.ones(2, 3, device="meta", dtype=torch.half)]
    factor, flag = torch.ones((), device="meta"), no_flag(device="meta")
    for norms in (l2_norms, max_norms, l2_norm):
        assert norms(column, factor=factor, flag=flag).device.type == "meta"
