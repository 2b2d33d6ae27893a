"""Rotary position embeddings: formula, layouts, errors. More: tests/ops/test_every_op.py."""

import importlib.util

import pytest
import torch
from torch import Tensor

from apex.ops import _runtime
from apex.ops.layers import rotary
from apex.transformer.functional import fused_rope as rope
from tests.tolerance import assert_one_rounding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PATHS = ["reference", "pieces"]
if importlib.util.find_spec("triton") is not None:
    PATHS.append("triton")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Compute this way; there are several pieces, and blocks of heads."""
    if request.param == "pieces":
        monkeypatch.setattr(rotary, "PIECE", 100)
        yield request.param
    else:
        if request.param == "triton":
            monkeypatch.setattr("apex.kernels.rotary.TILE", 32)
        with _runtime.use(request.param):
            yield request.param


def random(*shape, dtype=torch.float32, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def angles(rows, pairs, seed=1):
    """Float32 angles up to some 1,000 ``(rows, 1, 1, 2 pairs)``, whose two halves are equal."""
    half = 300 * torch.randn(rows, pairs, generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], -1)[:, None, None]


def turned(t, freqs):
    """The first channels as complex numbers times ``exp(i angle)``; freqs as broadcast to t."""
    pairs = freqs.shape[-1] // 2
    first, second, rest = t.tensor_split([pairs, 2 * pairs], -1)
    factor = torch.exp(1j * freqs[..., :pairs].double())
    y = torch.complex(first, second) * factor
    return torch.cat([y.real, y.imag, rest], -1)


def check(y, t, exact, exact_t, path, dy=None):
    """The result and the gradient of ``t`` against those of ``exact_t`` in float64."""
    interpreted = path == "triton"
    assert y.dtype == t.dtype
    assert_one_rounding(y.detach(), exact.detach(), interpreted=interpreted)
    dy = random(*y.shape, dtype=y.dtype, seed=5).detach() if dy is None else dy
    (grad,) = torch.autograd.grad(y, t, dy)
    (exact_grad,) = torch.autograd.grad(exact, exact_t, dy.double())
    assert_one_rounding(grad, exact_grad, interpreted=interpreted)
    return grad


def double(t):
    return t.detach().double().requires_grad_()


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "transposed"),
    [(16, False), (16, True), (24, True), (19, False)],
    ids=["all", "all, transposed", "some", "odd"],
)
def test_positions_first(path, dtype, channels, transposed):
    """16 channels are rotated."""
    t, freqs = random(5, 2, 7, channels, dtype=dtype), angles(9, 8)
    exact_t = double(t)
    y = rope.fused_apply_rotary_pos_emb(t, freqs, transposed)
    grad = check(y, t, turned(exact_t, freqs[:5]), exact_t, path)
    memory = y.transpose(0, 1) if transposed else y
    assert memory.is_contiguous()
    assert transposed or grad.is_contiguous()
    tables = freqs.cos(), freqs.sin()
    cached = rope.fused_apply_rotary_pos_emb_cached(t, *tables, transposed)
    check(cached, t, turned(exact_t, freqs[:5]), exact_t, path)
    assert cached.stride() == y.stride()


def test_few_elements_and_the_result_transposed():
    """Which torch's functions would not do; nor is a kernel that was asked for passed over."""
    t, freqs = random(5, 2, 7, 16), angles(5, 8)
    for arguments in (
        (rope.fused_apply_rotary_pos_emb, freqs),
        (rope.fused_apply_rotary_pos_emb_cached, freqs.cos(), freqs.sin()),
    ):
        function, *tables = arguments
        y = function(t, *tables, True)
        assert y.transpose(0, 1).is_contiguous()
        assert torch.equal(y, function(t, *tables))
        if "triton" in PATHS:
            with pytest.MonkeyPatch.context() as patch, _runtime.use("triton"):
                patch.setattr(rotary, "_rotated", pytest.fail)
                function(t, *tables)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_that_differ(path, dtype):
    """The gradient is the transposed map; that of equal halves would be another one."""
    t = random(4, 3, 2, 12, dtype=dtype)
    cos, sin = (random(4, 1, 1, 10, seed=seed) for seed in (2, 3))
    y = rope.fused_apply_rotary_pos_emb_cached(t, cos, sin)
    exact_t = double(t)
    x, rest = exact_t.tensor_split([10], -1)
    crossed = torch.cat([-x[..., 5:], x[..., :5]], -1)
    exact = torch.cat([x * cos.detach().double() + crossed * sin.detach().double(), rest], -1)
    check(y, t, exact, exact_t, path)
    total = rope.fused_apply_rotary_pos_emb_cached(t, cos, sin).sum()
    assert torch.autograd.grad(total, [t, cos, sin], allow_unused=True)[1:] == (None, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(path, dtype):
    """Each from position 0: of 3 tokens, none, 1 and 4; 2 more are in no sequence."""
    t, freqs = random(10, 3, 10), angles(4, 4)
    bounds = torch.tensor([0, 3, 3, 4, 8], dtype=dtype)
    y = rope.fused_apply_rotary_pos_emb_thd(t, bounds, freqs)
    exact_t = double(t)
    places = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3])
    exact = torch.cat([turned(exact_t[:8], freqs[places, 0]), exact_t[8:]])
    check(y, t, exact, exact_t, path)


