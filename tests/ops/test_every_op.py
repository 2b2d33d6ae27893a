"""What holds for every operator that `op` builds: those of the catalogue."""

import functools
import importlib
import importlib.util
import pkgutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex._compat import IS_2_13
from apex.catalogue.ops import OPS
from apex.ops import __path__ as PATH
from apex.ops import _runtime
from apex.ops._op import op
from apex.ops.norms import group_norm
from tests.tolerance import assert_one_rounding
from tests.vmapped import assert_backward_under_vmap

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Fewer elements need a wider tolerance in float32. Group norm has 3 groups of it, and 32 of
# (4, 512): each is a program, which the interpreter runs one after the other.
SHAPE = (4, 520)
# A padded block, a full one, 3-D, many rows; where values are small, eps matters.
SIZES = [((7, 123), 1.0), ((4, 512), 0.02), ((2, 3, 65), 1.0), ((48, 33), 0.02)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Case:
    """An op of the catalogue, called as the operator that it is."""

    def __init__(self, entry, layout):
        self.entry, self.layout = entry, layout
        self.name = (
            f"{entry.name}, {str(layout)[6:]}" if layout != torch.contiguous_format else entry.name
        )
        self.op, self.terms, self.fused_by = entry.operator, entry.terms, entry.fused_by

    @property
    def fuses(self):
        """Whether there is a kernel for the first tensor."""
        return HAS_TRITON and self.op.takes(self.tensors()[0])

    @property
    def keeps_result(self):
        """Whether the backward needs the result, so that it may not be changed in place."""
        return self.op.results[0] in self.op.saves

    def arguments(self, *tensors):
        return self.entry.arguments(*tensors, *self.entry.rest(tensors[0]))

    def __call__(self, *tensors):
        return self.op(*self.arguments(*tensors))

    def exact(self, *tensors):
        """The same in torch's functions."""
        return self.entry.theirs(*tensors, *self.entry.rest(tensors[0]))

    def operator(self, *tensors):
        output = self.op.operator(*self.arguments(*tensors))
        return (output,) if isinstance(output, torch.Tensor) else output

    def dtype(self, dtype):
        """Of the result."""
        return torch.promote_types(dtype, torch.float32) if self.entry.widens else dtype

    def tensors(self, shape=SHAPE, dtype=torch.float32, scale=1.0, step=1):
        """Leaf tensors that require gradients; with ``step`` 2 they are not contiguous."""
        made = []
        for seed, leaf in enumerate(self.entry.leaves(self.entry.of_matrix(shape))):
            generator = torch.Generator().manual_seed(seed)
            size = (*leaf.shape[:-1], leaf.shape[-1] * step)
            values = scale * torch.randn(size, generator=generator)
            layout = torch.contiguous_format if made else self.layout
            values = values.to(dtype).contiguous(memory_format=layout)
            made.append(values[..., ::step].requires_grad_())
        return made


CASES = [
    Case(entry, layout)
    for entry in OPS
    if entry.operator
    for layout in {torch.contiguous_format: 0, entry.layout: 0}
]


def _paths(case):
    """Every way to compute: kernels in the interpreter, the definition, pieces on a CPU."""
    found = ["triton"] if case.fuses else []
    has_pieces = case.op.pieces is not None and not case.op.own_backward
    return [*found, "reference", *["pieces"] * has_pieces]


def _compiled_paths(case):
    """Compiled, a call that takes pieces is the definition: one case shows both."""
    found = _paths(case)
    return [path for path in found if path != "reference" or "pieces" not in found]


def _pairs(cases, paths=_paths):
    pairs = [(case, path) for case in cases for path in paths(case)]
    ids = [f"{case.name}-{path}" for case, path in pairs]
    return pytest.mark.parametrize(("case", "path"), pairs, ids=ids, indirect=["path"])


# Gradients from a rounded output are those of another input: see the operations' own tests.
FROM_INPUT = [case for case in CASES if not case.op.own_backward]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_path = _pairs(CASES)
compiled_path = _pairs(CASES, _compiled_paths)
from_input = _pairs(FROM_INPUT)


@pytest.fixture
def path(request, monkeypatch):
    """Compute this way in a test."""
    if request.param == "pieces":
        case = request.node.callspec.params["case"]
        monkeypatch.setattr(case.op.pieces, "above", 0)
        yield request.param
    else:
        with _runtime.use(request.param):
            yield request.param


def random(*shape, seed=9):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def strided(shape):
    """A gradient that is not contiguous, and has one number a row; that of a scalar is one."""
    if not shape:
        return random()
    rows, *others = shape
    return random(2 * rows, *[1] * len(others))[::2].expand(shape)


def spaced(shape):
    """A gradient that is not contiguous, of other numbers: a softmax has none for equal ones."""
    return random(*shape[:-1], 2 * shape[-1])[..., ::2]


def assert_exact(case, tensors, path, gradient=lambda shape: random(*shape)):
    """Compare the result and all gradients with those of the definition in float64."""
    exact_tensors = double(tensors)
    y, exact = case(*tensors), case.exact(*exact_tensors)
    dy = gradient(y.shape)
    close = functools.partial(assert_one_rounding, interpreted=path == "triton")
    close(y.detach(), exact.detach())
    grads = torch.autograd.grad(y, tensors, dy.to(y.dtype))
    exact_grads = torch.autograd.grad(exact, exact_tensors, dy.to(y.dtype).double())
    if case.keeps_result and path != "reference":  # gradients of the rounded result
        constants = dict(zip(case.op.names, case.arguments(*tensors), strict=True))
        constants = {name: constants[name] for name in case.op.constants}
        exact_grads = case.op.gradient(dy.to(y.dtype).double(), y.detach().double(), **constants)
    for tensor, grad, exact_grad in zip(tensors, grads, exact_grads, strict=True):
        assert grad.dtype == tensor.dtype
        close(grad, exact_grad, added=tensors[0].numel() // tensor.numel())


def assert_same_bits(some, others):
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@from_input
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "scale"), SIZES, ids=str)
def test_forward_and_gradients_are_one_rounding_off(case, path, dtype, shape, scale):
    assert_exact(case, case.tensors(shape, dtype, scale), path)


