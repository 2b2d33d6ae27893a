"""Faults that are planted in Triton kernels and launches are found by what is executed."""

import pytest

pytest.importorskip("triton")

from tests.gpu import planted
from tests.gpu.memory import Fault
from tests.gpu.worker import call

FAULTS = {
    planted.approximate: "list_kernel: bits that are open: ex2.approx",
    planted.misaligned: "claiming: misaligned access of 16 bytes; thread 0 of program",
    planted.too_long: r"byte 160 of x_ptr, which has 160; thread 8 of program \(1, 0, 0\)",
    planted.too_long_a_list: r"out of bounds: 4 bytes at byte \d+ of tensor [01] of a column",
}


@pytest.mark.parametrize("function", FAULTS)
@pytest.mark.slow
def test_a_planted_fault_is_found(function):
    with pytest.raises(Fault, match=FAULTS[function]):
        call(planted.running, function)


@pytest.mark.slow
def test_numbers_that_no_kernel_writes_are_nan():
    assert call(planted.unwritten) == [False] * 63 + [True]
