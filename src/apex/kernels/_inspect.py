"""Compile kernels without a GPU and read the machine code: registers, spills, widths of accesses.

Memory-bound kernels are as fast as their accesses are wide, and nothing in a kernel's source shows
when the compiler falls back to narrow ones. So every `Case` is compiled and checked:

* no registers are spilled, and nothing else is kept in local memory;
* every pointer is read and written as the case says, and no other way;
* accesses through ``reads`` and ``writes`` are 128 bits wide, or as wide as one thread's share of
  the tile if that is less, and there are enough of them to move the whole tile.

The main path and the masked tail are told apart by the predicate: a masked access has one in the
PTX (``@%p4 ld.global.b32``), an access without a mask has none. With ``tail=True`` only accesses
without a predicate count. A main path that somebody masks has none left, so the count misses the
tile's; one with a mask that the compiler can prove to be whole is refused too, which is right: the
proof may fail for the next caller. Through which pointer an access goes is found by following its
address register back to the kernel's parameters, through a table of addresses where there is one.
PTX is where widths are decided: ptxas neither splits nor joins accesses, and its own disassembler
takes longer than the compiler. Accesses by tensor descriptors are not looked at.

In AMD's assembler masks are branches and registers are reused, so accesses have no pointers and no
paths: required are as many wide ones as the tiles need. The tail, whose bound is known at run time
only, has none. A main path that is masked has none for 16-bit columns and fails; for float32 ones
this compiler sees through the mask, and the accesses are wide after all. What a loop that was
unrolled reads too often goes unseen.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import PTXASError

import apex.kernels
from apex.kernels._cases import Case

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDE = 128  # bits: the widest access on every target
BLACKWELL = 100  # from sm_100 on there is a ptxas of its own
WAVE64 = "gfx9"  # the AMD family with 64 lanes in a wave; later ones have 32


class UnavailableError(RuntimeError):
    """This machine cannot compile for that target; the message says what is missing."""


@dataclass(frozen=True)
class Access:
    """One instruction that reads or writes global memory.

    Attributes:
        store: Whether it writes.
        bits: Its width for one thread.
        masked: Whether a predicate guards it; ``None`` where that cannot be told.
        pointer: Through which pointer it goes; empty where that cannot be told.
    """

    store: bool
    bits: int
    masked: bool | None
    pointer: str


@dataclass(frozen=True)
class Code:
    """What the compiler made of a case.

    Attributes:
        registers: Of a thread.
        spilled: Bytes of a thread's registers that are written to local memory and read back.
        shared: Bytes of shared memory of a block.
        threads: Of a block.
        accesses: All accesses to global memory.
    """

    registers: int
    spilled: int
    shared: int
    threads: int
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        kernel: Name of the operation.
        variant: Which variant of it.
        target: What it was compiled for.
        registers: Of a thread.
        spilled: Bytes of a thread's registers that are written to local memory and read back.
        shared: Bytes of shared memory of a block.
        main_loads: Bits -> number of loads in the main path, tables and scalars left out; ``None``
            where paths cannot be told apart.
        main_stores: The same for stores.
        loads: Bits -> number of loads in all.
        stores: Bits -> number of stores in all.
        bytes_per_element: What the main path moves for each element of the tile.
        problems: What is wrong, for people.
    """

    kernel: str
    variant: str
    target: str
    registers: int
    spilled: int
    shared: int
    main_loads: dict[int, int] | None
    main_stores: dict[int, int] | None
    loads: dict[int, int]
    stores: dict[int, int]
    bytes_per_element: float
    problems: tuple[str, ...]


def cases() -> Iterator[Case]:
    """Yield the cases of every kernel file; that each has some is a matter of the tests."""
    for info in pkgutil.iter_modules(apex.kernels.__path__, "apex.kernels."):
        if not info.name.rpartition(".")[2].startswith("_"):
            yield from getattr(importlib.import_module(info.name), "cases", tuple)()


