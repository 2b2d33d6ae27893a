"""Group norm: layouts, dtypes, sizes, a crash of torch's, launches; the rest: test_every_op.py."""

import contextlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from apex.commands.selftest.gpu import waits_refused
from apex.ops import _runtime
from apex.ops.norms import group_norm as ops
from apex.ops.norms.group_norm import group_norm
from tests.norms import group_norm_reference
from tests.tolerance import (
    GROUP_NORM,
    assert_close_in_rms,
    assert_one_rounding,
    assert_rounded_after_float32,
)

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
TRITON = pytest.param("triton", marks=NEEDS_TRITON)
PATHS = [None, "reference", TRITON]
LAST = torch.channels_last

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
paths = pytest.mark.parametrize("path", PATHS)
acts = pytest.mark.parametrize("act", [None, "silu"])
# A dtype matters where tensors are loaded and stored, and an act between: not each with each.
kinds = pytest.mark.parametrize(
    ("dtype", "act"),
    [(torch.float32, None), (torch.float32, "silu"), (torch.float16, "silu"), (HALVES[1], None)],
    ids=str,
)


def _path(name):
    return _runtime.use(name) if name else contextlib.nullcontext()


def _data(shape, dtype, weight_dtype=None, *, last=True, mean=0.5):
    """Image, weight and bias, which require gradients, and a gradient."""
    x, dy = (torch.randn(shape) + mean).to(dtype), torch.randn(shape).to(dtype)
    if last:
        x = x.contiguous(memory_format=ops.FORMATS[len(shape)])
    weights = [torch.randn(shape[1]).to(weight_dtype or dtype) for _ in range(2)]
    return [t.requires_grad_() for t in (x, *weights)], dy


def _check(tensors, dy, groups, act, path=None, wanted=None):
    """Compare with the definition in float64; gradients for ``wanted``, else for all tensors."""
    wanted = tensors if wanted is None else wanted
    x, *weights = tensors
    with _path(path):
        y = group_norm(x, groups, *weights, act=act)
        found = torch.autograd.grad(y, wanted, dy)
    exact_tensors = [t.detach().double().requires_grad_() for t in tensors]
    weight, bias = (*exact_tensors[1:], None, None)[:2]
    exact = group_norm_reference(exact_tensors[0], weight, bias, groups, 1e-5, act is not None)
    numbers = [number for number, t in enumerate(tensors) if any(t is w for w in wanted)]
    expected = torch.autograd.grad(exact, [exact_tensors[n] for n in numbers], dy.double())
    assert y.dtype == x.dtype
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    for actual, right in zip((y.detach(), *found), (exact.detach(), *expected), strict=True):
        if actual.dtype in HALVES:
            assert_one_rounding(actual, right, interpreted=path == "triton")
        else:
            assert_close_in_rms(actual, right, GROUP_NORM)
    return y


# groups of ten channels and 35 pixels, a full tile of channels, all in one group, three dimensions
SHAPES = [((2, 20, 5, 7), 2), ((3, 64, 6, 6), 32), ((1, 3, 4, 4), 1), ((2, 6, 3, 3, 2), 3)]


@paths
@kinds
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_groups_and_dimensions(shape, groups, last, dtype, act, path):
    tensors, dy = _data(shape, dtype, last=last)
    y = _check(tensors, dy, groups, act, path)
    assert ops.channels_last(y) == last


LAYOUTS = {
    "one image, its channels last": lambda: torch.randn(9, 8, 16).permute(2, 0, 1)[None],
    "sequences": lambda: torch.randn(2, 40, 16).transpose(1, 2)[..., None],
    "transposed sequences": lambda: torch.randn(2, 9, 16).transpose(1, 2),
    "one pixel": lambda: torch.randn(3, 16, 1, 1).contiguous(memory_format=LAST),
    "every other channel": lambda: torch.randn(3, 32, 6, 5).contiguous(memory_format=LAST)[:, ::2],
    "cropped": lambda: torch.randn(3, 16, 8, 7).contiguous(memory_format=LAST)[..., 1:, :-1],
    "every other image": lambda: torch.randn(6, 16, 6, 5).contiguous(memory_format=LAST)[::2],
    "one image again and again": lambda: torch.randn(1, 16, 6, 5).expand(3, -1, -1, -1),
    "pixels transposed": lambda: torch.randn(3, 16, 6, 5).mT,
    "no pixels": lambda: torch.randn(70, 16),
}


