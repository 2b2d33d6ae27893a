"""The builder of operations, tried on small operations that exist only here."""

import importlib
import json
import pkgutil
import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from apex.ops import _op, _runtime, _thresholds, layers, losses, norms
from apex.ops._check import ArgumentError, check_shape, check_tensors
from apex.ops._op import op
from tests.tolerance import integers

# Stands for a kernel file. It has a gradient for x alone.
KERNELS = types.SimpleNamespace(
    forward=lambda x, factor: x @ factor, backward=lambda dy, needs, x, factor: [dy @ factor.t()]
)
PRODUCT = op("product(Tensor x, Tensor factor) -> Tensor y", torch.mm, grads=("x",))
RULES = {
    rule: op(f"{rule}(Tensor x) -> Tensor y", torch.sin, grads=("x",), autocast=rule)
    for rule in ("half", "leave")
}


# Its backward has a factor of 3, which the definition has not.
PIECES = types.SimpleNamespace(forward=torch.clone, backward=lambda dy, needs, x: [3 * dy])
IN_PIECES = op("in_pieces(Tensor x) -> Tensor y", torch.clone, grads=("x",), pieces=PIECES)

# It keeps the result alone. The kernel's gradient has a factor of 3, which the definition has not.
FROM_RESULT = op(
    "from_result(Tensor x) -> Tensor y",
    torch.exp,
    grads=("x",),
    saves=("y",),
    gradient=lambda dy, y: [dy * y],
)

# Its kernel subtracts where the definition adds, and takes what is contiguous.
IF_DENSE = op(
    "if_dense(Tensor x) -> Tensor y",
    lambda x: x + 1,
    grads=("x",),
    contiguous=False,
    takes=(lambda x: x.is_contiguous(), 0),
)


@pytest.fixture(autouse=True)
def _kernel_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex.kernels.product", KERNELS)


@pytest.fixture(params=["triton", "reference"])
def path(request):
    with _runtime.use(request.param):
        yield request.param


def test_a_gradient_that_the_kernel_lacks(path):
    x, factor = integers(3, 4).requires_grad_(), integers(4, 5).requires_grad_()
    PRODUCT(x, factor).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5) @ factor.t())
    assert torch.equal(factor.grad, x.t() @ torch.ones(3, 5))


def test_an_operation_that_saves_its_result_alone(path, monkeypatch):
    """The kernel's gradient; gradients of gradients are those of the definition of the gradient."""
    kernels = types.SimpleNamespace(forward=torch.exp, backward=lambda dy, needs, y: [3 * dy * y])
    monkeypatch.setitem(sys.modules, "apex.kernels.from_result", kernels)
    x = torch.randn(4, requires_grad=True)
    factor = 3 if path == "triton" else 1
    (grad,) = torch.autograd.grad(FROM_RESULT(x).sum(), x)
    assert torch.equal(grad, factor * x.exp())
    for call in (FROM_RESULT, FROM_RESULT.operator):
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        assert torch.equal(grad, x.exp())
        assert torch.equal(torch.autograd.grad(grad.sum(), x)[0], factor * x.exp())  # through y


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_a_kernel_that_takes_some_tensors(compiled, monkeypatch):
    kernels = types.SimpleNamespace(forward=lambda x: x - 1, backward=lambda dy, needs, x: [-dy])
    monkeypatch.setitem(sys.modules, "apex.kernels.if_dense", kernels)
    call = torch.compile(IF_DENSE, fullgraph=True, backend="aot_eager") if compiled else IF_DENSE
    with _runtime.use("triton"):
        for x, sign in ((torch.ones(2, 3), -1.0), (torch.ones(3, 2).t(), 1.0)):
            y = call(x.requires_grad_())
            y.sum().backward()
            assert torch.equal(y, x + sign)
            assert torch.equal(x.grad, torch.full((2, 3), sign))


