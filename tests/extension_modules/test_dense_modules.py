"""``mlp_cuda``, ``fused_dense_cuda``, ``fused_weight_gradient_mlp_cuda``: positional functions."""

import contextlib
import functools

import fused_dense_cuda
import fused_weight_gradient_mlp_cuda as wgrad
import mlp_cuda
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from apex import _compat
from apex.fused_dense import FusedDenseFunc, FusedDenseGeluDenseFunc
from apex.mlp import MlpFunction
from apex.ops.layers import dense
from tests.tolerance import PRODUCTS, TWO_LAYERS, assert_close_in_rms, assert_one_rounding, integers

NARROW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("bias", [0, 1])
def test_mlp(bias, activation, layers, dtype, autocast):
    """What the autograd function gives, whatever autocast says; bit for bit where it is exact.

    Activations lie in one block here, which is aligned in another way than tensors of their own.
    """
    make = torch.randn if activation == 2 else functools.partial(integers, limit=1)
    weights = [make(4 + i, 3 + i) for i in range(layers)]
    args = [make(6, 3), *weights, *([make(len(w)) for w in weights] if bias else [])]
    args = [tensor.to(dtype).requires_grad_() for tensor in args]
    y = MlpFunction.apply(bias, activation, *args)
    grad = make(*y.shape).to(dtype)
    expected = torch.autograd.grad(y, args, grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = mlp_cuda.forward(bias, activation, args)
        found = mlp_cuda.backward(bias, activation, grad, outputs, args)
    assert len(outputs) == 2
    assert torch.equal(outputs[0], y)
    assert not outputs[0].requires_grad
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        if activation == 2:
            assert_close_in_rms(one, other.double(), max(PRODUCTS[dtype], TWO_LAYERS))
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [(0, 4), (6, 0)], ids=str)
def test_mlp_of_nothing(sizes):
    """No rows; a hidden layer without features."""
    rows, features = sizes
    args = [torch.randn(rows, 3), torch.randn(features, 3), torch.randn(2, features)]
    outputs = mlp_cuda.forward(0, 1, args)
    found = mlp_cuda.backward(0, 1, torch.ones(rows, 2), outputs, args)
    assert [grad.tolist() for grad in found] == [torch.zeros_like(a).tolist() for a in args]


@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
def test_fused_dense(dtype):
    shapes = [(2, 6, 5), (7, 5), (7,), (3, 7), (3,)]
    args = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    x, weight1, bias1, weight2, bias2 = args
    y = FusedDenseFunc.apply(*args[:3])
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, args[:3], grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused_dense_cuda.linear_bias_forward(*args[:3]), y)
        found = fused_dense_cuda.linear_bias_backward(x, weight1, grad)
    assert all(map(torch.equal, found, expected))

    y = FusedDenseGeluDenseFunc.apply(*args)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, args, grad)
    with torch.autocast("cpu", torch.bfloat16):
        output1, output2, gelu_in = fused_dense_cuda.linear_gelu_linear_forward(*args)
        found = fused_dense_cuda.linear_gelu_linear_backward(
            x, gelu_in, output1, weight1, weight2, grad
        )
    assert torch.equal(output2, y)
    assert torch.equal(gelu_in, F.linear(x, weight1, bias1))
    assert torch.equal(output1, F.gelu(gelu_in, approximate="tanh"))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("leading", [(200,), (4, 50), ()], ids=str)