@from_input
def test_noncontiguous_tensors(case, path):
    tensors = case.tensors(step=2)
    assert not any(tensor.is_contiguous() for tensor in tensors)
    assert_exact(case, tensors, path, spaced if case.keeps_result else strided)


@every_path
def test_a_sign_that_is_not_in_memory_yet(case, path):
    """``z.conj().imag`` is ``z.imag`` with a flag, which kernels do not see."""
    tensors = case.tensors()
    y = case(*tensors)
    dy = random(*y.shape)
    wanted = [y, *torch.autograd.grad(y, tensors, dy)]
    flagged = [torch._neg_view(-tensor.detach()).requires_grad_() for tensor in tensors]
    y = case(*flagged)
    assert_same_bits([y, *torch.autograd.grad(y, flagged, torch._neg_view(-dy))], wanted)


@every_path
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (3, 0)], ids=str)
def test_size_zero(case, path, shape):
    tensors = case.tensors(shape)
    y = case(*tensors)
    assert y.shape == case.exact(*tensors).shape
    assert_same_bits(torch.autograd.grad(y.sum(), tensors), map(torch.zeros_like, tensors))
    output = case.operator(*tensors)[0]
    assert_same_bits(torch.autograd.grad(output.sum(), tensors), map(torch.zeros_like, tensors))


@every_path
def test_only_gradients_that_are_needed(case, path):
    tensors = case.tensors()
    wanted = torch.autograd.grad(case(*tensors).sum(), tensors)
    for number, leaf in enumerate(tensors):
        given = [tensor.detach() for tensor in tensors]
        given[number] = leaf
        case(*given).sum().backward()
        torch.testing.assert_close(leaf.grad, wanted[number])  # torch may take another way to one


