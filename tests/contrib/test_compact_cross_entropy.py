"""``linear_cross_entropy(acc_policy="compact")``: an eighth of the logits, and three products."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from apex.commands.bench.memory import peak_bytes
from apex.contrib.xentropy import LinearCrossEntropyLoss, linear_cross_entropy
from apex.ops import _runtime
from apex.ops.losses import linear_cross_entropy as ops
from apex.ops.losses._pieces import compact_rows
from apex.ops.losses.cross_entropy import PIECE
from tests.counted import Counted
from tests.tolerance import ADDED_IN_PIECES, PRODUCTS, assert_close_in_rms

compact = functools.partial(linear_cross_entropy, acc_policy="compact")
REDUCTIONS = ["none", "mean", "sum"]
IGNORED = 3
BFLOAT16, FLOAT = torch.bfloat16, torch.float32


def _drawn(rows, features, classes, dtype, bias=True):
    made = functools.partial(torch.randn, dtype=FLOAT, device="cpu")
    x = made(rows, features).to(dtype).requires_grad_()
    weight = (made(classes, features) / features**0.5).to(dtype).requires_grad_()
    shift = made(classes).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(classes, (rows,), device="cpu")
    targets[rows // 2] = IGNORED if rows > 1 else 0
    return x, weight, shift, targets


def _exact(leaves, targets, options, factor=1.0):
    """Loss and gradients in float64."""
    x, weight, *bias = wide = [t.detach().double().requires_grad_() for t in leaves]
    loss = F.cross_entropy(F.linear(x, weight, *bias), targets, **options)
    return loss.detach(), *torch.autograd.grad(loss.sum() * factor, wide)


def _assert_right(loss, found, leaves, targets, options, factor=1.0):
    exact = _exact(leaves, targets, options, factor)
    assert [t.dtype for t in found] == [t.dtype for t in leaves]
    for one, other in zip((loss.detach(), *found), exact, strict=True):
        eps = torch.finfo(leaves[0].dtype).eps / torch.finfo(one.dtype).eps
        assert_close_in_rms(one, other, ADDED_IN_PIECES * PRODUCTS[leaves[0].dtype] * eps)


# -- values and gradients --------------------------------------------------------------------------


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(13, 17, 50, 4), (6, 5, 301, 1), (9, 8, 7, 9), (1, 8, 11, 1)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("wide", [False, True])
def test_values_and_gradients(dtype, shape, reduction, smoothing, wide):
    *sizes, chunk_size = shape
    x, weight, bias, targets = _drawn(*sizes, dtype)
    options = {"ignore_index": IGNORED, "label_smoothing": smoothing, "reduction": reduction}
    acc_dtype = torch.promote_types(dtype, FLOAT) if wide else None
    loss = compact(x, weight, targets, bias, chunk_size=chunk_size, acc_dtype=acc_dtype, **options)
    found = torch.autograd.grad(loss.sum() * 3.7, (x, weight, bias))
    _assert_right(loss, found, (x, weight, bias), targets, options, 3.7)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_with_each_path_of_the_loss(path):
    x, weight, _, targets = _drawn(5, 8, 301, FLOAT, bias=False)
    with _runtime.use(path):
        loss = compact(x, weight, targets, chunk_size=2, label_smoothing=0.1)
        found = torch.autograd.grad(loss, (x, weight))
    _assert_right(loss, found, (x, weight), targets, {"label_smoothing": 0.1})


def test_strided_inputs_and_leading_dimensions():
    x, weight, bias, targets = _drawn(12, 8, 50, FLOAT)
    strided = (x.detach().t().contiguous().t(), weight.detach()[:, torch.arange(8)].t().clone().t())
    strided = [*(t.requires_grad_() for t in strided), bias]
    loss = compact(strided[0].view(12, 8), *strided[1:2], targets, bias, chunk_size=5)
    found = torch.autograd.grad(loss, strided)
    _assert_right(loss, found, (x, weight, bias), targets, {})
    cube = compact(x.view(3, 4, 8), weight, targets.view(3, 4), bias, chunk_size=5)
    torch.testing.assert_close(cube, loss)


def test_a_target_out_of_range():
    x, weight, _, targets = _drawn(5, 4, 6, FLOAT)
    targets[3] = 6
    with pytest.raises(IndexError, match="label of row 3 is 6; allowed are 0 to 5, or -100 for"):
        compact(x, weight, targets)


@pytest.mark.onednn
def test_under_autocast():
    x, weight, bias, targets = _drawn(9, 8, 30, FLOAT)
    half = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    expected = compact(*half[:2], targets, half[2], chunk_size=4)
    with torch.autocast("cpu", BFLOAT16):
        loss = compact(x, weight, targets, bias, chunk_size=4)
        loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for one, other in zip((x, weight, bias), half, strict=True):
        assert torch.equal(one.grad, other.grad.float())


# -- backward passes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_more_backwards_make_the_gradients_again(reduction, dtype):
    """Bit for bit, although the first gave its own away; and those of one leaf after another."""
    x, weight, bias, targets = leaves = _drawn(9, 8, 30, dtype)
    leaves = leaves[:3]
    loss = compact(x, weight, targets, bias, reduction=reduction, chunk_size=4).sum() * 0.3
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [t.clone() for t in once]
    for t in once:
        t.zero_()  # they are the caller's
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    other = compact(x, weight, targets, bias, reduction=reduction, chunk_size=4).sum() * 0.3
    for leaf, expected in zip(leaves, kept, strict=True):
        (found,) = torch.autograd.grad(other, leaf, retain_graph=True)
        assert torch.equal(found, expected)


def test_gradients_of_gradients_take_the_definition():
    x, weight, _, targets = _drawn(5, 3, 6, torch.float64, bias=False)
    call = functools.partial(compact, targets=targets, chunk_size=2)
    assert torch.autograd.gradgradcheck(call, (x, weight))
    x, weight = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    (slope,) = torch.autograd.grad(call(x, weight), x, create_graph=True)
    (expected,) = torch.autograd.grad(
        linear_cross_entropy(x, weight, targets), x, create_graph=True
    )
    for one, other in zip(
        *(torch.autograd.grad(s.square().sum(), (x, weight)) for s in (slope, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gradients_in_place_are_taken_over_without_a_copy():
    """As ``.grad`` of the leaves, added to by later passes, and through hooks on saved tensors."""
    x, weight, _, targets = _drawn(6, 4, 20, FLOAT, bias=False)
    expected = _exact((x, weight), targets, {})[2]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = compact(x, weight, targets, chunk_size=2)
    for number in (1, 2):
        loss.backward(retain_graph=True)
        assert_close_in_rms(weight.grad, number * expected, 2 * PRODUCTS[FLOAT])
    loss = compact(x, weight, targets, chunk_size=2)
    loss.backward()
    assert_close_in_rms(weight.grad, 3 * expected, 2 * PRODUCTS[FLOAT])


def test_only_the_gradients_that_are_wanted():
    x, weight, bias, targets = _drawn(7, 4, 6, FLOAT)
    expected = _exact((x, weight, bias), targets, {"reduction": "sum"})[1:]
    for number in range(3):
        frozen = [t.detach() for t in (x, weight, bias)]
        frozen[number].requires_grad_()
        loss = compact(*frozen[:2], targets, frozen[2], reduction="sum", chunk_size=3)
        loss.backward()
        assert_close_in_rms(frozen[number].grad, expected[number], 2 * PRODUCTS[FLOAT])
        assert [t.grad is None for t in frozen] == [i != number for i in range(3)]


# -- the operator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_as_one_graph(reduction):
    x, weight, bias, targets = _drawn(9, 8, 30, FLOAT)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*leaves):
        return compact(*leaves[:2], targets, leaves[2], reduction=reduction, chunk_size=4)

    loss = compiled(x, weight, bias)
    found = torch.autograd.grad(loss.sum(), (x, weight, bias))
    _assert_right(loss, found, (x, weight, bias), targets, {"reduction": reduction})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.14
@pytest.mark.slow
def test_operations_are_registered_in_full():
    x, weight, _, targets = _drawn(5, 4, 6, BFLOAT16)
    rest = (0.1, IGNORED, "mean", 2, [True, True, False], BFLOAT16)
    opcheck(ops.OP.operator, (x, weight, None, targets, *rest))
    plain = [t.detach() for t in (x, weight)]
    nothing = torch.empty(0, dtype=FLOAT, device="cpu")
    lse = torch.rand(5, dtype=FLOAT, device="cpu")
    saved = (*plain, None, targets, lse, *plain, nothing)
    dy = torch.rand((), dtype=FLOAT, device="cpu")
    opcheck(ops.OP.backward_operator, (dy, [True, True, False], *saved, *rest))


# -- memory and products ---------------------------------------------------------------------------


def _on_meta(rows, features, classes, acc_dtype, reduction="mean"):
    """Forward and backward on meta tensors: what is counted, and the returned gradients."""
    made = functools.partial(torch.empty, dtype=BFLOAT16, device="meta")
    x, weight = made(rows, features), made(classes, features)
    targets = torch.empty(rows, dtype=torch.long, device="meta")
    given = (x, weight, None, targets, 0.0, -100, reduction, 0, [True, True, False], acc_dtype)
    names = ("x", "weight", "bias", "targets", "smoothing", "ignore_index", "reduction")
    names = dict(zip((*names, "chunk_size", "wanted", "acc_dtype"), given, strict=True))
    with Counted() as counted:
        _, lse, *kept = ops.COMPACT.forward(*given)
        kept = dict(zip(("dx", "dweight", "dbias"), kept, strict=True))
        dy = torch.empty((), dtype=FLOAT, device="meta")
        found = ops.COMPACT.backward(dy, [True, True, False], lse=lse, **kept, **names)
    return counted, [t for t in found if t is not None]


def test_an_eighth_of_the_logits_beyond_the_gradients():
    """Of Llama 3's vocabulary; in float32 the sum comes on top, and where it is rounded."""
    logits = 4096 * 128256 * 2
    counted, found = _on_meta(4096, 4096, 128256, BFLOAT16)
    returned = sum(t.nbytes for t in found)
    assert returned == (4096 + 128256) * 4096 * 2
    assert counted.peak - returned <= logits / 8
    counted, _ = _on_meta(4096, 4096, 128256, FLOAT)
    assert counted.peak - returned <= logits / 8 + 4 * 128256 * 4096 + 2 * 4096 * 4096


