"""``focal_loss``: the formula, awkward logits, targets, names; the rest is in ops/test_every_op."""

import contextlib
import math

import pytest
import torch

from apex.contrib.focal_loss import focal_loss
from apex.contrib.focal_loss.focal_loss import FocalLoss
from apex.ops import _runtime
from apex.ops.losses.focal_loss import OP, reference
from tests.tolerance import assert_one_rounding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = (6, 0.25, 2.0, 0.1)  # classes, alpha, gamma, smoothing
paths = pytest.mark.parametrize("path", ["reference", "triton"])


def by_hand(x, targets, total, classes, alpha, gamma, smoothing):
    """In the words of the paper, without regard for the cost."""
    x = x[targets != -2][:, :classes]
    positive = torch.zeros_like(x)
    for row, target in enumerate(targets[targets != -2].tolist()):
        if target >= 0:
            positive[row, target] = 1.0
    zero = x.new_zeros(())
    log_p, log_rest = -torch.logaddexp(zero, -x), -torch.logaddexp(zero, x)
    wanted = positive * (1 - smoothing / 2) + (1 - positive) * smoothing / 2
    entropy = -(wanted * log_p + (1 - wanted) * log_rest)
    of_class = alpha * torch.exp(gamma * log_rest)
    of_others = (1 - alpha) * torch.exp(gamma * log_p)
    return (
        torch.where(positive == 1, of_class, of_others) * entropy
    ).sum() / total.double().reshape(())


def data(rows=5, columns=7, dtype=torch.float32, scale=1.0):
    x = scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return x.to(dtype).requires_grad_(), torch.arange(rows) % columns - 2, torch.tensor([3.0])


def agrees(x, targets, total, *options, interpreted=False, exponentials=0):
    loss = focal_loss(x, targets, total, *options)
    exact_x = x.detach().double().requires_grad_()
    exact = by_hand(exact_x, targets, total, *options)
    assert loss.shape == ()
    assert loss.dtype == torch.promote_types(x.dtype, torch.float32)
    assert_one_rounding(loss.detach(), exact.detach())
    found, exact_found = (torch.autograd.grad(y, t)[0] for y, t in ((loss, x), (exact, exact_x)))
    assert found.dtype == x.dtype
    assert_one_rounding(found, exact_found, interpreted=interpreted, exponentials=exponentials)


