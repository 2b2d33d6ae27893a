"""``apex.contrib.xentropy.linear_cross_entropy``: never all logits in memory."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from apex.commands.bench.memory import peak_bytes
from apex.contrib.xentropy import LinearCrossEntropyLoss, linear_cross_entropy
from apex.ops import _runtime
from apex.ops.losses import linear_cross_entropy as ops
from apex.ops.losses._pieces import TILE, chunk_rows
from tests.tolerance import PRODUCTS, assert_close_in_rms
from tests.vmapped import assert_backward_under_vmap

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REDUCTIONS = ["none", "mean", "sum"]
IGNORED = 3
# rows, features, classes, rows at a time: an uneven last piece, one row at a time, one piece
SHAPES = [(13, 17, 50, 4), (6, 5, 300, 1), (9, 8, 7, 9)]


def _data(rows, features, classes, dtype, bias=True):
    x = torch.randn(rows, features).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features) / features**0.5).to(dtype).requires_grad_()
    shift = torch.randn(classes).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(classes, (rows,))
    targets[1] = IGNORED
    return x, weight, shift, targets


def _plain(x, weight, bias, targets, **options):
    logits = F.linear(x, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, **options)


def _agrees(loss, x, weight, bias, targets, **options):
    given = [t for t in (x, weight, bias) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = _plain(*wide, *[None] * (3 - len(wide)), targets, **options)
    grad = torch.rand(exact.shape) + 0.5
    found = torch.autograd.grad(loss, given, grad.to(loss.dtype))
    expected = torch.autograd.grad(exact, wide, grad.double())
    assert loss.dtype == torch.promote_types(x.dtype, torch.float32)
    assert [t.dtype for t in found] == [t.dtype for t in given]
    for one, other in zip((loss.detach(), *found), (exact.detach(), *expected), strict=True):
        assert_close_in_rms(
            one, other, PRODUCTS[x.dtype] * (torch.finfo(x.dtype).eps / torch.finfo(one.dtype).eps)
        )


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_agrees_with_the_definition(dtype, shape, reduction, smoothing):
    *sizes, chunk_size = shape
    x, weight, bias, targets = _data(*sizes, dtype)
    options = {"ignore_index": IGNORED, "label_smoothing": smoothing, "reduction": reduction}
    loss = linear_cross_entropy(x, weight, targets, bias, chunk_size=chunk_size, **options)
    _agrees(loss, x, weight, bias, targets, **options)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_each_path_of_the_loss(path, reduction):
    x, weight, _, targets = _data(5, 8, 300, torch.float32, bias=False)
    options = {"ignore_index": IGNORED, "label_smoothing": 0.1, "reduction": reduction}
    with _runtime.use(path):
        loss = linear_cross_entropy(x, weight, targets, chunk_size=2, **options)
        _agrees(loss, x, weight, None, targets, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_small_ones_and_defaults(reduction):
    x, weight, bias, targets = _data(6, 8, 20, torch.float32)
    targets[2] = -100
    loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction)
    _agrees(loss, x, weight, bias, targets, reduction=reduction)
    torch.testing.assert_close(loss, _plain(x, weight, bias, targets, reduction=reduction))


def test_leading_dimensions():
    x, weight, bias, targets = _data(12, 8, 20, torch.float32)
    flat = linear_cross_entropy(x, weight, targets, bias, reduction="none", chunk_size=5)
    cube, grid = x.view(3, 4, 8), targets.view(3, 4)
    for chunk_size in (None, 5):
        call = functools.partial(
            linear_cross_entropy, weight=weight, bias=bias, chunk_size=chunk_size
        )
        torch.testing.assert_close(call(cube, targets=grid, reduction="none"), flat.view(3, 4))
        torch.testing.assert_close(call(cube, targets=grid), flat.mean())
        one = call(x[0], targets=targets[0], reduction="none")
        assert one.shape == ()
        torch.testing.assert_close(one, flat[0])
    no_feature = linear_cross_entropy(cube[..., :0], weight[:, :0], grid)
    torch.testing.assert_close(no_feature.item(), math.log(20))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("policy", ["balanced", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_row_that_counts(reduction, dtype, policy):
    """The mean is nan, as torch's; no gradient is."""
    for rows in (0, 5):
        x, weight, bias, targets = _data(5, 4, 6, dtype)
        x, targets = x[:rows], targets[:rows].fill_(IGNORED)
        options = {"ignore_index": IGNORED, "chunk_size": 2, "acc_policy": policy}
        loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, **options)
        assert loss.isnan().any() == (reduction == "mean")
        for found in torch.autograd.grad(loss.sum(), (x, weight, bias)):
            assert not found.any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_only_the_gradients_that_are_wanted(reduction):
    """A frozen layer costs no product for its weight."""
    x, weight, bias, targets = _data(7, 4, 6, torch.float32)
    expected = torch.autograd.grad(
        _plain(x, weight, bias, targets, reduction="sum"), (x, weight, bias)
    )
    for number in range(3):
        frozen = [t.detach() for t in (x, weight, bias)]
        frozen[number].requires_grad_()
        loss = linear_cross_entropy(
            *frozen[:2], targets, frozen[2], reduction=reduction, chunk_size=3
        )
        factor = 7 if reduction == "mean" else 1
        loss.sum().backward()
        torch.testing.assert_close(factor * frozen[number].grad, expected[number])
        assert [t.grad is None for t in frozen] == [i != number for i in range(3)]
    with torch.no_grad():
        linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk_size=3)