@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
def test_weight_gradient_in_float32(dtype, leading):
    """Products of 16-bit numbers are not rounded to 16 bits on the way."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = (torch.randn(*leading, size).to(dtype) for size in (30, 20))
    total = torch.randn(20, 30, dtype=wide)
    before = total.clone()
    exact = total.double() + dy.double().reshape(-1, 20).T @ x.double().reshape(-1, 30)
    with torch.autocast("cpu", torch.bfloat16):
        assert wgrad.wgrad_gemm_accum_fp32(x, dy, total) is None
    assert_close_in_rms(total, exact, PRODUCTS[wide])
    wgrad.wgrad_gemm_accum_fp32(x, dy.reshape(-1, 20), before)  # leading dimensions may differ
    assert torch.equal(before, total)


class OnCuda(TorchFunctionMode):
    """Says that tensors are on CUDA; of products it has those that a release of torch has there."""

    def __init__(self, release):
        super().__init__()
        self._release, self.products = release, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return True
        to = kwargs.pop("out_dtype", None)
        if to is None:
            return func(*args, **kwargs)
        self.products.append(func.__name__)
        if self._release == "2.9" and len({tensor.dtype for tensor in args}) > 1:
            raise RuntimeError("self and mat2 must have the same dtype")
        return func(*(tensor.to(to) for tensor in args), **kwargs)


@pytest.mark.parametrize(
    ("release", "products"), [("2.9", ["mm"] * 3), ("2.10", ["addmm"]), (None, [])]
)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_weight_gradient_in_slices(dtype, release, products, monkeypatch):
    """As on CUDA with that release, and on a CPU: in slices where there is no one call for it."""
    monkeypatch.setattr(dense, "SLICE", 7)
    monkeypatch.setattr(_compat, "IS_2_10", release == "2.10")
    monkeypatch.setattr(torch.version, "hip", None)
    x, dy, total = (
        torch.randn(200, 30).to(dtype),
        torch.randn(200, 20).to(dtype),
        torch.randn(20, 30),
    )
    exact = total.double() + dy.double().T @ x.double()
    on_cuda = OnCuda(release)
    with on_cuda if release else contextlib.nullcontext():
        wgrad.wgrad_gemm_accum_fp32(x, dy, total)
    assert on_cuda.products == products
    assert_close_in_rms(total, exact, PRODUCTS[torch.float32])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_weight_gradient_in_16_bits(dtype):
    """The products add up in float32, and the sum is rounded once."""
    x, dy = torch.randn(7, 300, 30).to(dtype), torch.randn(7, 300, 20).to(dtype)
    total = torch.randn(20, 30).to(dtype).requires_grad_()
    exact = total.detach().double() + dy.double().flatten(0, 1).T @ x.double().flatten(0, 1)
    assert wgrad.wgrad_gemm_accum_fp16(x, dy, total) is None
    assert_one_rounding(total.detach(), exact)


def test_weight_gradients_that_are_refused_change_nothing():
    x, dy = torch.ones(4, 3), torch.ones(4, 2)
    total = torch.ones(2, 3)
    bad = [
        (x, torch.ones(5, 2), total, r"input has \[4, 3\] and d_output \[5, 2\]. Pass .* the same"),
        (x[0, 0], dy[0, 0], total, r"input has \[\] and d_output \[\]. Pass \(..., in_features\)"),
        (x, dy, torch.ones(3, 2), r"d_weight has shape \[3, 2\] and .*\[4, 2\]. Pass \[2, 3\]"),
        (x, dy.half(), total, "input torch.float32, d_output torch.float16. Pass one floating"),
        (x.half(), dy.half(), total.double(), "d_weight is torch.float64. Pass a contiguous tens"),
        (x, dy, torch.ones(3, 2).t(), "is torch.float32 and not contiguous. Pass a contiguous"),
        (x, dy, total.to("meta"), "d_weight is on meta and input on cpu"),
        (x, None, total, "d_output is a NoneType; pass a tensor"),
        (None, dy, total, "input is a NoneType; pass a tensor"),
    ]
    for input, d_output, d_weight, match in bad:
        with pytest.raises(ValueError, match="wgrad_gemm_accum_fp32: .*" + match):
            wgrad.wgrad_gemm_accum_fp32(input, d_output, d_weight)
    with pytest.raises(ValueError, match="d_weight is torch.float32; allowed are float16 and bfl"):
        wgrad.wgrad_gemm_accum_fp16(x, dy, total)
    with pytest.raises(ValueError, match="d_weight is torch.float16. Pass .* torch.bfloat16"):
        wgrad.wgrad_gemm_accum_fp16(x.bfloat16(), dy.bfloat16(), total.half())
    assert torch.equal(total, torch.ones(2, 3))


X, WEIGHT, DY = torch.ones(4, 3), torch.ones(2, 3), torch.ones(4, 2)
Y = torch.ones(4, 2), torch.ones(0)  # what mlp_cuda.forward returned
SHORT = Y[0], torch.ones(1)


@pytest.mark.parametrize(
    ("function", "arguments", "match"),
    [
        (mlp_cuda.forward, (0, 1, [X, WEIGHT.t()]), r"forward: input has shape \[4, 3\] and wei"),
        (mlp_cuda.forward, (0, 1, []), "got 0 tensors. Pass an input and weights"),
        (mlp_cuda.backward, (0, 1, X, Y, [X, WEIGHT]), r"grad_o has shape \[4, 3\] .* \[4, 2\]"),
        (mlp_cuda.backward, (0, 1, DY, SHORT, [X, WEIGHT]), r"reserved has shape \[1\] and input"),
        (
            mlp_cuda.backward,
            (0, 1, DY, Y[:1], [X, WEIGHT]),
            "are 1 outputs; pass the two outputs of mlp_c",
        ),
        (fused_dense_cuda.linear_bias_backward, (X, WEIGHT, X), r"d_output has shape \[4, 3\] and"),
        (
            fused_dense_cuda.linear_gelu_linear_backward,
            (X, X, DY, WEIGHT, WEIGHT.t(), X),
            r"gelu_in has shape \[4, 3\] and .* Pass \[4, 2\]",
        ),
    ],
)
def test_bad_input(function, arguments, match):
    with pytest.raises(ValueError, match=match):
        function(*arguments)
