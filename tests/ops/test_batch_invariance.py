"""apex.ops.batch_invariant: a row has the same bits in every batch."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import apex.ops
from apex._compat import IS_2_13
from apex.normalization import FusedRMSNorm
from apex.ops import _batch_invariance, _runtime
from apex.ops.layers import rotary, scaled_softmax, swiglu
from apex.ops.losses import cross_entropy
from apex.ops.norms import row_norm_pieces, row_norms
from tests.rows import CASES, batch_of, differing, some, strided
from tests.test_dev import ROOT
from tests.tolerance import assert_one_rounding

SIZES = (1, 2, 3, 7, 8, 64, 1000)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LENGTHS = (5, 33, 200)  # less than a vector of a CPU, vectors and a rest, a long row
OPS = (
    row_norms.OP, row_norms.MEMORY_EFFICIENT, scaled_softmax.OP, cross_entropy.OP, rotary.OP,
    swiglu.OP,
)  # fmt: skip
BY_SIZE = {
    "RMS norm": (row_norm_pieces, torch.float32),
    "softmax": (scaled_softmax.OP.pieces, torch.float16),
    "softmax, masked": (scaled_softmax.OP.pieces, torch.float16),
    "softmax, causal": (scaled_softmax.OP.pieces, torch.bfloat16),
    "rotary": (rotary.OP.pieces, torch.float32),
}


@pytest.fixture
def small(monkeypatch):
    """From 200 elements on a CPU takes pieces, not from a million on."""
    monkeypatch.setattr(row_norm_pieces, "above", 200)
    for op in (scaled_softmax.OP, cross_entropy.OP, rotary.OP):
        monkeypatch.setattr(op.pieces, "above", 200)


def _lengths(name):
    return [length for length in LENGTHS if not (name.endswith("causal") and length > 33)]


# -- the matrix ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu(name, dtype):
    with apex.ops.batch_invariant():
        for length in _lengths(name):
            assert differing(name, length, dtype, SIZES) == []
            assert differing(name, length, dtype, (1, 3, 64), strided) == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", BY_SIZE)
def test_without_the_switch_the_number_of_elements_decides(name, monkeypatch):
    """Few take the definition and many take pieces: on most processors they have other bits."""
    taken, pieces, dtype = [], *BY_SIZE[name]
    forward = pieces.forward
    monkeypatch.setattr(pieces, "forward", lambda *args: taken.append(None) or forward(*args))

    def in_pieces(length, count):
        taken.clear()
        CASES[name](length, dtype, lambda row: batch_of(count, row))
        return bool(taken)

    sizes = [(length, count) for length in _lengths(name) for count in SIZES]
    assert {in_pieces(*size) for size in sizes} == {False, True}
    with apex.ops.batch_invariant():
        assert not any(in_pieces(*size) for size in sizes)


def _functions_of(call):
    """The functions that autograd's profiler sees, without its and torch's namespaces."""
    with torch.autograd.profiler.profile() as profile:
        call()
    return {event.name.removeprefix("aten::") for event in profile.function_events}


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("SwiGLU", {"silu", "silu_backward", "sigmoid"}),
        ("RMS norm, memory_efficient", {"mv", "addmv", "addmv_", "mm", "matmul"}),
    ],
)
def test_no_function_tells_places_in_a_vector_apart(name, functions):
    """Where a processor has vectors: the end of a tensor is computed by another formula."""

    def found():
        return _functions_of(lambda: CASES[name](33, torch.float32, lambda row: batch_of(7, row)))

    assert found() & functions
    with apex.ops.batch_invariant():
        assert not found() & functions


@pytest.mark.parametrize("name", [name for name in CASES if "norm" in name])
def test_a_single_long_row_is_summed_like_one_of_several(name, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for dtype in (torch.float32, torch.float64):
            with apex.ops.batch_invariant():
                assert differing(name, 40_000, dtype, (1, 2, 3)) == []
    finally:
        torch.set_num_threads(before)


def _kernels(name, dtype, sizes, lengths):
    pytest.importorskip("triton")
    with _runtime.use("triton"), apex.ops.batch_invariant():
        for length in lengths:
            assert differing(name, length, dtype, sizes) == []
            assert differing(name, length, dtype, (2,), strided) == []


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_of_kernels_in_the_interpreter(name, dtype):
    _kernels(name, dtype, (2, 3, 7), (33,))


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_of_kernels_and_many_rows(name, dtype):
    _kernels(name, dtype, (1, 2, 8, 64), (5, 130))
    if not name.startswith(("softmax", "rotary")):
        _kernels(name, dtype, (1000,), (5,))


@pytest.mark.parametrize("name", ["cross-entropy", "cross-entropy, smoothed"])
def test_no_two_programs_share_a_row(name):
    """Fewer rows than multiprocessors are cut; the interpreter has 2."""
    kernels = pytest.importorskip("apex.kernels.cross_entropy")
    sizes, lengths = (1, 2), (9_000, 13_000, 20_000)
    for length in lengths:
        parts = {
            share: [kernels._parts(rows, length, 2, torch.float32, share)[2] for rows in sizes]
            for share in (True, False)
        }
        assert parts[False] == [1, 1]
        assert parts[True][0] > parts[True][1]
        with _runtime.use("triton"), apex.ops.batch_invariant():
            assert differing(name, length, torch.float32, sizes) == []


@pytest.mark.parametrize("name", CASES)
def test_other_rows_do_not_matter(name):
    """Rows of other numbers, and of inf and nan, above and below."""

    def among(row):
        if not row.is_floating_point():
            return batch_of(5, row)
        return torch.stack([row, -row, row * 0, row + torch.nan, row])

    with apex.ops.batch_invariant():
        alone = CASES[name](33, torch.float32, lambda row: batch_of(1, row))
        found = CASES[name](33, torch.float32, among)
    for rows, row in zip(found, alone, strict=True):
        assert torch.equal(rows[:1], row)
        assert torch.equal(rows[4:], row)


# -- the same operations -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_definition(name, dtype):
    args = (200 if name != "softmax, causal" else 33, dtype, lambda row: batch_of(7, row))
    wanted = CASES[name](*args)
    with apex.ops.batch_invariant():
        found = CASES[name](*args)
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_swiglu_is_rounded_once(dtype):
    gate, up, dy = (some(8, 520, dtype=dtype, seed=n).requires_grad_() for n in range(3))
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    exact = torch.nn.functional.silu(wide[0]) * wide[1]
    with apex.ops.batch_invariant():
        y = swiglu.swiglu(gate, up)
    assert_one_rounding(y, exact)
    found = torch.autograd.grad(y, (gate, up), dy)
    for one, wanted in zip(found, torch.autograd.grad(exact, wide, dy.double()), strict=True):
        assert_one_rounding(one, wanted)


def test_swiglu_where_exponentials_overflow():
    gate = torch.tensor([-torch.inf, -1e4, -90.0, 0.0, 90.0, 1e4, torch.inf, torch.nan])
    gate.requires_grad_()
    wanted = torch.nn.functional.silu(gate)
    with apex.ops.batch_invariant():
        y = swiglu.swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(y, wanted, equal_nan=True)
    ones = torch.ones_like(gate)
    (found,), (slopes,) = (torch.autograd.grad(each, gate, ones) for each in (y, wanted))
    torch.testing.assert_close(found[1:-2], slopes[1:-2])


@pytest.mark.parametrize("value", [-3.0, 0.0, 2.0])
def test_gradients_of_gradients_of_swiglu(value):
    gate, up = (torch.full((2,), v, dtype=torch.float64).requires_grad_() for v in (value, 1.5))
    with apex.ops.batch_invariant():
        assert torch.autograd.gradcheck(swiglu.swiglu, (gate, up))
        assert torch.autograd.gradgradcheck(swiglu.swiglu, (gate, up))


def test_no_rows():
    with apex.ops.batch_invariant():
        assert FusedRMSNorm(8)(torch.ones(0, 8)).shape == (0, 8)
        assert swiglu.swiglu(torch.ones(0, 8), torch.ones(0, 8)).shape == (0, 8)


def test_autocast():
    norm = FusedRMSNorm(33)
    with apex.ops.batch_invariant(), torch.autocast("cpu", torch.bfloat16):
        y = norm(batch_of(7, some(33)))
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, norm(some(33)[None]).expand_as(y))


def test_a_backward_takes_the_path_of_its_forward():
    def gradient(forward, backward):
        x = batch_of(7, some(33)).requires_grad_()
        with forward():
            y = swiglu.swiglu(x, x)
        with backward():
            functions = _functions_of(y.sum().backward)
        return x.grad, "silu_backward" in functions

    on, off = apex.ops.batch_invariant, contextlib.nullcontext
    for forward, backward in ((on, off), (off, on)):
        (found, by_torch), (wanted, _) = gradient(forward, backward), gradient(forward, forward)
        assert torch.equal(found, wanted)
        assert by_torch == (forward is off)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_the_same_again(reentrant):
    def gradients(function):
        x = batch_of(7, some(33)).requires_grad_()
        function(x).sum().backward()
        return x.grad

    def block(x):
        return swiglu.swiglu(norm(x), norm(x))

    norm = FusedRMSNorm(33)
    with apex.ops.batch_invariant():
        found = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        assert torch.equal(found, gradients(block))


# -- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.skipif(not IS_2_13, reason="seen with torch 2.13")
def test_a_compiled_graph_has_the_operators():
    seen = []

    def backend(graph, inputs):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def program(x):
        return swiglu.swiglu(norm(x), x)

    norm, x = FusedRMSNorm(33), some(7, 33)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(x)
    with apex.ops.batch_invariant():
        assert torch.equal(compiled(x), program(x))
    compiled(x)
    with apex.ops.batch_invariant():
        compiled(x)
    before, on = seen  # two graphs, for two states of the switch
    operators = {"apex.row_norm_by_row.default", "apex.swiglu_by_row.default"}
    assert operators <= {*on}
    assert not operators & {*before}


@pytest.mark.usefixtures("_fresh")
def test_a_compiled_backward_needs_no_block():
    def results(function, count):
        x, y = (batch_of(count, some(33, seed=n)).requires_grad_() for n in (0, 1))
        with apex.ops.batch_invariant():
            out = function(x, y)
        return [out, *torch.autograd.grad(out.sum(), (x, y))]

    compiled = torch.compile(swiglu.swiglu, backend="aot_eager", fullgraph=True)
    alone = results(swiglu.swiglu, 1)
    for count in (2, 7):
        for rows, row in zip(results(compiled, count), alone, strict=True):
            assert torch.equal(rows, row.expand_as(rows))


# -- the switch ----------------------------------------------------------------------------------


def test_blocks_nest():
    assert not _batch_invariance.on
    with apex.ops.batch_invariant() as switch:
        with apex.ops.batch_invariant(), switch:
            pass
        assert _batch_invariance.on
    assert not _batch_invariance.on
    with pytest.raises(KeyError, match="inside"), apex.ops.batch_invariant():
        raise KeyError("inside")
    assert not _batch_invariance.on


def _yields():
    yield 1


async def _waits():
    pass


@pytest.mark.parametrize(
    ("function", "said"),
    [(3, "got int; pass a function to decorate"), (None, "got NoneType"),
     (_yields, "the body of _yields runs after the call"), (_waits, "the body of _waits runs")],
)  # fmt: skip
def test_what_cannot_be_decorated_is_refused_at_once(function, said):
    with pytest.raises(TypeError, match=said):
        apex.ops.batch_invariant()(function)
    assert not _batch_invariance.on


def test_from_now_on():
    switch = apex.ops.batch_invariant()
    with apex.ops.batch_invariant():
        pass
    assert _batch_invariance.on
    switch.off()
    assert not _batch_invariance.on
    switch.off()  # nothing is left to end
    with apex.ops.batch_invariant():
        assert _batch_invariance.on


def test_a_decorated_function():
    @apex.ops.batch_invariant()
    def depth(n):
        """Say whether it is on, at every depth."""
        return [_batch_invariance.on, *(depth(n - 1) if n else [])]

    assert not _batch_invariance.on
    assert depth(2) == [True] * 3
    assert not _batch_invariance.on
    assert depth.__doc__.startswith("Say")


def test_blocks_of_threads_may_overlap():
    """The one that began first ends first; torch.set_grad_enabled would be off, then on."""
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with apex.ops.batch_invariant():
            entered.set()
            leave.wait(60)
            seen.append(_batch_invariance.on)

    thread = threading.Thread(target=other)
    with apex.ops.batch_invariant():
        thread.start()
        entered.wait(60)
    leave.set()
    thread.join()
    assert seen == [True]
    assert not _batch_invariance.on


def test_a_device_without_kernels_is_refused(monkeypatch):
    with apex.ops.batch_invariant():
        operation = row_norms.OP.by_row
    x = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64, numel=lambda: 3)
    monkeypatch.setattr(_runtime, "why_not_triton", lambda device_type: "no Triton")
    with pytest.raises(RuntimeError, match=r"row_norm_by_row \(torch.float64 on cuda; no Triton\)"):
        operation.definition(x)
    assert FusedRMSNorm(8, device="meta")(torch.ones(2, 8, device="meta")).shape == (2, 8)


def test_the_page_names_what_is_covered():
    with apex.ops.batch_invariant():
        assert all(op.by_row is not None for op in OPS)
    page = (ROOT / "docs" / "which-kernel.md").read_text("utf-8")
    for op in OPS:
        assert f"`{op.name}`" in page


@pytest.mark.parametrize("columns", [5, 8, 12])
def test_a_padded_mask_has_strides_for_one_kernel_only(columns):
    """Twice a stride is 0 or a multiple of 16, whichever dimensions are shared; values stay."""
    pytest.importorskip("triton")
    from apex.kernels.scaled_softmax import _readable

    drawn = torch.rand(4, 3, 7, columns, dtype=torch.float32, device="cpu") < 0.5
    for mask in (drawn, drawn[:1], drawn[:, :1], drawn[:, :, :1], drawn[:1, :1]):
        found, strides = _readable(mask, columns, padded=True)
        assert torch.equal(found, mask.to(torch.uint8))
        assert [stride % 16 for stride in strides] == [0, 0, 0]
        assert strides == [
            0 if n == 1 else 2 * s for n, s in zip(mask.shape[:-1], found.stride(), strict=False)
        ]


def test_kernels_get_tensors_that_begin_at_a_multiple_of_16_bytes():
    from apex.ops._by_row import _placed

    whole = torch.arange(17.0, dtype=torch.float32, device="cpu")
    for start in range(5):
        given = whole[start : start + 8]
        found = _placed(given)
        assert torch.equal(found, given)
        assert found.data_ptr() % 16 == 0
        assert (found is given) == (given.data_ptr() % 16 == 0)
    assert _placed(None) is None