@every_path
def test_repeats_bit_for_bit_and_evaluation_has_the_bits_of_training(case, path):
    tensors, runs = case.tensors((40, 33), torch.float16), []
    for _ in range(2):
        y = case(*tensors)
        runs.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
    assert_same_bits(*runs)
    with torch.no_grad():
        assert torch.equal(case(*tensors), runs[0][0])


@every
def test_gradcheck(case):
    tensors = double(case.tensors((3, 4)))
    assert torch.autograd.gradcheck(case, tensors)
    assert torch.autograd.gradgradcheck(case, tensors)


@from_input
@pytest.mark.parametrize("through", ["call", "operator"])
def test_gradients_of_gradients(case, path, through):
    def second(function, tensors, dy, vectors):
        grads = torch.autograd.grad(function(*tensors), tensors, dy, create_graph=True)
        return torch.autograd.grad(grads, [*tensors, dy], vectors, materialize_grads=True)

    function = case if through == "call" else lambda *tensors: case.operator(*tensors)[0]
    tensors = case.tensors()
    dy = random(*case(*tensors).shape).requires_grad_()
    vectors = [random(*tensor.shape, seed=8) for tensor in tensors]
    found = second(function, tensors, dy, vectors)
    exact = second(case.exact, double(tensors), *double([dy]), double(vectors))
    for actual, expected in zip(found, exact, strict=True):
        assert_one_rounding(actual, expected, added=case.terms)


@every_path
@pytest.mark.parametrize("other", [lambda x: 1 * x, torch.exp], ids=["same", "computed"])
def test_gradients_of_gradients_where_one_argument_comes_from_another(case, path, other):
    """``f(x, g(x))``: partial derivatives, with a path of their own for each argument."""

    def second(function, x):
        computed = other(x).flatten()
        others = [computed[: t.numel()].view(t.shape) for t in case.tensors()[1:]]
        (grad,) = torch.autograd.grad(function(x, *others).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    (x, *_) = case.tensors(scale=0.5)
    if case.op.own_backward:
        with pytest.raises(RuntimeError, match="memory_efficient=True x is not saved"):
            second(case, x)
        return
    exact = second(case.exact, *double([x]))
    assert_one_rounding(second(case, x), exact, added=64 * 64)  # terms of both signs cancel


def test_no_operation_is_left_out():
    """The linear cross-entropy has no kernel, and tests of its own in tests/contrib."""
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(PATH, "apex.ops.")]
    found = {x.name for module in modules for x in vars(module).values() if isinstance(x, op)}
    assert found - {"linear_cross_entropy"} == {case.op.name for case in CASES}


@every_path
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.14
@pytest.mark.slow
def test_opcheck(case, path):
    tensors = case.tensors((6, 10))
    torch.library.opcheck(case.op.operator, case.arguments(*tensors))
    y, *more = (output.detach() for output in case.operator(*tensors))
    assert not any(output.requires_grad for output in case.operator(*tensors)[1:])
    known = {"y": y} | dict(zip(case.op.results[1:], more, strict=True))
    known |= zip(case.op.names, [a.detach() if isinstance(a, torch.Tensor) else a
                                 for a in case.arguments(*tensors)], strict=True)  # fmt: skip
    rest = [known[name] for name in (*case.op.saves, *case.op.constants)]
    number = len(case.op.grads)
    for alone in range(number):
        args = (strided(y.shape), [alone == other for other in range(number)], *rest)
        torch.library.opcheck(case.op.backward_operator, args, test_utils="test_faketensor")
    torch.library.opcheck(case.op.backward_operator, (strided(y.shape), [True] * number, *rest))


