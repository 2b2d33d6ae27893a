"""Every function on NVIDIA's lists, on the CPU: as if its arguments had been cast by hand.

At O4 they compute what ``torch.autocast`` has them compute.
"""

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

from .functions import calls, convert

LISTS = (functional_overrides, torch_overrides, tensor_overrides)
IN_PLACE = ("__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__")
HALF = {"O1": torch.float16}
CALLS = calls()


def each(kind):
    keys = CALLS[kind]
    return pytest.mark.parametrize(
        "key", keys, ids=[f"{space.__name__}.{name}" for space, name in keys]
    )


def run(key, args):
    """The function's result and the gradient of its first argument, where it has one."""
    space, name = key
    first = args[0]
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        first = first.clone().requires_grad_()
        args = (first, *args[1:])
    result = getattr(space, name)(*args)
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return result, None
    with amp.disable_casts():
        result.sum().backward()
    return result.detach(), first.grad


def by_hand(key, args, dtype):
    """The same with the cast as an operation of its own."""
    space, name = key
    first = args[0]
    if not isinstance(first, torch.Tensor):
        return getattr(space, name)(*convert(args, dtype)), None
    first = first.clone().requires_grad_()
    result = getattr(space, name)(*convert((first, *args[1:]), dtype))
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return result, None
    result.sum().backward()
    return result.detach(), first.grad


def same(left, right):
    for one, other in zip(left, right, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def start(level):
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)


def test_the_calls_cover_the_lists():
    called = {key for kind in CALLS.values() for key in kind}
    kinds = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS")
    listed = {
        (module.MODULE, name)
        for module in LISTS
        for kind in kinds
        for name in getattr(module, kind, ())
        if name not in (*IN_PLACE, "__ipow__")  # that one is refused, see test_defects.py
    }
    assert called == listed


@pytest.mark.parametrize("level", HALF)
@each("half")
def test_half(level, key):
    for source in (torch.float32, HALF[level]):
        args = convert(CALLS["half"][key], source)
        start(level)
        with amp.disable_casts():  # float16 computes in float32 from here on
            expected = by_hand(key, args, HALF[level])
        same(run(key, args), expected)
        amp.reset()


@pytest.mark.parametrize("level", HALF)
@each("float")
def test_float(level, key):
    for source in (torch.float32, HALF[level]):
        args = convert(CALLS["float"][key], source)
        expected = by_hand(key, args, torch.float32)
        start(level)
        result, grad = run(key, args)
        if key[1] == "normalize":  # composite: the gradients of two casts meet in 16 bits
            assert grad.dtype == source
            grad = expected[1]
        same((result, grad), expected)
        amp.reset()


@pytest.mark.parametrize("level", HALF)
@each("promote")
def test_promote(level, key):
    half = HALF[level]
    for sources, target in (
        ((half, torch.float32), torch.float32),
        ((torch.float32, half), torch.float32),
        # Tensor.__rdiv__ is a reciprocal, which is on the float list, and a product
        ((half,), torch.float32 if key[1] in ("__rdiv__", "__rtruediv__") else half),
    ):
        args = convert(CALLS["promote"][key], *sources)
        expected = by_hand(key, args, target)
        start(level)
        same(run(key, args), expected)
        amp.reset()


@pytest.mark.parametrize("level", HALF)
@each("sequence")
def test_sequence_promote(level, key):
    half = HALF[level]
    for sources, target in (((half, torch.float32), torch.float32), ((half,), half)):
        args = convert(CALLS["sequence"][key], *sources)
        expected = by_hand(key, args, target)
        start(level)
        same(run(key, args), expected)
        same((getattr(*key)(tensors=args[0]),), expected[:1])
        amp.reset()