def test_products_of_each_piece():
    """Three, as a plain program's together, of the sizes that are: none is padded."""
    counted, _ = _on_meta(4100, 40, 1003, BFLOAT16)
    sizes = [512] * 8 + [4]
    assert counted.products == [
        product
        for rows in sizes
        for product in ((rows, 40, 1003), (rows, 1003, 40), (1003, rows, 40))
    ]
    assert counted.multiplications == 3 * 4100 * 40 * 1003


@pytest.mark.parametrize(
    ("rows", "classes", "expected"),
    [
        (4096, 128256, 384), (8192, 128256, 896), (16384, 128256, 1024), (4100, 1003, 512),
        (1, 10, 128), (1024, 128256, 128), (2**17, 2**19, 512),
    ],
)  # fmt: skip
def test_how_many_rows_at_a_time(rows, classes, expected):
    assert compact_rows(rows, classes) == expected


@pytest.mark.filterwarnings("ignore:.*")  # the profiler's, of torch's
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16], ids=str)
def test_peak_memory_on_a_cpu(dtype):
    """As the allocator counts it, through autograd; with two float32 pieces of the loss."""
    x, weight, _, targets = _drawn(2048, 8, 2**12, dtype, bias=False)

    def work():
        return torch.autograd.grad(compact(x, weight, targets), (x, weight))

    peak = peak_bytes(work, torch.device("cpu"))
    assert peak <= x.nbytes + weight.nbytes + 2048 * 2**12 * x.element_size() / 8 + 8 * PIECE


# -- how it is asked for ---------------------------------------------------------------------------


def test_module():
    layer = LinearCrossEntropyLoss(8, 20, acc_policy="compact", acc_dtype=FLOAT)
    x, targets = torch.randn(7, 8, dtype=FLOAT, device="cpu"), torch.arange(7, device="cpu")
    expected = compact(x, layer.linear.weight, targets, acc_dtype=FLOAT)
    assert torch.equal(layer(x, targets), expected)
    assert "chunk_size=None, acc_policy='compact', acc_dtype=torch.float32" in repr(layer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"acc_policy": "accurate"}, "acc_policy is 'accurate'; allowed are balanced, compact"),
        ({"acc_dtype": FLOAT}, "acc_dtype is torch.float32, which needs acc_policy='compact'"),
        (
            {"acc_policy": "compact", "acc_dtype": torch.float16},
            "acc_dtype is torch.float16; allowed for a weight of torch.bfloat16 are "
            "torch.bfloat16, torch.float32",
        ),
    ],
)
def test_what_is_refused(changes, said):
    x, weight, _, targets = _drawn(5, 4, 6, BFLOAT16)
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(x, weight, targets, **changes)
