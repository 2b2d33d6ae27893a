"""Newton-Schulz in Gram form, beside the standard form and float64."""

import functools

import pytest
import torch

from apex.ops.updates import newton_schulz as middle
from apex.ops.updates.newton_schulz import Iteration
from apex.optimizers import FusedMuon, _muon_shards
from tests.counted import Counted
from tests.optimizers import muon_programs as programs
from tests.optimizers.common import give_grads, parameters, same, train, values
from tests.ranks import Ranks
from tests.tolerance import GRAM_DISTANCE, GRAM_ERRORS, MUON, MUON_SINGULAR, rms

JORDAN = (3.4445, -4.7750, 2.0315)
STANDARD, GRAM = Iteration((JORDAN,), 1e-7, 5), Iteration((JORDAN,), 1e-7, 5, gram=True)
GRAM_OPTIONS = {"ns_algorithm": "gram_newton_schulz"}
BFLOAT16, FLOAT16, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def drawn(rows, columns, condition, batch=3, seed=0):
    """Matrices whose singular values go from 1 to 1 / condition, as far apart as logarithms are."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    short = min(rows, columns)
    left, right = (
        torch.linalg.qr(
            torch.randn(batch, size, short, generator=generator, dtype=DOUBLE, device="cpu")
        )[0]
        for size in (rows, columns)
    )
    exponents = torch.linspace(0, 1, short, dtype=DOUBLE, device="cpu")
    return (left * condition**-exponents) @ right.mT


def distance(found):
    """How far singular values are from 1, in the root mean square."""
    return rms(torch.linalg.svdvals(found.double()) ** 2 - 1)


# -- the numbers -----------------------------------------------------------------------------------


@pytest.mark.onednn
@pytest.mark.parametrize("condition", [1.0, 10.0, 1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT])
def test_as_orthogonal_as_the_standard_form(dtype, condition):
    """And about as near to its float64 numbers; wide and tall."""
    for shape in ((32, 128), (120, 30)):
        matrices = drawn(*shape, condition)
        exact = middle.newton_schulz(matrices, STANDARD)
        gram, standard = (
            middle.newton_schulz(matrices.to(dtype), numbers) for numbers in (GRAM, STANDARD)
        )
        assert gram.dtype == dtype
        assert distance(gram) <= distance(standard) + GRAM_DISTANCE[dtype]
        errors = [rms(found.double() - exact) for found in (gram, standard)]
        assert errors[0] <= GRAM_ERRORS[condition >= 1e3] * errors[1]


@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [
        *((JORDAN, steps) for steps in (0, 1, 3, 5, 12)),
        ((2.0, -1.5, 0.5), 12),
        ((1.5, -0.5, 0.0), 12),
        ((8.2, -22.6, 16.6), 3),
    ],
)
def test_the_same_polynomials(coefficients, steps):
    """In float64, where roundings are too small to grow."""
    matrices = drawn(6, 30, 20.0)
    numbers = Iteration((coefficients,), 1e-7, steps)
    standard = middle.newton_schulz(matrices, numbers)
    gram = middle.newton_schulz(matrices, numbers._replace(gram=True))
    torch.testing.assert_close(gram, standard)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT])
def test_matrices_without_full_rank(dtype):
    """Singular values that are 0 stay small; so does a matrix of zeros."""
    matrices = drawn(24, 96, 10.0)
    matrices[0] = matrices[0, :, :8] @ matrices[1, :8]
    matrices[1] = 0
    gram, standard = (middle.newton_schulz(matrices.to(dtype), n) for n in (GRAM, STANDARD))
    found, others = (torch.linalg.svdvals(some[0].double()) for some in (gram, standard))
    assert MUON_SINGULAR[0] < found[7] < found[0] < MUON_SINGULAR[1]
    assert found[8] < GRAM_ERRORS[1] * others[8]
    assert not gram[1].any()


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (9, 1), (2, 3), (0, 4), (4, 0), (5, 0, 7), (33, 65)]
)
def test_awkward_shapes(shape):
    matrices = torch.randn(shape, dtype=DOUBLE, device="cpu")
    gram, standard = (middle.newton_schulz(matrices, numbers) for numbers in (GRAM, STANDARD))
    assert gram.shape == matrices.shape
    torch.testing.assert_close(gram, standard)


# -- the products ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coefficients", "steps", "expected"),
    [
        (JORDAN, 5, [3, 2]),
        (JORDAN, 10, [3, 2, 2, 2, 1]),
        (JORDAN, 1, [1]),
        (JORDAN, 0, []),
        ((2.0, -1.5, 0.5), 12, [5, 3, 3, 1]),
        ((8.2, -22.6, 16.6), 5, [2, 1, 1, 1]),
        ((1e200, 0.0, 0.0), 3, [1, 1, 1]),
        ((1, 0, 0), 7, [7]),
    ],
)
def test_how_many_iterations_go_over_a_gram_matrix(coefficients, steps, expected):
    assert middle.runs(Iteration((coefficients,), 1e-7, steps, gram=True)) == expected


def test_products_of_both_forms():
    """Four of the long side instead of ten; of squares none is added."""
    with Counted() as standard:
        middle.newton_schulz(torch.empty(3, 8, 32, device="meta", dtype=BFLOAT16), STANDARD)
    assert standard.products == [(3, 8, 32, 8), (3, 8, 8, 8), (3, 8, 8, 32)] * 5
    with Counted() as gram:
        middle.newton_schulz(torch.empty(3, 32, 8, device="meta", dtype=BFLOAT16), GRAM)
    long, square, back = (3, 8, 32, 8), (3, 8, 8, 8), (3, 8, 8, 32)
    assert gram.products == [long, *[square] * 9, back, long, *[square] * 5, back]
    for counted, lengths in ((standard, [1] * 5), (gram, [3, 2])):
        assert counted.multiplications == 3 * middle.multiplications(8, 32, lengths)
    assert gram.multiplications * 3 == standard.multiplications * 2
    with Counted() as square_ones:
        middle.newton_schulz(torch.empty(8, 8, device="meta", dtype=BFLOAT16), GRAM)
    assert square_ones.products == [(8, 8, 8)] * 15


@pytest.mark.parametrize(
    ("columns", "is_gram"), [(64, False), (96, False), (97, True), (256, True)]
)
def test_the_gram_form_is_taken_where_it_has_fewer_multiplications(columns, is_gram):
    assert middle.chosen_runs(64, columns, GRAM) == ([3, 2] if is_gram else [1] * 5)
    assert middle.chosen_runs(columns, 64, GRAM) == ([3, 2] if is_gram else [1] * 5)
    assert middle.chosen_runs(columns, 64, STANDARD) == [1] * 5


# -- the optimizer ---------------------------------------------------------------------------------

SHAPES = ((5, 7), (7, 5), (16, 64), (1, 1), (1, 9), (9, 1), (100, 30), (16, 64), (3, 4, 12), (6,))


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
def test_steps_like_the_standard_form(dtype):
    """The state has no trace of it."""
    left, right = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    before = values(left)
    gram = FusedMuon(left, lr=0.02, iteration_dtype=dtype, **GRAM_OPTIONS)
    standard = FusedMuon(right, lr=0.02, iteration_dtype=dtype)
    train(gram, left, range(3))
    train(standard, right, range(3))
    far = max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))
    assert 0 < far < 4 * MUON[dtype]
    assert gram.state_dict()["param_groups"] == standard.state_dict()["param_groups"]
    assert not any(torch.equal(a, b) for a, b in zip(left, before, strict=True))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
def test_stacks_are_their_matrices(dtype):
    params = parameters(shapes=[(4, 6, 24), (6, 24), (24, 6)])
    alone = [torch.nn.Parameter(x.clone()) for x in params[0].detach()]
    alone += [torch.nn.Parameter(x.detach().clone()) for x in params[1:]]
    give_grads(params, 0)
    for param, grad in zip(alone, [*params[0].grad, params[1].grad, params[2].grad], strict=True):
        param.grad = grad
    options = {"lr": 0.02, "iteration_dtype": dtype, **GRAM_OPTIONS}
    FusedMuon(params, **options).step()
    for param in alone:
        FusedMuon([param], **options).step()
    found = [*params[0].detach(), *params[1:]]
    assert max((a - b).abs().max().item() for a, b in zip(found, alone, strict=True)) < MUON[FLOAT]


def test_how_the_optimizer_is_told():
    params = parameters(shapes=[(3, 12)])
    assert not FusedMuon(params).ns_algorithm.startswith("gram")
    with pytest.raises(
        ValueError, match="ns_algorithm was 'gram'; allowed are 'standard_newton_schulz' and 'gram"
    ):
        FusedMuon(params, ns_algorithm="gram")


def test_owners_are_chosen_by_the_multiplications_of_the_form():
    """The dearest first: a long matrix, or in Gram form a square one."""
    params = parameters(shapes=[(64, 256), (92, 92)])
    for numbers, first in ((STANDARD, 0), (GRAM, 1)):
        matrices = [_muon_shards.Matrix(p, numbers, False, FLOAT, p.device) for p in params]
        assert _muon_shards._owners([[0], [1]], matrices, [2]) == {first: (0,), 1 - first: (1,)}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("gram"), count=4) as ranks:
        yield ranks


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", ["Shard(0)", "two shards"])
def test_shards_give_the_bits_of_one_process(four, case):
    for weights, alone, _, _ in four.run(
        functools.partial(programs.stepped, case=case, **GRAM_OPTIONS)
    ):
        assert same(weights, alone)
