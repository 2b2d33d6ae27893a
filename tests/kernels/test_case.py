"""A case to inspect is what a launcher passes to a kernel."""

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from tools.kernels import derived, finding
from tools.kernels.case import launched, launches, meta


@triton.jit
def scaled_rows(x_ptr, mask_ptr, y_ptr, rows, columns, one, factor, BLOCK: tl.constexpr):
    pass


def launch():
    kernel, x, y = scaled_rows[(4,)], meta("bf16", 50, 64), meta("fp32", 50, 64)
    kernel(x, None, y, 50, 64, 1, 0.5, BLOCK=64, num_warps=32)


def test_what_is_absent_or_1_is_a_constant_and_multiples_of_16_are_known():
    (case,) = launched(launch, "scaled", "bf16", writes=("y_ptr", "z_ptr"))
    assert (case.name, case.variant) == ("scaled", "rows bf16")
    assert case.signature == {
        "x_ptr": "*bf16", "y_ptr": "*fp32", "rows": "i32", "columns": "i32", "factor": "fp32",
    }  # fmt: skip
    assert case.constants == {"mask_ptr": None, "one": 1, "BLOCK": 64}
    assert (case.reads, case.writes, case.tile) == (("x_ptr",), ("y_ptr",), 64)
    assert case.divisible == ("columns",)
    assert (case.options, case.amd) == ({"num_warps": 32}, {"num_warps": 16})


def test_kernels_run_again_behind_the_block():
    launcher = type(scaled_rows).__getitem__

    def fail():
        launch()
        raise KeyError

    with pytest.raises(KeyError):
        launches(fail)
    assert type(scaled_rows).__getitem__ is launcher


def told(cases):
    """What is compiled, and what is expected of it."""
    return {
        (case.kernel, repr((case.signature, case.constants, case.divisible)), case.reads,
         case.writes, case.tile, case.tail)
        for case in cases
    }  # fmt: skip


def test_cases_that_are_not_listed_are_those_of_the_catalogue():
    """Those of an op whose tensors have one shape are the listed ones."""
    assert told(derived.cases("swiglu")) == told(finding.cases_of("apex.kernels.swiglu"))
    cases = finding.cases_of("apex.kernels.lion")  # which lists none
    assert {case.name for case in cases} == {"lion"}
    assert len({case.variant for case in cases}) == len(cases) > 9
    assert finding.cases_of("apex.kernels.multi_tensor") == []