def inspect(case: Case, target: str) -> Finding:
    """Compile a case and judge what comes out.

    Args:
        case: What to compile.
        target: ``sm_80`` and the like, or ``gfx942`` and the like.

    Raises:
        UnavailableError: The compiler for that target is not here.
    """
    code = compiled(case, target)
    loads = [access for access in code.accesses if not access.store]
    stores = [access for access in code.accesses if access.store]
    told = _gpu(target).backend == "cuda"
    return Finding(
        kernel=case.name,
        variant=case.variant,
        target=target,
        registers=code.registers,
        spilled=code.spilled,
        shared=code.shared,
        main_loads=_widths(_main(case, loads, case.reads)) if told else None,
        main_stores=_widths(_main(case, stores, case.writes)) if told else None,
        loads=_widths(loads),
        stores=_widths(stores),
        bytes_per_element=_bytes_per_element(case, code, told),
        problems=tuple(_problems(case, code, told)),
    )


# -- compiling -----------------------------------------------------------------------------------


def compiled(case: Case, target: str) -> Code:
    """Compile a case for a target and read the result."""
    if not isinstance(case.kernel, triton.JITFunction):
        raise UnavailableError(
            "kernels were imported with TRITON_INTERPRET set, which leaves nothing to compile: "
            "unset it and start again"
        )
    gpu = _gpu(target)
    constants = {(case.kernel.arg_names.index(k),): v for k, v in case.constants.items()}
    signature = {
        name: "constexpr" if name in case.constants else case.signature[name]
        for name in case.kernel.arg_names
    }
    attributes = {
        path: [["tt.divisibility", 16]]
        for name, path, kind in case.parameters()
        if kind.startswith("*") or name in case.divisible
    }
    source = ASTSource(case.kernel, signature, constants, attributes)
    try:
        made = triton.compile(source, target=gpu, options=dict(case.options))
    except PTXASError as error:
        if "gpu-name" not in str(error):
            raise
        raise UnavailableError(f"this triton ({triton.__version__}) knows no {target}") from error
    threads = made.metadata.num_warps * gpu.warp_size
    return (_from_ptx if gpu.backend == "cuda" else _from_amdgcn)(case, made, threads)


@functools.cache
def _gpu(target: str) -> Any:
    """Find the compiler for a target."""
    cuda = re.fullmatch(r"sm_(\d+)", target)
    backend = "nvidia" if cuda else "amd"
    if not cuda and not re.fullmatch(r"gfx[0-9a-f]+", target):
        raise UnavailableError(f"{target}: unknown target; use {', '.join(TARGETS)} or the like")
    if backend not in backends:
        raise UnavailableError(
            f"this triton ({triton.__version__}) has no {backend} compiler for {target}: "
            "pip install triton"
        )
    if cuda is None:
        return GPUTarget("hip", target, 64 if target.startswith(WAVE64) else 32)
    _tool("ptxas-blackwell" if int(cuda[1]) >= BLACKWELL else "ptxas")
    _tool("cuobjdump")
    return GPUTarget("cuda", int(cuda[1]), 32)


def _tool(name: str) -> str:
    """Path of one of the programs that come with triton."""
    try:
        return str(getattr(triton.knobs.nvidia, name.replace("-", "_")).path)
    except RuntimeError as error:
        raise UnavailableError(
            f"this triton ({triton.__version__}) comes without {name}: pip install triton"
        ) from error


# -- NVIDIA --------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"(?P<predicate>@!?%\w+\s+)?(?P<name>[a-z][\w.:]*)\s+(?P<operands>.*);")
_GLOBAL = re.compile(r"(ld|st|atom|red)\.[\w.:]*global[\w.:]*?(?:\.v(\d))?\.[a-z]+(\d+)(?:x(\d))?")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")
_REGISTER = re.compile(r"%\w+")
_ADDRESS = re.compile(r"\[\s*([%\w]+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def _from_ptx(case: Case, made: Any, threads: int) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        with open(cubin, "wb") as file:
            file.write(made.asm["cubin"])
        usage = _USAGE.search(_run("cuobjdump", "--dump-resource-usage", cubin))
        assert usage is not None
        registers, stack, _, local = map(int, usage.groups())
        spilled = _spilled(case, made.asm["ptx"], folder) if stack + local else 0
    accesses = tuple(_accesses(case, made.asm["ptx"]))
    return Code(registers, spilled, made.metadata.shared, threads, accesses)


def _spilled(case: Case, ptx: str, folder: str) -> int:
    """Ask ptxas what a stack frame is for.

    It has one too where the subroutine of a correctly rounded division saves registers; that runs
    for operands next to the ends of the range only, and ptxas does not count it as spilling.
    """
    source, output = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "again.cubin")
    with open(source, "w", encoding="utf-8") as file:
        file.write(ptx)
    arch = re.findall(r"\.target (\w+)", ptx)[0]
    tool = "ptxas-blackwell" if int(re.findall(r"\d+", arch)[0]) >= BLACKWELL else "ptxas"
    fused = [] if case.options.get("enable_fp_fusion", True) else ["--fmad=false"]
    said = _run(tool, "-v", *fused, f"--gpu-name={arch}", source, "-o", output)
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", said)]
    arrays = [int(number) for number in re.findall(r"\.local .*\[(\d+)\];", ptx)]
    return sum(spilled) + sum(arrays)