def test_losses_of_rows_keep_the_inputs_and_two_numbers_a_row():
    """No memory for gradients, which are not known before the losses' own."""
    x, weight, bias, targets = _data(7, 4, 60, torch.float32)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    ):
        linear_cross_entropy(x, weight, targets, bias, reduction="none", chunk_size=3)
    inputs = x.numel() + weight.numel() + bias.numel() + targets.numel()
    assert sum(t.numel() for t in kept.values()) == inputs + 2 * 7


def test_gradients_survive_a_large_loss_scale_in_float16():
    """What a scale of 2**14 keeps from being 0 must not be rounded before it is multiplied."""
    targets = torch.randint(2000, (64,))
    # Logits are multiples of 1.25: exact in float16, in whichever order their terms are added up.
    weight = (2.0 * torch.randint(2, (2000, 32)) - 1).half().requires_grad_()
    x = (0.625 * weight.detach()[targets]).requires_grad_()  # sure of the target: small gradients
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(_plain(*wide, None, targets) * 2.0**14, wide)
    loss = linear_cross_entropy(x, weight, targets, chunk_size=10)
    for one, other in zip(torch.autograd.grad(loss * 2.0**14, (x, weight)), exact, strict=True):
        assert_close_in_rms(one, other, PRODUCTS[torch.float16])


def _peak(call, *tensors):
    def work():
        loss = call()
        torch.autograd.grad(loss, tensors, torch.ones_like(loss))

    return peak_bytes(work, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:.*")  # the profiler's, of torch's
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    ("rows", "classes", "part"),
    [(4096, 2**12, 7), pytest.param(512, 2**14, 2.5, marks=pytest.mark.onednn)],
)
@pytest.mark.slow
def test_peak_memory(rows, classes, part, reduction, dtype):
    """A seventh of what the plain program needs; below 1,024 rows all logits are there, once."""
    x, weight, _, targets = _data(rows, 32, classes, dtype, bias=False)
    plain = _peak(lambda: _plain(x, weight, None, targets, reduction=reduction), x, weight)
    ours = _peak(lambda: linear_cross_entropy(x, weight, targets, reduction=reduction), x, weight)
    assert plain >= rows * classes * 8
    assert ours <= plain / part


@pytest.mark.filterwarnings("ignore:.*")
def test_the_weights_gradient_is_there_twice_at_most():
    """As it was kept and as it is returned, multiplied by what came in."""
    x, weight, _, targets = _data(256, 256, 2**15, torch.float32, bias=False)
    peak = _peak(lambda: linear_cross_entropy(x, weight, targets), x, weight)
    assert peak <= 2.1 * weight.nbytes


def test_the_weights_gradient_adds_up_in_float32():
    """Products of pieces are not rounded to 16 bits, whatever the number of pieces."""
    x = torch.randint(-2, 3, (64, 8)).bfloat16() / 4  # logits need no rounding
    weight = torch.randint(-2, 3, (50, 8)).bfloat16() / 4
    targets, options = torch.randint(50, (64,)), (0.0, IGNORED, "mean")
    one, many = (
        ops.OP.operator(x, weight, None, targets, *options, size, [True, True, False], None)[3]
        for size in (64, 1)
    )
    assert one.dtype == many.dtype == torch.float32
    assert_close_in_rms(many, one.double(), PRODUCTS[torch.float32])


