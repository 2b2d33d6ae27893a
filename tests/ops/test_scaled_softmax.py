"""The scaled and masked softmax: what is special about it. The rest is in test_every_op.py."""

import contextlib
import math

import pytest
import torch

from apex.ops import _runtime
from apex.ops.layers import scaled_softmax
from apex.ops.layers.scaled_softmax import OP, reference
from tests.tolerance import assert_one_rounding

INF, NAN = math.inf, math.nan
HALF = torch.float16
# The interpreter's: inf - inf and 1 / 0 are meant.
NUMPY = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")


@pytest.fixture(params=["triton", "reference", "pieces"])
def path(request, monkeypatch):
    """The kernels in blocks of 8 columns, the definition, a few rows at a time."""
    if request.param == "triton":
        kernels = pytest.importorskip("apex.kernels.scaled_softmax")
        monkeypatch.setattr(kernels, "WIDEST_FORWARD", 16)
        monkeypatch.setattr(kernels, "WIDEST_BACKWARD", 16)
        monkeypatch.setattr(kernels, "BLOCK", 8)
    monkeypatch.setattr(scaled_softmax, "PIECE", 100)
    monkeypatch.setattr(OP.pieces, "above", 0)
    chosen = contextlib.nullcontext() if request.param == "pieces" else _runtime.use(request.param)
    with chosen:
        yield request.param


def run(x, mask=None, scale=1.0, causal=False, dy=None):
    """The result and the gradient."""
    x = x.detach().requires_grad_()
    y = OP(x, mask, scale, causal)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy)[0]


def masked(*rows):
    return torch.tensor([[rows]], dtype=torch.uint8)


def same(found, *rows):
    torch.testing.assert_close(found[0, 0], torch.tensor(rows), equal_nan=True)


