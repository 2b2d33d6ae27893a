"""Layer norm and RMS norm: sizes, dtypes, memory, launches; the rest is in test_every_op.py."""

import contextlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from apex.ops import _runtime
from apex.ops.norms import row_norm_pieces, row_norms
from apex.ops.norms.row_norms import norm
from tests.norms import layer_norm_reference, rms_norm_reference
from tests.tolerance import assert_one_rounding, assert_rounded_after_float32

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
NORMS = ["layer", "rms"]
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
)
PATHS = [None, "reference", TRITON]


def _path(name):
    return _runtime.use(name) if name else contextlib.nullcontext()


def _norm(name, x, weight, bias, shape, *, memory_efficient=False, weights="float32"):
    return norm(x, weight, bias, shape, 1e-5, memory_efficient, name == "layer", weights, "")


def _reference(name, x, weight, bias, shape):
    if name == "layer":
        return layer_norm_reference(x, weight, bias, shape, 1e-5)
    return rms_norm_reference(x, weight, shape, 1e-5)


def _inputs(name, shape, row, dtype, weight_dtype=None, *, scale=1.0, shift=0.0, affine=True):
    x = (shift + scale * torch.randn(shape)).to(dtype).requires_grad_()
    weight = bias = None
    if affine:
        weight = (1 + 0.1 * torch.randn(row)).to(weight_dtype or dtype).requires_grad_()
        if name == "layer":
            bias = torch.randn(row).to(weight_dtype or dtype).requires_grad_()
    dy = torch.randn(shape).to(weight_dtype or dtype)
    return x, weight, bias, dy