@pytest.mark.parametrize("compiled", [False, True])
def test_pieces_without_a_bound_serve_every_call(path, compiled):
    call = torch.compile(IN_PIECES, fullgraph=True, backend="aot_eager") if compiled else IN_PIECES
    for size, factor in ((5, 3.0), (0, 1.0)):
        x = torch.ones(size, requires_grad=True)
        call(x).sum().backward()
        assert torch.equal(x.grad, torch.full((size,), factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_rules(dtype):
    x = torch.randn(5).to(dtype)
    with torch.autocast("cpu", torch.float16):
        found = {rule: operation(x).dtype for rule, operation in RULES.items()}
    half = dtype if dtype == torch.float64 else torch.float16  # float64 is never cast
    assert found == {"half": half, "leave": dtype}
    assert all(operation(x).dtype == dtype for operation in RULES.values())


def test_autocast_does_not_change_what_is_computed(path):
    x, factor = integers(8, 8, limit=1000).requires_grad_(), integers(8, 8, limit=1000)
    with torch.autocast("cpu", torch.bfloat16):
        y = PRODUCT(x, factor)
    assert torch.equal(y, torch.mm(x, factor))


def test_autocast_does_not_change_a_backward():
    x, factor = integers(8, 8, limit=1000).requires_grad_(), integers(8, 8, limit=1000)
    with _runtime.use("triton"), torch.autocast("cpu", torch.bfloat16):
        (grad,) = torch.autograd.grad(PRODUCT(x, factor).sum(), x)
    assert torch.equal(grad, torch.ones(8, 8) @ factor.t())


def test_an_operator_without_a_kernel_computes_the_definition():
    """A graph that was compiled for a GPU runs where no kernel does."""
    x, factor = integers(3, 4).requires_grad_(), integers(4, 5)
    with _runtime.use("reference"):
        y = torch.ops.apex.product(x, factor)
        y.sum().backward()
    assert torch.equal(y, torch.mm(x, factor))
    assert torch.equal(x.grad, torch.ones(3, 5) @ factor.t())


def test_the_path_depends_on_device_and_size(monkeypatch):
    """On a GPU, of which fake tensors are enough here."""
    taken = []
    monkeypatch.setattr(PRODUCT, "definition", lambda *args: taken.append("definition"))
    monkeypatch.setattr(PRODUCT, "compute", lambda *args: taken.append("kernel"))
    monkeypatch.setattr(PRODUCT, "operator", lambda *args: taken.append("operator") or args)
    monkeypatch.setattr(_runtime, "TENSOR_TYPES", (FakeTensor,))
    monkeypatch.setattr(_runtime, "_missing", lambda: None)
    monkeypatch.setattr(_op, "_as_tuple", lambda result: result)
    with FakeTensorMode():
        on_cpu, on_gpu = torch.empty(8), torch.empty(8, device="cuda")

    def path(x, least=8):
        monkeypatch.setattr(PRODUCT, "threshold", _thresholds.Threshold(least, least))
        PRODUCT(x, x)
        return taken.pop()

    assert path(on_cpu) == "definition"
    assert path(on_gpu, least=9) == "definition"
    assert path(on_gpu) == "kernel"
    monkeypatch.setattr(_runtime, "_missing", lambda: "no C compiler")
    assert path(on_gpu) == "definition"
    for name in ("is_compiling", "is_dynamo_compiling"):
        monkeypatch.setattr(torch.compiler, name, lambda: True)
    assert path(on_gpu, least=9) == "operator"  # whatever the size
    assert path(on_cpu) == "definition"
    monkeypatch.setattr(_runtime, "HAS_TRITON", False)
    assert path(on_gpu) == "definition"


def test_what_only_torch_supports_is_computed_by_the_definition(monkeypatch):
    class Subclass(torch.Tensor):
        pass

    calls = []
    monkeypatch.setattr(PRODUCT, "definition", lambda *args: calls.append(1) or torch.mm(*args))
    x = torch.randn(3, 3)
    with _runtime.use("triton"):
        PRODUCT(x, x)
        assert not calls
        PRODUCT(x.double(), x.double())
        PRODUCT(x.as_subclass(Subclass), x)
        torch.func.grad(lambda x: PRODUCT(x, x).sum())(x)
        torch.vmap(PRODUCT)(x[None], x[None])
        with torch.autograd.forward_ad.dual_level():
            PRODUCT(x, x)
        torch.jit.trace(lambda x: PRODUCT(x, x), (x,), check_trace=False)
    assert len(calls) == 6


def test_meta_device():
    assert RULES["half"](torch.ones(5, device="meta")).shape == (5,)


def test_errors_say_what_to_pass():
    x = torch.ones(2, 2)
    with pytest.raises(ArgumentError, match=r"f: x is a float; pass a tensor"):
        check_tensors("f", {"x": 1.0}, floating=())
    with pytest.raises(ArgumentError, match=r"f: x is torch\.int64; allowed are float16"):
        check_tensors("f", {"x": x.long()}, floating={"x"})
    with pytest.raises(
        ArgumentError, match=r"y is on meta and x on cpu\. Move one: y\.to\('cpu'\)"
    ):
        check_tensors("f", {"x": x, "y": x.to("meta")}, floating={"x"})
    with pytest.raises(ArgumentError, match=r"y has shape \[2\] and gate is 3 x 4\. Pass \[3, 4\]"):
        check_shape("f", "y", torch.ones(2), (3, 4), "gate is 3 x 4")
    check_tensors("f", {"x": x, "y": None}, floating={"x", "y"})
    for kind in (RuntimeError, TypeError, ValueError):
        assert issubclass(ArgumentError, kind)


def test_every_operation_with_a_kernel_has_a_threshold():
    """And no name in the table is misspelt; calls that need the kernel always take it."""
    modules = [
        importlib.import_module(module.name)
        for package in (layers, losses, norms)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    found = {x for module in modules for x in vars(module).values() if isinstance(x, op)}
    chosen = {x.name for x in found if x._kernel_file and not x.own_backward}
    assert chosen == json.loads(_thresholds.FILE.read_text("utf-8")).keys()
    for x in found:
        row = _thresholds.threshold(x.name) if x.name in chosen else None
        assert x.threshold is row or (row is None and x.threshold.least == 1)
