"""``apex.contrib.group_norm``: channels last, SiLU built in."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm.group_norm import (
    cuda_group_norm_nhwc_one_pass,
    cuda_group_norm_nhwc_two_pass,
    cuda_group_norm_v2_nhwc,
    get_cc_and_sm_count,
    torch_group_norm,
)
from apex.ops import _runtime
from apex.ops import group_norm as ops
from tests.tolerance import (
    GROUP_NORM,
    assert_close_in_rms,
    assert_one_rounding,
    assert_rounded_after_float32,
)
from tests.vmapped import assert_backward_under_vmap

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# groups of ten channels and 35 pixels, a full tile of channels, all in one group, three dimensions
SHAPES = [((2, 20, 5, 7), 2), ((3, 64, 6, 6), 32), ((1, 3, 4, 4), 1), ((2, 6, 3, 3, 2), 3)]


def _data(shape, dtype, weight_dtype=None, mean=0.5, last=True):
    x = (torch.randn(shape) + mean).to(dtype)
    grad = torch.randn(shape).to(dtype)
    if last:
        x, grad = (t.contiguous(memory_format=ops.FORMATS[len(shape)]) for t in (x, grad))
    weights = [torch.randn(shape[1]).to(weight_dtype or dtype) for _ in range(2)]
    return [t.requires_grad_() for t in (x, *weights)], grad


def _agrees(y, given, grad, groups, act, interpreted=False):
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = F.group_norm(wide[0], groups, *wide[1:])
    exact = F.silu(exact) if act else exact
    expected = torch.autograd.grad(exact, wide, grad.double())
    found = torch.autograd.grad(y, given, grad)
    assert y.dtype == given[0].dtype
    assert [t.dtype for t in found] == [t.dtype for t in given]
    for one, other in zip((y.detach(), *found), (exact.detach(), *expected), strict=True):
        if one.dtype in (torch.float16, torch.bfloat16):
            assert_one_rounding(one, other, interpreted=interpreted)
        else:
            assert_close_in_rms(one, other, GROUP_NORM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
@pytest.mark.parametrize("act", [None, "silu"])
def test_exact_in_every_way(dtype, shape, groups, act):
    """The layer, the operation, and the kernel; what is 16 bits wide to one rounding."""
    given, grad = _data(shape, dtype)
    layer = GroupNorm(groups, shape[1], act=act)
    layer.weight, layer.bias = (torch.nn.Parameter(t.detach()) for t in given[1:])
    given[1:] = layer.weight, layer.bias
    for way in ("layer", "host", "operation", "triton"):
        with _runtime.use("triton" if way == "triton" else "reference"):
            if way == "operation":
                y = ops.FPROP(given[0], groups, *given[1:], 1e-5, act is not None)[0]
            elif way == "host":
                y = ops._on_host(given[0], groups, *given[1:], 1e-5, act is not None)
            else:
                y = layer(given[0])
            assert y.is_contiguous(memory_format=ops.FORMATS[len(shape)])
            _agrees(y, given, grad, groups, act, interpreted=way == "triton")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 320, 9, 8), 32), ((1, 512, 8, 8), 16), ((1, 32, 70, 70), 4), ((5, 33, 3, 1), 11)],
    ids=str,
)
@pytest.mark.parametrize("act", [None, "silu"])
def test_kernel_exhaustively(dtype, weight_dtype, shape, groups, act):
    given, grad = _data(shape, dtype, weight_dtype)
    with _runtime.use("triton"):
        y = ops.group_norm(given[0], groups, *given[1:], act=act)
        _agrees(y, given, grad, groups, act, interpreted=True)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("last", [True, False])
def test_mixed_dtypes(weight_dtype, path, last):
    """Any pair, as in the original; the result has the input's."""
    given, grad = _data((2, 8, 5, 3), torch.float16, weight_dtype, last=last)
    with _runtime.use(path):
        y = ops.group_norm(given[0], 4, *given[1:], act="swish")
        _agrees(y, given, grad, 4, "swish", interpreted=path == "triton")


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_autocast_changes_nothing(last, dtype, act):
    """As with the original's kernel: the output has the input's dtype."""
    given, _ = _data((2, 8, 5, 3), dtype, torch.float32, last=last)
    for path in ("reference", "triton"):
        with _runtime.use(path):
            y = ops.group_norm(given[0], 4, *given[1:], act=act)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(ops.group_norm(given[0], 4, *given[1:], act=act), y)
        assert y.dtype == dtype


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_weights(path, dtype):
    (x, *_), grad = _data((2, 8, 5, 3), dtype)
    layer = GroupNorm(4, 8, affine=False, act="silu")
    assert list(layer.parameters()) == []
    with _runtime.use(path):
        _agrees(layer(x), [x], grad, 4, "silu", interpreted=path == "triton")


