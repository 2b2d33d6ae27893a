"""Count a kernel's instructions by the pipe that executes them, from its machine code.

A kernel takes the longer of two times: that of the bytes it moves, and that of the instructions it
issues. Counted is the fast path: the path through the code that moves most bytes by wide accesses,
and among those the shortest. That leaves out masked tails, and the subroutines of correctly rounded
divisions, which run for operands next to the ends of the range. Where that path moves its tiles in
loops, the loops are counted, once around each; what stands before and behind them is not.

Bytes are those that these accesses move. Rows that are walked twice count twice, though most of the
second walk comes from a cache.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.kernels.compiler import run

# Pipe -> what it executes. Of an instruction as nvdisasm writes it: the name up to the first dot,
# or more of it. What is not here takes an issue slot and waits for none of these pipes: branches,
# barriers, the uniform registers.
PIPES: Mapping[str, tuple[str, ...]] = {
    "fma": (
        "FADD", "FMUL", "FFMA", "FADD32I", "FMUL32I", "FFMA32I", "HADD2", "HMUL2", "HFMA2",
        "HADD2_32I", "HFMA2.MMA",
    ),
    "imad": ("IMAD", "IDP"),
    "alu": (
        "FSETP", "FSET", "FSEL", "FMNMX", "FCHK", "HSETP2", "HSET2", "HMNMX2", "IADD3", "IADD",
        "VIADD", "VIADDMNMX", "VIMNMX", "IMNMX", "ISETP", "IABS", "ICMP", "LEA", "LOP3", "PLOP3",
        "SHF", "SHL", "SHR", "SEL", "PRMT", "P2R", "R2P", "MOV", "CS2R", "F2FP", "SGXT", "BMSK",
        "VABSDIFF", "I2FP", "FRND",
    ),
    "mufu": ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV"),
    "lsu": (
        "LDG", "STG", "LDGSTS", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LDC", "ATOM", "ATOMG",
        "ATOMS", "RED", "SHFL", "S2R",
    ),
}  # fmt: skip
_PIPE = {name: pipe for pipe, names in PIPES.items() for name in names}


@dataclass(frozen=True)
class Rate:
    """How many thread instructions a GPU executes in the time in which it moves a byte.

    Attributes:
        target: What it runs.
        issue: Of all kinds together; four schedulers of a multiprocessor issue 32 each a cycle.
        pipes: Of those of a pipe. The instructions of ``imad`` are also instructions of ``fma``.
    """

    target: str
    issue: float
    pipes: Mapping[str, float]


def _rate(target: str, multiprocessors: int, hertz: float, bandwidth: float, fma: int) -> Rate:
    """From thread instructions a cycle of a multiprocessor."""
    cycles = multiprocessors * hertz / bandwidth
    per_cycle = {"fma": fma, "imad": 64, "alu": 64, "mufu": 16, "lsu": 32}
    return Rate(target, 128 * cycles, {name: n * cycles for name, n in per_cycle.items()})


# Multiprocessors, boost clock and bandwidth: NVIDIA's data sheets (SXM). Per cycle: *CUDA
# Programming Guide*, throughput of native arithmetic instructions.
RATES: Mapping[str, Rate] = {
    "H100": _rate("sm_90", 132, 1.755e9, 3.35e12, 128),
    "H200": _rate("sm_90", 132, 1.755e9, 4.80e12, 128),
    "A100": _rate("sm_80", 108, 1.41e9, 2.04e12, 64),
}


@dataclass(frozen=True)
class Counts:
    """What a thread executes once around a loop of the fast path, or on all of a path without one.

    Attributes:
        pipes: Pipe -> instructions; ``"other"`` for those of no pipe.
        loaded: Bits of its wide accesses that read.
        stored: Bits of those that write.
        looped: Whether it is a loop.
    """

    pipes: Mapping[str, int]
    loaded: int
    stored: int
    looped: bool


def limits(target: str, per_byte: Mapping[str, float]) -> dict[str, str]:
    """Say for each GPU with this target what limits a kernel, and how far it is above the memory.

    Args:
        target: What it was compiled for.
        per_byte: Pipe -> thread instructions for each byte.

    Returns:
        GPU -> ``"memory"``, or ``"alu 1.4"``: the instructions of that pipe take 1.4 times as long
        as the memory.
    """
    said = {}
    for gpu, rate in RATES.items():
        if rate.target == target:
            times = {"issue": sum(per_byte.values()) / rate.issue}
            for pipe, most in rate.pipes.items():
                of_it = per_byte.get(pipe, 0.0)
                times[pipe] = (of_it + (pipe == "fma") * per_byte.get("imad", 0.0)) / most
            slowest = max(times, key=lambda pipe: times[pipe])
            said[gpu] = f"{slowest} {times[slowest]:.2g}" if times[slowest] > 1 else "memory"
    return said


# -- reading ---------------------------------------------------------------------------------------

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_CONDITION = re.compile(r"!?U?P\d")  # an operand, as in `BRA.U UP0, 0x6f0` of sm_100
_TARGET = re.compile(r"0x[0-9a-f]+$")
_BITS = re.compile(r"\.(?:U|S)?(8|16|32|64|128)\b")


@dataclass(frozen=True)
class Instruction:
    """One of a program: where, whether under a predicate, its name, and where it may jump."""

    address: int
    masked: bool
    name: str
    target: int | None

    @property
    def bits(self) -> int:
        """Of an access to global memory; 0 for any other instruction."""
        if self.name.partition(".")[0] not in ("LDG", "STG", "LDGSTS"):
            return 0
        width = _BITS.search(self.name.replace(".LTC128B", "").replace(".LTC64B", ""))
        return int(width[1]) if width else 32


def disassembled(cubins: Sequence[bytes], target: str) -> list[list[Instruction]]:
    """Read the kernels of some binaries; one call of the tool, which takes 0.3 s to start."""
    texts = [_text(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "kernels.bin")
        with open(file, "wb") as stream:
            stream.write(b"".join(texts))
        said = run("nvdisasm", "--no-dataflow", "--binary", target.upper().replace("_", ""), file)
    programs: list[list[Instruction]] = [[] for _ in texts]
    ends = [sum(map(len, texts[: number + 1])) for number in range(len(texts))]
    number = 0
    for address, predicate, name, operands in _LINE.findall(said):
        while int(address, 16) >= ends[number]:
            number += 1
        jump = _TARGET.search(operands) if name.startswith("BRA") else None
        masked = bool(predicate) or bool(jump and _CONDITION.match(operands))
        one = Instruction(int(address, 16), masked, name, int(jump[0], 0) if jump else None)
        programs[number].append(one)
    return programs


def _text(cubin: bytes) -> bytes:
    """Find the kernel's machine code in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, sections, names = struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + n * size) for n in range(sections)]
    for name, _, _, _, offset, length in heads:
        if cubin.startswith(b".text.", heads[names][4] + name):
            return cubin[offset : offset + length]
    raise ValueError("no machine code in this file")


