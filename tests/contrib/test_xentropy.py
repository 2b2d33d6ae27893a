"""``SoftmaxCrossEntropyLoss``: labels, awkward logits; the rest is in ops/test_every_op.py."""

import contextlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.ops import _runtime
from apex.ops.losses import cross_entropy as ops
from tests.tolerance import NEAR_PROBABILITY_1, assert_one_rounding, errors_in_eps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# a block and one more, one class, one row of which several programs take a part
SHAPES = [(5, 4097), (3, 1), (1, 9000)]
PADDING = 3
HAS_TRITON = importlib.util.find_spec("triton") is not None


def _data(shape, dtype, seed=0, scale=1.0):
    rows, classes = shape
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(classes, (rows,), generator=generator)
    if rows > 2 and classes > PADDING:
        labels[1] = PADDING
    grad = torch.rand(rows, generator=generator) + 0.5
    return logits, labels, grad


def _exact(logits, labels, grad, smoothing, padding_idx=PADDING):
    wide = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(
        wide, labels, reduction="none", label_smoothing=smoothing, ignore_index=padding_idx
    )
    losses.backward(grad.double())
    return losses.detach(), wide.grad


def _agrees(
    losses, logits, labels, grad, smoothing, interpreted=False, padding_idx=PADDING, added=1
):
    (found,) = torch.autograd.grad(losses, logits, grad.to(losses.dtype))
    exact, exact_grad = _exact(logits, labels, grad, smoothing, padding_idx)
    assert losses.dtype == torch.promote_types(logits.dtype, torch.float32)
    assert found.dtype == logits.dtype
    assert_one_rounding(losses.detach(), exact)
    assert_one_rounding(found, exact_grad, interpreted=interpreted, added=added)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_exact_to_one_rounding_in_every_way(dtype, shape, smoothing):
    """In pieces, by the definition, and by the kernel."""
    logits, labels, grad = _data(shape, dtype)
    losses = ops.OP.operator(logits, labels, smoothing, PADDING)[0]
    _agrees(losses, logits, labels, grad, smoothing)
    for path in ("reference", "triton"):
        with _runtime.use(path):
            losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, PADDING, True)
            _agrees(losses, logits, labels, grad, smoothing, interpreted=path == "triton")


@pytest.mark.parametrize("path", [None, "triton"])
def test_more_than_64k_classes(path, monkeypatch):
    """On a GPU 17 programs share a row, one of which has 5 columns."""
    if path == "triton":
        from apex.kernels import cross_entropy as kernels

        monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    logits, labels, grad = _data((3, 2**16 + 5), torch.float32)
    labels[0] = 2**16 + 4
    with contextlib.nullcontext() if path is None else _runtime.use(path):
        losses = ops.OP.operator(logits, labels, 0.1, PADDING)[0]
        # torch adds up the probabilities one after the other on a CPU without vectors
        _agrees(losses, logits, labels, grad, 0.1, added=2**16)


@pytest.mark.parametrize("piece", [300, 50])
def test_pieces_that_stay_in_the_cache(piece, monkeypatch):
    """The CPU's path over several pieces: the last one smaller, or a row larger than a piece."""
    monkeypatch.setattr(ops, "PIECE", piece)
    for dtype in (*DTYPES, torch.float64):
        logits, labels, grad = _data((8, 100), dtype)
        losses = ops.OP.operator(logits, labels.to(torch.uint8), 0.1, PADDING)[0]
        _agrees(losses, logits, labels, grad, 0.1)
        losses = ops.OP.operator(logits, labels.to(torch.uint8), 0.1, PADDING - 256)[0]
        _agrees(losses, logits, labels, grad, 0.1, padding_idx=PADDING - 256)


def test_an_eager_call_makes_no_lse_in_pieces(monkeypatch):
    """The pieces' backward reads none: two passes of the forward less, and the losses' bits."""
    logits, labels, _ = _data((9, 50), torch.float32)
    monkeypatch.setattr(ops.OP.pieces, "above", 0)
    monkeypatch.setattr(ops, "PIECE", 2 * 50)
    losses, sums = ops.OP.operator(logits, labels, 0.1, PADDING)
    assert sums[:, 0].isfinite().all()
    monkeypatch.setattr(torch.Tensor, "amax", pytest.fail)
    eager = ops.cross_entropy(logits, labels, smoothing=0.1, padding_idx=PADDING)
    assert torch.equal(eager, losses)
    eager.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [100, 4099, 32000])
