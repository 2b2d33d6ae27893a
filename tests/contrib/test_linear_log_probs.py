"""``linear_log_probs``, and what language models add to ``linear_cross_entropy``."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from apex.commands.bench.memory import peak_bytes
from apex.contrib.xentropy import LinearCrossEntropyLoss, linear_cross_entropy, linear_log_probs
from apex.ops import _runtime
from tests.contrib.test_linear_cross_entropy import _data
from tests.tolerance import (
    NEAR_PROBABILITY_1,
    NEAR_PROBABILITY_1_IN_16_BITS,
    PRODUCTS,
    assert_close_in_rms,
    errors_in_eps,
)
from tests.vmapped import assert_backward_under_vmap

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
IGNORED = 3
# rows, features, classes, rows at a time: an uneven last piece, one row at a time, one piece; more
# classes than a slice in float32 has numbers are a slice for each row
SHAPES = [(13, 17, 50, 4), (6, 5, 300, 1), (9, 8, 7, 9)]
OPTIONS = [
    {"softcap": 3.0},
    {"temperature": 0.7},
    {"z_loss": 0.1},
    {"softcap": 3.0, "temperature": 1.5, "z_loss": 0.1, "label_smoothing": 0.1},
]


def _z(x, weight, bias, softcap=None, temperature=1.0):
    z = F.linear(x, weight, bias)
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def _loss(x, weight, bias, targets, reduction, z_loss=0.0, label_smoothing=0.0, **shape):
    z, counts = _z(x, weight, bias, **shape), targets != IGNORED
    losses = F.cross_entropy(
        z, targets, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="none"
    )
    losses = losses + z_loss * z.logsumexp(1).square() * counts
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}[reduction]


def _numbers(x, weight, bias, targets, **shape):
    logs, counts = F.log_softmax(_z(x, weight, bias, **shape), 1), targets != IGNORED
    return logs.gather(1, targets[:, None])[:, 0] * counts, -(logs.exp() * logs).sum(1) * counts


def _agree(ours, definition, given):
    """Values, and gradients for weights of their own, against float64."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    exact = definition(*wide)
    grads = [torch.rand(one.shape).double() + 0.5 for one in exact]
    leaves, wide = ([t for t in some if t is not None] for some in (given, wide))
    found = torch.autograd.grad(ours, leaves, [g.to(o) for g, o in zip(grads, ours, strict=True)])
    expected = torch.autograd.grad(exact, wide, grads)
    dtype = leaves[0].dtype
    assert {one.dtype for one in ours} == {torch.promote_types(dtype, torch.float32)}
    assert {one.dtype for one in found} == {dtype}
    for one, other in zip((*ours, *found), (*exact, *expected), strict=True):
        limit = PRODUCTS[dtype] * (torch.finfo(dtype).eps / torch.finfo(one.dtype).eps)
        assert_close_in_rms(one.detach(), other.detach(), limit)


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("policy", ["balanced", "compact"])
def test_losses_agree_with_the_definition(dtype, shape, options, reduction, policy):
    *sizes, chunk_size = shape
    x, weight, bias, targets = _data(*sizes, dtype)
    options = {**options, "reduction": reduction}
    loss = linear_cross_entropy(
        x, weight, targets, bias, ignore_index=IGNORED, chunk_size=chunk_size, acc_policy=policy,
        acc_dtype=torch.promote_types(dtype, torch.float32) if policy == "compact" else None,
        **options,
    )  # fmt: skip
    _agree([loss], lambda *wide: [_loss(*wide, targets, **options)], [x, weight, bias])


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_and_entropy_agree_with_the_definition(dtype, shape, options, bias):
    *sizes, chunk_size = shape
    x, weight, bias, targets = _data(*sizes, dtype, bias=bias)
    ours = linear_log_probs(
        x, weight, targets, bias, ignore_index=IGNORED, chunk_size=chunk_size, **options
    )
    _agree(ours, lambda *wide: _numbers(*wide, targets, **options), [x, weight, bias])


def test_one_of_the_two_has_the_same_gradient_alone():
    x, weight, _, targets = _data(9, 8, 30, torch.float64, bias=False)
    for number in range(2):
        ours = linear_log_probs(x, weight, targets, ignore_index=IGNORED, chunk_size=2)[number]
        exact = _numbers(x, weight, None, targets)[number]
        found, expected = (torch.autograd.grad(one.sum(), (x, weight)) for one in (ours, exact))
        torch.testing.assert_close(found, expected)


def test_a_row_that_is_ignored_may_have_numbers_that_are_not_finite():
    x, weight, _, targets = _data(4, 5, 6, torch.float32, bias=False)
    with torch.no_grad():
        x[1] = torch.inf
    log_probs, entropy = linear_log_probs(x, weight, targets, ignore_index=IGNORED)
    (slope,) = torch.autograd.grad((log_probs + entropy).sum(), x)
    assert log_probs[1] == entropy[1] == 0
    assert not slope[1].any()
    assert log_probs.isfinite().all()