@pytest.mark.parametrize(
    ("rows", "classes", "expected"),
    [
        (512, 2**15, 1024),  # the least that keeps products fast
        (8192, 2**15, 1024),
        (8192, 128256, 1024),  # Llama 3
        (8192, 256000, 1024),  # Gemma 2
        (8192, 2**19, 512),  # 512 MiB in 16 bits
        (10, 2**27, 128),
        (12000, 2**15, 1408),  # an eighth
        (2**20, 2**15, 2048),  # 256 MiB of float32
        (9000, 1000, 4096),  # 16 MiB of float32
    ],
)
def test_how_many_rows_at_a_time(rows, classes, expected):
    """Whole tiles of 128 rows."""
    assert chunk_rows(rows, classes) == expected
    assert expected % TILE == 0


@pytest.mark.onednn
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_under_autocast(reduction):
    """As ``F.linear`` under autocast, with the loss in float32; float64 is left alone."""
    x, weight, bias, targets = _data(9, 8, 30, torch.float32)
    half = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    expected = linear_cross_entropy(*half[:2], targets, half[2], reduction=reduction, chunk_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk_size=4)
        double = linear_cross_entropy(
            x.double(), weight.double(), targets, reduction=reduction, chunk_size=4
        )
        loss.sum().backward()
    expected.sum().backward()
    assert torch.equal(loss, expected)
    assert (loss.dtype, double.dtype) == (torch.float32, torch.float64)
    for one, other in zip((x, weight, bias), half, strict=True):
        assert one.grad.dtype == torch.float32
        assert torch.equal(one.grad, other.grad.float())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_in_float64(reduction):
    x, weight, bias, targets = _data(5, 3, 6, torch.float64)

    def loss(*tensors):
        return linear_cross_entropy(
            *tensors[:2], targets, tensors[2], ignore_index=IGNORED, label_smoothing=0.1,
            reduction=reduction, chunk_size=2,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (x, weight, bias))
    assert torch.autograd.gradgradcheck(loss, (x, weight, bias))


def test_transforms_of_torch_func():
    x, weight, _, targets = _data(6, 4, 5, torch.float32, bias=False)

    def loss(rows, labels):
        return linear_cross_entropy(rows, weight, labels, chunk_size=2)

    found = torch.vmap(loss)(x.view(2, 3, 4), targets.view(2, 3))
    expected = [loss(x[:3], targets[:3]), loss(x[3:], targets[3:])]
    torch.testing.assert_close(found, torch.stack(expected))
    slope = torch.func.grad(lambda w: linear_cross_entropy(x, w, targets, chunk_size=2))(weight)
    assert slope.shape == weight.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_backward_under_vmap(reduction, dtype):
    x, weight, bias, targets = _data(6, 4, 5, dtype)
    loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk_size=2)
    assert_backward_under_vmap(loss, [x, weight, bias])


@pytest.mark.onednn
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_runs_and_two_backwards_are_bitwise_equal(reduction):
    x, weight, bias, targets = _data(33, 20, 90, torch.bfloat16)

    def run():
        loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk_size=7)
        once = torch.autograd.grad(loss.sum(), (x, weight, bias), retain_graph=True)
        again = torch.autograd.grad(loss.sum(), (x, weight, bias))
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        return loss, *once

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_evaluation_has_the_bits_of_training(reduction):
    for rows in range(20, 60):  # sum * (1 / rows) is not always sum / rows
        x, weight, bias, targets = _data(rows, 8, 11, torch.float32)
        options = {"reduction": reduction, "chunk_size": 7}
        loss = linear_cross_entropy(x, weight, targets, bias, **options)
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(x, weight, targets, bias, **options), loss)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.14
@pytest.mark.slow
def test_operations_are_registered_in_full():
    x, weight, bias, targets = _data(5, 4, 6, torch.float32)
    plain, sums, nothing = [t.detach() for t in (x, weight, bias)], torch.rand(5, 2), [False] * 3
    rest = (0.1, IGNORED, "none", 2, nothing, None)
    opcheck(ops.OP.operator, (x, weight, bias, targets, *rest))
    needs, unknown = [True, False, True], [torch.empty(0) for _ in range(3)]
    opcheck(
        ops.OP.backward_operator, (torch.rand(5), needs, *plain, targets, sums, *unknown, *rest)
    )
    needs = [True, True, False]
    rest = (0.1, IGNORED, "mean", 2, needs, None)
    opcheck(ops.OP.operator, (x, weight, None, targets, *rest))
    saved = (*plain[:2], None, targets, sums, *plain[:2], torch.empty(0))
    opcheck(ops.OP.backward_operator, (torch.rand(()), needs, *saved, *rest))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_as_one_graph(reduction):
    x, weight, bias, targets = _data(9, 8, 30, torch.float32)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*tensors):
        return linear_cross_entropy(*tensors, targets, bias, reduction=reduction, chunk_size=4)

    _agrees(compiled(x, weight), x, weight, bias, targets, reduction=reduction)


