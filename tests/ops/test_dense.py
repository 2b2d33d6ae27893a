"""Dense layers by their autograd functions: numbers, derivatives, autocast, compile."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from apex.commands.bench.memory import peak_bytes
from apex.fused_dense import DenseNoBiasFunc, FusedDenseFunc, FusedDenseGeluDenseFunc
from apex.mlp import MlpFunction, mlp_function
from apex.ops.layers import dense
from apex.transformer import parallel_state
from apex.transformer.tensor_parallel.layers import (
    linear_with_grad_accumulation_and_async_allreduce as parallel_linear,
)
from tests.tolerance import PRODUCTS, TWO_LAYERS, assert_close_in_rms
from tests.vmapped import assert_backward_under_vmap

ACTIVATIONS = [lambda z: z, lambda z: z.clamp(min=0), lambda z: 1 / (1 + torch.exp(-z))]


def _gelu(z):
    return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


def _rounded(x, dtype):
    """Round to what a layer hands on; its derivative is 1."""
    return x + (x.to(dtype).double() - x).detach()


def _mlp(bias, activation, x, *args, dtype=torch.float64):
    """The definition of an MLP: products and sums, and roundings, which may move a ReLU to 0."""
    n = len(args) // 2 if bias else len(args)
    for i in range(n):
        x = x @ args[i].T + (args[n + i] if bias else 0)
        x = _rounded(ACTIVATIONS[activation](_rounded(x, dtype)), dtype)
    return x


def _two(x, weight1, bias1, weight2, bias2, dtype=None):
    return _gelu(x @ weight1.T + bias1) @ weight2.T + bias2


def _dense(x, weight, bias=None, dtype=None):
    return x @ weight.T + (0 if bias is None else bias)


TWO, ONE = [(20, 30), (20,), (10, 20), (10,)], [(20, 30), (20,)]
# name -> what is called, its definition, shapes of the parameters; ``apply`` calls the function
FORMS = {
    "FusedDenseFunc": (FusedDenseFunc.apply, _dense, ONE),
    "DenseNoBiasFunc": (DenseNoBiasFunc.apply, _dense, ONE[:1]),
    "FusedDenseGeluDenseFunc": (FusedDenseGeluDenseFunc.apply, _two, TWO),
}
for number, name in enumerate(["none", "relu", "sigmoid"]):
    for has_bias in (True, False):
        shapes = TWO[::2] + (TWO[1::2] if has_bias else [])
        known = functools.partial(_mlp, has_bias, number)
        called = functools.partial(MlpFunction.apply, has_bias, number)
        FORMS[f"MlpFunction-{name}-{has_bias}"] = (called, known, shapes)

each_form = pytest.mark.parametrize("form", FORMS)


def _tensors(form, rows=(50,), dtype=torch.float64, features=30):
    parameters = [torch.randn(shape) / shape[-1] ** 0.5 for shape in FORMS[form][2]]
    given = [torch.randn(*rows, features), *parameters]
    return [tensor.to(dtype).requires_grad_() for tensor in given]


def _results(function, tensors, dy):
    y = function(*tensors)
    return [y, *torch.autograd.grad(y, tensors, dy)]


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@pytest.mark.parametrize("rows", [(400,), (7, 3, 20), ()], ids=str)
@each_form
def test_numbers(form, rows, dtype):
    function, definition, _ = FORMS[form]
    definition = functools.partial(definition, dtype=dtype)
    tensors = _tensors(form, rows, dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = definition(*wide)
    layers = sum(tensor.dim() == 2 for tensor in tensors[1:])
    factor = max(PRODUCTS[dtype], TWO_LAYERS) if layers > 1 else PRODUCTS[dtype]
    dy = torch.randn_like(exact).to(dtype)
    found = _results(function, tensors, dy)
    for actual, wanted in zip(found, _results(definition, wide, dy.double()), strict=True):
        assert actual.dtype == dtype
        assert_close_in_rms(actual, wanted, factor)
    again = _results(function, tensors, dy)
    assert all(map(torch.equal, found, again))


@each_form
def test_derivatives(form):
    """And those of derivatives, for which the autograd functions save too little."""
    function, _, shapes = FORMS[form]
    small = [tuple(-(-size // 10) for size in shape) for shape in shapes]
    parameters = [torch.randn(shape, dtype=torch.float64) for shape in small]
    tensors = [torch.randn(2, 2, 3, dtype=torch.float64), *parameters]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("rows", [(2, 2), (2, 0)], ids=str)
@each_form
def test_backward_under_vmap(form, rows):
    function, _, _ = FORMS[form]
    tensors = _tensors(form, rows)
    assert_backward_under_vmap(function(*tensors), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_form
def test_checkpointed(form, dtype):
    """Activations computed again in the backward, also under autocast."""
    function, _, _ = FORMS[form]
    tensors = _tensors(form, (3, 4), torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = function(*tensors)
        y = checkpoint(function, *tensors, use_reentrant=False)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, tensors, dy)
    assert all(map(torch.equal, torch.autograd.grad(y, tensors, dy), wanted))


@each_form
def test_only_what_is_needed(form):
    """Each argument alone wants a gradient, and gets the one that it gets among all."""
    function, _, _ = FORMS[form]
    tensors = _tensors(form)
    dy = torch.randn_like(function(*tensors))
    _, *wanted = _results(function, tensors, dy)
    for i, expected in enumerate(wanted):
        alone = [tensor.detach().requires_grad_(i == j) for j, tensor in enumerate(tensors)]
        (found,) = torch.autograd.grad(function(*alone), alone[i], dy)
        assert torch.equal(found, expected)


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_form
def test_autocast(form, dtype):
    """Everything is cast to its dtype but float64, and gradients come back in float32."""
    function, _, _ = FORMS[form]
    tensors = _tensors(form, dtype=torch.float32)
    narrow = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    dy = torch.randn_like(function(*narrow))
    wanted = _results(function, narrow, dy)
    for inside in (False, True):
        with torch.autocast("cpu", dtype):
            y = function(narrow[0], *tensors[1:]) if inside else function(*tensors)
            assert y.dtype == dtype
            if inside:
                torch.autograd.grad(y, tensors[1:], dy)
        if not inside:
            found = [y, *torch.autograd.grad(y, tensors, dy)]
            assert {grad.dtype for grad in found[1:]} == {torch.float32}
            for actual, expected in zip(found, wanted, strict=True):
                assert torch.equal(actual.to(dtype), expected)
    with torch.autocast("cpu", dtype):
        assert function(*_tensors(form)).dtype == torch.float64
        with pytest.raises(ValueError, match="float64.* Pass one floating dtype for all.$"):
            function(_tensors(form)[0], *tensors[1:])


@each_form
def test_autocast_around_a_backward_changes_nothing_that_autocast_computed(form):
    """Of a forward outside of autocast torch casts the backward inside, as that of its own."""
    function, _, _ = FORMS[form]
    tensors = _tensors(form, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, again = function(*tensors), function(*tensors)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, tensors, dy)
    assert all(map(torch.equal, found, torch.autograd.grad(again, tensors, dy)))


@each_form
def test_transforms(form):
    """``torch.vmap`` and ``torch.func.grad``, which refuse most autograd functions."""
    function, definition, _ = FORMS[form]
    x, *parameters = (tensor.detach() for tensor in _tensors(form, (3, 4)))
    mapped = torch.vmap(lambda x: function(x, *parameters))(x)
    torch.testing.assert_close(mapped, function(x, *parameters))
    found = torch.func.grad(lambda x: function(x, *parameters).square().sum())(x)
    torch.testing.assert_close(
        found, torch.func.grad(lambda x: definition(x, *parameters).square().sum())(x)
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by the compiler itself
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", [f for f in FORMS if "none" not in f and "False" not in f])
def test_compiled_in_one_graph(form, autocast):
    function, _, _ = FORMS[form]
    tensors = _tensors(form, (3, 4), torch.float32)
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend="aot_eager")
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, expected = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, tensors, dy)
    torch.testing.assert_close(torch.autograd.grad(y, tensors, dy), wanted)


@each_form
def test_errors(form):
    function, _, _ = FORMS[form]
    x, *parameters = _tensors(form, dtype=torch.float32)
    with pytest.raises(
        TypeError, match=r"input torch.float16, weight\w* torch.float32.*torch.autocast"
    ):
        function(x.half(), *parameters)
    with pytest.raises(ValueError, match=r"input has shape \[50, 7\] and weight\w* \[20, 30\]. Pa"):
        function(torch.ones(50, 7), *parameters)
    with pytest.raises(RuntimeError, match=r"input has shape \[\] and weight"):
        function(torch.tensor(1.0), *parameters)
    with pytest.raises(TypeError, match=r"weight\w* is torch.int64; allowed are float16, bfloat16"):
        function(x, parameters[0].long(), *parameters[1:])
    with pytest.raises(TypeError, match="weight\\w* is a NoneType; pass a tensor"):
        function(x, None, *parameters[1:])
    if len(parameters) > 1:
        last = parameters[-1][:-1]
        with pytest.raises(ValueError, match=r"has shape \[\d+(, \d+)?\]"):
            function(x, *parameters[:-1], last if last.dim() == 1 else last[:, 1:])


def test_zero_rows_and_zero_features():
    x, weight, bias = torch.ones(0, 3), torch.ones(2, 3, requires_grad=True), torch.ones(2)
    FusedDenseFunc.apply(x, weight, bias).sum().backward()
    assert weight.grad.tolist() == [[0.0] * 3] * 2
    y = mlp_function(True, 1, torch.ones(2, 5, 0), torch.ones(3, 0), torch.ones(3))
    assert y.tolist() == torch.ones(2, 5, 3).tolist()


def _of_a_parallel_layer(dy, x, weight):
    """Cast by autocast, the weight that the backward meets requires no gradient."""
    x, weight = x.float().requires_grad_(), weight.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel_linear(x, weight, None, False, False, False)
    return torch.autograd.grad(y.transpose(0, 1), (x, weight), dy.transpose(0, 1).contiguous())


@pytest.mark.onednn
@pytest.mark.filterwarnings("ignore:.*")  # the profiler's, of torch's
@pytest.mark.parametrize("backward", [dense.linear_backward, _of_a_parallel_layer])
def test_a_transposed_gradient_takes_no_copies_of_the_weight(backward, monkeypatch):
    """torch's product of such a 3-D tensor has one for each of 64 positions."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    x, weight = torch.randn(64, 2, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    dy = torch.randn(2, 64, 256).bfloat16().transpose(0, 1)
    peak = peak_bytes(lambda: backward(dy, x, weight), torch.device("cpu"))
    assert peak < 16 * weight.nbytes
