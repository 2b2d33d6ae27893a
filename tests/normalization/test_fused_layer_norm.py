"""Modules, functions and autograd functions: dtypes, autocast, state, compilation."""

import contextlib
import copy
import inspect
import warnings

import pytest
import torch

from apex import normalization
from apex.normalization import fused_layer_norm as functions
from apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from apex.ops import _runtime
from tests.checkpoints import scripted
from tests.norms import layer_norm_reference, rms_norm_reference
from tests.tolerance import assert_one_rounding

MODULES = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
MIXED = [MixedFusedLayerNorm, MixedFusedRMSNorm]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [name for name in vars(functions) if name.endswith("Function")]


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Each test of this file may compile; what was compiled of one function is limited."""
    yield
    torch._dynamo.reset()


def _exact(module, x):
    weight, bias = module.weight, getattr(module, "bias", None)
    weight, bias = (None if t is None else t.detach().double() for t in (weight, bias))
    shape = module.normalized_shape
    if isinstance(module, FusedLayerNorm):
        return layer_norm_reference(x.detach().double(), weight, bias, shape, module.eps)
    return rms_norm_reference(x.detach().double(), weight, shape, module.eps)


def _random(module):
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [8, (8,), [4, 8], torch.Size([2, 4, 8])], ids=str)
@pytest.mark.parametrize("cls", MODULES)
def test_modules(cls, shape, dtype, memory_efficient):
    module = _random(cls(shape, memory_efficient=memory_efficient, dtype=dtype))
    x = torch.randn(3, 2, 4, 8).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    assert_one_rounding(y.detach(), _exact(module, x))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("cls", [FusedLayerNorm, FusedRMSNorm])
def test_without_parameters(cls):
    module = cls(8, elementwise_affine=False)
    assert list(module.state_dict()) == []
    assert module.weight is None
    x = torch.randn(2, 8)
    assert_one_rounding(module(x), _exact(module, x))


def test_attributes_and_names():
    module = FusedLayerNorm(8, memory_efficient=True)
    assert module.normalized_shape == torch.Size([8])
    assert isinstance(module.normalized_shape, torch.Size)
    assert (module.eps, module.elementwise_affine, module.memory_efficient) == (1e-5, True, True)
    assert repr(module) == "FusedLayerNorm((8,), eps=1e-05, elementwise_affine=True)"
    assert repr(FusedRMSNorm((2, 3), 1e-6, False)) == (
        "FusedRMSNorm((2, 3), eps=1e-06, elementwise_affine=False)"
    )
    torch.nn.LayerNorm(8).load_state_dict(module.state_dict())
    torch.nn.RMSNorm(8).load_state_dict(FusedRMSNorm(8).state_dict())
    assert FusedRMSNorm(8).extra_repr() == "(8,), eps=1e-05, elementwise_affine=True"
    assert normalization.__all__ == sorted(cls.__name__ for cls in MODULES)


@pytest.mark.parametrize("cls", MODULES)
def test_where_and_what_parameters_are(cls):
    module = cls(8, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    module = cls(8)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("cpu", torch.float32)}
    assert torch.equal(module.weight, torch.ones(8))
    torch.nn.init.uniform_(module.weight)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8))


@pytest.mark.parametrize("cls", MODULES)
def test_copies(cls):
    module = _random(cls(8))
    x = torch.randn(2, 8)
    assert torch.equal(copy.deepcopy(module)(x), module(x))


@pytest.mark.parametrize("cls", MIXED)
def test_mixed_modules_take_any_keyword(cls):
    cls(8, sequence_parallel=True, zero_centered=False)
    with pytest.warns(UserWarning, match=f"{cls.__name__} always has a weight"):
        cls(8, elementwise_affine=True)
    with pytest.raises(RuntimeError, match=f"{cls.__name__} always.*Use {cls.__name__[5:]}"):
        cls(8, elementwise_affine=False)


# --- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("path", [None, "triton"])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", [*MIXED, FusedRMSNorm])
def test_the_output_has_the_weights_dtype(cls, dtype, weight_dtype, path, memory_efficient):
    module = _random(cls(16, memory_efficient=memory_efficient, dtype=weight_dtype))
    x = torch.randn(3, 16).to(dtype).requires_grad_()
    with _runtime.use(path) if path else contextlib.nullcontext():
        y = module(x)
        y.sum().backward()
    assert y.dtype == weight_dtype
    assert_one_rounding(y.detach(), _exact(module, x), interpreted=path == "triton")
    assert (x.grad.dtype, module.weight.grad.dtype) == (dtype, weight_dtype)


def test_a_16_bit_input_of_float32_parameters():
    """As torch's layer norm does on a CPU."""
    module = _random(FusedLayerNorm(16))
    x = torch.randn(3, 16).bfloat16()
    assert module(x).dtype == torch.bfloat16
    assert_one_rounding(module(x).detach(), _exact(module, x))
    with pytest.raises(RuntimeError, match=r"expected scalar type Float but found Half.*Mixed"):
        FusedLayerNorm(16).half()(torch.randn(3, 16))
    for module in (FusedLayerNorm(16), FusedRMSNorm(16)):
        with pytest.raises(RuntimeError, match="input is torch.int64; allowed are float16"):
            module(torch.ones(3, 16, dtype=torch.int64))
        with pytest.raises(TypeError, match="x is a NoneType; pass a tensor"):
            module(None)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_functions_refuse_wider_weights(half):
    """The words that programs and answers on the internet know."""
    x, weight = torch.randn(3, 16).to(half), torch.ones(16)
    words = {torch.float16: "Half", torch.bfloat16: "BFloat16"}[half]
    match = f"expected scalar type {words} but found Float.*Use mixed_dtype_fused"
    with pytest.raises(RuntimeError, match=match):
        fused_layer_norm_affine(x, weight, weight, (16,))
    with pytest.raises(RuntimeError, match=match):
        fused_rms_norm_affine(x, weight, (16,))
    with pytest.raises(RuntimeError, match=f"expected scalar type {words} but found Float"):
        functions.FusedLayerNormAffineFunction.apply(x, weight, weight, (16,), 1e-5)
    with pytest.raises(RuntimeError, match=f"expected scalar type {words} but found Float"):
        functions.FusedRMSNormAffineFunction.apply(x, weight, (16,), 1e-5)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_functions_of_rms_norm_take_narrower_weights(half):
    """T5 in half: its feed-forward layers give float32."""
    x, weight = torch.randn(3, 16), torch.rand(16).to(half)
    exact = rms_norm_reference(x.double(), weight.double(), (16,), 1e-6)
    assert_one_rounding(fused_rms_norm_affine(x, weight, (16,)), exact)
    assert fused_rms_norm_affine(x, weight, (16,)).dtype == half