@paths
@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, act, path):
    """Strides of sizes of 1 may be any, and mislead torch's kernels, as do images with gaps."""
    x = LAYOUTS[layout]().to(dtype).detach().requires_grad_()
    weights = [torch.randn(16).to(dtype).requires_grad_() for _ in range(2)]
    y = _check([x, *weights], torch.randn(x.shape).to(dtype), 4, act, path)
    last = x.dim() == 4 and x.stride(1) == 1 and not x.is_contiguous()
    assert y.is_contiguous(memory_format=LAST if last else torch.contiguous_format)


@acts
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["dense", "cropped"])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_weights_alone(frozen, layout, dtype, act):
    """A frozen input, or one nobody asks about: torch's own crashes with channels last on a CPU."""
    tensors, dy = _data((2, 8, 5, 3), dtype)
    if layout == "cropped":
        tensors[0] = _data((2, 8, 6, 5), dtype)[0][0].detach()[:, :, 1:, 1:-1].requires_grad_()
    tensors[0].requires_grad_(not frozen)
    _check(tensors, dy, 2, act, wanted=tensors[1:])
    _check(tensors, dy, 2, act, wanted=tensors[2:])


@acts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_large_images_on_a_cpu(last, dtype, act, monkeypatch):
    """What pieces serve, or torch's functions do; without a graph the bits are the same.

    Gradients of 16 bits with channels last are computed in float32, of some images at a time.
    """
    monkeypatch.setattr(ops._PIECES, "above", 0)
    monkeypatch.setattr(ops, "_PIECE", 2 * 20 * 35)
    given, gradients = [], ops._gradients

    def seen(dy, x, *rest):
        given.append((len(x), x.dtype))
        return gradients(dy, x, *rest)

    monkeypatch.setattr(ops, "_gradients", seen)
    tensors, dy = _data((5, 20, 5, 7), dtype, last=last)
    y = _check(tensors, dy, 2, act)
    if last and dtype in HALVES and act is None:
        assert given == [(2, torch.float32), (2, torch.float32), (1, torch.float32)]
    with torch.no_grad():
        assert torch.equal(group_norm(tensors[0], 2, *tensors[1:], act=act), y)
    for wanted in (tensors[1:], tensors[2:], tensors[:1]):
        _check(tensors, dy, 2, act, wanted=wanted)
    _check(tensors[:1], dy, 2, act)
    _check(tensors[:2], dy, 2, act)


@acts
def test_a_frozen_input_compiled(act):
    (x, *weights), dy = _data((2, 8, 5, 3), torch.float32)
    x = x.detach()

    def norm(x, weight, bias):
        return group_norm(x, 2, weight, bias, act=act)

    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, *weights), weights, dy)
    torch.testing.assert_close(found, torch.autograd.grad(norm(x, *weights), weights, dy))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_for_an_unknown_number_of_images():
    def norm(x, chosen):
        return group_norm(x[chosen], 2)

    torch._dynamo.reset()
    x, chosen = torch.randn(4, 6), torch.tensor([True, False, True, True])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, chosen), norm(x, chosen))


@paths
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_weights_of_another_dtype(last, dtype, weight_dtype, path):
    tensors, dy = _data((2, 8, 5, 3), dtype, weight_dtype, last=last)
    _check(tensors, dy, 4, "swish", path)
    _check(tensors, dy, 4, None, path)


@kinds
@pytest.mark.parametrize("last", [True, False])
def test_weights_that_are_not_contiguous(last, dtype, act):
    (x, *weights), dy = _data((2, 512, 16, 9), dtype, last=last)  # large enough for the pieces
    weights = [torch.stack([w, w], 1)[:, 0].detach().requires_grad_() for w in weights]
    assert weights[0].stride() == (2,)
    _check([x, *weights], dy, 128, act)


