"""``index_mul_2d``: shapes, sums of many rows, indices; the rest is in ops/test_every_op.py."""

import pytest
import torch

from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.index_mul_2d.index_mul_2d import index_mul_2d as same
from apex.ops import _runtime
from apex.ops.layers.index_mul_2d import OP
from tests.tolerance import assert_one_rounding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
paths = pytest.mark.parametrize("path", ["reference", "triton"])


@pytest.fixture
def path(request):
    with _runtime.use(request.param):
        yield request.param


def data(rows, size, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(columns)
    in1, in2 = (torch.randn(n, columns, generator=generator).to(dtype) for n in (rows, size))
    index = torch.randint(rows, (size,), generator=generator)
    return in1.requires_grad_(), in2.requires_grad_(), index


def agrees(in1, in2, index, interpreted=False):
    """With a loop over the rows, in float64."""
    y = index_mul_2d(in1, in2, index)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    found = torch.autograd.grad(y, (in1, in2), dy)
    one, two, given = in1.detach().double(), in2.detach().double(), dy.double()
    exact, din1, din2 = torch.zeros_like(two), torch.zeros_like(one), torch.zeros_like(two)
    for row, at in enumerate(index.tolist()):
        exact[row] = one[at] * two[row]
        din1[at] += given[row] * two[row]
        din2[row] = given[row] * one[at]
    added = max(1, len(in2) // max(1, len(in1)))
    for actual, wanted in ((y.detach(), exact), (found[0], din1), (found[1], din2)):
        assert_one_rounding(actual, wanted, interpreted=interpreted, added=added)


@pytest.mark.parametrize("path", ["reference", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(5, 300, 24), (1, 70, 9), (40, 13, 200), (3, 50, 1)],
    ids=["many rows each", "one row", "rows that no index names", "one column"],
)
def test_exact_to_one_rounding(path, dtype, sizes):
    agrees(*data(*sizes, dtype), interpreted=path == "triton")


@paths
def test_a_row_of_one_index_alone_is_not_in_other_sums(path):
    """Equal to the last bit: 300 rows in two orders of the other indices."""
    in1, in2, index = data(5, 300, 24)

    def din1(order):
        y = OP(in2[order], in1, index[order])
        return torch.autograd.grad(y.sum(), in1)[0][2]

    first = torch.argsort((index != 2).long(), stable=True)
    with _runtime.use(path):
        assert torch.equal(din1(first), din1(torch.arange(300)))


@pytest.mark.parametrize("index", [-1, 5, -(2**40), 2**32])
def test_an_index_out_of_range(index):
    """An error on a CPU. From the kernel its row is nan and adds to no sum; the rest is right."""
    in1, in2, good = data(5, 30, 24)
    bad = good.clone()
    bad[7] = index
    with pytest.raises(IndexError, match=rf"idx1\[7\] is {index}; allowed are 0 to 4"):
        index_mul_2d(in1, in2, bad)
    with pytest.raises(IndexError, match=rf"idx1\[7\] is {index}; allowed are 0 to 4"):
        index_mul_2d(in1.bfloat16(), in2.bfloat16(), bad)
    with pytest.raises(IndexError, match=rf"idx1\[7\] is {index}; allowed are 0 to 4"):
        index_mul_2d(in1[:, :0], in2[:, :0], bad)
    with pytest.raises(IndexError, match="out of range"):
        torch.vmap(index_mul_2d, (None, None, 0))(in1, in2, torch.stack([good, bad]))
    others = torch.arange(30) != 7
    with _runtime.use("triton"):
        y, wanted = OP(in2, in1, bad), OP(in2[others], in1, good[others])
        assert y[7].isnan().all()
        assert torch.equal(y[others], wanted)
        din1, din2 = torch.autograd.grad(y, (in1, in2), torch.ones_like(y))
        wanted = torch.autograd.grad(wanted, (in1, in2), torch.ones_like(wanted))
    assert din2[7].isnan().all()
    assert torch.equal(din2[others], wanted[1][others])
    torch.testing.assert_close(din1, wanted[0])


@pytest.mark.parametrize("path", ["reference", "triton"], indirect=True)
def test_dtypes(path):
    in1, in2, index = data(5, 30, 24)
    y = index_mul_2d(in1.half(), in2, index)
    assert y.dtype == torch.float32
    assert torch.equal(y, index_mul_2d(in1.half().float(), in2, index))
    assert index_mul_2d(in1.half(), in2.bfloat16(), index).dtype == torch.float32
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(
            index_mul_2d(in1, in2, index.to(dtype)), index_mul_2d(in1, in2, index)
        )  # fmt: skip
    assert same is index_mul_2d


def test_no_rows():
    in1, in2, index = data(5, 30, 24)
    for dtype in (torch.float32, torch.half):
        y = index_mul_2d(in1[:0].to(dtype), in2[:0].to(dtype), index[:0])
        assert y.shape == (0, 24)
        with pytest.raises(ValueError, match=r"in1 of shape \[0, 24\] has no rows"):
            index_mul_2d(in1[:0].to(dtype), in2.to(dtype), index)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((4, 3), (5, 2), (5,)), r"in1 has shape \[4, 3\] and in2 \[5, 2\]. Pass two matrices"),
        (((4,), (4,), (4,)), r"in1 has shape \[4\] and in2 \[4\]"),
        (((4, 3), (5, 3), (4,)), r"idx1 has shape \[4\] and in2 has \[5, 3\]. Pass \[5\]"),
        (((4, 3), (5, 3), (5, 1)), r"idx1 has shape \[5, 1\]"),
    ],
)
def test_bad_shapes(shapes, said):
    in1, in2 = (torch.zeros(shape) for shape in shapes[:2])
    with pytest.raises(ValueError, match=said):
        index_mul_2d(in1, in2, torch.zeros(shapes[2], dtype=torch.int64))


def test_bad_dtypes():
    x, index = torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="idx1 is torch.float32; pass an integer dtype"):
        index_mul_2d(x, x, index.float())
    with pytest.raises(TypeError, match="in1 is torch.int64; allowed are float16"):
        index_mul_2d(x.long(), x, index)
    with pytest.raises(TypeError, match="in2 is a list; pass a tensor"):
        index_mul_2d(x, [1.0], index)