def test_float64():
    x, weight = torch.randn(3, 16).double(), torch.rand(16).double()
    layer, rms = torch.nn.functional.layer_norm, torch.nn.functional.rms_norm
    y = fused_layer_norm_affine(x, weight, weight, (16,))
    torch.testing.assert_close(y, layer(x, (16,), weight, weight, 1e-6))
    y = fused_rms_norm_affine(x, weight, (16,))
    torch.testing.assert_close(y, rms(x, (16,), weight, 1e-6))
    assert mixed_dtype_fused_rms_norm_affine(x, weight.half(), (16,)).dtype == torch.float16
    assert FusedLayerNorm(16, dtype=torch.float64)(x).dtype == torch.float64


# --- functions ----------------------------------------------------------------------------------


def test_the_default_eps_of_functions_is_not_that_of_modules():
    x = 0.001 * torch.randn(3, 16)
    weight, bias = torch.rand(16), torch.rand(16)
    layer = layer_norm_reference(x.double(), weight.double(), bias.double(), (16,), 1e-6)
    rms = rms_norm_reference(x.double(), weight.double(), (16,), 1e-6)
    assert_one_rounding(fused_layer_norm_affine(x, weight, bias, (16,)), layer)
    assert_one_rounding(mixed_dtype_fused_layer_norm_affine(x, weight, bias, (16,)), layer)
    assert_one_rounding(fused_rms_norm_affine(x, weight, (16,)), rms)
    assert_one_rounding(mixed_dtype_fused_rms_norm_affine(x, weight, (16,)), rms)
    plain = layer_norm_reference(x.double(), None, None, (16,), 1e-6)
    assert_one_rounding(fused_layer_norm(x, (16,)), plain)
    assert_one_rounding(fused_rms_norm(x, (16,)), rms_norm_reference(x.double(), None, (16,), 1e-6))