@paths
@dtypes
@pytest.mark.parametrize("last", [True, False])
def test_without_weights_and_with_either(last, dtype, path):
    (x, weight, bias), dy = _data((2, 8, 5, 3), dtype, last=last)
    _check([x], dy, 4, "silu", path)
    _check([x, weight], dy, 4, None, path)
    with _path(path):
        y = group_norm(x, 2, None, bias)
        dx, dbias = torch.autograd.grad(y, (x, bias), torch.ones_like(y))
    assert torch.equal(dbias, torch.full_like(bias, 30.0))
    assert dx.abs().max() < 0.1


@paths
def test_a_wide_bias_beside_a_narrow_weight_keeps_its_gradient(path):
    """Larger than any float16."""
    x = torch.ones(1, 8, 32, 32).half().contiguous(memory_format=LAST)
    weight, bias = torch.ones(8).half().requires_grad_(), torch.zeros(8, requires_grad=True)
    with _path(path):
        y = group_norm(x, 2, weight, bias)
        y.backward(torch.full_like(y, 100.0))
    assert torch.equal(bias.grad, torch.full((8,), 102400.0))


@acts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 5), (2, 8, 5, 3)], ids=str)
def test_channels_first_is_torchs_own(shape, dtype, act):
    (x, weight, bias), _ = _data(shape, dtype, last=False)
    y = F.group_norm(x, 4, weight, bias)
    assert torch.equal(group_norm(x, 4, weight, bias, act=act), F.silu(y) if act else y)


@pytest.mark.parametrize("way", ["channels first", "channels last", TRITON])
@dtypes
def test_groups_of_two_values(dtype, way):
    """They become -1 and 1 but for eps: the input's gradient is what terms leave that cancel.

    A rounding of float32 in those is all that is wrong; torch's own statistics in 16 bits put the
    gradient of float16 off by 11 here, where the largest is 77.
    """
    images = 8 if way == "triton" else 64  # the interpreter takes 0.1 s an image
    given, grad = _data((images, 4, 1, 1), dtype)
    if way == "channels first":
        given[0], grad = given[0].detach().flatten(1).requires_grad_(), grad.flatten(1)
    with _path("triton" if way == "triton" else None):
        y = group_norm(given[0], 2, *given[1:])
        found = torch.autograd.grad(y, given, grad)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = group_norm_reference(*wide, 2, 1e-5, False)
    expected = torch.autograd.grad(exact, wide, grad.double())
    x, weight, bias = (t.detach().flatten(1) if t.dim() > 1 else t.detach() for t in wide)
    rstd = torch.rsqrt(x.view(images, 2, 2).var(-1, correction=0) + 1e-5).repeat_interleave(2, 1)
    magnified = 1 + x.abs() * rstd  # a rounding of the input, in roundings of the normalized
    size = grad.double().flatten(1).abs()
    terms = [
        x.abs() * rstd * weight.abs() + bias.abs(), size * weight.abs() * rstd * magnified,
        (size * magnified).sum(0), size.sum(0),
    ]  # fmt: skip
    for actual, right, term in zip(
        (y.detach(), *found), (exact.detach(), *expected), terms, strict=True
    ):
        assert_rounded_after_float32(actual, right, term, interpreted=way == "triton")


@paths
@acts
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (0, 4), (2, 4, 0)], ids=str)
def test_no_images_and_images_without_pixels(shape, affine, act, path):
    """Torch's own gradients of weights are nan."""
    (x, *weights), dy = _data(shape, torch.bfloat16, last=len(shape) == 4)
    with _path(path):
        y = group_norm(x, 2, *(weights if affine else ()), act=act)
        y.backward(dy)
    assert (y.shape, x.grad.shape, y.dtype) == (shape, shape, torch.bfloat16)
    assert not affine or not any(weight.grad.any() for weight in weights)