def test_a_class_of_probability_0_gives_no_nan():
    x, weight, _, targets = _data(5, 4, 6, torch.float32, bias=False)
    bias = torch.zeros(6)
    bias[2] = -torch.inf  # a token that is masked
    targets.fill_(0)
    log_probs, entropy = linear_log_probs(x, weight, targets, bias)
    grads = torch.autograd.grad((log_probs + entropy).sum(), (x, weight))
    assert all(one.isfinite().all() for one in (log_probs, entropy, *grads))
    assert not grads[1][2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", [None, "triton"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 2.0}, {}, {"chunk_size": 1}, {"chunk_size": 1, "acc_policy": "compact"}],
    ids=str,
)
def test_the_gradient_of_a_class_near_probability_1_does_not_cancel(options, path, dtype):
    """Two roundings: of the logits' gradient and of the product."""
    others = torch.tensor(3_999.0, dtype=torch.float64).log()  # of logits of 0
    for miss in (1e-2, 1e-4, 1e-6):
        scale, odds = options.get("temperature", 1.0), torch.tensor(1 / miss - 1).double()
        weight = torch.zeros(4_000, 1, dtype=dtype)
        weight[0] = scale * (others + odds.log())
        x = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        with contextlib.nullcontext() if path is None else _runtime.use(path):
            loss = linear_cross_entropy(x, weight, torch.tensor([0]), **options)
            (slope,) = torch.autograd.grad(loss * 2**12, x)  # a scale, which float16 needs
        logit = weight[0].double() / scale
        exact = -logit * torch.sigmoid(others - logit) * 2**12
        limit = NEAR_PROBABILITY_1 if dtype == torch.float32 else 2 * NEAR_PROBABILITY_1_IN_16_BITS
        assert errors_in_eps(slope[0], exact) <= limit


def test_derivatives_of_every_order_and_transforms():
    x, weight, bias, targets = _data(4, 3, 5, torch.float64)

    def numbers(*given):
        return linear_log_probs(
            given[0], given[1], targets, given[2], ignore_index=IGNORED, softcap=2.0, chunk_size=3
        )

    assert torch.autograd.gradcheck(numbers, (x, weight, bias))
    assert torch.autograd.gradgradcheck(numbers, (x, weight, bias))
    assert_backward_under_vmap(numbers(x, weight, bias).entropy, (x, weight, bias))
    many = torch.stack([x, 2 * x])
    found = torch.vmap(lambda one: numbers(one, weight, bias).log_probs)(many)
    torch.testing.assert_close(found, torch.stack([numbers(one, weight, bias)[0] for one in many]))
    with _runtime.use("reference"):
        torch.testing.assert_close(numbers(x, weight, bias), numbers(x, weight, bias))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's
def test_compiled_whole():
    x, weight, bias, targets = _data(6, 4, 9, torch.float32)

    def loss(*given):
        return linear_cross_entropy(
            given[0], given[1], targets, given[2], ignore_index=IGNORED, z_loss=0.1, chunk_size=4
        )

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    given = (x, weight, bias)
    ours, expected = compiled(*given), loss(*given)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, given), torch.autograd.grad(expected, given)
    )


def test_shapes_integers_and_autocast():
    x, weight, _, _ = _data(6, 4, 9, torch.float32, bias=False)
    targets = torch.randint(9, (2, 3), dtype=torch.int16)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_log_probs(x.view(2, 3, 4), weight, targets)
    assert [(one.shape, one.dtype) for one in found] == [((2, 3), torch.float32)] * 2
    found.entropy.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    empty = linear_log_probs(x[:0], weight, targets.view(-1)[:0])
    assert [one.shape for one in empty] == [(0,)] * 2


def test_the_module_passes_them_on():
    layer = LinearCrossEntropyLoss(4, 9, softcap=2.0, temperature=0.5, z_loss=0.1)
    x, targets = torch.randn(5, 4), torch.randint(9, (5,))
    expected = linear_cross_entropy(
        x, layer.linear.weight, targets, softcap=2.0, temperature=0.5, z_loss=0.1
    )
    assert layer(x, targets) == expected
    assert "softcap=2.0, temperature=0.5, z_loss=0.1" in repr(layer)


@pytest.mark.filterwarnings("ignore:.*")  # the profiler's, of torch's
@pytest.mark.parametrize(
    ("policy", "dtype", "part"),
    [("balanced", torch.float32, 0.45), ("compact", torch.bfloat16, 0.3)],
    ids=["balanced", "compact"],
)
def test_logits_are_never_all_in_memory(policy, dtype, part):
    x, weight, _, targets = _data(4096, 16, 4096, dtype, bias=False)

    def run():
        log_probs, entropy = linear_log_probs(x, weight, targets, acc_policy=policy)
        torch.autograd.grad((log_probs + entropy).sum(), (x, weight))

    assert peak_bytes(run, torch.device("cpu")) <= part * 4096 * 4096 * dtype.itemsize


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"softcap": 0.0}, "softcap is 0.0; pass a number above 0, or None"),
        ({"temperature": 0.0}, "temperature is 0.0; pass a number above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"z_loss": -1.0}, "z_loss is -1.0; pass 0 or more"),
    ],
)
def test_what_is_refused(options, said):
    x, weight, _, targets = _data(4, 3, 5, torch.float32, bias=False)
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: {said}"):
        linear_cross_entropy(x, weight, targets, **options)
    if "z_loss" not in options:
        with pytest.raises(ValueError, match=f"^linear_log_probs: {said}"):
            linear_log_probs(x, weight, targets, **options)


def test_a_target_that_is_no_class_is_named():
    x, weight, _, _ = _data(4, 3, 5, torch.float32, bias=False)
    with pytest.raises(IndexError, match=r"linear_log_probs: the label of row 2 is 5"):
        linear_log_probs(x, weight, torch.tensor([0, 1, 5, 2]))
    with pytest.raises(ValueError, match="linear_log_probs: "):
        linear_log_probs(x, weight, torch.tensor([0, 1]))