def test_positions_beyond_the_table_are_nan_and_nothing_else_is(path):
    t, freqs = random(10, 3, 10), angles(3, 4)
    y = rope.fused_apply_rotary_pos_emb_thd(t, torch.tensor([1, 5, 8]), freqs)
    (grad,) = torch.autograd.grad(y.sum(), t)
    for found in (y, grad):
        assert found[4, :, :8].isnan().all()
        assert found[4, :, 8:].isfinite().all()  # channels that are not rotated
        assert found[:4].isfinite().all()
        assert found[5:].isfinite().all()
    assert torch.equal(y[[0, 8, 9]], t[[0, 8, 9]])


@pytest.mark.parametrize("bounds", [[0], [9, 4, 1], [-5, 100], [3, 3]])
def test_senseless_bounds_read_nothing_out_of_bounds(path, bounds):
    t, freqs = random(10, 3, 8), angles(3, 4)
    bounds = torch.tensor(bounds, dtype=torch.int32)
    rows = rotary.by_sequences(t, bounds, freqs).positions
    assert rows.min() >= 0
    assert rows.max() <= 4
    assert rope.fused_apply_rotary_pos_emb_thd(t, bounds, freqs).shape == t.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images(path, dtype):
    rows, columns = (angles(n, 4, seed).transpose(0, 1) for n, seed in ((5, 1), (3, 2)))
    t = random(2, 4 * 3, 2, 16, dtype=dtype)
    tables = rows.cos(), rows.sin(), columns.cos(), columns.sin()
    y = rope.fused_apply_rotary_pos_emb_2d(t, 4, 3, *tables)
    exact_t = double(t)
    by_row, by_column = exact_t.view(2, 4, 3, 2, 16).chunk(2, -1)
    by_row = turned(by_row, rows[:, :4, None])
    exact = torch.cat([by_row, turned(by_column, columns[:, None])], -1).flatten(1, 2)
    assert check(y, t, exact, exact_t, path).is_contiguous()
    assert y.is_contiguous()


# -- layouts -------------------------------------------------------------------------------------


def _of_a_projection(s, b, h, d):
    return random(s, b, h, 3 * d)[..., d : 2 * d]