@pytest.mark.parametrize("path", [None, "reference", "triton"])
def test_the_gradient_of_the_label_near_probability_1_does_not_cancel(dtype, classes, path):
    _is_exact_at_the_label([1e-2, 0.5, 1e-3, 1e-4, 1e-5, 1e-6], classes, dtype, path, (0.0, 0.1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [100, 4099, 32000])
def test_rows_that_are_not_corrected_have_an_exact_gradient_too(dtype, classes, monkeypatch):
    """Without a row near probability 1 the gradient is torch's."""
    corrected = []
    monkeypatch.setattr(ops, "_correct", lambda *_: corrected.append(1))
    misses = [0.12, 0.2, 0.3, 0.5, 0.9, 0.99]
    _is_exact_at_the_label(misses, classes, dtype)
    assert not corrected
    monkeypatch.undo()
    _is_exact_at_the_label([0.08, *misses[1:]], classes, dtype)


def _near_1(misses, classes, dtype=torch.float32):
    """Logits of rows whose label has the probability ``1 - miss``, and the labels."""
    misses = torch.tensor(misses, dtype=torch.float64)
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn((len(misses), classes), generator=generator)
    others = logits[:, 1:].double().logsumexp(1)
    logits[:, 0] = others + (1 / misses - 1).log()
    at = PADDING + classes // 3
    return logits.roll(at, 1).to(dtype).requires_grad_(), torch.full((len(misses),), at)


def _is_exact_at_the_label(misses, classes, dtype, path=None, smoothings=(0.0,)):
    logits, labels = _near_1(misses, classes, dtype)
    ones = torch.ones(len(misses))
    for smoothing in smoothings:
        with contextlib.nullcontext() if path is None else _runtime.use(path):
            losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, PADDING)
            (found,) = torch.autograd.grad(losses, logits, ones)
        _, exact = _exact(logits, labels, ones, smoothing)
        for row in range(len(misses)):
            one, other = found[row, labels[row], None], exact[row, labels[row], None]
            if dtype == torch.float32:
                assert errors_in_eps(one, other) <= NEAR_PROBABILITY_1
            else:
                assert_one_rounding(one, other, interpreted=path == "triton")


@pytest.mark.parametrize("padding", [-100, PADDING])
def test_derivatives_of_every_order_near_probability_1(padding):
    """Of corrected rows: second ones, those of many gradients at once, and of a None."""
    logits, labels = _near_1([1e-2, 0.5, 1e-6, 1e-4], 20)
    labels[1] = padding

    def losses(x):
        return SoftmaxCrossEntropyLoss.apply(x, labels, 0.0, padding)

    def exact(x):
        return F.cross_entropy(x, labels, ignore_index=padding, reduction="none")

    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    first = jacobian(exact, logits.detach().double())
    second = hessian(lambda x: exact(x).sum(), logits.detach().double())
    for found in (
        jacobian(losses, logits),
        jacobian(losses, logits, vectorize=True),
        jacobian(losses, logits, create_graph=True),
        torch.func.jacrev(losses)(logits.detach()),
        torch.func.jacfwd(losses)(logits.detach()),
    ):
        for row in range(4):
            assert errors_in_eps(found[row, row], first[row, row]) <= NEAR_PROBABILITY_1
            assert not found[row, torch.arange(4) != row].any()
    found = hessian(lambda x: losses(x).sum(), logits)
    for row in range(4):
        assert errors_in_eps(found[row, :, row], second[row, :, row]) <= NEAR_PROBABILITY_1

    class Absorbed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    (Absorbed.apply(losses(logits)).sum() + logits.sum()).backward()
    assert torch.equal(logits.grad, torch.ones_like(logits))