@compiled_path
@pytest.mark.slow
def test_compiles_to_one_operator_or_to_what_the_compiler_fuses(case, path):
    if case.op is group_norm.OP and path != "triton" and not IS_2_13:
        pytest.skip("torch 2.9 fails on its own group_norm's gradient with symbolic channels")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(case, fullgraph=True, dynamic=True, backend=backend)
    for rows, stance in ((6, "default"), (9, "fail_on_recompile")):  # no guard on the size
        tensors = case.tensors((rows, 10))
        with torch.compiler.set_stance(stance):
            y = compiled(*tensors)
        expected = case(*tensors)
        dy = random(*expected.shape)
        torch.testing.assert_close(y, expected)
        for a, b in zip(
            torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected, tensors, dy),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, b)
    has_operator = case.op.operator in [node.target for node in graphs[-1].graph.nodes]
    kernel = path == "triton" and case.fused_by == "us"
    assert has_operator == (kernel or case.op.own_backward)


@every
def test_dispatch_mode_sees_one_operator(case):
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with _runtime.use("triton" if case.fuses else "reference"), Record():
        case(*case.tensors()).sum().backward()
    if case.fuses or case.op.own_backward:
        assert case.op.operator in seen
        assert case.op.backward_operator in seen


@every_path
def test_transforms_of_torch_func(case, path):
    tensors = [torch.stack([t, 2 * t]).detach() for t in case.tensors()]
    wanted = torch.stack([case(*each) for each in zip(*tensors, strict=True)])
    torch.testing.assert_close(torch.vmap(case)(*tensors), wanted)
    first = [t[0] for t in tensors]
    exact = double(first)
    total = case.exact(*exact).square().sum()
    numbers = tuple(range(len(first)))
    gradients = torch.func.grad(lambda *given: case(*given).square().sum(), numbers)(*first)
    for actual, expected in zip(gradients, torch.autograd.grad(total, exact), strict=True):
        # A sum of a row or column is in each element; it is added up one by one without vectors.
        assert_one_rounding(actual, expected, added=max(first[0].shape))
    _, tangent = torch.func.jvp(case, tuple(first), tuple(map(torch.ones_like, first)))
    assert tangent.shape == wanted[0].shape


@every_path
def test_a_backward_under_vmap(case, path):
    tensors = case.tensors((5, 66))
    assert_backward_under_vmap(case(*tensors), tensors)


@every_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast(case, path, dtype):
    tensors = case.tensors(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        given = case.op.cast(*tensors)
        y = case(*given)
        grads = torch.autograd.grad(y.sum(), tensors)
    expected = {"half": torch.bfloat16, "float": torch.float32, "leave": dtype}[case.op.autocast]
    assert y.dtype == case.dtype(dtype if dtype == torch.float64 else expected)
    assert all(grad.dtype == dtype for grad in grads)


@every_path
def test_a_change_of_what_is_saved_is_noticed(case, path):
    if path == "reference" and not case.op.own_backward:
        pytest.skip("PyTorch's functions save what they need")
    if not case.keeps_result and case.op.names[0] not in case.op.saves:
        pytest.skip("neither the first tensor nor the result is saved")
    tensors = case.tensors()
    first = tensors[0] * 1
    y = case(first, *tensors[1:])
    (y if case.keeps_result else first).detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@from_input
def test_the_output_may_be_changed_in_place(case, path):
    """As a residual connection does; and gradients may be detached, as old training loops do."""
    if case.keeps_result:
        pytest.skip("the backward needs the result")
    tensors = case.tensors()
    y = case(*tensors)
    dy = random(*y.shape)
    wanted = torch.autograd.grad(case(*tensors), tensors, 2 * dy)
    y += 1.0
    y.mul_(2.0).backward(dy)
    assert_same_bits([tensor.grad.detach_() for tensor in tensors], wanted)


@every
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_what_ran_forward_runs_backward(case):
    """A backward outside of the block that chose the kernel still finds what it saved."""
    tensors = case.tensors()
    dy = random(*case.exact(*tensors).shape)
    with _runtime.use("triton"):
        wanted = torch.autograd.grad(case(*tensors), tensors, dy)
        y = case(*tensors)
    assert_same_bits(torch.autograd.grad(y, tensors, dy), wanted)