LAYOUTS = {
    "a part of a projection": _of_a_projection,
    "an odd stride": lambda s, b, h, d: random(s, b, h, d + 1)[..., :d],
    "batches first": lambda s, b, h, d: random(b, s, h, d).transpose(0, 1),
    "heads first": lambda s, b, h, d: random(h, s, b, d).permute(1, 2, 0, 3),
    "channels first": lambda s, b, h, d: random(d, s, b, h).permute(1, 2, 3, 0),
    "one head for all": lambda s, b, h, d: random(s, b, 1, d).expand(s, b, h, d),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(path, layout):
    """Of the tensor, of the gradient of the result, and of tables."""
    t, freqs = LAYOUTS[layout](3, 2, 5, 16), angles(3, 6)
    dy = LAYOUTS[layout](3, 2, 5, 16).detach() + 0
    exact_t = double(t)
    strided = freqs.repeat_interleave(2, -1)[..., ::2]
    cos, sin = strided.cos(), strided.sin().expand(3, 1, 1, 12)
    y = rope.fused_apply_rotary_pos_emb_cached(t, cos, sin)
    check(y, t, turned(exact_t, freqs), exact_t, path, dy)
    assert y.is_contiguous()


def test_a_gradient_of_one_number(path):
    t, freqs = random(3, 2, 5, 16), angles(3, 6)
    exact_t = double(t)
    y = rope.fused_apply_rotary_pos_emb(t, freqs, True)
    check(y, t, turned(exact_t, freqs), exact_t, path, torch.ones(()).expand(y.shape))


# -- how it is called ----------------------------------------------------------------------------

FREQS = angles(6, 4)
TABLES = FREQS.cos(), FREQS.sin()
PLACES = FREQS[:2].transpose(0, 1), FREQS[:3].transpose(0, 1)
PLACES = PLACES[0].cos(), PLACES[0].sin(), PLACES[1].cos(), PLACES[1].sin()
BOUNDS = torch.tensor([0, 2, 6])
CALLS = {  # function, its class, shape of t, arguments
    rope.fused_apply_rotary_pos_emb: (rope.FusedRoPEFunc, (6, 2, 3, 12), (FREQS, True)),
    rope.fused_apply_rotary_pos_emb_cached: (rope.FusedRoPECachedFunc, (6, 2, 3, 12), TABLES),
    rope.fused_apply_rotary_pos_emb_thd: (rope.FusedRoPETHDFunc, (6, 3, 12), (BOUNDS, FREQS)),
    rope.fused_apply_rotary_pos_emb_2d: (rope.FusedRoPE2DFunc, (2, 6, 3, 16), (2, 3, *PLACES)),
}
calls = pytest.mark.parametrize("function", CALLS)


@calls
def test_the_class_calls_the_function(function):
    """What classes do with it: tests/ops/test_function.py."""
    cls, shape, args = CALLS[function]
    t = random(*shape)
    y, other = function(t, *args), cls.apply(t, *args)
    assert torch.equal(y, other)
    assert y.stride() == other.stride()


@calls
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own
def test_one_graph(function):
    """Of the function, and of the class inside of it."""
    cls, shape, args = CALLS[function]
    t = random(*shape)
    torch._dynamo.reset()

    def both(t):
        return function(cls.apply(t, *args), *args)

    y, expected = torch.compile(both, fullgraph=True, backend="aot_eager")(t), both(t)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(z.square().sum(), t)[0] for z in (y, expected)]
    torch.testing.assert_close(*grads)


class Rotates(torch.nn.Module):
    def forward(self, t: Tensor, freqs: Tensor) -> Tensor:
        return rope.fused_apply_rotary_pos_emb(t, freqs)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recorder", ["trace", "export"])
def test_recorded_with_as_many_positions_as_angles(recorder):
    """The program takes fewer positions, too."""
    t, freqs, module = random(6, 2, 3, 12), angles(6, 6), Rotates()
    if recorder == "trace":
        recorded = torch.jit.trace(module, (t, freqs))
    else:
        sizes = {"t": {0: torch.export.Dim.DYNAMIC}, "freqs": None}
        recorded = torch.export.export(module, (t, freqs), dynamic_shapes=sizes).module()
    torch.testing.assert_close(recorded(t[:4], freqs), module(t[:4], freqs))


@calls
def test_vmap(function):
    _, shape, args = CALLS[function]
    t = random(3, *shape).detach()
    torch.testing.assert_close(
        torch.vmap(lambda t: function(t, *args))(t), torch.stack([function(x, *args) for x in t])
    )


# -- errors --------------------------------------------------------------------------------------

T = torch.zeros(6, 2, 3, 12)
rotate, rotate_cached = rope.fused_apply_rotary_pos_emb, rope.fused_apply_rotary_pos_emb_cached


