"""Every kernel as it is compiled for a GPU, executed; see driver.py.

Results are those of the definition. Lists have its bits, and those of Triton's interpreter, but
where sums of many numbers enter: their order is the compiler's.
"""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from apex.bench.selftest.ops import CHECKED
from apex.ops import _runtime
from tests.gpu import tasks
from tests.gpu.worker import worker
from tests.kernels.operations import lists
from tests.tolerance import APPROXIMATE, CLIPPED, ROUNDINGS, assert_close_to_largest

OPERATIONS = dict(lists())
SUMMED = ("LAMB", "Lamb", "NovoGrad", "norm", "larc", "lamb", "clip", "fused")  # a norm enters


@pytest.fixture(scope="module", autouse=True)
def _process():
    yield
    worker().close()
    worker.cache_clear()


def _root(x):
    """Rounded correctly, as on a GPU; MKL's float32 root is an ulp off now and then."""
    return x.double().sqrt().to(x.dtype)


def _here(name, path):
    torch.manual_seed(0)
    with mock.patch.object(torch, "sqrt", _root), _runtime.use(path):  # kernels have tl's
        return OPERATIONS[name]()


def _same(a, b):
    return bool(((a == b) | ((a != a) & (b != b))).all())


@pytest.mark.parametrize("name", OPERATIONS)
def test_lists_have_the_bits_of_their_definition_and_of_the_interpreter(name):
    found, launched = worker().call(tasks.written, name)
    assert launched["list_kernel"]
    for path in ("triton", "reference"):
        for one, wanted in zip(found, _here(name, path), strict=True):
            if path == "triton" and one.dtype == torch.bfloat16:
                continue  # the interpreter truncates
            if path == "reference" and "stochastic" in name:
                continue  # the definition draws its numbers elsewhere
            if not any(word in name for word in SUMMED):
                assert _same(one, wanted), path
            elif one.dtype.is_floating_point:  # low bits of a weight may all be others
                eps = torch.finfo(one.dtype).eps
                assert_close_to_largest(one, wanted, CLIPPED if eps < CLIPPED else eps)


# -- the checks of `apex selftest` -----------------------------------------------------------------

CHECKS = tasks.checks()
SAMPLE = [f"norms and losses: {op.title}, {op.dtypes[-1]}, backward" for op in CHECKED]


def _sampled(names):
    """All with --all, else the sample."""
    rare = pytest.mark.exhaustive
    return [name if name in SAMPLE else pytest.param(name, marks=rare) for name in names]


@pytest.mark.parametrize("name", _sampled(CHECKS))
def test_results_are_within_the_tolerances_of_the_self_test(name):
    _assert_right(name, False)


@pytest.mark.parametrize("name", _sampled(n for n in CHECKS if n.startswith("optimizers")))
def test_steps_taken_and_skipped_over_unaligned_and_strided_members(name):
    _assert_right(name, True)


def _assert_right(name, misplaced):
    result, launched = worker().call(tasks.checked, name, 1, misplaced)
    assert result.error is None, result.error
    assert launched
    assert not result.warnings
    wrong = [one for one in result.measured if not one.value <= _allowed(one)]
    assert result.measured
    assert not wrong


def _allowed(one):
    moved = one.unit == "roundings" and one.allowed >= ROUNDINGS[torch.float32]
    return one.allowed * (APPROXIMATE if moved else 1)