# -- the fast path ---------------------------------------------------------------------------------


def counted(program: Sequence[Instruction], wide: int) -> list[Counts]:
    """Count the instructions of the fast path, loop by loop.

    Args:
        program: From its first instruction on.
        wide: Bits of the accesses by which tiles are moved, at least.
    """
    blocks = {block[0].address: block for block in _blocks(program)}
    order, loops = _ordered(blocks, program[0].address)
    best: dict[int, tuple[tuple[int, int, int], list[int]]] = {}
    for at in reversed(order):  # a jump back leads to what is not in `best` yet
        ways = [best[to] for to in _next(blocks, at) if to in best]
        (calls, moved, short), path = max(ways, key=lambda way: way[0], default=((0, 0, 0), []))
        block = blocks[at]
        calls -= sum(one.name.startswith("CALL") for one in block)
        moved += sum(one.bits**2 for one in block if one.bits >= wide)
        best[at] = (calls, moved, short - len(block)), [at, *path]
    path = best[program[0].address][1]
    parts = [[one for at in path if at in loop for one in blocks[at]] for loop in loops]
    parts = [part for part in parts if any(one.bits >= wide for one in part)]
    looped = bool(parts)
    counts = []
    for part in parts or [[one for at in path for one in blocks[at]]]:
        tiles = [one for one in part if one.bits >= wide]
        stored = sum(one.bits for one in tiles if one.name.startswith("STG"))
        pipes = Counter(_pipe(one.name) for one in part)
        counts.append(Counts(pipes, sum(one.bits for one in tiles) - stored, stored, looped))
    return counts


@functools.cache
def _pipe(name: str) -> str:
    words = name.split(".")
    return _PIPE.get(".".join(words[:2])) or _PIPE.get(words[0], "other")


def _ends(one: Instruction) -> bool:
    return one.target is not None or one.name in ("EXIT", "RET.REL.NODEC")


def _blocks(program: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Instructions that run one after the other: up to a jump, or to where a jump leads."""
    starts = {one.target for one in program}
    block: list[Instruction] = []
    for one in program:
        if block and (one.address in starts or _ends(block[-1])):
            yield block
            block = []
        block.append(one)
    yield block


def _next(blocks: Mapping[int, list[Instruction]], at: int) -> list[int]:
    """Where a program may go on behind a block."""
    last = blocks[at][-1]
    following = [last.address + 16] if last.masked or not _ends(last) else []
    # BRA.DIV leads to what a warp does whose threads have parted.
    jump = [] if last.target is None or last.name.startswith("BRA.DIV") else [last.target]
    return [to for to in (*following, *jump) if to in blocks]


def _ordered(
    blocks: Mapping[int, list[Instruction]], first: int
) -> tuple[list[int], list[set[int]]]:
    """Blocks so that each comes before those it leads to, but for jumps back; and the loops."""
    left: list[int] = []  # in the order in which the search leaves them
    jumps: list[tuple[int, int]] = []
    open_, path = {first}, [(first, iter(_next(blocks, first)))]
    seen = {first}
    while path:
        at, following = path[-1]
        to = next(following, None)
        if to is None:
            path.pop()
            open_.remove(at)
            left.append(at)
        elif to in open_:
            jumps.append((at, to))
        elif to not in seen:
            seen.add(to)
            open_.add(to)
            path.append((to, iter(_next(blocks, to))))
    before: dict[int, set[int]] = {}
    for at in left:
        for to in _next(blocks, at):
            before.setdefault(to, set()).add(at)
    loops = []
    for last, head in jumps:
        loop, todo = {head}, [last]
        while todo:
            at = todo.pop()
            if at not in loop:
                loop.add(at)
                todo += before.get(at, ())
        loops.append(loop)
    return left[::-1], loops