@paths
@pytest.mark.parametrize(
    ("alpha", "gamma", "smoothing"),
    [(0.25, 0.0, 0.2), (0.25, 0.5, 0.0), (0.5, 1.0, 0.2), (0.25, 2.0, 0.0), (1.0, 3.7, 0.2)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formula(path, alpha, gamma, smoothing, dtype):
    """Two columns of padding, every kind of target, a block and a part of one."""
    with _runtime.use(path):
        options = (35, alpha, gamma, smoothing)
        agrees(*data(53, 37, dtype), *options, interpreted=path == "triton")


@paths
@pytest.mark.parametrize("columns", [1, 1024, 2500])
def test_one_class_and_rows_of_a_block_and_more(path, columns):
    with _runtime.use(path):
        x, targets, total = data(3, columns)
        agrees(x, targets.clamp(max=columns - 1), total, columns, 0.25, 2.0, 0.1)


@paths
@pytest.mark.parametrize(("gamma", "smoothing"), [(0.0, 0.2), (0.5, 0.0), (2.0, 0.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_of_100(path, gamma, smoothing, dtype):
    """Right and wrong by 100; sigmoid(-104) is 0 in float32, whose power has slope inf."""
    x = torch.tensor([100.0, -100.0, 104.0, -104.0]).repeat(6, 32).to(dtype).requires_grad_()
    with _runtime.use(path):
        targets, total = torch.tensor([-2, -1, 0, 1, 2, 3]), torch.tensor([3.0])
        options = (128, 0.25, gamma, smoothing)
        agrees(x, targets, total, *options, interpreted=path == "triton")


@paths
def test_small_losses_are_exact(path):
    """log(1 + p) of a small p, as in a detector that starts with p = 0.01, or knows its classes."""
    for bias in (-4.6, -12.0):
        x, _, total = data(20, 64)
        x = (x.detach() / 10 + bias).requires_grad_()
        with _runtime.use(path):
            agrees(x, torch.full((20,), -1), total, 64, 0.25, 2.0, 0.0, exponentials=3)


def test_float64():
    """Where torch's softplus, by default, would take a logit for its cross-entropy."""
    x = torch.linspace(20.5, 30.0, 24, dtype=torch.float64).view(4, 6)
    arguments = (x, torch.tensor([-1, 0, 1, 2]), torch.tensor([3.0]), *OPTIONS)
    assert_one_rounding(focal_loss(*arguments), by_hand(*arguments))


def test_gradients_of_gradients_of_large_logits():
    x, targets, total = data(6, 8, torch.float64, scale=200.0)
    for gamma in (0.5, 1.5, 2.0):
        loss = focal_loss(x, targets, total, 8, 0.25, gamma, 0.1)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()
    assert torch.isfinite(x.grad).all()


@paths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_does_not_count_may_be_anything(path, bad):
    x, targets, total = data()
    with _runtime.use(path):
        wanted = focal_loss(x, targets, total, *OPTIONS)
        (wanted_grad,) = torch.autograd.grad(wanted, x)
        with torch.no_grad():
            x[0] = bad  # target -2
            x[:, 6] = bad  # padding
        loss = focal_loss(x, targets, total, *OPTIONS)
        assert torch.equal(loss, wanted)
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, wanted_grad)
    assert not grad[0].any()
    assert not grad[:, 6].any()


@paths
def test_masked_logits(path):
    """Minus infinity rules a class out, and costs nothing."""
    x, targets, total = data()
    with torch.no_grad():
        x[:, 5] = -torch.inf
    with _runtime.use(path):
        loss = focal_loss(x, targets, total, 6, 0.25, 2.0).detach()
        exact = focal_loss(x.detach().double(), targets, total, 5, 0.25, 2.0)
        assert_one_rounding(loss, exact)


@pytest.mark.parametrize(("target", "said"), [(6, "6"), (-3, "-3")])
@pytest.mark.slow
def test_a_target_out_of_range(target, said):
    """An error on a CPU; nan where the host would have to wait for the targets to know."""
    x, targets, total = data()
    (wanted,) = torch.autograd.grad(focal_loss(x, targets, total, *OPTIONS), x)
    targets[3] = target
    with pytest.raises(IndexError, match=f"anchor 3 is {said}; allowed are 0 to 5, -1 for backgr"):
        focal_loss(x, targets, total, *OPTIONS)
    compiled = torch.compile(focal_loss, backend="aot_eager", fullgraph=True)
    mapped = torch.vmap(focal_loss, (0, 0, *[None] * 5))
    for function, path in ((compiled, None), (mapped, None), (OP, "triton")):
        with _runtime.use(path) if path else contextlib.nullcontext():
            given = (x[None], targets[None]) if function is mapped else (x, targets)
            losses = function(*given, total, *OPTIONS)
            assert losses.isnan().all()
            (grad,) = torch.autograd.grad(losses.sum(), x)
        assert grad[3, :6].isnan().all()
        grad[3] = wanted[3]
        torch.testing.assert_close(grad, wanted)


@paths
def test_the_number_of_positives(path):
    x, targets, _ = data()
    with _runtime.use(path):
        whole = focal_loss(x, targets, torch.tensor([1.0]), *OPTIONS)
        (whole_grad,) = torch.autograd.grad(whole, x)
        for total in (torch.tensor(4.0), torch.tensor([4]), torch.tensor([[4.0]]).half()):
            loss = focal_loss(x, targets, total, *OPTIONS)
            assert torch.equal(loss, whole / 4)
            (grad,) = torch.autograd.grad(loss, x)
            torch.testing.assert_close(grad, whole_grad / 4)
        assert focal_loss(x, targets, torch.tensor([0.0]), *OPTIONS) == math.inf
        total = torch.tensor([2.0], requires_grad=True)
        found = torch.autograd.grad(focal_loss(x, targets, total, *OPTIONS), (x, total))
        torch.testing.assert_close(found[1], -whole.detach()[None] / 4)
        torch.testing.assert_close(found[0], whole_grad / 2)


@paths
def test_any_rank_and_integer(path):
    x, targets, total = data(24, 7)
    with _runtime.use(path):
        exact = focal_loss(x.detach().double(), targets, total, *OPTIONS)
        for dtype in (torch.int8, torch.int32):
            shape = (2, 3, 4)
            found = focal_loss(x.view(*shape, 7), targets.to(dtype).view(shape), total, *OPTIONS)
            assert_one_rounding(found.detach(), exact)
        first = focal_loss(x[2], targets[2].to(torch.uint8), total, *OPTIONS)
        exact = focal_loss(x[2:3].detach().double(), targets[2:3], total, *OPTIONS)
        assert_one_rounding(first.detach(), exact)
        assert focal_loss(x[:0], targets[:0], total, *OPTIONS) == 0.0


def test_names():
    """``focal_loss`` of the package is the function, and has what the module of its name has."""
    import apex.contrib.focal_loss.focal_loss as module

    arguments = (*data(), *OPTIONS)
    wanted = focal_loss(*arguments)
    assert torch.equal(focal_loss.focal_loss(*arguments), wanted)
    assert torch.equal(module.focal_loss(*arguments), wanted)
    assert module.FocalLoss is focal_loss.FocalLoss is FocalLoss


def test_apply():
    x, targets, total = data()
    wanted = focal_loss(x, targets, total, *OPTIONS)
    (wanted_grad,) = torch.autograd.grad(wanted, x)

    compiled = torch.compile(FocalLoss.apply, backend="aot_eager", fullgraph=True)
    for apply in (FocalLoss.apply, compiled):
        loss = apply(x, targets, total, *OPTIONS)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], wanted_grad)
    plain = FocalLoss.apply(x, targets, total, 6, 0.25, 2.0)
    assert torch.equal(plain, focal_loss(x, targets, total, 6, 0.25, 2.0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cls_output": torch.zeros(5, 7, dtype=torch.int64)}, "cls_output is torch.int64"),
        ({"cls_targets_at_level": torch.zeros(5)}, "targets is torch.float32; pass an integer"),
        ({"cls_targets_at_level": torch.zeros(4).long()}, r"has shape \[4\] and cls_output \[5, 7"),
        ({"num_positive_sum": 3.0}, "num_positives_sum is a float; pass a tensor"),
        ({"num_positive_sum": torch.ones(2)}, r"has shape \[2\] and has to be one number"),
        ({"num_real_classes": 8}, r"num_real_classes is 8 and cls_output has shape \[5, 7\]. Pass"),
        ({"num_real_classes": 0}, "num_real_classes is 0"),
        ({"num_real_classes": 5.5}, "num_real_classes is 5.5"),
        ({"num_positive_sum": torch.tensor([1j])}, "num_positives_sum is torch.complex64; pass a"),
        ({"alpha": -1.0}, "alpha is -1.0; pass a number from 0 to 1"),
        ({"gamma": -0.5}, "gamma is -0.5; pass a number of 0 or more"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5; pass a number from 0 to 1"),
    ],
)
def test_bad_input(changes, said):
    x, targets, total = data()
    arguments = {
        "cls_output": x, "cls_targets_at_level": targets, "num_positive_sum": total,
        "num_real_classes": 6, "alpha": 0.25, "gamma": 2.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        focal_loss(**arguments | changes)


@pytest.mark.parametrize("columns", [5, 7])
def test_few_anchors_are_computed_at_once_with_the_bits_of_the_definition(columns):
    logits = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets, positives = torch.tensor([-2, -1, 0, 4, 2, -2]), torch.tensor([3.0])
    args = (logits, targets, positives, 5, 0.25, 2.0, 0.1)
    found, expected = OP.torchs(*args), reference(*args)
    assert torch.equal(found, expected)
    assert torch.equal(focal_loss(*args), expected)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    assert torch.equal(*grads)
    assert OP.torchs(logits, targets, positives.to("meta"), *args[3:]) is None
    assert OP.torchs(logits.int(), *args[1:]) is None
