"""Judge the machine code of a case: is every tile moved by as wide accesses as there are?

With ``tail=True`` only accesses without a predicate count. A main path that somebody masks has none
left, so the count misses the tile's; one with a mask that the compiler can prove to be whole is
refused too, which is right: the proof may fail for the next caller.

On AMD, where accesses have no pointers and no paths, required are as many wide ones as the tiles
need. The tail, whose bound is known at run time only, has none. A main path that is masked has none
for 16-bit columns and fails; for float32 ones this compiler sees through the mask, and the accesses
are wide after all. What a loop that was unrolled reads too often goes unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tools.kernels.case import CompiledCase
from tools.kernels.instructions import RATES, Instruction, counted
from tools.kernels.machine_code import Access, MachineCode

WIDE = 128  # bits: the widest access on every target
# What a program can be launched with: threads, and KiB of shared memory. Sources: *CUDA Programming
# Guide*, technical specifications per compute capability; AMD's *CDNA3 ISA*.
THREADS = 1024
SHARED = {
    "sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227,
    "sm_100": 227, "sm_103": 227, "sm_120": 99, "sm_121": 99, "gfx90a": 64, "gfx942": 64,
    "gfx950": 160,
}  # fmt: skip


def widths(accesses: Iterable[Access]) -> dict[int, int]:
    """Count accesses by their bits, the widest first."""
    counts = Counter(access.bits for access in accesses)
    return dict(sorted(counts.items(), reverse=True))


def main(case: CompiledCase, accesses: Iterable[Access], names: Sequence[str]) -> list[Access]:
    """Pick the accesses of the main path through these pointers."""
    return [a for a in accesses if a.pointer in names and not (case.tail and a.masked)]


def _needed(case: CompiledCase, threads: int, name: str) -> tuple[int, int]:
    """Width and number of accesses with which a thread moves its share of a tile."""
    share = _share(case, threads, name)
    width = case.pointers()[name] if name in case.single else min(share, WIDE)
    return width, share // width


def _share(case: CompiledCase, threads: int, name: str) -> int:
    """Bits of a tile that one thread moves."""
    bits = case.pointers()[name]
    return max(bits, case.tile * bits // threads)


def bytes_per_element(case: CompiledCase, code: MachineCode) -> float:
    """Bytes for each element; loops that the compiler has unrolled are divided out."""
    if not code.attributed or case.repeated:
        bits = case.pointers()
        return sum(bits[name] for name in (*case.reads, *case.writes)) / 8
    loads = main(case, [a for a in code.accesses if not a.store], case.reads)
    stores = main(case, [a for a in code.accesses if a.store], case.writes)
    moved = sum(access.bits for access in [*loads, *stores]) / 8
    return moved * code.threads / (case.tile * _unrolled(case, code))


def instructions(
    case: CompiledCase, code: MachineCode, program: Sequence[Instruction]
) -> dict[str, float] | None:
    """Thread instructions of the fast path for each byte that it moves: pipe -> number.

    ``None`` for a kernel that moves no tiles.
    """
    names = [*case.reads, *case.writes]
    even = [name for name in names if name not in case.narrow]
    if not names:
        return None
    widths = [_needed(case, code.threads, name)[0] for name in even]
    pipes: dict[str, float] = {}
    moved = 0.0
    for count in counted(program, min(widths or (case.pointers()[name] for name in names))):
        often = case.read if count.looped and not count.stored else 1.0
        for pipe, number in count.pipes.items():
            pipes[pipe] = pipes.get(pipe, 0.0) + number * often
        moved += count.loaded * case.read + count.stored
    # A loop over a list's tiles may be unrolled in whole. Without wide accesses, assume one tile.
    if not moved or not (count.looped or case.tail):
        moved = _moved(case, code, names)
    elif even:  # and what goes by narrow accesses
        moved *= _moved(case, code, names) / _moved(case, code, even)
    return {pipe: 8 * number / moved for pipe, number in pipes.items()}


def _moved(case: CompiledCase, code: MachineCode, names: Sequence[str]) -> float:
    """Bits of a tile that one thread moves through these pointers."""
    reads = sum(_share(case, code.threads, name) for name in case.reads if name in names)
    return reads * case.read + sum(
        _share(case, code.threads, name) for name in case.writes if name in names
    )


def _unrolled(case: CompiledCase, code: MachineCode) -> int:
    """How often the whole tile is moved by the code of the main path."""
    times = [
        sum(a.bits for a in main(case, code.accesses, [name]) if a.store == store)
        // _share(case, code.threads, name)
        for names, store in ((case.reads, False), (case.writes, True))
        for name in names
    ]
    return max(1, min(times, default=1)) if case.tail else 1


def refusals(code: MachineCode, target: str) -> Iterator[str]:
    """Say why a program cannot be launched at all on a target whose limits are known."""
    most = SHARED.get(target, 0) * 1024
    if most and code.threads > THREADS:
        warps = code.threads // (64 if target.startswith("gfx") else 32)
        yield (
            f"cannot run: {warps} warps are {code.threads} threads, and a program has at most "
            f"{THREADS} there"
        )
    if most and code.shared > most:
        yield (
            f"cannot run: {code.shared} bytes of shared memory, and a program has at most {most} "
            "there"
        )


def slow(
    case: CompiledCase, code: MachineCode, per_byte: Mapping[str, float] | None
) -> Iterator[str]:
    """Say what makes a kernel slower than it has to be."""
    if code.spilled:
        yield f"{code.spilled} bytes of spilled registers or local memory"
    many, most = sum((per_byte or {}).values()), RATES["H100"].issue
    if many > most and not case.computes:
        yield f"{many:.1f} instructions for each byte, and an H100 issues {most:.1f}"
    for store, names in ((False, case.reads), (True, case.writes)):
        accesses = [access for access in code.accesses if access.store == store]
        if code.attributed:
            yield from _misdirected(case, accesses, names, store)
            for name in names:
                if name not in case.narrow:
                    yield from _too_narrow(case, code, accesses, name, store)
        else:
            yield from _too_few(case, code, accesses, names, store)


def _misdirected(
    case: CompiledCase, accesses: Sequence[Access], names: Sequence[str], store: bool
) -> Iterator[str]:
    expected = {*names, *case.narrow}
    for pointer in sorted({access.pointer for access in accesses} - expected):
        yield f"{pointer} is {'written' if store else 'read'}, which its case does not say"


def _too_narrow(
    case: CompiledCase, code: MachineCode, accesses: Sequence[Access], name: str, store: bool
) -> Iterator[str]:
    width, count = _needed(case, code.threads, name)
    of_main = main(case, accesses, [name])
    word = "stores" if store else "loads"
    where = " of the main path" if case.tail else ""
    wide = sum(access.bits >= width for access in of_main)
    moved = sum(access.bits for access in of_main if access.bits >= width)
    if moved < width * count:
        yield f"{name}: {wide} {width}-bit {word}{where}, and the tile needs {count}"
    elif case.tail and moved != width * count * _unrolled(case, code):
        yield f"{name}: {word}{where} move more than the tile"
    if name in case.single and moved > width * wide:
        yield f"{name}: {word}{where} wider than its case says, an element at a time"
    if wide < len(of_main):
        yield f"{name}: {len(of_main) - wide} {word}{where} narrower than {width} bits"


def _too_few(
    case: CompiledCase,
    code: MachineCode,
    accesses: Sequence[Access],
    names: Sequence[str],
    store: bool,
) -> Iterator[str]:
    """Check without pointers: are there enough accesses of each width?"""
    word = "stores" if store else "loads"
    found = widths(accesses)
    needed: Counter[int] = Counter()
    for name in names:
        if name not in case.narrow:
            width, count = _needed(case, code.threads, name)
            needed[width] += count
    for width, count in needed.items():
        if found.get(width, 0) < count:
            yield f"{found.get(width, 0)} {width}-bit {word}, and the tiles need {count}"
