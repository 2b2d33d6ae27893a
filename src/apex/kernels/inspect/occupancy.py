"""How many programs of a kernel run on a multiprocessor at once: a model, and never a measurement.

A multiprocessor has so many registers, so much shared memory and so many places for warps and
programs; what runs out first is the limit. NVIDIA's occupancy calculator computes the same. On AMD
a multiprocessor is a compute unit and a warp a wavefront; scalar registers are left out, which are
not what runs out in kernels like ours.

Sources: *CUDA Programming Guide*, technical specifications per compute capability; *CUDA Occupancy
Calculator*; LLVM's *User Guide for AMDGPU Backend* and AMD's *CDNA3 ISA*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

KIB = 1024


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has, and how it is handed out.

    Attributes:
        lanes: Threads of a warp.
        threads_per_program: The most that can be launched.
        shared_per_program: Bytes of shared memory, the most that can be launched.
        programs: That are resident at once.
        warps: That are resident at once.
        parts: Schedulers; each has an equal share of warps and registers.
        registers: 32-bit registers of all threads together.
        register_unit: A thread's registers are rounded up to a multiple of it.
        shared: Bytes of shared memory.
        shared_unit: Bytes in which it is handed out.
        shared_reserved: Bytes of each program that the system takes.
    """

    lanes: int
    threads_per_program: int
    shared_per_program: int
    programs: int
    warps: int
    parts: int
    registers: int
    register_unit: int
    shared: int
    shared_unit: int
    shared_reserved: int


_A100 = Limits(
    lanes=32, threads_per_program=1024, shared_per_program=163 * KIB, programs=32, warps=64,
    parts=4, registers=65536, register_unit=8, shared=164 * KIB, shared_unit=128,
    shared_reserved=KIB,
)  # fmt: skip
_RTX30 = replace(_A100, programs=16, warps=48, shared=100 * KIB, shared_per_program=99 * KIB)
_H100 = replace(_A100, shared=228 * KIB, shared_per_program=227 * KIB)
_MI200 = Limits(
    lanes=64, threads_per_program=1024, shared_per_program=64 * KIB, programs=16, warps=32,
    parts=4, registers=4 * 512 * 64, register_unit=8, shared=64 * KIB, shared_unit=512,
    shared_reserved=0,
)  # fmt: skip
LIMITS: Mapping[str, Limits] = {
    "sm_70": replace(
        _A100, shared=96 * KIB, shared_per_program=96 * KIB, shared_unit=256, shared_reserved=0
    ),
    "sm_75": replace(
        _A100, programs=16, warps=32, shared=64 * KIB, shared_per_program=64 * KIB,
        shared_unit=256, shared_reserved=0,
    ),
    "sm_80": _A100,
    "sm_86": _RTX30,
    "sm_87": replace(_A100, programs=16, warps=48),
    "sm_89": replace(_RTX30, programs=24),
    "sm_90": _H100,
    "sm_100": _H100,
    "sm_103": _H100,
    "sm_120": replace(_RTX30, programs=24),
    "sm_121": replace(_RTX30, programs=24),
    "gfx90a": _MI200,
    "gfx942": _MI200,
    "gfx950": replace(_MI200, shared=160 * KIB, shared_per_program=160 * KIB, shared_unit=1280),
}  # fmt: skip


def refusals(limits: Limits, threads: int, shared: int) -> tuple[str, ...]:
    """Say why a program cannot be launched at all; nothing if it can.

    Args:
        limits: Of the target, from `LIMITS`.
        threads: Of a program.
        shared: Bytes of shared memory of a program.
    """
    said = []
    if threads > limits.threads_per_program:
        said.append(
            f"cannot run: {threads // limits.lanes} warps are {threads} threads, and a program has "
            f"at most {limits.threads_per_program} there"
        )
    if shared > limits.shared_per_program:
        said.append(
            f"cannot run: {shared} bytes of shared memory, and a program has at most "
            f"{limits.shared_per_program} there"
        )
    return tuple(said)


def programs_per_multiprocessor(limits: Limits, threads: int, registers: int, shared: int) -> int:
    """Compute how many programs of a kernel fit on a multiprocessor.

    The least of four quotients: places for programs, places for warps, registers and shared memory.
    A warp lives in one of the multiprocessor's parts; there its registers are handed out for all
    of its lanes at once, rounded up.

    Args:
        limits: Of the target, from `LIMITS`.
        threads: Of a program.
        registers: Of a thread.
        shared: Bytes of shared memory of a program.

    Returns:
        The number of programs; 0 if not even one fits.

    Example:
        A100, 4 warps of 40 registers: a warp takes 32 * 40 = 1,280, one of the four parts of
        16,384 holds 12 warps, all four 48, and that is 12 programs.
    """
    if refusals(limits, threads, shared):
        return 0
    warps = -(-threads // limits.lanes)
    of_warp = _rounded_up(max(registers, 1), limits.register_unit) * limits.lanes
    with_registers = limits.parts * (limits.registers // limits.parts // of_warp)
    fits = [limits.programs, limits.warps // warps, with_registers // warps]
    taken = _rounded_up(shared + limits.shared_reserved, limits.shared_unit)
    if taken:
        fits.append(limits.shared // taken)
    return min(fits)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