def _run(name: str, *words: str) -> str:
    done = subprocess.run([_tool(name), *words], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _accesses(case: Case, ptx: str) -> Iterator[Access]:
    flow = _Flow(case)
    found = []
    for line in ptx.splitlines():
        instruction = _INSTRUCTION.match(line.partition("//")[0].strip())
        if instruction is None:
            continue
        name, operands = instruction["name"], instruction["operands"]
        flow.add(name, operands)
        bits = _bits(name, operands)
        if bits is not None:
            masked = instruction["predicate"] is not None
            address = _ADDRESS.findall(operands)[-1 if _COPY.match(name) else 0]
            found.append((name.startswith(("st", "red")), bits, masked, address))
    for store, bits, masked, address in found:
        yield Access(store, bits, masked, flow.pointer(address))


def _bits(name: str, operands: str) -> int | None:
    """Width of an access to global memory; ``None`` for another instruction."""
    if _COPY.match(name):
        return 8 * int(operands.split(",")[2], 0)
    access = _GLOBAL.fullmatch(name)
    return None if access is None else int(access[2] or 1) * int(access[3]) * int(access[4] or 1)


class _Flow:
    """From which registers each register of a PTX program was computed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._parameters = list(case.parameters())
        self._sources: dict[str, set[str]] = {}

    def add(self, name: str, operands: str) -> None:
        """Take up one instruction."""
        if name.startswith(("st.", "red.", "bra", "bar")):
            return
        if operands.startswith("{"):
            made, _, used = operands.partition("}")
        else:
            made, _, used = operands.partition(",")
        if name.startswith("ld.param"):
            sources = {f"parameter {number}" for number in re.findall(r"_param_(\d+)", used)}
        elif ".global" in name:
            sources = {f"behind {_ADDRESS.findall(used)[0]}"}
        else:
            sources = set(_REGISTER.findall(used))
        for register in _REGISTER.findall(made):
            self._sources.setdefault(register, set()).update(sources - {register})

    def pointer(self, address: str) -> str:
        """Name the pointer that an address was computed from."""
        direct, behind = self._roots(address)
        if not direct:
            direct = {f"{name}[]" for register in behind for name in self._tables_at(register)}
        return " or ".join(sorted(direct)) or "unknown"

    def _tables_at(self, register: str) -> Iterable[str]:
        return self._roots(register)[0] & set(self._case.tables)

    def _roots(self, address: str) -> tuple[set[str], set[str]]:
        """Pointers among the parameters, and registers behind which a value was read."""
        direct: set[str] = set()
        behind: set[str] = set()
        seen: set[str] = set()
        left = [address]
        while left:
            here = left.pop()
            if here in seen:
                continue
            seen.add(here)
            word, _, rest = here.partition(" ")
            if word == "parameter":
                direct |= self._name(int(rest))
            elif word == "behind":
                behind.add(rest)
            else:
                left += self._sources.get(here, ())
        return direct, behind

    def _name(self, number: int) -> set[str]:
        """Name of a parameter if it is a pointer; the compiler adds two of its own at the end."""
        if number >= len(self._parameters):
            return set()
        name, _, kind = self._parameters[number]
        return {name} if kind.startswith("*") else set()


# -- AMD -----------------------------------------------------------------------------------------

# dwordx4, ushort, short_d16; from gfx11 on b128, u16, d16_b16
_VECTOR = re.compile(
    r"^\s+(?:global|buffer|flat)_(load|store)_(?:d16_(?:hi_)?)?[usib]?(dword|short|byte|\d+)"
    r"(?:x(\d))?",
    re.MULTILINE,
)
_WORDS = {"dword": 32, "short": 16, "byte": 8}


def _from_amdgcn(case: Case, made: Any, threads: int) -> Code:
    text = made.asm["amdgcn"]
    accesses = tuple(
        Access(kind == "store", (_WORDS.get(word) or int(word)) * int(count or 1), None, "")
        for kind, word, count in _VECTOR.findall(text)
    )
    number = {
        key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)
    }
    # Spilled registers live in scratch memory, or in spare registers of the matrix units.
    spilled = max(number["private_segment_fixed_size"], 4 * number["vgpr_spill_count"])
    return Code(number["vgpr_count"], spilled, made.metadata.shared, threads, accesses)


# -- judging -------------------------------------------------------------------------------------


def _widths(accesses: Iterable[Access]) -> dict[int, int]:
    counts = Counter(access.bits for access in accesses)
    return dict(sorted(counts.items(), reverse=True))


def _main(case: Case, accesses: Iterable[Access], names: Sequence[str]) -> list[Access]:
    return [a for a in accesses if a.pointer in names and not (case.tail and a.masked)]


def _needed(case: Case, threads: int, name: str) -> tuple[int, int]:
    """Width and number of accesses with which a thread moves its share of a tile."""
    share = _share(case, threads, name)
    width = min(share, WIDE)
    return width, share // width


def _share(case: Case, threads: int, name: str) -> int:
    """Bits of a tile that one thread moves."""
    bits = case.pointers()[name]
    return max(bits, case.tile * bits // threads)


def _bytes_per_element(case: Case, code: Code, told: bool) -> float:
    """Bytes for each element; loops that the compiler has unrolled are divided out."""
    if not told:
        bits = case.pointers()
        return sum(bits[name] for name in (*case.reads, *case.writes)) / 8
    loads = _main(case, [a for a in code.accesses if not a.store], case.reads)
    stores = _main(case, [a for a in code.accesses if a.store], case.writes)
    moved = sum(access.bits for access in [*loads, *stores]) / 8
    return moved * code.threads / (case.tile * _unrolled(case, code))


def _unrolled(case: Case, code: Code) -> int:
    """How often the whole tile is moved by the code of the main path."""
    times = [
        sum(a.bits for a in _main(case, code.accesses, [name]) if a.store == store)
        // _share(case, code.threads, name)
        for names, store in ((case.reads, False), (case.writes, True))
        for name in names
    ]
    return max(1, min(times, default=1)) if case.tail else 1


def _problems(case: Case, code: Code, told: bool) -> Iterator[str]:
    if code.spilled:
        yield f"{code.spilled} bytes of spilled registers or local memory"
    for store, names in ((False, case.reads), (True, case.writes)):
        accesses = [access for access in code.accesses if access.store == store]
        if told:
            yield from _misdirected(case, accesses, names, store)
            for name in names:
                if name not in case.narrow:
                    yield from _too_narrow(case, code, accesses, name, store)
        else:
            yield from _too_few(case, code, accesses, names, store)


def _misdirected(
    case: Case, accesses: Sequence[Access], names: Sequence[str], store: bool
) -> Iterator[str]:
    expected = {*names, *case.narrow}
    for pointer in sorted({access.pointer for access in accesses} - expected):
        yield f"{pointer} is {'written' if store else 'read'}, which its case does not say"


def _too_narrow(
    case: Case, code: Code, accesses: Sequence[Access], name: str, store: bool
) -> Iterator[str]:
    width, count = _needed(case, code.threads, name)
    main = _main(case, accesses, [name])
    word = "stores" if store else "loads"
    where = " of the main path" if case.tail else ""
    wide = sum(access.bits >= width for access in main)
    moved = sum(access.bits for access in main if access.bits >= width)
    if moved < width * count:
        yield f"{name}: {wide} {width}-bit {word}{where}, and the tile needs {count}"
    elif case.tail and moved != width * count * _unrolled(case, code):
        yield f"{name}: {word}{where} move more than the tile"
    if wide < len(main):
        yield f"{name}: {len(main) - wide} {word}{where} narrower than {width} bits"


def _too_few(
    case: Case, code: Code, accesses: Sequence[Access], names: Sequence[str], store: bool
) -> Iterator[str]:
    """Check without pointers: are there enough accesses of each width?"""
    word = "stores" if store else "loads"
    found = _widths(accesses)
    needed: Counter[int] = Counter()
    for name in names:
        if name not in case.narrow:
            width, count = _needed(case, code.threads, name)
            needed[width] += count
    for width, count in needed.items():
        if found.get(width, 0) < count:
            yield f"{found.get(width, 0)} {width}-bit {word}, and the tiles need {count}"
