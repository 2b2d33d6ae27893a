"""Every function on NVIDIA's lists, on the CPU: as if its arguments had been cast by hand.

At O4 they compute what ``torch.autocast`` has them compute.
"""

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.casting import cpu_float16
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from tests.amp import levels
from tests.amp.levels import HALF, cast
from tests.amp.training import scaled_backward, started

from .functions import calls, convert


def same(left, right):
    """Assert equality of what may be no tensors."""
    for one, other in zip(left, right, strict=True):
        if isinstance(one, torch.Tensor):
            levels.assert_same([one], [other])
        else:
            assert one == other


def begin(level):
    cast(level, nn.Linear(1, 1))


def check(key, args, expected):
    """Compare with what was computed before O1's casts."""
    begin("O1")
    same(run(key, args), expected)
    amp.reset()


LISTS = (functional_overrides, torch_overrides, tensor_overrides)
IN_PLACE = ("__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__")
CALLS = calls()


def each(kind):
    keys = CALLS[kind]
    return pytest.mark.parametrize(
        "key", keys, ids=[f"{space.__name__}.{name}" for space, name in keys]
    )


def run(key, args, before=tuple):
    """The function's result and the gradient of its first argument, where it has one."""
    space, name = key
    first = args[0]
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        first = first.clone().requires_grad_()
        args = (first, *args[1:])
    result = getattr(space, name)(*before(args))
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return result, None
    with amp.disable_casts():
        result.sum().backward()
    return result.detach(), first.grad


def by_hand(key, args, dtype):
    """The same with the cast as an operation of its own."""
    return run(key, args, lambda given: convert(given, dtype))


def test_the_calls_cover_the_lists():
    called = {key for kind in CALLS.values() for key in kind}
    kinds = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS")
    listed = {
        (module.MODULE, name)
        for module in LISTS
        for kind in kinds
        for name in getattr(module, kind, ())
        if name not in (*IN_PLACE, "__ipow__")  # that one is refused, see below
    }
    assert called == listed


@each("half")
def test_half(key):
    for source in (torch.float32, torch.float16):
        args = convert(CALLS["half"][key], source)
        begin("O1")
        with amp.disable_casts():  # float16 computes in float32 from here on
            expected = by_hand(key, args, torch.float16)
        check(key, args, expected)


@each("float")
def test_float(key):
    for source in (torch.float32, torch.float16):
        args = convert(CALLS["float"][key], source)
        expected = by_hand(key, args, torch.float32)
        begin("O1")
        result, grad = run(key, args)
        if key[1] == "normalize":  # composite: the gradients of two casts meet in 16 bits
            assert grad.dtype == source
            grad = expected[1]
        same((result, grad), expected)
        amp.reset()


@each("promote")
def test_promote(key):
    half, wide = torch.float16, torch.float32
    # Tensor.__rdiv__ is a reciprocal, which is on the float list, and a product
    alone = wide if key[1] in ("__rdiv__", "__rtruediv__") else half
    for sources, target in (((half, wide), wide), ((wide, half), wide), ((half,), alone)):
        args = convert(CALLS["promote"][key], *sources)
        check(key, args, by_hand(key, args, target))


@each("sequence")
def test_sequence_promote(key):
    half, wide = torch.float16, torch.float32
    for sources, target in (((half, wide), wide), ((half,), half)):
        args = convert(CALLS["sequence"][key], *sources)
        expected = by_hand(key, args, target)
        check(key, args, expected)
        begin("O1")
        same((getattr(*key)(tensors=args[0]),), expected[:1])
        amp.reset()