@pytest.mark.parametrize("times", [1, 20], ids=["few", "many"])
@pytest.mark.parametrize("padding", [-100, PADDING])
def test_rows_of_padding_are_not_taken_for_certain_ones(padding, times, monkeypatch):
    """Their loss is 0, which no correction follows; with a certain row among them one does."""
    corrected = []
    monkeypatch.setattr(ops, "_correct", lambda *_: corrected.append(1))
    logits, labels = _near_1([0.5, 0.5, 0.9] * times, 20)
    labels[1::3] = padding
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, padding)
    gradient = torch.autograd.grad(losses.sum(), logits)[0]
    assert gradient.any(1).tolist() == [True, False, True] * times
    SoftmaxCrossEntropyLoss.apply(logits, torch.full_like(labels, padding), 0.0, padding)
    assert not corrected
    logits, _ = _near_1([0.5, 0.5, 1e-6] * times, 20)
    SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, padding)
    assert corrected


def test_large_logits_take_the_operation(monkeypatch):
    monkeypatch.setattr(ops.OP.pieces, "above", 100)
    logits, labels, _ = _data((8, 100), torch.float32)
    assert "cross_entropy" in type(SoftmaxCrossEntropyLoss.apply(logits, labels).grad_fn).__name__
    monkeypatch.undo()
    assert "NllLoss" in type(SoftmaxCrossEntropyLoss.apply(logits, labels).grad_fn).__name__


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_label_0_is_padding_by_default(path):
    """As in the original; every other label counts."""
    logits, labels = torch.zeros(3, 4, requires_grad=True), torch.tensor([0, 1, 3])
    with _runtime.use(path):
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
        losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.0, 1.38629436, 1.38629436])
    assert not logits.grad[0].any()
    assert logits.grad[1].tolist() == pytest.approx([0.25, -0.75, 0.25, 0.25])


@pytest.mark.parametrize("way", ["operation", "triton"])
def test_padded_rows_are_0_whatever_is_in_them(way):
    logits = torch.randn(4, 9)
    logits[1], logits[2] = torch.nan, torch.inf
    logits.requires_grad_()
    labels = torch.tensor([2, -1, -1, 5])
    with _runtime.use("triton" if way == "triton" else "reference"):
        losses = ops.OP.operator(logits, labels, 0.1, -1)[0]
        losses.backward(torch.ones(4))
    assert losses[1:3].tolist() == [0.0, 0.0]
    assert not logits.grad[1:3].any()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("path", ["reference", "triton", "shared rows"])
@pytest.mark.parametrize("first", [0, 300])
def test_infinite_logits(path, first):
    """Classes ruled out by -inf, a whole block of them first too."""
    logits = torch.randn(2, 600)
    logits[:, first : first + 300] = -torch.inf
    logits.requires_grad_()
    labels = torch.tensor([(first + 300) % 600, (first + 301) % 600])
    given = "reference" if path == "reference" else "triton"
    with _runtime.use(given), pytest.MonkeyPatch.context() as patch:
        if given == "triton":
            from apex.kernels import cross_entropy as kernels

            patch.setattr(kernels, "BLOCK", 256)
            patch.setattr(kernels, "multiprocessors", lambda device: 99 * (path != "triton"))
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -1)
        losses.sum().backward()
    exact, exact_grad = _exact(logits, labels, torch.ones(2), 0.0, -1)
    assert_one_rounding(losses.detach(), exact)
    assert_one_rounding(logits.grad, exact_grad)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_logits_far_from_zero(path, smoothing):
    """As exact as those near it: the sum's logarithm is 1e4, its float32 0.001 off."""
    logits, labels, grad = _data((9, 70), torch.float32)
    logits = logits.detach() + 20000.0
    with _runtime.use(path):
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, PADDING)
    exact, _ = _exact(logits, labels, grad, smoothing)
    assert_one_rounding(losses, exact)


