"""``apex.transformer.functional.fused_softmax``: functions, autograd functions and layers."""

import pytest
import torch

from apex.ops.layers.scaled_softmax import reference
from apex.transformer.enums import AttnMaskType
from apex.transformer.functional import FusedScaleMaskSoftmax, fused_softmax
from apex.transformer.functional.fused_softmax import (
    GenericFusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
)
from tests.tolerance import assert_one_rounding

PADDING, CAUSAL = AttnMaskType.padding, AttnMaskType.causal
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHAPE = (2, 4, 24, 24)


def masked(scores, mask):
    """As Megatron's own, in place."""
    return scores.masked_fill_(mask, -10000.0)


def layer(dtype=HALF, kind=PADDING, fusion=True, mask_func=masked, scale=0.3):
    return FusedScaleMaskSoftmax(
        dtype == HALF, dtype == BRAIN, kind, fusion, mask_func, True, scale
    )


def some_mask():
    mask = torch.rand(2, 1, 24, 24) < 0.3
    mask[:, :, 3] = True
    return mask


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT], ids=str)
@pytest.mark.parametrize("kind", [PADDING, CAUSAL], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("scale", [0.3, None])
def test_both_ways_compute_the_same(dtype, kind, given, scale):
    """A fully masked row too; and the scores are what they were."""
    mask = some_mask() if given else None
    scores = torch.randn(SHAPE).to(dtype)
    before, kernel = scores.clone(), dtype != FLOAT and (given or kind == CAUSAL)
    exact_scores = scores.double().requires_grad_()
    exact = reference(exact_scores, mask, scale or 1.0, kind == CAUSAL)
    dy = torch.randn(SHAPE).to(dtype)
    (exact_dx,) = torch.autograd.grad(exact, exact_scores, dy.double())
    for fusion in (True, False):
        module = layer(dtype, kind, fusion, scale=scale)
        assert module.is_kernel_available(mask, *SHAPE) == (fusion and kernel)
        leaf = scores.requires_grad_()
        y = module(leaf, mask)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert y.dtype == dx.dtype == dtype
        assert_one_rounding(y.detach(), exact.detach())
        assert_one_rounding(dx, exact_dx)
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    ("shape", "padding", "causal"),
    [
        ((2, 4, 24, 24), True, True),
        ((2, 4, 16, 16), False, False),  # more than 16 keys
        ((1, 4, 64, 16384), True, False),
        ((1, 4, 64, 16388), False, False),
        ((2, 4, 24, 18), False, False),  # in fours
        ((4, 4, 18, 18), False, False),
        ((3, 2, 24, 24), False, False),
        ((2, 4, 24, 20), True, False),  # as many queries as keys
        ((1, 8, 20, 20), False, True),  # 8 rows a block
        ((1, 4, 64, 64), True, False),
        ((2, 4, 4, 4096), True, False),  # 4 rows a block
        ((1, 4, 4096, 4096), True, True),
    ],
)
def test_apexs_rule_for_its_kernels(shape, padding, causal):
    mask = torch.empty(0)
    assert layer().is_kernel_available(mask, *shape) == padding
    assert not layer().is_kernel_available(None, *shape)
    assert layer(kind=CAUSAL).is_kernel_available(None, *shape) == causal
    assert not layer(FLOAT).is_kernel_available(mask, *shape)
    assert not layer(fusion=False).is_kernel_available(mask, *shape)
    generic = GenericFusedScaleMaskSoftmax(False, False, True, masked, True, 1.0)
    assert generic.is_kernel_available(None, *shape)


def test_rows_of_a_block_of_apexs():
    found = {sk: FusedScaleMaskSoftmax.get_batch_per_block(4, sk, 1, 1) for sk in
             (1, 3, 16, 17, 64, 128, 129, 16384)}  # fmt: skip
    assert found == {1: 256, 3: 64, 16: 16, 17: 8, 64: 8, 128: 8, 129: 4, 16384: 4}


def test_a_mask_function_of_ones_own_gets_float32_and_its_rows_may_be_empty():
    def added(scores, mask):
        assert scores.dtype == FLOAT
        return scores + mask

    scores, mask = torch.randn(1, 1, 3, 5).to(BRAIN), torch.zeros(1, 1, 3, 5)
    mask[..., 0, :], mask[..., 1, 2] = -torch.inf, -torch.inf
    y = layer(BRAIN, mask_func=added)(scores, mask)
    exact = torch.softmax(scores.double() * 0.3 + mask, -1).nan_to_num(0.0)
    assert_one_rounding(y, exact)
    without = layer(BRAIN, mask_func=None)(scores, mask < 0)
    assert torch.equal(y, without)