def test_many_programs_for_one_image(monkeypatch):
    """Partial sums of several tiles and several programs, the last of each smaller."""
    from apex.kernels import group_norm as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    monkeypatch.setattr(kernels, "TILE", 256)
    given, grad = _data((1, 24, 7, 19), torch.float32, mean=0.0)
    with _runtime.use("triton"):
        _agrees(ops.group_norm(given[0], 3, *given[1:]), given, grad, 3, None)
        for joined in (1, 16):
            monkeypatch.setattr(kernels, "JOINED", joined)
            monkeypatch.setattr(kernels, "PROGRAMS", 1000)
            _agrees(ops.group_norm(given[0], 3, *given[1:]), given, grad, 3, None)


def test_a_large_mean_does_not_cancel_the_variance():
    """Sums of squares in float32 would lose all; rounding the mean costs its size / spread."""
    x = (torch.randn(1, 16, 8, 8) * 0.01 + 100).contiguous(memory_format=torch.channels_last)
    with _runtime.use("triton"):
        y = ops.group_norm(x, 4)
    assert_close_in_rms(y, F.group_norm(x.double(), 4), 100 / 0.01)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_constant_groups_and_nan(path):
    x = torch.full((2, 4, 3, 3), 7.3).contiguous(memory_format=torch.channels_last)
    x[1, 3, 1, 1] = torch.nan
    with _runtime.use(path):
        y = ops.group_norm(x, 2)
    assert y[0].abs().max() <= (0.0 if path == "triton" else 2e-4)  # torch rounds its mean
    assert y[1].isnan().flatten(1).all(1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_channels_first_is_torchs_own(dtype, act):
    for shape in ((2, 8), (2, 8, 5), (2, 8, 5, 3)):
        given, _ = _data(shape, dtype, last=False)
        y = ops.group_norm(given[0], 4, *given[1:], act=act)
        assert torch.equal(y, torch_group_norm(given[0], 4, *given[1:], 1e-5, act))


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [True, False])
def test_channels_first_in_16_bits(weights, dtype, act):
    for shape in ((2, 8), (2, 8, 50), (2, 8, 5, 3)):
        given, grad = _data(shape, dtype, last=False)
        given = given if weights else given[:1]
        _agrees(ops.group_norm(given[0], 2, *given[1:], act=act), given, grad, 2, act)
        with torch.no_grad():
            y = ops.group_norm(given[0], 2, *given[1:], act=act)
        assert_one_rounding(y, F.silu(_double(given)) if act else _double(given))


def _double(given):
    return F.group_norm(given[0].detach().double(), 2, *(t.detach().double() for t in given[1:]))