def _exact(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def _check(name, path, inputs, row, **kwargs):
    """Forward and every gradient against float64."""
    *tensors, dy = inputs
    with _path(path):
        y = _norm(name, *tensors, row, **kwargs)
        y.backward(dy)
    exact_tensors = _exact(tensors)
    exact = _reference(name, *exact_tensors, row)
    exact.backward(dy.double())
    interpreted = path == "triton"
    assert_one_rounding(y.detach(), exact.detach(), interpreted=interpreted)
    # On a CPU float32 layer norm is torch's, which adds up weight gradients row by row.
    own = [None] * 3 if interpreted or name == "rms" else _torchs_gradients(tensors, dy, row)
    for tensor, exact_tensor, torchs in zip(tensors, exact_tensors, own, strict=True):
        if tensor is not None:
            assert tensor.grad.dtype == tensor.dtype
            assert_one_rounding(
                tensor.grad, exact_tensor.grad, interpreted=interpreted, torchs=torchs
            )
    return y


def _torchs_gradients(tensors, dy, row):
    wide = [None if t is None else t.detach().float().requires_grad_() for t in tensors]
    F.layer_norm(wide[0], row, wide[1], wide[2], 1e-5).backward(dy.float())
    return [None if t is None else t.grad for t in wide]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_a_large_mean_does_not_cancel(name, path):
    """The variance of numbers near 100 must not be a difference of squares."""
    _check(name, path, _inputs(name, (4, 96), (96,), torch.bfloat16, shift=100.0), (96,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_without_weight(name, dtype, path):
    inputs = _inputs(name, (5, 200), (200,), dtype, affine=False)
    _check(name, path, inputs, (200,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_weight_without_bias_and_rows_of_several_dimensions(name, path):
    x, weight, _, dy = _inputs(name, (2, 3, 4, 5), (4, 5), torch.float32)
    _check(name, path, (x, weight, None, dy), (4, 5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16),
     (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", NORMS)
def test_output_of_another_dtype(name, dtype, weight_dtype, path):
    inputs = _inputs(name, (9, 130), (130,), dtype, weight_dtype)
    y = _check(name, path, inputs, (130,), weights="any")
    assert y.dtype == weight_dtype


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_float32_weights_of_a_16_bit_input(name, path):
    x, weight, bias, dy = _inputs(name, (9, 130), (130,), torch.bfloat16, torch.float32)
    y = _check(name, path, (x, weight, bias, dy.bfloat16()), (130,))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "columns", "dtype"),
    [
        ("layer", 17000, torch.float32),
        ("rms", 17000, torch.float32),
        ("layer", 16385, torch.float16),
        pytest.param("rms", 16385, torch.float16, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_rows_wider_than_a_tile(name, columns, dtype, path):
    """More than the widest forward tile: two walks over the row, the last block not full."""
    _check(name, path, _inputs(name, (2, columns), (columns,), dtype, shift=1.0), (columns,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in NORMS for shape in ((2000, 66), (70, 2000), (2, 200_704))],
    ids=str,  # one value: the quick selection has each norm of each shape
)
def test_large_inputs(name, shape, dtype, monkeypatch):
    """Where on a CPU our functions replace torch's, in several blocks.

    2000 rows are what its sums lose bits over, 200,704 columns what its norm does.
    """
    monkeypatch.setattr(row_norm_pieces, "above", 0)
    monkeypatch.setattr(row_norm_pieces, "BLOCK", 2**16)
    _check(name, None, _inputs(name, shape, shape[-1:], dtype), shape[-1:])


@pytest.mark.parametrize("block", [2**18, 300], ids=["one block", "several"])
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_without_a_graph(name, dtype, memory_efficient, block, monkeypatch):
    """On a CPU the same bits, and no autograd.Function."""
    x, weight, bias, _ = _inputs(name, (9, 66), (66,), dtype)
    monkeypatch.setattr(row_norm_pieces, "above", 0)
    monkeypatch.setattr(row_norm_pieces, "BLOCK", block)
    y = _norm(name, x, weight, bias, (66,), memory_efficient=memory_efficient)
    for op in (row_norms.OP, row_norms.MEMORY_EFFICIENT):
        monkeypatch.setattr(op, "compute", pytest.fail)
    with torch.no_grad():
        found = _norm(name, x, weight, bias, (66,), memory_efficient=memory_efficient)
        turned = _norm(
            name, x.t().contiguous().t(), weight, bias, (66,), memory_efficient=memory_efficient
        )
    assert torch.equal(found, y)
    assert torch.equal(turned, y)


@pytest.mark.parametrize(("name", "most"), [("layer", (3, 21)), ("rms", (12, 21))])
def test_operators_of_a_memory_efficient_norm(name, most):
    """Of few rows; their calls are the time of a small norm on a CPU."""
    x, weight, bias, dy = (
        None if t is None else t.detach()
        for t in _inputs(name, (4, 64), (64,), torch.float32)
    )  # fmt: skip
    how = {"shape": (64,), "eps": 1e-5, "centered": name == "layer", "dtype": x.dtype}
    with _Operators() as forward:
        y, _, rstd = row_norm_pieces.forward(x, weight, bias, *how.values())
    with _Operators() as backward:
        row_norm_pieces.backward(
            dy, [True] * 3, y=y, weight=weight, bias=bias, rstd=rstd, x_dtype=x.dtype, **how
        )
    assert forward.count <= most[0]
    assert backward.count <= most[1]


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 129, 1000])
@pytest.mark.parametrize("columns", [2, 3, 64, 257, 1024, 4096, 8193, 16384, 65536, 100_001])
@pytest.mark.parametrize("name", NORMS)
def test_every_size(name, columns, rows, dtype, path):
    if rows * columns > (2**20 if path == "triton" else 2**24):
        rows = 2
    if columns < 64 and path == "triton":  # the interpreter adds up a tile's rows one by one
        rows = min(rows, 129)
    inputs = _inputs(name, (rows, columns), (columns,), dtype)
    if name == "layer" and columns < 4:
        _check_short_rows(path, inputs, (columns,))
    else:
        _check(name, path, inputs, (columns,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (40, 2), (40, 3)], ids=str)
def test_rows_of_few_elements(shape, dtype, path):
    _check_short_rows(path, _inputs("layer", shape, shape[1:], dtype), shape[1:])


def _check_short_rows(path, inputs, row):
    """Forward and every gradient against what float32 can know.

    Two elements are normalized to -1 and 1 but for eps: the input's gradient is what is left when
    terms 1e5 times as large cancel. If they are nearly the same, a rounding of their mean shows.
    """
    *tensors, dy = inputs
    with _path(path):
        y = _norm("layer", *tensors, row)
        y.backward(dy)
    x, weight, bias = _exact(tensors)
    exact = _reference("layer", x, weight, bias, row)
    exact.backward(dy.double())
    with torch.no_grad():
        rstd = torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
        magnified = 1 + x.abs() * rstd  # a rounding of the input, in roundings of the normalized
        terms = [
            x.abs() * rstd * weight + bias.abs(), (dy * weight).abs() * rstd * magnified,
            (dy.abs() * magnified).sum(0), dy.abs().sum(0),
        ]  # fmt: skip
    found = [y.detach(), *(t.grad for t in tensors)]
    wanted = [exact.detach(), x.grad, weight.grad, bias.grad]
    for actual, exact, term in zip(found, wanted, terms, strict=True):
        assert_rounded_after_float32(actual, exact, term, interpreted=path == "triton")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 6])
def test_rows_of_one_element(rows, path):
    """The input's gradient is 0 for layer norm and next to it for RMS norm."""
    x, weight, bias, dy = _inputs("layer", (rows, 1), (1,), torch.float32)
    with _path(path):
        y = _norm("layer", x, weight, bias, (1,))
        y.backward(dy)
        assert torch.equal(y, bias.expand(rows, 1))
        ulp = 2**-23 * (weight * dy).abs() / 1e-5**0.5  # of the terms that cancel
        assert (x.grad.abs() <= ulp).all()
        assert weight.grad.abs() <= ulp.sum() / weight
        assert_one_rounding(bias.grad, dy.double().sum(0))
        y = _norm("rms", x, None, None, (1,))
    assert_one_rounding(y.detach(), rms_norm_reference(x.detach().double(), None, (1,), 1e-5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [60, 4200])
@pytest.mark.parametrize("name", NORMS)
def test_memory_efficient(name, columns, dtype, path):
    """Gradients are those of the input that the rounded output stands for."""
    x, weight, bias, dy = _inputs(name, (9, columns), (columns,), dtype)
    with _path(path):
        y = _norm(name, x, weight, bias, (columns,), memory_efficient=True)
        y.backward(dy)
    exact_x, exact_weight, exact_bias = _exact((x, weight, bias))
    exact = _reference(name, exact_x, exact_weight, exact_bias, (columns,))
    interpreted = path == "triton"
    assert_one_rounding(y.detach(), exact.detach(), interpreted=interpreted)

    y, weight64 = y.detach().double(), weight.detach().double()
    xhat = (y if bias is None else y - bias.detach().double()) / weight64
    g = dy.double() * weight64
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    rows = exact_x.detach()
    if name == "layer":
        dx = dx - g.mean(-1, keepdim=True)
        rows = rows - rows.mean(-1, keepdim=True)
    rstd = (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_one_rounding(x.grad, dx * rstd, interpreted=interpreted)
    assert_one_rounding(weight.grad, (dy.double() * xhat).sum(0), interpreted=interpreted)
    if bias is not None:
        assert_one_rounding(bias.grad, dy.double().sum(0), interpreted=interpreted)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_memory_efficient_keeps_the_output_and_not_the_input(name, dtype, path):
    x, weight, bias, _ = _inputs(name, (4, 32), (32,), dtype)
    kept = []
    with (
        _path(path),
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda tensor: tensor
        ),
    ):
        y = _norm(name, x, weight, bias, (32,), memory_efficient=True)
    assert y.data_ptr() in kept
    assert x.data_ptr() not in kept


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_memory_efficient_with_weights_of_zero(name, path):
    """What the output no longer holds counts as nothing; everything stays finite."""
    x, weight, bias, dy = _inputs(name, (4, 32), (32,), torch.float32)
    with torch.no_grad():
        weight[::3] = 0
    with _path(path):
        _norm(name, x, weight, bias, (32,), memory_efficient=True).backward(dy)
    assert torch.equal(weight.grad[::3], torch.zeros(11))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_memory_efficient_divides_by_eps_with_the_weights_sign(name, path):
    x, weight, _, dy = _inputs(name, (4, 32), (32,), torch.float32)
    with torch.no_grad():
        weight[::2] = -2e-6
        weight[1::4] = 2e-6
    with _path(path):
        y = _norm(name, x, weight, None, (32,), memory_efficient=True)
        y.backward(dy)
    least = torch.where(weight < 0, -1e-5, 1e-5).double()
    by = torch.where(weight.abs() < 1e-5, least, weight.double()).detach()
    xhat = y.detach().double() / by
    assert_one_rounding(weight.grad, (dy.double() * xhat).sum(0))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_weights_of_zero(name, path):
    inputs = _inputs(name, (4, 32), (32,), torch.float32)
    with torch.no_grad():
        inputs[1][::3] = 0
    _check(name, path, inputs, (32,))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("name", "columns"), [("layer", 600), ("rms", 500)])
@pytest.mark.slow
def test_more_programs_than_the_second_stage_adds_at_a_time(name, columns, monkeypatch):
    from apex.kernels import row_norms as kernels

    monkeypatch.setattr(kernels, "ROWS_PER_PROGRAM", 1)
    monkeypatch.setattr(kernels, "WIDEST_BACKWARD", 512)
    monkeypatch.setattr(kernels, "TILE_ROWS", 2)
    monkeypatch.setattr(kernels, "SUM_TILE", 64)
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 128)
    _check(name, "triton", _inputs(name, (70, columns), (columns,), torch.float32), (columns,))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("columns", "programs"), [(8192, 256), (4096, 256), (2048, 256), (64, 8)])
def test_the_second_stage_has_a_program_for_each_multiprocessor(columns, programs):
    from apex.kernels import row_norms as kernels

    rows, across = kernels._sum_tile(columns, 132)
    assert -(-columns // across) == programs
    assert rows * across == kernels.SUM_TILE


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": ()}, "at least 1-dimensional"),
        ({"shape": 8}, r"normalized_shape is 8, a number; pass .*: \[8\]"),
        ({"shape": (7,)}, r"Given normalized_shape=\[7\], expected input with shape \[\*, 7\], "
                          r"but got input of size\[3, 8\]"),
        ({"x": torch.zeros(3, 8, dtype=torch.int32)}, "input is torch.int32; allowed"),
        ({"weight": torch.ones(7)}, r"weight has shape \[7\] and normalized_shape is \[8\]"),
        ({"weight": torch.ones(8, dtype=torch.int64)}, "weight is torch.int64"),
        ({"weight": torch.ones(8, device="meta")}, "weight is on meta and input on cpu"),
        ({"weight": None}, "weight is None and bias torch.float32"),
        ({"bias": torch.ones(8).half()}, "weight is torch.float32 and bias torch.float16"),
    ],
    ids=["no dimension", "a number", "other row", "integers", "other weight", "integer weight",
         "other device", "bias alone", "other bias"],
)  # fmt: skip
def test_bad_input(change, match):
    given = {"x": torch.zeros(3, 8), "weight": torch.ones(8), "bias": torch.zeros(8), "shape": (8,)}
    given |= change
    with pytest.raises(RuntimeError, match=match):
        _norm("layer", **given)
    if "bias" not in change and given["weight"] is not None:
        with pytest.raises(RuntimeError, match=match):
            _norm("rms", **given | {"bias": None})