def test_causal_with_other_numbers_of_queries_and_keys():
    module, scores = layer(kind=CAUSAL), torch.randn(1, 2, 3, 5)
    with pytest.raises(ValueError, match="as many queries as keys. For other shapes pass a mask"):
        module(scores, None)
    mask = torch.ones(3, 5, dtype=torch.bool).triu(3)
    for function in (masked, None):
        y = layer(kind=CAUSAL, mask_func=function)(scores, mask)
        torch.testing.assert_close(y, torch.softmax((0.3 * scores).masked_fill(mask, -1e9), -1))
    one = module(scores[:, :, :1], None)
    torch.testing.assert_close(one, torch.softmax(0.3 * scores[:, :, :1], -1))


def test_what_a_layer_refuses():
    with pytest.raises(RuntimeError, match="both fp16 and bf16 flags cannot be active"):
        FusedScaleMaskSoftmax(True, True, PADDING, True, masked, True, None)
    with pytest.raises(RuntimeError, match="softmax should be in fp32 when scaled: scale is 2.0"):
        FusedScaleMaskSoftmax(True, False, PADDING, True, masked, False, 2.0)
    with pytest.raises(ValueError, match="Invalid attn_mask_type None: pass AttnMaskType.padding"):
        FusedScaleMaskSoftmax(True, False, None, True, masked, True, 2.0)
    with pytest.raises(ValueError, match=r"FusedScaleMaskSoftmax: input has shape \[2, 2\]; pass"):
        layer()(torch.ones(2, 2), None)
    for function in (masked, None):
        module = layer(fusion=False, mask_func=function)
        for call in (module, module.forward_torch_softmax):
            with pytest.raises(TypeError, match=r"input is torch.int64; allowed are float16"):
                call(torch.ones(SHAPE, dtype=torch.int64), MASK)
            with pytest.raises(TypeError, match="FusedScaleMaskSoftmax: input is a list; pass a t"):
                call([1.0], MASK)


@pytest.mark.parametrize(
    ("function", "found"),
    [(lambda x, mask: None, "NoneType"), (lambda x, mask: x[..., :2], r"\[2, 4, 24, 2\]")],
)
def test_a_mask_function_that_returns_something_else(function, found):
    with pytest.raises(ValueError, match=rf"mask_func returned {found} for scores \[2, 4, 24, 24"):
        layer(fusion=False, mask_func=function)(X, MASK)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_a_scale_that_is_a_parameter_gets_no_gradient():
    x, scale = X.clone().requires_grad_(), torch.nn.Parameter(torch.tensor(0.3))
    for cls in (ScaledSoftmax, ScaledUpperTriangMaskedSoftmax):
        y = cls.apply(x, scale)
        (dx,) = torch.autograd.grad(y[..., 0].sum(), x)
        torch.testing.assert_close(dx, torch.autograd.grad(cls.apply(x, 0.3)[..., 0].sum(), x)[0])


X, MASK = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), some_mask()
FUNCTIONS = [
    (ScaledMaskedSoftmax, (MASK, 0.3), fused_softmax.scaled_masked_softmax, (MASK, 0.3)),
    (ScaledSoftmax, (0.3,), fused_softmax.scaled_masked_softmax, (None, 0.3)),
    (
        ScaledUpperTriangMaskedSoftmax,
        (0.3,),
        fused_softmax.scaled_upper_triang_masked_softmax,
        (None, 0.3),
    ),
]
each = pytest.mark.parametrize(
    ("cls", "args", "function", "rest"), FUNCTIONS, ids=[cls.__name__ for cls, *_ in FUNCTIONS]
)


@each
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's
def test_autograd_functions(cls, args, function, rest):
    """The numbers of the functions; one node of a compiled graph."""
    causal = cls is ScaledUpperTriangMaskedSoftmax
    x = X.clone().requires_grad_()
    torch._dynamo.reset()
    apply = torch.compile(lambda x: cls.apply(x, *args), fullgraph=True, backend="aot_eager")
    exact = reference(X.double(), rest[0], rest[1], causal)
    for call in (lambda x: cls.apply(x, *args), lambda x: function(x, *rest), apply):
        y = call(x)
        assert_one_rounding(y.detach(), exact)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y).tril())
        torch.testing.assert_close(
            dx, torch.func.grad(lambda x: reference(x, *rest, causal).tril().sum())(X)
        )


@each
def test_autocast(cls, args, function, rest):
    """The functions cast, as Apex's did, and the layers with them; ``apply`` does not."""
    with torch.autocast("cpu", BRAIN):
        assert function(X, *rest).dtype == BRAIN
        assert cls.apply(X, *args).dtype == FLOAT
        assert layer()(X, MASK).dtype == layer(fusion=False)(X, MASK).dtype == BRAIN
        assert function(X.double(), *rest).dtype == torch.float64


@pytest.mark.parametrize("kind", [PADDING, CAUSAL], ids=str)
@pytest.mark.parametrize("fusion", [True, False])
def test_compiled_and_scripted_layers(kind, fusion):
    module = layer(kind=kind, fusion=fusion)
    wanted = module(X.half(), MASK)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X.half(), MASK), wanted)
    assert torch.equal(torch.jit.script(module)(X.half(), MASK), wanted)