@paths
def test_constant_groups_and_nan(path):
    x = torch.full((2, 4, 3, 3), 7.3).contiguous(memory_format=LAST)
    x[1, 3, 1, 1] = torch.nan
    with _path(path):
        y = group_norm(x, 2)
    assert y[0].abs().max() <= (0.0 if path == "triton" else 2e-4)  # torch rounds its mean
    assert y[1].isnan().flatten(1).all(1).tolist() == [False, False, True, True]


@acts
@pytest.mark.parametrize("last", [True, False])
def test_traced(last, act):
    (x, weight, bias), _ = _data((2, 8, 5, 3), torch.float32, last=last)
    inputs = [t.detach() for t in (x, weight, bias)]
    traced = torch.jit.trace(
        lambda x, weight, bias: group_norm(x, 2, weight, bias, act=act), inputs
    )
    y = traced(*inputs)
    torch.testing.assert_close(y, group_norm(inputs[0], 2, *inputs[1:], act=act))
    assert ops.channels_last(y) == last


# --- the kernel -----------------------------------------------------------------------------------


@NEEDS_TRITON
@pytest.mark.slow
def test_many_programs_for_one_image(monkeypatch):
    """Partial sums of several tiles and several programs, the last of each smaller."""
    from apex.kernels import group_norm as kernels

    monkeypatch.setattr(kernels, "TILE", 256)
    tensors, dy = _data((1, 24, 7, 19), torch.float32, mean=0.0)
    for programs, joined, steps in ((4, 1024, 64), (1000, 1, 64), (1000, 16, 64), (1000, 16, 2)):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        monkeypatch.setattr(kernels, "JOINED", joined)
        monkeypatch.setattr(kernels, "STEPS", steps)
        _check(tensors, dy, 3, None, "triton")


@NEEDS_TRITON
@pytest.mark.parametrize("groups", [1, 2, 32])
def test_partial_sums_are_joined_in_few_steps(groups):
    from apex.kernels import group_norm as kernels

    shape = kernels._shapes("forward", torch.float32, 1, 512, 512 * 512, groups)
    assert shape.parts > 100
    assert shape.parts / shape.joins[0] <= kernels.STEPS


@NEEDS_TRITON
def test_a_large_mean_does_not_cancel_the_variance():
    """Sums of squares in float32 would lose all; rounding the mean costs its size / spread."""
    x = (torch.randn(1, 16, 8, 8) * 0.01 + 100).contiguous(memory_format=LAST)
    with _runtime.use("triton"):
        y = group_norm(x, 4)
    assert_close_in_rms(y, F.group_norm(x.double(), 4), 100 / 0.01)


@NEEDS_TRITON
@pytest.mark.parametrize("place", [0, 100, 132])
def test_an_outlier_does_not_cancel_the_variance(place, monkeypatch):
    """A marker, or a broken sensor; in one program and several, joined in one step and several."""
    from apex.kernels import group_norm as kernels

    monkeypatch.setattr(kernels, "TILE", 256)
    x = torch.randn(1, 24, 7, 19)
    x.flatten(2)[..., place] = 1e4
    x, others = x.contiguous(memory_format=LAST), torch.arange(133) != place
    exact = F.group_norm(x.double(), 3).flatten(2)[..., others]
    for programs, joined in ((1, 1024), (1000, 1024), (1000, 8)):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        monkeypatch.setattr(kernels, "JOINED", joined)
        with _runtime.use("triton"):
            y = group_norm(x, 3)
        assert_close_in_rms(y.flatten(2)[..., others], exact, GROUP_NORM)


@pytest.mark.exhaustive
@NEEDS_TRITON
@dtypes
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 320, 9, 8), 32), ((1, 512, 8, 8), 16), ((1, 32, 70, 70), 4), ((5, 33, 3, 1), 11)],
    ids=str,
)
@acts
def test_kernel_exhaustively(dtype, weight_dtype, shape, groups, act):
    _check(*_data(shape, dtype, weight_dtype), groups, act, "triton")