@pytest.mark.parametrize("way", ["channels first", "channels last", "operation", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_two_values(dtype, way):
    """They become -1 and 1 but for eps: the input's gradient is what terms leave that cancel.

    A rounding of float32 in those is all that is wrong; torch's own statistics in 16 bits put the
    gradient of float16 off by 11 here, where the largest is 77.
    """
    given, grad = _data((64, 4, 1, 1), dtype)
    if way == "channels first":
        given[0], grad = given[0].detach().flatten(1).requires_grad_(), grad.flatten(1)
    with _runtime.use("triton" if way == "triton" else "reference"):
        if way == "operation":
            y = ops.FPROP(given[0], 2, *given[1:], 1e-5, False)[0]
        else:
            y = ops.group_norm(given[0], 2, *given[1:])
        found = torch.autograd.grad(y, given, grad)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = F.group_norm(wide[0], 2, *wide[1:])
    expected = torch.autograd.grad(exact, wide, grad.double())
    x, weight, bias = (t.detach().flatten(1) if t.dim() > 1 else t.detach() for t in wide)
    rstd = torch.rsqrt(x.view(64, 2, 2).var(-1, correction=0) + 1e-5).repeat_interleave(2, 1)
    magnified = 1 + x.abs() * rstd  # a rounding of the input, in roundings of the normalized
    size = grad.double().flatten(1).abs()
    terms = [
        x.abs() * rstd * weight.abs() + bias.abs(), size * weight.abs() * rstd * magnified,
        (size * magnified).sum(0), size.sum(0),
    ]  # fmt: skip
    for actual, wanted, term in zip(
        (y.detach(), *found), (exact.detach(), *expected), terms, strict=True
    ):
        assert_rounded_after_float32(actual, wanted, term, interpreted=way == "triton")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (0, 4), (2, 4, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty(dtype, shape, act, affine):
    """No image, or images without pixels, of which torch's own gradients are nan."""
    for path in ("reference", "triton"):
        x = torch.randn(shape).to(dtype)
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        layer = GroupNorm(2, 4, affine=affine, act=act)
        with _runtime.use(path):
            y = layer(x)
            y.sum().backward()
        assert y.shape == x.shape == x.grad.shape
        assert y.dtype == dtype
        assert not any(parameter.grad.any() for parameter in layer.parameters())


def test_two_runs_are_bitwise_equal():
    given, grad = _data((2, 20, 9, 9), torch.float16)

    def run(path):
        with _runtime.use(path):
            y = ops.group_norm(given[0], 2, *given[1:], act="silu")
            return y, *torch.autograd.grad(y, given, grad)

    for path in ("reference", "triton"):
        assert all(torch.equal(a, b) for a, b in zip(run(path), run(path), strict=True))


@pytest.mark.parametrize("act", [None, "silu"])
def test_derivatives_in_float64(act):
    given, _ = _data((2, 4, 2, 3), torch.float64)
    for function in (
        lambda *t: ops.group_norm(t[0], 2, *t[1:], act=act),
        lambda *t: ops.FPROP(t[0], 2, *t[1:], 1e-5, act is not None)[0],
        lambda *t: ops._on_host(t[0], 2, *t[1:], 1e-5, act is not None),
    ):
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(function, given)


def test_transforms_of_torch_func():
    given, _ = _data((4, 4, 2, 3), torch.float32)
    with _runtime.use("triton"):
        found = torch.vmap(lambda x: ops.group_norm(x[None], 2, *given[1:])[0])(given[0])
        slope = torch.func.grad(lambda x: ops.group_norm(x, 2, act="silu").sum())(given[0])
    torch.testing.assert_close(found, F.group_norm(given[0], 2, *given[1:]))
    assert slope.shape == given[0].shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, for jvp
@pytest.mark.parametrize("act", [None, "silu"])
def test_forward_mode_derivatives(act):
    """With channels last torch's own group norm has none."""
    given, _ = _data((1, 4, 2, 3), torch.float64)

    def call(*tensors):
        return ops.group_norm(tensors[0], 2, *tensors[1:], act=act)

    assert torch.autograd.gradcheck(call, given, check_forward_ad=True)
    x = given[0].detach()
    found = torch.func.jacfwd(lambda x: call(x, *given[1:]))(x)
    wanted = torch.autograd.functional.jacobian(lambda x: call(x, *given[1:]), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("pays", [True, False])
def test_gradients_of_weights_alone(pays, dtype, biased, act, monkeypatch):
    """A frozen input, or one nobody asks about: torch's own crashes with channels last on a CPU."""
    monkeypatch.setattr(ops, "_pays", lambda *_: pays)
    given, grad = _data((2, 8, 5, 3), dtype)
    given = given if biased else given[:2]

    def gradients(wanted):
        y = ops.group_norm(given[0], 2, *given[1:], act=act)
        return torch.autograd.grad(y, wanted, grad)

    _agrees(ops.group_norm(given[0], 2, *given[1:], act=act), given, grad, 2, act)
    of_all = gradients(given)
    assert all(map(torch.equal, gradients(given[1:]), of_all[1:]))
    given[0].requires_grad_(False)
    assert all(map(torch.equal, gradients(given[1:]), of_all[1:]))


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("cut", ["channels", "images", "all"])
def test_images_with_gaps(cut, act):
    """Torch's own copies them to channels last, and crashes where the input has no gradient."""
    given, grad = _data((3, 16, 6, 5), torch.float32)
    x = {
        "channels": given[0][:, ::2], "images": given[0][::2, :8], "all": given[0][:, 1:9, 1:, :-1]
    }[cut].detach()  # fmt: skip
    given, grad = [x, *(t.detach()[:8].requires_grad_() for t in given[1:])], torch.randn(x.shape)
    y = ops.group_norm(x, 2, *given[1:], act=act)
    found = torch.autograd.grad(y, given[1:], grad)
    given[0] = x.requires_grad_()
    _agrees(ops.group_norm(x, 2, *given[1:], act=act), given, grad, 2, act)
    of_all = torch.autograd.grad(ops.group_norm(x, 2, *given[1:], act=act), given, grad)
    assert all(map(torch.equal, found, of_all[1:]))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("weights", [0, 1, 2])
@pytest.mark.parametrize("piece", [1, 40, 130, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_computed_by_pieces(dtype, piece, weights, act, last, monkeypatch):
    """One group at a time, a divisor of them, an image, two images and the rest."""
    monkeypatch.setattr(ops, "PIECE", piece)
    given, grad = _data((3, 24, 4, 3), dtype, last=last)
    given = given[: 1 + weights]
    _agrees(
        ops._on_host(given[0], 6, *(*given[1:], None, None)[:2], 1e-5, bool(act)),
        given,
        grad,
        6,
        act,
    )
    with torch.no_grad():
        y = ops.group_norm(given[0], 6, *given[1:], act=act)
    exact = F.group_norm(given[0].detach().double(), 6, *(t.detach().double() for t in given[1:]))
    assert_one_rounding(y, F.silu(exact) if act else exact)


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_channels_first_with_gaps(dtype, act, monkeypatch):
    """Pixels in another order, every second row; under autocast, with weights of other dtypes."""
    monkeypatch.setattr(ops, "PIECE", 20)
    (x, *weights), grad = _data((2, 8, 6, 5), dtype, torch.float32, last=False)
    for some in (x.flatten(2).detach()[..., ::2], x.detach().mT, x.detach()[:, :, ::2]):
        given = [some.requires_grad_(), *(weights if dtype != torch.float64 else [])]
        slope = grad.flatten()[: some.numel()].view(some.shape)
        for autocasts in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                y = ops.group_norm(some, 4, *given[1:], act=act)
            assert y.is_contiguous()
            _agrees(y, given, slope, 4, act)


@pytest.mark.parametrize("act", [None, "silu"])
def test_a_frozen_input_compiled(act):
    (x, *_), _ = _data((2, 8, 5, 3), torch.float32)
    x, layer = x.detach(), GroupNorm(2, 8, act=act)
    torch._dynamo.reset()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    found, layer.weight.grad = layer.weight.grad, None
    layer(x).square().sum().backward()
    torch.testing.assert_close(found, layer.weight.grad)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("path", ["reference", "host", "triton"])
def test_a_backward_under_vmap(path, last, monkeypatch):
    if path == "host":
        path = "reference"
        monkeypatch.setattr(ops, "_pays", lambda *_: True)
    given, _ = _data((2, 6, 3, 4), torch.float32, last=last)
    with _runtime.use(path):
        assert_backward_under_vmap(ops.group_norm(given[0], 2, *given[1:], act="silu"), given)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_operations_are_registered_in_full(path):
    (x, weight, bias), grad = _data((2, 6, 3, 4), torch.float32)
    with _runtime.use(path):
        opcheck(ops.FPROP, (x, 2, weight, bias, 1e-5, True))
        opcheck(ops.FPROP, (x.detach().bfloat16(), 2, None, None, 1e-5, False))
        plain = [t.detach() for t in (x, weight, bias)]
        stats = torch.rand(2, 2, 2)
        opcheck(ops.BPROP, (grad, stats, plain[0], 2, *plain[1:], 1e-5, True))


def test_compiled_as_one_graph():
    given, grad = _data((2, 8, 3, 4), torch.bfloat16)
    layer = GroupNorm(4, 8, act="silu", dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _agrees(compiled(given[0]), [given[0], layer.weight, layer.bias], grad, 4, "silu")
    twice = torch.compile(
        lambda x: ops.FPROP(x, 4, None, None, 1e-5, True)[0], fullgraph=True, backend="aot_eager"
    )
    _agrees(twice(given[0]), given[:1], grad, 4, "silu")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # not ours to say
def test_scripted_and_traced():
    layer, x = GroupNorm(2, 4, act="silu"), torch.randn(2, 4, 3, 3)
    assert torch.equal(torch.jit.script(layer)(x), layer(x))
    assert torch.equal(torch.jit.script(torch.nn.Sequential(layer))(x), layer(x))
    assert torch.equal(torch.jit.trace(layer, x)(x), layer(x))

    def functions(x: torch.Tensor, weight: torch.Tensor):
        y = cuda_group_norm_nhwc_two_pass(x, 2, weight, weight, 1e-5)
        return y, torch_group_norm(x, 2, weight, None, 1e-5, "swish")

    weight = torch.rand(4)
    for found, y in zip(torch.jit.script(functions)(x, weight), functions(x, weight), strict=True):
        assert torch.equal(found, y)


def test_layer_is_a_drop_in():
    layer = GroupNorm(4, 8, 1e-3, dtype=torch.float64, act="SiLU")
    theirs = torch.nn.GroupNorm(4, 8, 1e-3, dtype=torch.float64)
    torch.nn.init.normal_(theirs.weight)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 5, dtype=torch.float64)
    assert torch.equal(layer(x), F.silu(theirs(x)))
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones_like(layer.weight))
    assert repr(layer) == "GroupNorm(4, 8, eps=0.001, affine=True, act=silu)"
    assert repr(GroupNorm(4, 8)) == "GroupNorm(4, 8, eps=1e-05, affine=True)"


def test_lists_of_the_original():
    assert (torch.float16, torch.float32) in GroupNorm.SUPPORTED_DTYPES
    assert len(GroupNorm.SUPPORTED_DTYPES) == 9
    assert (1024, 320) in GroupNorm.GN_V2_SUPPORTED_CHANNELS
    assert len(GroupNorm.GN_V2_SUPPORTED_CHANNELS) == 14
    assert {16, 32} == GroupNorm.SUPPORTED_GROUPS
    assert get_cc_and_sm_count() != ((0, 0), 0) or not torch.cuda.is_available()


def test_functions_of_the_original():
    given, grad = _data((2, 8, 3, 4), torch.float32, last=False)
    for function in (
        cuda_group_norm_nhwc_one_pass, cuda_group_norm_nhwc_two_pass, cuda_group_norm_v2_nhwc
    ):  # fmt: skip
        y = function(given[0], 4, *given[1:], 1e-5, "silu")
        assert y.is_contiguous(memory_format=torch.channels_last)
        _agrees(y, given, grad, 4, "silu")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: GroupNorm(3, 8),
            ValueError,
            "num_channels must be divisible by num_groups; got 8",
        ),
        (lambda: GroupNorm(0, 8), ValueError, "divisible by num_groups; got 8 and 0"),
        (lambda: GroupNorm(2, 8, act="relu"), ValueError, "act is 'relu'; allowed are 'silu'"),
        (lambda: GroupNorm(2, 8)(torch.ones(2, 6, 1, 1)), ValueError, "weight has shape .8,. and"),
        (
            lambda: GroupNorm(2, 8)(torch.ones(8)),
            ValueError,
            r"shape \(8,\) and there are 2 groups",
        ),
        (lambda: GroupNorm(2, 8)(torch.ones(1, 8).long()), TypeError, "input is torch.int64"),
        (lambda: GroupNorm(2, 8)(torch.ones(1, 8).to("meta")), ValueError, "on meta and weight on"),
        (lambda: ops.group_norm(torch.ones(1, 8), 3), ValueError, r"Pass \(images, channels"),
        (lambda: ops.group_norm(torch.ones(1, 8), 2, act="gelu"), ValueError, "act is 'gelu'"),
    ],
)
def test_bad_input(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype):
    """Large enough for the kernel; nothing waits."""
    given, grad = _data((4, 320, 64, 64), dtype)
    there = [t.detach().cuda().requires_grad_() for t in given]
    slope = grad.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = ops.group_norm(there[0], 32, *there[1:], act="silu")
        found = torch.autograd.grad(y, there, slope)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = F.silu(F.group_norm(wide[0], 32, *wide[1:]))
    expected = torch.autograd.grad(exact, wide, grad.double())
    for one, other in zip((y, *found), (exact, *expected), strict=True):
        assert_close_in_rms(one.detach().cpu(), other.detach(), GROUP_NORM)


@pytest.mark.parametrize("act", ["", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "image",
    [
        lambda: torch.randn(2, 4096, 32).transpose(1, 2)[..., None],
        lambda: torch.randn(1, 1, 4096, 32).transpose(1, 3),
        lambda: torch.randn(4096, 32, 1, 1).contiguous(memory_format=torch.channels_last),
    ],
    ids=["sequences", "one image", "one pixel"],
)
def test_channels_last_with_sizes_of_one(image, recorded, dtype, act):
    """Their strides may be any, and torch's kernels mind."""
    torch.manual_seed(0)
    x = image().to(dtype).requires_grad_(recorded)
    y = GroupNorm(4, 32, act=act).to(dtype)(x)
    exact = F.group_norm(x.detach().double(), 4)
    assert_one_rounding(y.detach(), F.silu(exact) if act else exact)
    if recorded:
        y.sum().backward()
        assert x.grad.isfinite().all()


def test_a_bias_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    ops.group_norm(x, 2, None, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((8,), 32.0))
    assert x.grad.abs().max() < 1


def test_a_wide_bias_beside_a_narrow_weight_keeps_its_gradient():
    """Larger than any float16."""
    x = torch.ones(1, 8, 32, 32).half().contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(8).half().requires_grad_(), torch.zeros(8, requires_grad=True)
    with _runtime.use("triton"):
        y = ops.group_norm(x, 2, weight, bias)
        y.backward(torch.full_like(y, 100.0))
    assert torch.equal(bias.grad, torch.full((8,), 102400.0))