def test_compiled_without_a_row():
    _, weight, bias, _ = _data(5, 4, 6, torch.float32)
    x, targets = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.long)
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, weight, targets, bias, reduction="sum", chunk_size=2)
    assert not any(found.any() for found in torch.autograd.grad(loss, (x, weight, bias)))


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_target_out_of_range(chunk_size, reduction):
    x, weight, _, targets = _data(5, 4, 6, torch.float32)
    targets[3] = 6
    with pytest.raises(IndexError, match="label of row 3 is 6; allowed are 0 to 5, or -100 for"):
        linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_size=chunk_size)


ONES = functools.partial(torch.ones, dtype=torch.float32)
GOOD = {
    "input": ONES(2, 3), "weight": ONES(4, 3), "targets": torch.ones(2, dtype=torch.long)
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"weight": ONES(4, 5)}, ValueError, r"Pass \(..., in_features\) and"),
        ({"bias": ONES(3)}, ValueError, r"bias has shape \[3\] and we"),
        ({"targets": GOOD["targets"][:1]}, ValueError, r"\[2, 3\]. Pass \[2\]"),
        ({"targets": ONES(2)}, TypeError, "targets is torch.float32"),
        ({"weight": ONES(4, 3).half()}, TypeError, "float16. Pass one floating"),
        (
            {"input": ONES(2, 3).long(), "weight": ONES(4, 3).long()},
            TypeError,
            "input is torch.int64; allowed",
        ),
        ({"weight": ONES(4, 3).to("meta")}, ValueError, "weight is on meta and input"),
        ({"reduction": "avg"}, ValueError, "'avg'; allowed are"),
        ({"label_smoothing": 2}, ValueError, "is 2.0; pass"),
        ({"chunk_size": 0}, ValueError, "chunk_size is 0; pass"),
        ({"chunk_size": 2.0}, ValueError, "chunk_size is 2.0; p"),
        ({"weight": ONES(0, 3)}, ValueError, r"shape \[0, 3\] has no class"),
        ({"weight": None}, TypeError, "weight is a NoneType; pass a tensor"),
        ({"targets": [0, 1]}, TypeError, "targets is a list; pass a tensor"),
    ],
)
def test_bad_input(changes, error, said):
    with pytest.raises(error, match=said):
        linear_cross_entropy(**GOOD | changes)


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch 2.13 has this class, 2.9 has not"
)
def test_module():
    """Arguments and weights are those of torch's class of the same name."""
    layer = LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1, chunk_size=3)
    theirs = torch.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
    theirs.load_state_dict(layer.state_dict())
    x, targets = torch.randn(7, 8), torch.randint(20, (7,))
    torch.testing.assert_close(layer(x, targets), theirs(x, targets))
    assert repr(layer).splitlines()[1:-1] == [
        "  reduction='mean', ignore_index=-100, label_smoothing=0.1, chunk_size=3",
        "  (linear): Linear(in_features=8, out_features=20, bias=True)",
    ]


def test_scripted_and_traced():
    """A scripted program calls the module; one that calls the function is told why it cannot."""

    def caller(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor):
        return linear_cross_entropy(x, weight, targets)

    with pytest.raises(
        torch.jit.frontend.NotSupportedError, match="take LinearCrossEntropyLoss there"
    ):
        torch.jit.script(caller)
    layer, x, targets = LinearCrossEntropyLoss(8, 20), torch.randn(7, 8), torch.randint(20, (7,))
    for program in (torch.jit.script(layer), torch.jit.trace(layer, (x, targets))):
        torch.testing.assert_close(program(x, targets), layer(x, targets))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_targets_too_narrow_for_the_classes(dtype, chunk_size, reduction):
    """-100 is 156 in uint8, and 300 classes are 44."""
    x, weight, _, _ = _data(4, 5, 300, torch.float32)
    targets = torch.tensor([0, 156, 3, 100] if dtype == torch.uint8 else [0, 120, -100, 100])
    found = linear_cross_entropy(
        x, weight, targets.to(dtype), reduction=reduction, chunk_size=chunk_size
    )
    torch.testing.assert_close(
        found, F.cross_entropy(F.linear(x, weight), targets, reduction=reduction)
    )