def _attempt(key, args):
    torch.manual_seed(0)
    try:
        return run(key, args)
    except (RuntimeError, NotImplementedError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.slow
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
            begin("O4")
            same(_attempt(key, args), expected)
            amp.reset()


@pytest.mark.parametrize("kind", CALLS)
def test_float64_is_left_alone(kind):
    for key, args in CALLS[kind].items():
        args = convert(args, torch.float64)
        check(key, args, by_hand(key, args, torch.float64))


def test_in_place_operators_write_into_their_own_tensor():
    begin("O1")
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
    begin("O1")
    assert torch.equal(torch.linalg.vector_norm(half, dtype=torch.float16), expected)
    assert half.softmax(-1, dtype=torch.float16).dtype == torch.float16
    assert half.sum(dtype=torch.float64).dtype == torch.float64
    assert half.cumsum(0, dtype=torch.int64).dtype == torch.int64


def test_integers_and_complex_numbers_are_left_alone():
    begin("O1")
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
    cpu_float16.begin(torch.float16, ["cpu"])  # by hand too float16 computes in float32
    expected = call(a.half(), b.half())
    begin("O1")
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
    begin("O1")
    same((call(half),), (expected,))


def test_what_torch_promotes_and_the_original_did_not():
    half, wide = torch.rand(4, 4).half(), torch.rand(4, 4)
    rows = torch.zeros(4, 4, dtype=torch.int64)
    calls = [
        lambda a, b: torch.vdot(a[0], b[0]),
        lambda a, b: torch.tensordot(a, b, 1),
        lambda a, b: a.scatter_add(0, rows, b),
        lambda a, b: a.index_put((torch.tensor([1]),), b[0]),
    ]
    expected = [call(half.float(), wide) for call in calls]
    begin("O1")
    same([call(half, wide) for call in calls], expected)


@pytest.mark.parametrize("other", [torch.float32, torch.float16])
def test_double_meets_narrower_tensors_as_in_torch(other):
    x, y = torch.rand(3, dtype=torch.float64), torch.rand(3).to(other)
    calls = (torch.add, torch.mul, torch.atan2, torch.ge, torch.Tensor.__truediv__)
    calls += (lambda x, y: torch.cat([x, y]),)
    expected = [call(x, y) for call in calls]
    begin("O1")
    same([call(x, y) for call in calls], expected)


@pytest.mark.parametrize("level", HALF)
def test_prelu_and_bilinear_layers_meet_their_float32_weights(level):
    class Twice(nn.Bilinear):
        def forward(self, x):
            return super().forward(x, x)

    model, optimizer = started(level, nn.Sequential(nn.PReLU(), Twice(2, 2, 3)))
    x = torch.randn(4, 2, dtype=HALF[level])
    assert model[0](x).dtype == HALF[level]
    scaled_backward(model(x).float().sum(), optimizer)
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())


REFUSED = {  # with arguments that each takes
    **dict.fromkeys(("acos_", "asin_", "cosh_", "exp_", "expm1_", "log_", "log10_", "log2_"), ()),
    **dict.fromkeys(("reciprocal_", "rsqrt_", "sinh_", "tan_", "erfinv_"), ()),
    "pow_": (2,),
    "__ipow__": (2,),
    "cumprod_": (0,),
    "cumsum_": (0,),
    "renorm_": (2, 0, 1.0),
}


@pytest.mark.parametrize("begin", [lambda: cast("O1", nn.Linear(1, 1)), amp.init])
def test_in_place_functions_of_the_float_list_are_refused_on_16_bit_tensors(begin):
    base = torch.rand(3, 3) * 0.8 + 0.1
    types = (torch.float16, torch.bfloat16)
    plain = {(n, d): getattr(base.to(d), n)(*args) for n, args in REFUSED.items() for d in types}
    begin()
    for (name, dtype), native in plain.items():
        args, x = REFUSED[name], base.to(dtype)
        method = "pow" if name == "__ipow__" else name.removesuffix("_")
        for function in filter(None, (getattr(s, name, None) for s in (torch.Tensor, torch))):
            target, wide = x.clone(), x.float()
            with pytest.raises(NotImplementedError, match=rf"Write x = x\.{method}\(\.\.\.\)"):
                function(target, *args)
            assert torch.equal(target, x)
            assert function(wide, *args) is wide
            with amp.disable_casts():
                assert torch.equal(function(target, *args), native)
            with torch.autocast("cpu", dtype=dtype):  # the program's own
                assert torch.equal(function(x.clone(), *args), native)


@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_in_place_functions_of_the_float_list_are_taken_elsewhere(level):
    begin(level)
    for x in (torch.rand(3).half(), torch.rand(3).bfloat16()):
        assert x.exp_() is x


def test_in_place_functions_of_an_edited_float_list(monkeypatch):
    x = torch.rand(3).half()
    for module in (torch_overrides, tensor_overrides):
        names = [name for name in module.FP32_FUNCS if name != "exp"]
        monkeypatch.setattr(module, "FP32_FUNCS", names)
    begin("O1")
    assert x.exp_() is x
    with pytest.raises(NotImplementedError):
        x.log_()


def test_in_place_functions_are_refused_in_a_model_and_not_in_derivatives():
    class InPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x).exp_()

    model = cast("O1", InPlace(2, 2))
    for level in ("O2", "O4"):
        begin(level)
        with pytest.raises(NotImplementedError, match="exp_ on a torch.float16 tensor"):
            model(torch.ones(1, 2))
    begin("O1")
    with amp.disable_casts():
        x = torch.rand(4, requires_grad=True)
        norm = x.half().norm(p=3)  # its derivative calls pow_ on a float16 tensor
    norm.backward()
    assert torch.isfinite(x.grad).all()