def test_affine_functions_take_none():
    """timm calls them so for layers without parameters."""
    x = torch.randn(3, 16)
    y = fused_layer_norm_affine(x, None, None, [16], eps=1e-5)
    assert torch.equal(y, fused_layer_norm(x, [16], 1e-5))
    assert torch.equal(fused_rms_norm_affine(x, None, [16]), fused_rms_norm(x, [16]))


def test_manual_rms_norm():
    x, weight = torch.randn(3, 4, 8), torch.rand(4, 8)
    exact = rms_norm_reference(x.double(), weight.double(), (4, 8), 1e-6)
    assert_one_rounding(manual_rms_norm(x, (4, 8), weight, 1e-6), exact)
    assert manual_rms_norm(x.half(), (4, 8), None, 1e-6).dtype == torch.float32
    assert manual_rms_norm(x.half(), (4, 8), weight, 1e-6).dtype == torch.float32
    assert manual_rms_norm(x, (4, 8), weight.half(), 1e-6).dtype == torch.float16
    y = manual_rms_norm(x.double(), (4, 8), None, 1e-6)
    assert_one_rounding(y, rms_norm_reference(x.double(), None, (4, 8), 1e-6))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_functions_have_the_argument_that_callers_look_for(name):
    names = inspect.getfullargspec(getattr(functions, name).forward).args
    assert names[:2] == ["ctx", "input"]
    assert names[-1] == "memory_efficient"
    assert inspect.getfullargspec(getattr(functions, name).forward).defaults[-1] is False


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch.compile's own doing
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_functions(name, memory_efficient):
    affine, layer = "Affine" in name, "Layer" in name
    x = torch.randn(5, 16, requires_grad=True)
    dtype = torch.bfloat16 if "Mixed" in name else torch.float32
    parameters = [torch.rand(16).to(dtype).requires_grad_() for _ in range(affine * (1 + layer))]
    arguments = (x, *parameters, (16,), 1e-5, memory_efficient)
    y = getattr(functions, name).apply(*arguments)
    weight, bias = (*(p.detach().double() for p in parameters), None, None)[:2]
    exact_x = x.detach().double()
    exact = (
        layer_norm_reference(exact_x, weight, bias, (16,), 1e-5)
        if layer
        else rms_norm_reference(exact_x, weight, (16,), 1e-5)
    )
    assert_one_rounding(y.detach(), exact)
    found = torch.autograd.grad(y.sum(), [x, *parameters])
    assert [g.dtype for g in found] == [torch.float32, *[dtype] * len(parameters)]

    def call(*arguments):
        return getattr(functions, name).apply(*arguments)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(compiled, y)
    again = torch.autograd.grad(compiled.sum(), [x, *parameters])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


# --- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", MODULES)
def test_autocast_makes_the_output_16_bit(cls, dtype):
    module = _random(cls(16))
    x = torch.randn(3, 16, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = module(x)
        y.sum().backward()
    assert y.dtype == dtype
    exact = _exact(copy.deepcopy(module).to(dtype), x.to(dtype))
    assert_one_rounding(y.detach(), exact)
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32


def test_autocast_leaves_float64_and_casts_functions():
    x, weight = torch.randn(3, 16), torch.ones(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_layer_norm(x, (16,)).dtype == torch.bfloat16
        assert fused_rms_norm(x, (16,)).dtype == torch.bfloat16
        assert fused_layer_norm_affine(x, weight, weight, (16,)).dtype == torch.bfloat16
        assert fused_rms_norm_affine(x.bfloat16(), weight, (16,)).dtype == torch.bfloat16
        assert fused_layer_norm(x.double(), (16,)).dtype == torch.float64


@pytest.mark.parametrize("cls", MODULES)
def test_a_backward_under_autocast_is_not_cast(cls):
    module = _random(cls(64))
    x = torch.randn(2100, 64, requires_grad=True)
    y = module(x)
    dy = torch.randn(2100, 64)
    wanted = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], wanted)