def _images(rows=2, columns=3, channels=16, places=PLACES):
    t = torch.zeros(2, 6, 3, channels)
    return rope.fused_apply_rotary_pos_emb_2d(t, rows, columns, *places)


def _packed(bounds, t=T[:, 0]):
    return rope.fused_apply_rotary_pos_emb_thd(t, bounds, FREQS)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: rotate(None, FREQS), "t is a NoneType; pass a tensor"),
        (lambda: rotate(T, None), "freqs is a NoneType; pass a tensor"),
        (lambda: rotate(T.int(), FREQS), "t is torch.int32; allowed are"),
        (lambda: rotate(T, FREQS.to("meta")), "freqs is on meta and t on"),
        (lambda: rotate(T[0], FREQS), r"t has shape \[2, 3, 12\]. Pass \[s, b, h, d\]"),
        (
            lambda: rotate(T, FREQS[:5]),
            r"freqs has shape \[5, 1, 1, 8\] and t \[6, 2, 3, 12\]. Pass .* at least 6 positions",
        ),
        (lambda: rotate(T, FREQS[..., :7]), "number of channels must be even"),
        (lambda: rotate(T[..., :6], FREQS), "at most 6"),
        (lambda: rotate(T, FREQS[..., :0]), "number of channels must be even"),
        (lambda: rotate(T, FREQS[:, 0, 0]), r"freqs has shape \[6, 8\]"),
        (lambda: rotate(T, FREQS.expand(6, 2, 1, 8)), r"Pass \[positions, 1, 1, channels\]"),
        (
            lambda: rotate_cached(T, TABLES[0], TABLES[1][..., :6]),
            r"sin has shape \[6, 1, 1, 6\] .* the same in all tables",
        ),
        (lambda: _packed(BOUNDS.float()), r"cu_seqlens is torch.float32 of shape \[3\]. Pass"),
        (lambda: _packed(BOUNDS.short()), r"cu_seqlens is torch.int16 of shape \[3\]. Pass int32"),
        (lambda: _packed(BOUNDS[None]), r"cu_seqlens is torch.int64 of shape \[1, 3\]. Pass"),
        (lambda: _packed([0, 6]), "cu_seqlens is a list; pass a tensor"),
        (lambda: _packed(BOUNDS, T), r"t has shape .* Pass \[tokens, h, d\]"),
        (lambda: _images(2, 2), r"t has shape \[2, 6, 3, 16\], img_h is 2 and img_w 2. Pass"),
        (lambda: _images(-2, -3), "img_h is -2 and img_w -3"),
        (lambda: _images(3, 2), r"cos_h has shape \[1, 2, 1, 8\] .* at least 3 positions"),
        (
            lambda: _images(places=(*PLACES[:3], PLACES[3][:, :2])),
            r"sin_w has shape \[1, 2, 1, 8\] .* at least 3 positions",
        ),
        (lambda: _images(channels=12), "at most 6"),
        (lambda: _images(channels=17), "with an even d"),
    ],
)
def test_errors(call, match):
    with pytest.raises(ValueError, match=f"rotary: .*{match}"):
        call()


def test_a_program_holds_few_elements_of_channels_that_are_only_copied():
    """1024 heads of 4096 channels are 4 million elements; Triton takes one million."""
    kernels = pytest.importorskip("apex.kernels.rotary")
    for channels, half, heads in ((4096, 1, 1024), (128, 8, 64), (96, 32, 64)):
        _, _, height, lanes, rest, warps = kernels._tiles(channels, half, heads, torch.float32)
        held = height * max(2 * lanes, rest)
        assert held <= max(2 * kernels.TILE, channels)
        assert held <= 2 * warps * kernels.WARP


def test_more_positions_than_programs_are_not_given_to_the_kernel():
    """A GPU launches up to 2**31 - 1."""
    t = torch.empty(1, device="meta")
    assert rotary.OP.takes(t.expand(2**15, 2**15, 1, 2))
    assert not rotary.OP.takes(t.expand(2**16, 2**15, 1, 2))
