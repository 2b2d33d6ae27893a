"""Programs on a multiprocessor, beside examples computed by hand."""

import pytest

pytest.importorskip("triton")  # the package of kernels imports it

from apex.kernels.inspect.occupancy import LIMITS, programs_per_multiprocessor, refusals

BY_HAND = [
    # target, threads, registers, shared bytes -> programs
    # Nothing runs out but places for programs: 32, and with 4 warps each 64 warps are 16 programs.
    ("sm_90", 32, 16, 0, 32),
    ("sm_90", 128, 32, 0, 16),
    # 40 registers * 32 lanes = 1,280; 16,384 // 1,280 = 12 warps in each of 4 parts; 48 // 4 = 12.
    ("sm_80", 128, 40, 0, 12),
    # 41 registers are 48: 1,536; 16,384 // 1,536 = 10 warps in each of 4 parts; 40 // 4 = 10.
    ("sm_80", 128, 41, 0, 10),
    # The norms' case: 128 registers at 16 warps. 4,096; 4 warps in each of 4 parts: one program.
    ("sm_90", 512, 128, 0, 1),
    ("sm_90", 512, 64, 0, 2),
    ("sm_90", 512, 65, 0, 1),  # 72: 16,384 // 2,304 = 7 in each of 4 parts; 28 // 16 = 1
    ("sm_90", 512, 255, 0, 0),  # 2 warps in each of 4 parts, and the program has 16
    # Shared memory: 48 KiB and the reserved 1 are 49 of 164 KiB, or of 228.
    ("sm_80", 128, 32, 49152, 3),
    ("sm_90", 128, 32, 49152, 4),
    ("sm_90", 128, 32, 227 * 1024, 1),
    ("sm_90", 128, 32, 227 * 1024 + 1, 0),
    # An RTX 4090 has places for 48 warps and 24 programs.
    ("sm_89", 64, 16, 0, 24),
    ("sm_89", 128, 32, 0, 12),
    ("sm_75", 1024, 32, 0, 1),
    # MI300: 512 registers of each lane in each of 4 parts. 128 of them: 4 wavefronts, in all 16.
    ("gfx942", 256, 128, 0, 4),
    ("gfx942", 256, 129, 0, 3),  # 136: 3 in each part, 12 in all
    ("gfx942", 256, 32, 0, 8),  # 32 places for wavefronts
    ("gfx942", 256, 32, 16384, 4),  # of 64 KiB
    ("gfx942", 2048, 32, 0, 0),
]


@pytest.mark.parametrize(("target", "threads", "registers", "shared", "programs"), BY_HAND)
def test_as_computed_by_hand(target, threads, registers, shared, programs):
    found = programs_per_multiprocessor(LIMITS[target], threads, registers, shared)
    assert found == programs


def test_what_cannot_be_launched_is_said():
    assert refusals(LIMITS["sm_90"], 1024, 232448) == ()
    threads, shared = refusals(LIMITS["gfx942"], 2048, 65537)
    assert threads == (
        "cannot run: 32 warps are 2048 threads, and a program has at most 1024 there"
    )
    assert shared == (
        "cannot run: 65537 bytes of shared memory, and a program has at most 65536 there"
    )