def test_other_integer_labels_and_strides():
    wide = torch.randn(5, 40).requires_grad_()
    labels = torch.tensor([1, 9, 3, 7, 3])
    for logits in (wide[:, 3:30], wide[:, ::2], wide.t()[:5, ::8]):
        short = labels[: logits.shape[0]] % logits.shape[1]
        expected = SoftmaxCrossEntropyLoss.apply(logits, short, 0.1, 3)
        for dtype in (torch.int32, torch.uint8):
            for path in ("reference", "triton"):
                with _runtime.use(path):
                    found = SoftmaxCrossEntropyLoss.apply(logits, short.to(dtype), 0.1, 3)
                    found.sum().backward()
                torch.testing.assert_close(found, expected)
        wide.grad = None


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("rows", "columns", "programs"),
    [(1, 2**17, 32), (1, 2**22, 512), (64, 2**17, 8), (100, 2**15, 4), (132, 2**20, 1)],
)
def test_how_many_programs_share_a_row(rows, columns, programs):
    """At most four a multiprocessor in all, of whole blocks each; one where all are busy."""
    from apex.kernels import cross_entropy as kernels

    width = kernels._width(rows, columns, 132, kernels.BLOCK, kernels.PROGRAMS_PER_MULTIPROCESSOR)
    assert width % kernels.BLOCK == 0
    assert -(-columns // width) == programs


def test_incoming_gradient_is_left_alone():
    """The original masks it in place."""
    logits, labels, grad = _data((6, 8), torch.float32)
    before = grad.clone()
    ops.OP.operator(logits, labels, 0.0, PADDING)[0].backward(grad)
    assert torch.equal(grad, before)


def _wrong(rows, bad):
    labels = torch.ones(rows, dtype=torch.long)
    labels[2] = bad
    return labels


@pytest.mark.parametrize("bad", [5, -1, 2**40])
@pytest.mark.parametrize("small", [2**22, 0], ids=["definition", "pieces"])
def test_a_label_out_of_range_on_a_cpu(bad, small, monkeypatch):
    monkeypatch.setattr(ops.OP.pieces, "above", small)
    said = rf"label of row 2 is {bad}; allowed are 0 to 4, or 0 for"
    with pytest.raises(IndexError, match=said):
        SoftmaxCrossEntropyLoss.apply(torch.randn(4, 5), _wrong(4, bad), 0.0, 0)


@pytest.mark.parametrize("bad", [5, -1, 2**40])
def test_a_label_out_of_range_in_the_kernel_is_nan(bad):
    """Nothing is read or written out of bounds, and nobody waits to find out."""
    logits = torch.randn(4, 5, requires_grad=True)
    with _runtime.use("triton"):
        losses = SoftmaxCrossEntropyLoss.apply(logits, _wrong(4, bad), 0.1, 0)
        losses.sum().backward()
    assert losses.isnan().tolist() == [False, False, True, False]
    assert logits.grad.isnan().all(1).tolist() == [False, False, True, False]
    assert logits.grad[[0, 1, 3]].isfinite().all()


LOGITS, LABELS = torch.ones(2, 3), torch.ones(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((LOGITS, torch.ones(3).long()), ValueError, r"\[2, 3\] and labels \[3\]"),
        ((torch.ones(2, 3, 4), LABELS), ValueError, r"view\(-1, classes\)"),
        ((LOGITS, torch.ones(2)), TypeError, "labels is torch.float32; pass an integer"),
        ((LOGITS, [1, 2]), TypeError, "labels is a list; pass a tensor"),
        ((LOGITS.long(), LABELS), TypeError, "logits is torch.int64; allowed"),
        ((LOGITS, LABELS, 1.5), ValueError, "smoothing is 1.5; pass"),
        ((torch.ones(2, 0), LABELS), ValueError, "have no class"),
        ((LOGITS, LABELS.to("meta")), ValueError, "Move one"),
    ],
)
def test_bad_input(arguments, error, said):
    with pytest.raises(error, match=said):
        SoftmaxCrossEntropyLoss.apply(*arguments)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_rows_give_no_losses(shape, smoothing):
    x = torch.zeros(shape, requires_grad=True)
    y = SoftmaxCrossEntropyLoss.apply(x, torch.zeros(0, dtype=torch.long), smoothing, -1)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((0,), shape)