def test_by_hand(path):
    """Masked columns have no weight, but where the others are as small; 2 is not masked."""
    x = torch.tensor([[[[0.0, math.log(3.0), 50.0], [1.0, 2.0, 3.0], [-4999.5, -6000.0, 1.0]]]])
    mask = masked([0, 2, 1], [1, 1, 1], [0, 0, 1])
    dy = torch.tensor([[[[1.0, 0.0, 5.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]]])
    y, dx = run(x, mask, 1.0, dy=dy)
    same(y, [0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    same(dx, [0.1875, -0.1875, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    y, dx = run(x, mask, 2.0, dy=dy)  # 0 and log 9; the last row's largest is -9,999
    same(y, [0.1, 0.9, 0.0], [0.0, 0.0, 0.0], [1 / (1 + math.exp(-1)), 0.0, 1 / (1 + math.e)])
    same(dx, [0.18, -0.18, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])


@NUMPY
def test_rows_of_zeros_where_a_mask_is_given(path):
    x = torch.tensor([[[[-10000.0, -20000.0], [-20000.0, 5.0], [-INF, -INF], [-INF, 0.0]]]])
    mask = masked([0, 0], [0, 1], [0, 0], [0, 0])
    same(run(x, mask)[0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0])
    same(run(x[:, :, [0, 1, 3]])[0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0])


@NUMPY
def test_what_is_not_a_number_reaches_its_row(path):
    rows = [[NAN, 1.0], [INF, 1.0], [-INF, -INF], [0.0, 0.0]]
    x = torch.tensor([[rows]])
    same(run(x)[0], [NAN, NAN], [NAN, NAN], [NAN, NAN], [0.5, 0.5])
    mask = masked([0, 1], [0, 0], [0, 0], [0, 0])
    same(run(x, mask)[0], [NAN, NAN], [NAN, NAN], [0.0, 0.0], [0.5, 0.5])
    mask = masked([1, 0], [1, 0], [0, 0], [0, 0])
    same(run(x, mask)[0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.5, 0.5])
    causal = run(x[..., :2, :], causal=True)[0]
    same(causal, [NAN, 0.0], [NAN, NAN])


@pytest.mark.parametrize("size", [5, 20])
def test_causal_rows_do_not_ask_for_later_columns(path, size):
    """Neither a score nor a gradient there is looked at, whatever it is."""
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    x, dy = torch.randn(2, 1, 1, size, size)
    y, dx = run(x, None, 0.7, True, dy)
    exact, exact_dx = run(x.double(), None, 0.7, True, dy.double())
    assert_one_rounding(y, exact)
    assert_one_rounding(dx, exact_dx)
    assert (y[:, :, later] == 0).all()
    spoilt = run(x.masked_fill(later, NAN), None, 0.7, True, dy.masked_fill(later, INF))
    assert all(map(torch.equal, (y, dx), spoilt))


def masks(batch, heads, queries, keys):
    """Masks of every form, the first query without a key."""
    full = torch.rand(batch, heads, queries, keys) < 0.3
    full[:, :, 0] = True
    yield full
    yield full[:, :1]
    yield full[:1, :1].to(torch.uint8)
    yield full[:, :1, :1].expand(batch, 1, queries, keys)
    yield full[0, 0]
    yield full.mT.contiguous().mT[:, :1]
    yield full[..., :1]


SHAPES = [(2, 2, 2, 20), (1, 2, 1, 17), (2, 2, 3, 16), (3, 2, 4, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_of_every_form(path, shape):
    x, dy = torch.randn(2, *shape)
    for mask in masks(*shape):
        found = run(x, mask, 0.7, dy=dy)
        exact = run(x.double(), mask.expand(shape).clone(), 0.7, dy=dy.double())
        torch.testing.assert_close(found, tuple(each.float() for each in exact))


def test_a_mask_beside_a_causal_softmax(path):
    x, mask = torch.randn(2, 2, 9, 9), torch.rand(2, 1, 9, 9) < 0.3
    y, _ = run(x, mask, 0.7, True)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    both = torch.softmax((0.7 * x).masked_fill(mask | later, -INF), -1).nan_to_num(0.0)
    torch.testing.assert_close(y, both)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_the_scale_is_not_rounded(path, dtype):
    """Scores of about 100: a scale rounded to 16 bits moves logits by up to 0.1."""
    x = (100 * torch.randn(4, 10, 13)).to(dtype)
    y, _ = run(x, None, 0.1)
    assert_one_rounding(y, reference(x.double(), None, 0.1, False), interpreted=path == "triton")


def test_a_mask_is_not_expanded_in_memory():
    kernels = pytest.importorskip("apex.kernels.scaled_softmax")
    mask = torch.zeros(2, 1, 1, 40, dtype=torch.bool)
    bytes_, strides = kernels._readable(mask, 40)
    assert (bytes_.data_ptr(), strides) == (mask.data_ptr(), [2 * 40, 0, 0])


def test_gradcheck_of_what_is_causal():
    x = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: OP(x, None, 0.7, True), x)
    assert torch.autograd.gradgradcheck(lambda x: OP(x, None, 0.7, True), x)


X = torch.ones(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("x", "mask", "causal", "match"),
    [
        (None, None, False, "name: input is a NoneType; pass a tensor"),
        (X.long(), None, False, "name: input is torch.int64; allowed are float16"),
        (X, X, False, "name: mask is torch.float32; pass torch.bool, or torch.uint8 in which 1 is"),
        (X, X.long(), False, "name: mask is torch.int64"),
        (X, [1], False, "name: mask is a list; pass a tensor"),
        (X, X.bool().to("meta"), False, "name: mask is on meta and input on cpu"),
        (
            X,
            X.bool()[..., :4],
            False,
            r"mask has shape \[2, 3, 4, 4\] and input \[2, 3, 4, 5\]. Pa",
        ),
        (X, X.bool()[:, :2], False, r"Pass \[2, 1, 4, 5\]; any of the sizes may be 1"),
        (X, X.bool()[None], False, r"mask has shape \[1, 2, 3, 4, 5\]"),
        (X[None], X.bool(), False, "The input has at most 4 dimensions"),
        (X[0, 0, 0], None, False, r"input has shape \[5\]; pass \(..., queries, keys\)"),
        (X, None, True, r"input has shape \[2, 3, 4, 5\]; a causal softmax needs as many queries"),
        (X[0], None, True, r"input has shape \[3, 4, 5\]; a causal softmax needs as many queries"),
    ],
)
def test_errors(x, mask, causal, match):
    with pytest.raises((TypeError, ValueError), match=match):
        scaled_softmax.scaled_softmax(x, mask, 1.0, causal, name="name")


@NUMPY
def test_what_lies_above_the_diagonal_does_not_count(path):
    """Whatever it is, in the input and in the gradient of the result."""
    x = torch.randn(1, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    dy = torch.randn(1, 1, 7, 7, generator=torch.Generator().manual_seed(1))
    wanted = run(x, causal=True, dy=dy)
    for value in (NAN, INF, -INF):
        above = torch.full((7, 7), value).triu(1).nan_to_num(value, value, value)
        above = torch.where(torch.ones(7, 7).triu(1).bool(), above, 0.0)
        found = run(x + above, causal=True, dy=dy + above)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
    y = run(torch.where(torch.eye(7).bool(), NAN, x), causal=True)[0]
    assert y.isnan().sum() == 7 * 8 // 2  # and zeros above


@NUMPY
def test_what_lies_above_the_diagonal_gets_no_gradient(path):
    """Not in a row of nan either."""
    x = torch.where(torch.eye(7).bool(), NAN, torch.arange(7.0)).expand(1, 1, 7, 7)
    dx = run(x, causal=True, dy=torch.arange(49.0).view(1, 1, 7, 7))[1]
    assert dx.isnan().sum() == 7 * 8 // 2
    assert not dx.triu(1).nan_to_num(1.0).any()