# --- compilation --------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("cls", MODULES)
def test_modules_compile_as_one_graph(cls, memory_efficient):
    module = _random(cls(16, memory_efficient=memory_efficient))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16, requires_grad=True)
    y, z = compiled(x), module(x)
    torch.testing.assert_close(y, z)
    for a, b in zip(
        torch.autograd.grad(y.sum(), [x, module.weight]),
        torch.autograd.grad(z.sum(), [x, module.weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_compiled_under_autocast():
    module = FusedRMSNorm(16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("cls", MODULES)
def test_modules_in_torchscript(cls):
    """Scripted and traced modules run torch's own functions."""
    module = _random(cls(16))
    x = torch.randn(3, 16)
    torch.testing.assert_close(torch.jit.script(module)(x), module(x))
    torch.testing.assert_close(torch.jit.trace(module, x)(torch.cat([x, x]))[:3], module(x))


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", MODULES)
def test_scripted_modules_have_the_same_output_dtype(cls, dtype, weight_dtype):
    if cls is FusedLayerNorm and dtype != weight_dtype and weight_dtype != torch.float32:
        return  # refused
    module = _random(cls(16)).to(weight_dtype)
    x = torch.randn(3, 16).to(dtype)
    torch.testing.assert_close(scripted(module)(x), module(x))


def test_functions_in_torchscript():
    """They are called back in Python, with defaults, and say there what they refuse."""

    def rms(x: torch.Tensor, weight: torch.Tensor):
        plain = fused_rms_norm(x, [16], memory_efficient=True)
        manual = manual_rms_norm(x, [16], weight, 1e-5)
        mixed = mixed_dtype_fused_rms_norm_affine(x, weight, [16])
        return plain, manual, mixed, fused_rms_norm_affine(x, weight, [16])

    def layer(x: torch.Tensor, weight: torch.Tensor):
        mixed = mixed_dtype_fused_layer_norm_affine(x, weight, weight, [16])
        return fused_layer_norm(x, [16]), mixed, fused_layer_norm_affine(x, weight, weight, [16])

    x, weight = torch.randn(3, 16), torch.rand(16)
    for function in (rms, layer):
        scripted = torch.jit.script(function)
        for found, wanted in zip(scripted(x, weight), function(x, weight), strict=True):
            assert torch.equal(found, wanted)
        with pytest.raises(Exception, match="Half but found Float: the input is torch.float16"):
            scripted(x.half(), weight)


def test_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in MODULES:
            cls(8)(torch.randn(2, 8)).sum().backward()


def test_shape_functions_give_the_shapes():
    x, weight = torch.randn(3, 4, 8), torch.rand(8)
    y, mean, invvar = functions.fused_layer_norm_affine_fwd_fake(x, weight, weight, (8,), 1e-5)
    assert (y.shape, mean.shape, invvar.shape) == (x.shape, (12,), (12,))
    back = functions.fused_layer_norm_affine_bwd_fake(
        y, mean, invvar, x, (8,), weight, weight, 1e-5
    )
    assert [g.shape for g in back] == [x.shape, weight.shape, weight.shape]
    assert functions.fused_layer_norm_bwd_fake(y, mean, invvar, x, (8,), 1e-5).shape == x.shape
    y, invvar = functions.fused_rms_norm_affine_fwd_fake(x.double(), weight, (8,), 1e-5)
    assert (y.dtype, invvar.dtype) == (torch.float64, torch.float64)
    assert len(functions.fused_rms_norm_affine_bwd_fake(y, invvar, x, (8,), weight, 1e-5)) == 2
    assert functions.fused_rms_norm_bwd_fake(y, invvar, x, (8,), 1e-5).shape == x.shape
    assert functions.supports_custom_op()


@pytest.mark.parametrize("module", [FusedLayerNorm, FusedRMSNorm])
def test_size_may_be_an_integer_of_numpy(module):
    numpy = pytest.importorskip("numpy")
    assert module(numpy.int64(4)).normalized_shape == (4,)