class _Launches(TorchDispatchMode):
    """Count what a GPU would launch: operators but views, and kernels that are stand-ins."""

    FREE = ("detach", "empty", "permute", "movedim", "select", "transpose", "unbind", "view")
    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not any(name in str(operation) for name in self.FREE)
        return operation(*args, **(kwargs or {}))

    def __getitem__(self, grid):
        assert grid[2:] in ((), (1,))
        return self

    def __call__(self, *args, **kwargs):
        self.count += 1


@NEEDS_TRITON
@pytest.mark.parametrize("shape", [(1, 32, 2, 2), (8, 320, 64, 64), (64, 4096, 64, 64)], ids=str)
def test_few_launches_where_it_is_compiled_for_a_gpu(shape, monkeypatch):
    """One operator whatever the size; no GPU is needed to see what it launches."""
    from apex.kernels import group_norm as kernels

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *given: [given[0]]

    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(shape, device="cuda").to(memory_format=LAST)
        weights = [torch.empty(shape[1], device="cuda") for _ in range(2)]
        norm = torch.compile(group_norm, backend=keep, fullgraph=True)
        norm(x, 32, *weights, act="silu")
    assert ops.OP.operator in [node.target for node in graphs[0].graph.nodes]

    launches = _Launches()
    for name in [name for name in vars(kernels) if name.startswith("group_norm_")]:
        monkeypatch.setattr(kernels, name, launches)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta").to(memory_format=LAST)
    weight, bias = (torch.empty(shape[1], dtype=torch.bfloat16, device="meta") for _ in range(2))
    dy = torch.empty_like(x, memory_format=torch.contiguous_format)
    with launches:
        y, stats = kernels.forward(x, weight, bias, 32, 1e-5, True)
        found = kernels.backward(
            dy, [True] * 3, x=x, weight=weight, bias=bias, stats=stats, groups=32, eps=1e-5,
            silu=True,
        )  # fmt: skip
    assert [t.dtype for t in (y, *found)] == [torch.bfloat16] * 4
    assert launches.count == 6 + 1 + 1 + 2  # kernels, a copy of dy, sums over images, two casts


@pytest.mark.gpu
@dtypes
def test_on_a_gpu(dtype):
    """Large enough for the kernel; nothing waits."""
    tensors, dy = _data((4, 320, 64, 64), dtype)
    there = [t.detach().cuda().requires_grad_() for t in tensors]
    slope = dy.cuda()
    with waits_refused():
        y = group_norm(there[0], 32, *there[1:], act="silu")
        found = torch.autograd.grad(y, there, slope)
    exact_tensors = [t.detach().double().requires_grad_() for t in tensors]
    exact = group_norm_reference(*exact_tensors, 32, 1e-5, True)
    expected = torch.autograd.grad(exact, exact_tensors, dy.double())
    for actual, right in zip((y, *found), (exact, *expected), strict=True):
        assert_close_in_rms(actual.detach().cpu(), right.detach(), GROUP_NORM)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.ones(8)}, r"shape \[8\] and there are 2 groups. Pass \(images, channels"),
        ({"groups": 3}, r"shape \[1, 8, 2, 2\] and there are 3 groups"),
        ({"groups": 0}, "there are 0 groups"),
        ({"x": torch.ones(1, 8).long()}, "input is torch.int64; allowed are float16"),
        ({"x": torch.ones(1, 8, device="meta")}, "weight is on cpu and input on meta"),
        ({"weight": torch.ones(6)}, r"weight has shape \[6\] and input has 8 channels. Pass \[8\]"),
        ({"bias": torch.ones(1, 8)}, r"bias has shape \[1, 8\]"),
        ({"act": "gelu"}, "act is 'gelu'; allowed are 'silu', 'swish', '' and None"),
    ],
    ids=["no channels", "odd groups", "no groups", "integers", "devices", "weight", "bias", "act"],
)  # fmt: skip
@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_bad_input(change, match, error):
    given = {"x": torch.ones(1, 8, 2, 2), "groups": 2, "weight": torch.ones(8)} | change
    with pytest.raises(error, match=match):
        group_norm(**given)