def _attempt(key, args):
    torch.manual_seed(0)
    try:
        return run(key, args)
    except (RuntimeError, NotImplementedError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", CALLS)
def test_o4_is_torchs_autocast(kind):
    half = torch.bfloat16
    for key, given in CALLS[kind].items():
        for sources in ((torch.float32,), (half,), (half, torch.float32)):
            args = convert(given, *sources)
            with torch.autocast("cpu", half):
                expected = _attempt(key, args)
                if kind == "promote" and isinstance(expected[1], str):  # types that torch refuses
                    expected = _attempt(key, convert(args, torch.float32))
                    expected = expected[0], expected[1].to(args[0].dtype)
            start("O4")
            same(_attempt(key, args), expected)
            amp.reset()


@pytest.mark.parametrize("kind", CALLS)
def test_float64_is_left_alone(kind):
    for key, args in CALLS[kind].items():
        args = convert(args, torch.float64)
        expected = by_hand(key, args, torch.float64)
        start("O1")
        same(run(key, args), expected)
        amp.reset()


def test_in_place_operators_write_into_their_own_tensor():
    start("O1")
    x, y = torch.rand(3).half(), torch.rand(3)
    for name in IN_PLACE:
        if hasattr(torch.Tensor, name):
            target = x.clone()
            assert getattr(target, name)(y) is target
            expected = getattr(x.clone(), name)(y.clone())
            assert torch.equal(target, expected)
            assert target.dtype == torch.float16


def test_a_dtype_asked_for_is_the_dtype_given():
    half = torch.rand(3, 4).half()
    expected = torch.linalg.vector_norm(half, dtype=torch.float16)
    start("O1")
    assert torch.equal(torch.linalg.vector_norm(half, dtype=torch.float16), expected)
    assert half.softmax(-1, dtype=torch.float16).dtype == torch.float16
    assert half.sum(dtype=torch.float64).dtype == torch.float64
    assert half.cumsum(0, dtype=torch.int64).dtype == torch.int64


def test_integers_and_complex_numbers_are_left_alone():
    start("O1")
    assert torch.arange(4).sum().dtype == torch.int64
    assert (torch.arange(4) ** 2).dtype == torch.int64
    assert torch.ones(2, 2, dtype=torch.int64).mv(torch.arange(2)).dtype == torch.int64
    assert torch.ones(3, dtype=torch.complex64).std().dtype == torch.float32
    assert torch.ones(2, 2, dtype=torch.complex64).mm(torch.eye(2) + 0j).dtype == torch.complex64


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: torch.einsum("ij,kj->ik", a, b),
        lambda a, b: torch.linalg.multi_dot([a, b.t(), a]),
        lambda a, b: nn.functional.scaled_dot_product_attention(a[None], b[None], b[None]),
    ],
)
def test_what_torch_lists_and_the_original_did_not_is_half(call):
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    expected = call(a.half(), b.half())
    start("O1")
    for left, right in ((a, b), (a.half(), b)):
        same((call(left, right),), (expected,))


@pytest.mark.parametrize(
    "call",
    [
        torch.log1p,
        lambda a: a.logsumexp(0),
        lambda a: torch.cdist(a, a),
        nn.functional.pdist,
        lambda a: nn.functional.rms_norm(a, (4,)),
        lambda a: nn.functional.huber_loss(a, a * 2),
        lambda a: torch.linalg.vector_norm(a, 3),
        torch.linalg.matrix_norm,
        lambda a: torch.linalg.matrix_norm(a, "nuc"),
        lambda a: torch.norm(a, "fro"),
        lambda a: a.softmax(0),
        lambda a: torch.log_softmax(a, 0),
        lambda a: nn.functional.interpolate(a[None], 2, mode="area"),
    ],
)
def test_what_torch_lists_and_the_original_did_not_is_float(call):
    half = torch.rand(3, 4).half()
    expected = call(half.float())
    start("O1")
    same((call(half),), (expected,))


def test_what_torch_promotes_and_the_original_did_not():
    half, wide = torch.rand(4, 4).half(), torch.rand(4, 4)
    rows = torch.zeros(4, 4, dtype=torch.int64)
    calls = [
        torch.vdot,
        lambda a, b: torch.tensordot(a, b, 1),
        lambda a, b: a.scatter_add(0, rows, b),
        lambda a, b: a.index_put((torch.tensor([1]),), b[0]),
    ]
    for call in calls:
        args = (half[0], wide[0]) if call is torch.vdot else (half, wide)
        amp.reset()
        expected = call(*[arg.float() for arg in args])
        start("O1")
        same((call(*args),), (expected,))
