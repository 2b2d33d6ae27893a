"""Every kernel as it is compiled for a GPU, executed; see driver.py.

Results are those of the definition. Lists have its bits, and those of Triton's interpreter, but
where sums of many numbers enter: their order is the compiler's. What takes time is compiling: a
quarter of a second for each kernel, 72 of them in the trainings.
"""

import pkgutil
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from apex.catalogue.optimizers import BY_NAME
from apex.commands.selftest.ops import CHECKED
from apex.ops import _runtime
from tests.gpu import tasks
from tests.gpu.worker import call
from tests.kernels.operations import lists
from tests.tolerance import CLIPPED, assert_close_to_largest, assert_same_training
from tools.kernels import cases, finding

OPERATIONS = dict(lists())
LEVELS = {"O1": torch.float16, "O2": torch.float16, "O5": torch.bfloat16}
LIST, SUMS = "list_kernel", "segment_kernel"
LAUNCHES = {  # counted by hand
    **dict.fromkeys(("FusedAdam", "FusedSGD", "FusedAdagrad", "FusedLion"), [LIST]),
    **dict.fromkeys(("FusedAdam, storage=low_bits", "FusedAdam, storage=stochastic"), [LIST]),
    "FusedLAMB": [LIST, SUMS, LIST, SUMS, LIST],  # norm of all gradients, terms, weights
    **dict.fromkeys(("FusedNovoGrad", "amp O2, fused", "clip_grad_norm_"), [LIST, SUMS, LIST]),
    "multi_tensor_axpby": [LIST],
}
SUMMED = ("LAMB", "Lamb", "NovoGrad", "norm", "larc", "lamb", "clip", "fused")  # a norm enters


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
@pytest.mark.slow
def test_lists_have_the_bits_of_their_definition_and_of_the_interpreter(name):
    found, launched = call(tasks.written, name)
    assert launched == LAUNCHES.get(name, launched)
    assert {LIST, "quantized_kernel"} & {*launched}
    for path in ("triton", "reference"):
        for one, wanted in zip(found, _here(name, path), strict=True):
            drawn = "stochastic" in name  # the definition draws its numbers elsewhere
            truncated = one.dtype == torch.bfloat16 and not drawn
            if truncated if path == "triton" else drawn:
                continue
            if not any(word in name for word in SUMMED):
                assert _same(one, wanted), path
            elif one.dtype.is_floating_point:  # low bits of a weight may all be others
                eps = torch.finfo(one.dtype).eps
                assert_close_to_largest(one, wanted, CLIPPED if eps < CLIPPED else eps)


# -- the checks of `apex selftest` -----------------------------------------------------------------

CHECKS = tasks.checks()
SAMPLE = {f"norms and losses: {op.title}, {op.dtypes[-1]}, backward" for op in CHECKED}
SAMPLE |= {name for name in CHECKS if name.startswith(tasks.AWKWARD) and name.endswith("1 x 1")}
SAMPLE |= {f"{tasks.AWKWARD}: layer_norm, 5 x 1000{tasks.MISPLACED}"}
ODD_SAMPLE = {f"optimizers: {name}, fp16" for name in BY_NAME}


def _sampled(names, sample):
    """All with --all, else the sample."""
    assert sample <= {*names}
    rare = pytest.mark.exhaustive
    return [name if name in sample else pytest.param(name, marks=rare) for name in names]


@pytest.mark.parametrize("name", _sampled([*CHECKS], SAMPLE))
@pytest.mark.slow
def test_results_are_within_the_tolerances_of_the_self_test(name):
    _assert_right(name, False)


@pytest.mark.parametrize(
    "name", _sampled([name for name in CHECKS if name.startswith("optimizers")], ODD_SAMPLE)
)
@pytest.mark.slow
def test_steps_taken_and_skipped_over_unaligned_and_strided_members(name):
    _assert_right(name, True)


def _assert_right(name, misplaced):
    result, launched = call(tasks.checked, name, 1, misplaced)
    assert result.error is None, result.error
    assert launched
    assert not result.warnings
    assert result.measured
    if not name.endswith(("x 1", "x 2")):  # of so few numbers only cancellation is left
        assert [one for one in result.measured if not one.right] == []


# -- a training ------------------------------------------------------------------------------------

# Kernel files with cases of their own. Others are the catalogue's, whose checks run them above.
LISTED = [f"apex.kernels.{info.name}" for info in pkgutil.iter_modules(cases.__path__)]


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.exhaustive), "O2", "O5"])
@pytest.mark.slow
def test_a_training_that_launches_every_kernel_has_the_losses_of_the_definition(level):
    found, wanted, launched = call(tasks.trained, level)
    assert_same_training(found, wanted, LEVELS[level])
    listed = {case.kernel.__name__ for file in LISTED for case in finding.cases_of(file)}
    assert listed <= {*launched}


# -- what memory moves -----------------------------------------------------------------------------


def _moved(counters, numbers):
    """Bytes for each of the numbers in sectors that warps ask for: read, written."""
    sectors = counters.sectors.items()
    return [
        32 * sum(many for (_, kind), many in sectors if kind == of) / numbers
        for of in ("read", "write")
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "read", "write"),
    [
        ("FusedAdam", "fp32", 16, 12),
        ("FusedSGD, no momentum", "bf16", 4, 2),
        ("FusedLion", "fp32", 12, 8),
        ("swiglu", "bf16", 4 + 6, 2 + 4),  # forward and backward
    ],
)
def test_sectors_that_are_moved_are_those_that_are_needed(name, dtype, read, write):
    """Two percent more for tables of addresses and scalars."""
    counters = call(tasks.counted, name, (5, 8192), dtype)
    assert _moved(counters, 5 * 8192) == pytest.approx([read, write], rel=0.02)
    assert not counters.totals["conflicts"]


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm",
        "cross_entropy, smoothed",
        "masked_softmax, no key",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("rms_norm", "index_mul_2d")
        ),
    ],
)
@pytest.mark.slow
def test_rows_of_a_multiple_of_8_are_moved_as_those_of_a_multiple_of_16(name):
    """1,000 columns take at most 1.08 times what 1,024 do: rows of 2,000 bytes share sectors."""
    few, many = (
        sum(_moved(call(tasks.counted, name, (16, columns)), 16 * columns))
        for columns in (1000, 1024)
    )
    assert many <= few <= 1.08 * many


@pytest.mark.slow
def test_a_tail_runs_once_and_unaligned_tensors_are_read_in_narrow_pieces():
    """Tiles of 1,024: a chunk has 8, of which a block runs each; a tail of 9 numbers has one."""
    counters = call(tasks.counted, "FusedAdam", (8201, 1), "fp32")
    assert sorted(many for _, many in counters.paths.items())[-1] == 8
    assert 1 in counters.paths.values()
    numbers = 5 * 8192
    odd = call(tasks.counted, "FusedAdam", (5, 8192), "fp32", True)
    read, write = _moved(odd, numbers)
    assert read > 2 * 16  # by instructions of four threads to a sector; most are in a cache then
    assert write == pytest.approx(13, rel=0.01)
    once = sum(many for (_, kind), many in odd.once.items() if kind == "read")
    assert 32 * once / numbers == pytest.approx(16, rel=0.01)
